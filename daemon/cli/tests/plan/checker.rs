//! Rules that every printed plan must keep. They read the JSON, the job and what was held before; they share no code with the
//! planner.

use super::printed::{Axis, Figure, Group, Held, Place, Plan, Sync, axes, name, set};
use std::collections::{BTreeMap, BTreeSet};

/// A job as far as a plan depends on it.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) data: u32,
    pub(crate) pipeline: u32,
    pub(crate) tensor: u32,
    pub(crate) min_tensor: u32,
    pub(crate) layers: u32,
    pub(crate) kv_heads: u32,
    pub(crate) ffn_units: u32,
    pub(crate) vocab_units: u32,
    pub(crate) tied: bool,
    pub(crate) global: u32,
    pub(crate) shrink: bool,
    pub(crate) spares: u32,
    pub(crate) boost: bool,
}

const HEAD_DIM: u64 = 4;
const BLOCK: u64 = 16;

impl Job {
    fn hidden(&self) -> u64 {
        2 * HEAD_DIM * u64::from(self.kv_heads)
    }

    pub(crate) fn toml(&self) -> String {
        let Self {
            data, pipeline, tensor, min_tensor, layers, kv_heads, tied, global, spares, boost, ..
        } = self;
        let (hidden, heads) = (self.hidden(), 2 * kv_heads);
        let (ffn, vocab) = (BLOCK * u64::from(self.ffn_units), BLOCK * u64::from(self.vocab_units));
        let policy = if self.shrink { "shrink" } else { "keep_global" };
        format!(
            r#"name = "random"
model = {{ kind = "decoder", layers = {layers}, hidden = {hidden}, heads = {heads}, kv_heads = {kv_heads}, ffn = {ffn}, ffn_block = {BLOCK}, vocab = {vocab}, vocab_block = {BLOCK}, seq_len = 8, tie_embeddings = {tied} }}
parallel = {{ data = {data}, tensor = {tensor}, pipeline = {pipeline}, min_tensor = {min_tensor} }}
batch = {{ global = {global}, micro = 2, policy = "{policy}" }}
optimizer = {{ lr = 1e-3, warmup_steps = 0, decay_steps = 0, min_lr = 0.0, betas = [0.9, 0.95], eps = 1e-8, weight_decay = 0.0, grad_clip = 1.0 }}
data = {{ files = ["a"], tokenizer = "other.json" }}
recovery = {{ spares = {spares}, power_boost = {boost} }}
run = {{ steps = 1, seed = 1 }}
"#
        )
    }

    fn units(&self, family: &str) -> u32 {
        match family {
            "attn" => self.kv_heads,
            "ffn" => self.ffn_units,
            "vocab" => self.vocab_units,
            other => panic!("family {other}"),
        }
    }

    /// 12 bytes a parameter: queries, keys, values and output of two query heads; gate, up and down; embedding and head.
    fn unit_bytes(&self, stage: u32, family: &str) -> u64 {
        let both = self.pipeline == 1 && !self.tied;
        12 * self.hidden()
            * match family {
                "attn" => 6 * HEAD_DIM,
                "ffn" => 3 * BLOCK,
                "vocab" => BLOCK * if both { 2 } else { 1 },
                other => panic!("family {other} of stage {stage}"),
            }
    }

    /// Two norms a layer and the last one.
    fn replicated_bytes(&self, stage: u32) -> u64 {
        let (start, end) = self.stage_layers(stage);
        let last = u64::from(stage + 1 == self.pipeline);
        12 * self.hidden() * (2 * u64::from(end - start) + last)
    }

    fn stage_layers(&self, stage: u32) -> (u32, u32) {
        let (size, more) = (self.layers / self.pipeline, self.layers % self.pipeline);
        let start = |stage: u32| stage * size + stage.min(more);
        (start(stage), start(stage + 1))
    }

