//! The way of every gradient through hand-over, sum and return, in memory: every rank ends with the sum over replicas.

use crate::crew::spec;
use reknit_layout::job::ModelSpec;
use reknit_layout::{
    Axis, Epoch, GpuId, Holding, Incarnation, JobSpec, Layout, Place, PlanRequest, Slot, Step, Topology,
    Units, WorkerKey, candidates,
};
use reknit_model::{Bucket, Shard};
use reknit_worker::parcels::{PARCEL_BYTES, Parcel, pack, unpack};
use reknit_worker::sync::SyncPlan;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

fn worker(place: Place) -> WorkerKey {
    WorkerKey { gpu: GpuId(format!("GPU-{}-{}", place.replica, place.slot)), incarnation: Incarnation(1) }
}

/// The layout after all places were filled and then these were lost.
fn layout(job: &JobSpec, lost: &[(u32, u32)]) -> Layout {
    let plan = |places: &[Place], holdings: BTreeMap<WorkerKey, Holding>, fresh: bool| {
        let members = places.iter().map(|place| (*place, worker(*place)));
        let workers = candidates(members, holdings);
        let topology = Topology::default();
        let request = PlanRequest { job, topology: &topology, epoch: Epoch(1), workers: &workers, fresh };
        reknit_layout::plan(&request).unwrap().layout
    };
    let all = (0..job.parallel.data)
        .flat_map(|replica| (0..job.parallel.tensor).map(move |slot| Place::new(replica, 0, slot)));
    let all: Vec<_> = all.collect();
    let nominal = plan(&all, BTreeMap::new(), true);
    let left: Vec<_> =
        all.into_iter().filter(|place| !lost.contains(&(place.replica.0, place.slot.0))).collect();
    let held = nominal.holdings(Step(1)).filter(|(place, _)| left.contains(place));
    plan(&left, held.map(|(place, holding)| (worker(place), holding)).collect(), false)
}

/// What a replica's batch made of one element: whole numbers, so that sums are exact.
fn gradient(replica: usize, bucket: Bucket, side: usize, unit: u32, element: usize) -> f64 {
    let of_bucket = match bucket {
        Bucket::Axis(Axis { family, layer }) => {
            (family as usize + 1) * 10 + layer.map_or(0, |layer| layer as usize + 1)
        }
        Bucket::Replicated => 7,
    };
    (((of_bucket * 2 + side) * 1009 + unit as usize) * 10_007 + element) as f64
        * [1.0, 3.0, 17.0, 129.0][replica]
}

/// A bucket's gradients as a shard that owns these units stores them.
fn stored(
    job: &JobSpec,
    owned: &BTreeMap<Axis, Units>,
    bucket: Bucket,
    of: impl Fn(usize, u32, usize) -> f64,
) -> Vec<f64> {
    match bucket {
        Bucket::Axis(axis) => {
            let units = owned.get(&axis).cloned().unwrap_or_default();
            let mut values = Vec::new();
            for (side, len) in Shard::<f64>::unit_parts(&job.model, axis.family).into_iter().enumerate() {
                for unit in units.iter() {
                    values.extend((0..len).map(|element| of(side, unit, element)));
                }
            }
            values
        }
        Bucket::Replicated => {
            (0..job.model.replicated_params() as usize).map(|element| of(0, 0, element)).collect()
        }
    }
}

struct Rank {
    place: Place,
    sync: SyncPlan,
    parcels: Vec<Parcel>,
    own: Vec<Vec<f64>>,
    passing: Vec<f64>,
    column: Vec<f64>,
}

type Places = fn(&Parcel) -> &Vec<Range<usize>>;

