//! Who sends what to whom.
//!
//! Every unit that a slot owns but does not hold comes from a live holder of the newest step: one in the same domain if there is one,
//! else a worker that leaves (it has nothing else to do), else another replica's. Among those who are equally near the
//! load is [spread](super::spread) so that the most loaded sender sends least.

use super::spread::{Parcel, spread};
use super::stock::Stock;
use crate::grid::Grid;
use crate::{Axis, PlanRequest, StageId, Transfer, Units, WorkerKey};
use std::collections::{BTreeMap, HashMap};

/// Units of one axis that a worker must receive; the replicated parameters where `axis` is `None`.
pub(super) struct Need<'a> {
    /// Number of the receiver's group.
    pub(super) group: usize,
    pub(super) stage: StageId,
    pub(super) axis: Option<Axis>,
    pub(super) units: &'a Units,
    pub(super) to: &'a WorkerKey,
}

/// Finds a source for everything needed, and what has none. What goes between one pair of workers of one axis makes one
/// transfer.
pub(super) fn transfers(
    request: &PlanRequest<'_>,
    grid: Grid,
    stock: &Stock<'_>,
    needs: &[Need<'_>],
) -> (Vec<Transfer>, BTreeMap<Axis, Units>) {
    let job = request.job;
    if needs.is_empty() {
        return Default::default();
    }
    let mut market = Market::new(request, grid, stock);
    let mut missing: BTreeMap<Axis, Vec<u32>> = BTreeMap::new();
    // Each parcel with the need it is for and its unit.
    let (mut parcels, mut contents) = (Vec::new(), Vec::new());
    for need in needs {
        let Some(axis) = need.axis else {
            if let Some(able) = market.able_for(need, |_| true) {
                parcels.push(Parcel { bytes: job.replicated_bytes(need.stage), able });
                contents.push((need, None));
            }
            continue;
        };
        let bytes = job.unit_bytes(need.stage, axis.family);
        for unit in need.units.iter() {
            match market.able_for(need, |held| held.get(&axis).is_some_and(|units| units.contains(unit))) {
                Some(able) => {
                    parcels.push(Parcel { bytes, able });
                    contents.push((need, Some(unit)));
                }
                None => missing.entry(axis).or_default().push(unit),
            }
        }
    }
    let senders = spread(&parcels, &market.able, stock.holders.len());
    let mut found: BTreeMap<_, (Vec<u32>, u64)> = BTreeMap::new();
    for ((parcel, (need, unit)), sender) in parcels.iter().zip(contents).zip(senders) {
        let key = (need.axis, stock.holders[sender].worker, need.to);
        let (units, bytes) = found.entry(key).or_default();
        units.extend(unit);
        *bytes += parcel.bytes;
    }
    let transfers = found.into_iter().map(|((axis, from, to), (units, bytes))| Transfer {
        axis,
        units: units.into_iter().collect(),
        from: from.clone(),
        to: to.clone(),
        bytes,
    });
    let missing = missing.into_iter().map(|(axis, units)| (axis, units.into_iter().collect()));
    (transfers.collect(), missing.collect())
}

/// Who can send what.
struct Market<'a> {
    request: &'a PlanRequest<'a>,
    grid: Grid,
    stock: &'a Stock<'a>,
    /// Shards by stage.
    of_stage: BTreeMap<StageId, Vec<usize>>,
    /// Lists of holders that are equally near.
    able: Vec<Vec<usize>>,
    /// By the shards that have what is needed.
    pools: HashMap<Vec<usize>, Pool>,
}

/// Those who hold one of some shards.
struct Pool {
    holders: Vec<Seller>,
    /// The list for a receiver who has none of them near.
    elsewhere: usize,
    /// The list for a receiver's group and domain.
    known: HashMap<(usize, Option<usize>), usize>,
}

/// A holder and where it is.
struct Seller {
    holder: usize,
    /// `None` for one that leaves.
    group: Option<usize>,
    domain: Option<usize>,
}

impl<'a> Market<'a> {
    fn new(request: &'a PlanRequest<'a>, grid: Grid, stock: &'a Stock<'a>) -> Self {
        let mut of_stage: BTreeMap<StageId, Vec<usize>> = BTreeMap::new();
        for (index, shard) in stock.shards.iter().enumerate().filter(|(_, shard)| !shard.holders.is_empty()) {
            of_stage.entry(shard.stage).or_default().push(index);
        }
        Self { request, grid, stock, of_stage, able: Vec::new(), pools: HashMap::new() }
    }

    /// The list of the nearest of those whose units are such; `None` when there is nobody.
    fn able_for(&mut self, need: &Need<'_>, has: impl Fn(&BTreeMap<Axis, Units>) -> bool) -> Option<usize> {
        let shards = self.of_stage.get(&need.stage)?.iter().copied();
        let shards: Vec<usize> = shards.filter(|&shard| has(self.stock.shards[shard].units)).collect();
        if shards.is_empty() {
            return None;
        }
        if !self.pools.contains_key(&shards) {
            let pool = self.pool(&shards);
            self.pools.insert(shards.clone(), pool);
        }
        let pool = self.pools.get_mut(&shards)?;
        let home = self.request.topology.domain_of(&need.to.gpu);
        let able = &mut self.able;
        let list = *pool.known.entry((need.group, home)).or_insert_with(|| {
            let near = |seller: &&Seller| {
                seller.group == Some(need.group) || (home.is_some() && seller.domain == home)
            };
            let near: Vec<usize> = pool.holders.iter().filter(near).map(|seller| seller.holder).collect();
            if near.is_empty() {
                return pool.elsewhere;
            }
            able.push(near);
            able.len() - 1
        });
        Some(list)
    }

    /// All who hold one of the shards. Of those, they who leave have nothing else to do.
    fn pool(&mut self, shards: &[usize]) -> Pool {
        let mut holders: Vec<usize> =
            shards.iter().flat_map(|&shard| &self.stock.shards[shard].holders).copied().collect();
        holders.sort_unstable();
        let seller = |holder: usize| {
            let at = &self.stock.holders[holder];
            let group = at.place.map(|place| self.grid.group(place));
            Seller { holder, group, domain: self.request.topology.domain_of(&at.worker.gpu) }
        };
        let sellers: Vec<Seller> = holders.into_iter().map(seller).collect();
        let leaving: Vec<usize> =
            sellers.iter().filter(|seller| seller.group.is_none()).map(|seller| seller.holder).collect();
        self.able.push(match leaving.is_empty() {
            true => sellers.iter().map(|seller| seller.holder).collect(),
            false => leaving,
        });
        Pool { holders: sellers, elsewhere: self.able.len() - 1, known: HashMap::new() }
    }
}