    fn axes(&self, stage: u32) -> BTreeSet<Axis> {
        let (start, end) = self.stage_layers(stage);
        let layered = (start..end).flat_map(|l| ["attn", "ffn"].map(|f| (f.to_owned(), Some(l))));
        let vocab = stage == 0 || stage + 1 == self.pipeline;
        layered.chain(vocab.then(|| ("vocab".to_owned(), None))).collect()
    }
}

/// Checks `plan` as the answer to: `before` was held, and the GPUs of `failed` have lost it.
pub(crate) fn check(job: &Job, plan: &Plan, before: &Held, failed: &BTreeSet<String>) {
    let gpus = plan.gpus();
    let owned = plan.owned();
    members(job, plan);
    for group in plan.groups.iter().filter(|group| group.degree > 0) {
        covered(job, group, &owned);
    }
    batch(job, plan);
    let live: Held = before
        .iter()
        .filter(|(gpu, _)| !failed.contains(*gpu))
        .map(|(g, h)| (g.clone(), h.clone()))
        .collect();
    sources(job, plan, &gpus, &owned, &live);
    for sync in &plan.sync {
        columns(job, plan, sync);
    }
    figures(job, plan, &gpus);
    ahead(job, plan, &gpus, &owned);
}

/// Checks the answer where nobody can go on although every unit lives.
pub(crate) fn check_nobody(job: &Job, plan: &Plan, before: &Held, failed: &BTreeSet<String>) {
    assert!(plan.recoverable && plan.groups.iter().all(|group| group.degree == 0));
    assert!(plan.totals.step_time_ratio.is_none() && plan.transfers.is_empty());
    check(job, plan, before, failed);
    for group in &plan.groups {
        let stage = plan.groups.iter().filter(|other| other.stage == group.stage);
        let live: Vec<_> = stage
            .flat_map(|group| &group.slots)
            .filter(|slot| !failed.contains(&slot.gpu))
            .filter_map(|slot| before.get(&slot.gpu))
            .collect();
        for axis in job.axes(group.stage) {
            let held: BTreeSet<_> = live.iter().filter_map(|axes| axes.get(&axis)).flatten().collect();
            assert_eq!(held.len(), job.units(&axis.0) as usize, "{axis:?} of stage {}", group.stage);
        }
    }
}

fn members(job: &Job, plan: &Plan) {
    let given: Vec<_> = plan.groups.iter().map(|group| (group.replica, group.stage)).collect();
    let stages = (0..job.data).flat_map(|r| (0..job.pipeline).map(move |s| (r, s)));
    assert_eq!(given, stages.collect::<Vec<_>>());
    let mut seen = BTreeSet::new();
    for group in &plan.groups {
        let slots: Vec<_> = group.slots.iter().map(|slot| slot.slot).collect();
        assert_eq!(slots, (0..job.tensor).collect::<Vec<_>>());
        assert_eq!(group.degree as usize, group.slots.iter().filter(|slot| slot.active).count());
        assert!(group.degree == 0 || group.degree >= job.min_tensor, "{group:?}");
        assert!(group.slots.iter().all(|slot| seen.insert(slot.gpu.clone())), "a GPU sits twice: {group:?}");
        let whole = plan.groups.iter().filter(|other| other.replica == group.replica);
        assert!(whole.clone().all(|other| (other.degree > 0) == (group.degree > 0)), "half a replica trains");
    }
}

/// COVER and balance.
fn covered(job: &Job, group: &Group, owned: &BTreeMap<Place, BTreeMap<Axis, BTreeSet<u32>>>) {
    for axis in job.axes(group.stage) {
        let mut all = Vec::new();
        let mut sizes = Vec::new();
        for slot in &group.slots {
            let units = &owned[&(group.replica, group.stage, slot.slot)][&axis];
            assert!(slot.active || units.is_empty(), "{axis:?}: {slot:?} owns {units:?}");
            if slot.active {
                sizes.push(units.len());
            }
            all.extend(units.iter().copied());
        }
        all.sort_unstable();
        assert_eq!(all, (0..job.units(&axis.0)).collect::<Vec<_>>(), "{axis:?} of {group:?}");
        assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1, "{axis:?}: {sizes:?}");
    }
    let slots = group.slots.iter().map(|slot| &owned[&(group.replica, group.stage, slot.slot)]);
    assert!(
        slots.into_iter().all(|axes| axes.keys().cloned().collect::<BTreeSet<_>>() == job.axes(group.stage))
    );
}