/// Within a group: what each rank has in its `send` comes to the others' `receive`.
fn all_to_all(group: &mut [Rank], number: usize, send: Places, receive: Places) {
    let mut messages = Vec::new();
    for (from, rank) in group.iter().enumerate() {
        for (to, range) in send(&rank.parcels[number]).iter().enumerate() {
            messages.push((from, to, rank.passing[range.clone()].to_vec()));
        }
    }
    for (from, to, message) in messages {
        let Rank { parcels, passing, .. } = &mut group[to];
        passing[receive(&parcels[number])[from].clone()].copy_from_slice(&message);
    }
}

/// Returns how many parcels a step has, and whether anything was handed over.
fn check(job: &JobSpec, layout: &Layout, target: usize) -> (usize, bool) {
    let mut groups: Vec<Vec<Rank>> = layout
        .groups
        .iter()
        .map(|group| {
            let places = group.members().map(|(place, _)| place);
            let rank = |place: Place| {
                let sync = SyncPlan::new(layout, place).unwrap();
                let parcels = Parcel::all::<f64>(&job.model, &sync, target).unwrap();
                Rank { place, sync, parcels, own: Vec::new(), passing: Vec::new(), column: Vec::new() }
            };
            places.map(rank).collect()
        })
        .collect();
    let buckets = |rank: &Rank| rank.parcels.iter().map(|parcel| parcel.buckets.clone()).collect::<Vec<_>>();
    let order = buckets(&groups[0][0]);
    assert!(groups.iter().flatten().all(|rank| buckets(rank) == order), "all ranks have the same parcels");
    assert_eq!(order.concat(), Bucket::in_order(&job.model).collect::<Vec<_>>());

    let mut travelled = false;
    for number in 0..order.len() {
        for group in &mut groups {
            for rank in group.iter_mut() {
                let Rank { place, sync, parcels, own, passing, .. } = rank;
                let parcel = &parcels[number];
                let replica = place.replica.0 as usize;
                let made = parcel.buckets.iter().map(|bucket| {
                    stored(job, &sync.owned, *bucket, |side, unit, element| {
                        gradient(replica, *bucket, side, unit, element)
                    })
                });
                *own = made.collect();
                *passing = vec![f64::NAN; parcel.passing()];
                pack(&parcel.give, own, passing);
                assert!(passing.is_empty() || parcel.crossing);
                assert!(!parcel.passed_whole || *passing == own[0], "it could not be moved as it lies");
                travelled |= !passing.is_empty();
            }
            all_to_all(group, number, |parcel| &parcel.given, |parcel| &parcel.handed);
            for rank in group.iter_mut() {
                let parcel = &rank.parcels[number];
                rank.column = vec![f64::NAN; parcel.column];
                pack(&parcel.keep, &rank.own, &mut rank.column);
                pack(&parcel.take, std::slice::from_ref(&rank.passing), &mut rank.column);
                assert!(!parcel.whole || rank.column == rank.own[0], "it could not be moved as it lies");
            }
        }
        let mut sums: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for rank in groups.iter().flatten() {
            let Some(column) = &rank.sync.column else { continue };
            let sum = sums.entry(column.index).or_insert_with(|| vec![0.0; rank.column.len()]);
            assert_eq!(sum.len(), rank.column.len());
            sum.iter_mut().zip(&rank.column).for_each(|(sum, value)| *sum += value);
        }
        for group in &mut groups {
            for rank in group.iter_mut() {
                let parcel = &rank.parcels[number];
                if let Some(column) = &rank.sync.column {
                    unpack(&parcel.keep, &sums[&column.index], &mut rank.own);
                    unpack(&parcel.take, &sums[&column.index], std::slice::from_mut(&mut rank.passing));
                }
                // What was given comes back, and is not what lies there still.
                rank.passing[..parcel.handed.first().map_or(0, |first| first.start)].fill(f64::NAN);
            }
            all_to_all(group, number, |parcel| &parcel.handed, |parcel| &parcel.given);
            for (at, rank) in group.iter_mut().enumerate() {
                let Rank { sync, parcels, own, place, passing, .. } = rank;
                unpack(&parcels[number].give, passing, own);
                for (bucket, values) in order[number].iter().zip(own) {
                    if *bucket == Bucket::Replicated && at != sync.replicated_root {
                        continue;
                    }
                    let replicas = 0..job.parallel.data as usize;
                    let expected = stored(job, &sync.owned, *bucket, |side, unit, element| {
                        replicas.clone().map(|replica| gradient(replica, *bucket, side, unit, element)).sum()
                    });
                    assert!(*values == expected, "{place}: {bucket:?} is not the sum over replicas");
                }
            }
        }
    }
    (order.len(), travelled)
}