fn batch(job: &Job, plan: &Plan) {
    assert_eq!(plan.batch.len(), job.data as usize);
    for group in &plan.groups {
        assert_eq!(plan.batch[group.replica as usize] > 0, group.degree > 0, "{:?}", plan.batch);
    }
    let sum: u32 = plan.batch.iter().sum();
    if plan.groups.iter().all(|group| group.degree == 0) {
        assert_eq!(sum, 0);
    } else if job.shrink {
        assert!(sum <= job.global, "{:?}", plan.batch);
    } else {
        assert_eq!(sum, job.global, "{:?}", plan.batch);
    }
}

fn sources(
    job: &Job,
    plan: &Plan,
    gpus: &BTreeMap<Place, (&str, bool)>,
    owned: &BTreeMap<Place, BTreeMap<Axis, BTreeSet<u32>>>,
    live: &Held,
) {
    let of_name: BTreeMap<String, (Place, &str)> =
        gpus.iter().map(|(place, (gpu, _))| (name(*place), (*place, *gpu))).collect();
    // Everything that an active slot owns and does not hold, once; and the norms for whoever holds nothing.
    let mut needed: BTreeSet<(Place, Axis, u32)> = BTreeSet::new();
    let mut norms = BTreeSet::new();
    let mut must = 0;
    for (place, (gpu, _)) in gpus.iter().filter(|(_, (_, active))| *active) {
        let held = live.get(*gpu);
        if held.is_none_or(|axes| axes.values().all(BTreeSet::is_empty)) {
            norms.insert(*place);
            must += job.replicated_bytes(place.1);
        }
        for (axis, units) in &owned[place] {
            let has = held.and_then(|axes| axes.get(axis));
            let lacks = units.iter().filter(|unit| has.is_none_or(|has| !has.contains(unit)));
            needed.extend(lacks.map(|unit| (*place, axis.clone(), *unit)));
        }
    }
    // Units that nobody of the group holds must move, whatever the plan.
    for group in plan.groups.iter().filter(|group| group.degree > 0) {
        for axis in job.axes(group.stage) {
            let active = group.slots.iter().filter(|slot| slot.active);
            let held: BTreeSet<u32> =
                active.filter_map(|slot| live.get(&slot.gpu)?.get(&axis)).flatten().copied().collect();
            let gone = u64::from(job.units(&axis.0)) - held.len() as u64;
            must += gone * job.unit_bytes(group.stage, &axis.0);
        }
    }
    let mut lost: BTreeSet<(Axis, u32)> = BTreeSet::new();
    for entry in &plan.unrecoverable_units {
        for axis in axes(&entry.family, entry.layers) {
            lost.extend(set(&entry.units).into_iter().map(|unit| (axis.clone(), unit)));
        }
    }
    assert_eq!(plan.recoverable, lost.is_empty());
    for (axis, unit) in &lost {
        let has =
            |axes: &BTreeMap<Axis, BTreeSet<u32>>| axes.get(axis).is_some_and(|units| units.contains(unit));
        let stages: Vec<u32> = (0..job.pipeline).filter(|stage| job.axes(*stage).contains(axis)).collect();
        assert!(stages.len() > 1 || !live.values().any(has), "{axis:?} unit {unit} lives");
    }
    let (mut sent, mut received) = (BTreeMap::new(), BTreeMap::new());
    let mut sum = 0;
    for transfer in &plan.transfers {
        let (to, _) = of_name[&transfer.to];
        // A GPU that has no place any more is named itself.
        let from = of_name.get(&transfer.from).map_or(transfer.from.as_str(), |(_, gpu)| gpu);
        let holds = &live[from];
        let bytes = if transfer.family == "replicated" {
            assert_eq!(transfer.layers, Some(job.stage_layers(to.1)));
            assert!(transfer.units.is_empty());
            assert!(norms.remove(&to), "{transfer:?}");
            let stage: BTreeSet<Axis> =
                holds.iter().filter(|(_, u)| !u.is_empty()).map(|(a, _)| a.clone()).collect();
            assert!(stage.is_subset(&job.axes(to.1)) && !stage.is_empty(), "{transfer:?} of another stage");
            job.replicated_bytes(to.1)
        } else {
            let mut bytes = 0;
            for axis in axes(&transfer.family, transfer.layers) {
                for unit in set(&transfer.units) {
                    assert!(
                        holds.get(&axis).is_some_and(|units| units.contains(&unit)),
                        "{transfer:?} {axis:?}"
                    );
                    assert!(needed.remove(&(to, axis.clone(), unit)), "not needed or twice: {transfer:?}");
                    bytes += job.unit_bytes(to.1, &axis.0);
                }
            }
            bytes
        };
        assert_eq!(transfer.bytes, bytes, "{transfer:?}");
        *sent.entry(from).or_insert(0) += bytes;
        *received.entry(to).or_insert(0) += bytes;
        sum += bytes;
    }
    needed.retain(|(_, axis, unit)| !lost.contains(&(axis.clone(), *unit)));
    assert_eq!(needed, BTreeSet::new(), "nobody sends these");
    let totals = &plan.totals;
    assert_eq!(totals.bytes_moved, sum);
    assert_eq!(totals.max_sent_by_one, sent.values().copied().max().unwrap_or(0));
    assert_eq!(totals.max_received_by_one, received.values().copied().max().unwrap_or(0));
    if plan.recoverable {
        assert!(norms.is_empty(), "{norms:?} get no norms");
        assert!(totals.bytes_moved >= totals.bytes_lower_bound, "{totals:?}");
        assert!(totals.bytes_lower_bound >= must, "{totals:?} but {must} must move");
    }
}

fn columns(job: &Job, plan: &Plan, sync: &Sync) {
    let groups: Vec<_> = plan.groups.iter().filter(|group| group.stage == sync.stage).collect();
    let least = groups.iter().map(|group| group.degree).filter(|degree| *degree > 0).min().unwrap_or(0);
    assert_eq!(sync.columns, least);
    assert_eq!(sync.hosts.len(), groups.len());
    for (group, hosts) in groups.iter().zip(&sync.hosts) {
        let distinct: BTreeSet<_> = hosts.iter().collect();
        let expected = if group.degree > 0 { least as usize } else { 0 };
        assert_eq!((hosts.len(), distinct.len()), (expected, expected), "{sync:?}");
        assert!(hosts.iter().all(|host| group.slots[*host as usize].active), "{sync:?}");
    }
    let mut seen = BTreeSet::new();
    for partition in &sync.partitions {
        assert_eq!(partition.columns.len(), least as usize);
        let mut all: Vec<u32> = partition.columns.iter().flat_map(set).collect();
        all.sort_unstable();
        assert_eq!(all, (0..job.units(&partition.family)).collect::<Vec<_>>(), "{partition:?}");
        assert!(axes(&partition.family, partition.layers).into_iter().all(|axis| seen.insert(axis)));
    }
    assert_eq!(seen, if least > 0 { job.axes(sync.stage) } else { BTreeSet::new() });
}