fn wide(data: u32, tensor: u32) -> JobSpec {
    spec(Path::new("text"), "f64", data, tensor, 1)
}

/// A unit a slot, and one table for both ends.
fn narrow(data: u32, tensor: u32) -> JobSpec {
    let job = wide(data, tensor);
    let model = ModelSpec {
        hidden: 16,
        heads: 8,
        kv_heads: 4,
        head_dim: Some(2),
        ffn: 32,
        tie_embeddings: true,
        ..job.model
    };
    JobSpec { model, ..job }
}

#[test]
fn every_gradient_becomes_the_sum_over_replicas_on_whoever_owns_it() {
    type Lost = &'static [(u32, u32)];
    let losses: [(u32, u32, Lost); 8] = [
        (2, 4, &[]),
        (3, 1, &[]),
        (2, 2, &[(1, 0)]),
        (2, 4, &[(1, 2)]),
        (2, 3, &[(0, 0), (1, 2)]),
        (3, 4, &[(0, 1), (2, 0), (2, 3)]),
        (4, 4, &[(0, 0), (1, 1), (2, 2), (3, 3)]),
        (2, 4, &[(1, 0), (1, 1), (1, 3)]),
    ];
    for job in [wide, narrow] {
        for (data, tensor, lost) in losses {
            let job = job(data, tensor);
            let layout = layout(&job, lost);
            let uneven = !lost.is_empty();
            let parcels = [0, PARCEL_BYTES, usize::MAX].map(|target| {
                let (parcels, travelled) = check(&job, &layout, target);
                assert_eq!(travelled, uneven, "{data}x{tensor} without {lost:?}");
                parcels
            });
            assert!(parcels[0] == 6 && parcels[2] == 1, "{parcels:?}");
        }
    }
}

#[test]
fn nothing_is_copied_where_all_replicas_are_split_alike() {
    let job = wide(2, 4);
    let layout = layout(&job, &[]);
    let sync = SyncPlan::new(&layout, Place::new(1, 0, 2)).unwrap();
    for parcel in Parcel::all::<f64>(&job.model, &sync, 0).unwrap() {
        assert!(parcel.whole || parcel.buckets == [Bucket::Replicated], "{parcel:?}");
    }
}

#[test]
fn what_one_host_gets_all_of_is_not_copied() {
    let job = wide(2, 2);
    let layout = layout(&job, &[(1, 0)]);
    let guest = Slot(u32::from(layout.sync[0].hosts[0] == [Slot(0)]));
    let sync = SyncPlan::new(&layout, Place::new(0, 0, guest.0)).unwrap();
    for parcel in Parcel::all::<f64>(&job.model, &sync, 0).unwrap() {
        assert!(parcel.passed_whole || parcel.buckets == [Bucket::Replicated], "{parcel:?}");
    }
}

#[test]
fn a_column_with_a_unit_that_nobody_brings_is_refused() {
    let job = wide(2, 2);
    let layout = layout(&job, &[(1, 0)]);
    let place = Place::new(0, 0, 0);
    let mut sync = SyncPlan::new(&layout, place).unwrap();
    assert!(sync.column.is_some() && !sync.crossing.is_empty());
    sync.take[1].remove(0);
    let hole = Parcel::all::<f64>(&job.model, &sync, 0).unwrap_err().to_string();
    assert!(hole.contains("nobody in the group brings attn/"), "{hole}");
}