fn figures(job: &Job, plan: &Plan, gpus: &BTreeMap<Place, (&str, bool)>) {
    let active: Vec<_> =
        gpus.iter().filter(|(_, (_, active))| *active).map(|(place, _)| name(*place)).collect();
    let named = |figures: &[Figure]| figures.iter().map(|figure| figure.slot.clone()).collect::<Vec<_>>();
    assert_eq!(named(&plan.memory), active);
    assert_eq!(named(&plan.power), active);
    assert!(plan.memory.iter().all(|figure| figure.bytes.unwrap() > 0));
    let ratios: Vec<f64> = plan.power.iter().map(|figure| figure.ratio.unwrap()).collect();
    assert!(ratios.iter().all(|ratio| (1.0..=1.3).contains(ratio)), "{ratios:?}");
    assert!(job.boost || ratios.iter().all(|ratio| *ratio == 1.0), "{ratios:?}");
    let Some(step) = plan.totals.step_time_ratio else {
        assert!(active.is_empty() && plan.totals.throughput_ratio == 0.0);
        return;
    };
    let samples = f64::from(plan.batch.iter().sum::<u32>()) / f64::from(job.global);
    assert!((plan.totals.throughput_ratio - samples / step).abs() < 1e-9, "{:?}", plan.totals);
    if active.len() == gpus.len() {
        assert!((step - 1.0).abs() < 1e-9, "{step} at full strength");
    }
}

/// Counts by trying every set.
fn ahead(
    job: &Job,
    plan: &Plan,
    gpus: &BTreeMap<Place, (&str, bool)>,
    owned: &BTreeMap<Place, BTreeMap<Axis, BTreeSet<u32>>>,
) {
    let active: Vec<Place> =
        gpus.iter().filter(|(_, (_, active))| *active).map(|(place, _)| *place).collect();
    // A unit of one stage with all that own it.
    let mut owners: BTreeMap<(u32, &Axis, u32), BTreeSet<Place>> = BTreeMap::new();
    for place in &active {
        for (axis, units) in &owned[place] {
            for unit in units {
                owners.entry((place.1, axis, *unit)).or_default().insert(*place);
            }
        }
    }
    let owners: BTreeSet<_> = owners.into_values().collect();
    // Nodes are called DOMAIN or DOMAIN-x, GPUs NODE/INDEX.
    let node = |place: &Place| gpus[place].0.split('/').next().unwrap().to_owned();
    let domain = |place: &Place| node(place).trim_end_matches("-x").to_owned();
    let k = plan.contingency.k as usize;
    for (kind, site) in [
        ("gpu", &(|place: &Place| name(*place)) as &dyn Fn(&Place) -> String),
        ("node", &node),
        ("domain", &domain),
    ] {
        let mut sites: BTreeMap<String, BTreeSet<Place>> = BTreeMap::new();
        for place in &active {
            sites.entry(site(place)).or_default().insert(*place);
        }
        let all: Vec<_> = sites.iter().collect();
        let mut fatal = BTreeSet::new();
        let mut sets = 0;
        for (i, (name, places)) in all.iter().enumerate() {
            let others: Vec<_> = match k {
                1 => vec![None],
                _ => all[i + 1..].iter().map(Some).collect(),
            };
            for other in others {
                sets += 1;
                let lost =
                    |place| places.contains(place) || other.is_some_and(|(_, more)| more.contains(place));
                // Where units are lost already, nothing more can be survived.
                if !plan.recoverable || owners.iter().any(|owners| owners.iter().all(lost)) {
                    let names =
                        std::iter::once((*name).clone()).chain(other.map(|(name, _)| (*name).clone()));
                    fatal.insert(names.collect::<BTreeSet<_>>());
                }
            }
        }
        let told = &plan.contingency.by[kind];
        assert_eq!((told.sets, told.unrecoverable), (sets, fatal.len() as u64), "{kind} of {job:?}");
        assert_eq!(told.examples.is_empty(), fatal.is_empty());
        for example in &told.examples {
            assert!(fatal.contains(&example.iter().cloned().collect()), "{example:?} of {kind}");
        }
    }
}
