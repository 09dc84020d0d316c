//! A plan as JSON. Other tools read it: the names and their order are a contract, told in docs/planning.md.

use super::answer::Answer;
use super::runs::{ascending, runs};
use crate::failure::Failure;
use reknit_layout::{
    Axis, Exposure, Family, GpuId, Group, Partitions, Place, Slot, StageId, SyncColumns, Transfer, Units,
    WorkerKey, memory,
};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

/// Half-open, `None` for a family without layers.
type Layers = Option<(u32, u32)>;

#[derive(Serialize)]
struct PlanJson<'a> {
    version: u32,
    mode: String,
    recoverable: bool,
    unrecoverable_units: Vec<LostJson<'a>>,
    groups: Vec<GroupJson<'a>>,
    batch: &'a [u32],
    sync: Vec<SyncJson<'a>>,
    transfers: Vec<TransferJson<'a>>,
    totals: TotalsJson,
    memory: Vec<MemoryJson>,
    power: Vec<PowerJson>,
    contingency: ContingencyJson,
}

#[derive(Serialize)]
struct LostJson<'a> {
    family: Family,
    layers: Layers,
    units: &'a Units,
}

#[derive(Serialize)]
struct GroupJson<'a> {
    replica: u32,
    stage: u32,
    degree: u32,
    slots: Vec<SlotJson<'a>>,
    /// Shared by groups that are split alike.
    partitions: Rc<Vec<PartitionJson>>,
}

#[derive(Serialize)]
struct SlotJson<'a> {
    slot: u32,
    gpu: &'a GpuId,
    active: bool,
}

#[derive(Serialize)]
struct PartitionJson {
    family: Family,
    layers: Layers,
    /// One set per slot, empty when inactive.
    owned: Vec<Units>,
}

#[derive(Serialize)]
struct SyncJson<'a> {
    stage: u32,
    columns: u32,
    /// The slot of each column, by replica.
    hosts: &'a [Vec<Slot>],
    partitions: Vec<SyncPartitionJson<'a>>,
}

#[derive(Serialize)]
struct SyncPartitionJson<'a> {
    family: Family,
    layers: Layers,
    columns: &'a [Units],
}

#[derive(Serialize)]
struct TransferJson<'a> {
    family: FamilyJson,
    layers: Layers,
    units: &'a Units,
    from: String,
    to: String,
    bytes: u64,
}

/// A family, or the parameters that every rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum FamilyJson {
    Attn,
    Ffn,
    Vocab,
    Replicated,
}

impl From<Option<Axis>> for FamilyJson {
    fn from(axis: Option<Axis>) -> Self {
        match axis.map(|axis| axis.family) {
            Some(Family::Attn) => Self::Attn,
            Some(Family::Ffn) => Self::Ffn,
            Some(Family::Vocab) => Self::Vocab,
            None => Self::Replicated,
        }
    }
}

#[derive(Serialize)]
struct TotalsJson {
    bytes_moved: u64,
    bytes_lower_bound: u64,
    max_sent_by_one: u64,
    max_received_by_one: u64,
    /// `null` when nobody trains.
    step_time_ratio: f64,
    throughput_ratio: f64,
}

#[derive(Serialize)]
struct MemoryJson {
    slot: Place,
    bytes: u64,
    limit: Option<u64>,
}

#[derive(Serialize)]
struct PowerJson {
    slot: Place,
    ratio: f64,
}

#[derive(Serialize)]
struct ContingencyJson {
    k: u32,
    by: ByJson,
}

#[derive(Serialize)]
struct ByJson {
    gpu: Exposure,
    node: Exposure,
    domain: Exposure,
}

/// On one line. `k`: how many further losses to look ahead to.
pub(crate) fn plan(answer: &Answer<'_>, k: u32) -> Result<String, Failure> {
    let plan = &answer.plan;
    let (max_sent_by_one, max_received_by_one) = answer.busiest();
    let lost = runs(answer.missing.iter().map(|(axis, units)| (*axis, units)));
    let ahead = answer.ahead(k);
    let json = PlanJson {
        version: 1,
        mode: answer.mode.to_string(),
        recoverable: answer.missing.is_empty(),
        unrecoverable_units: lost
            .into_iter()
            .map(|run| LostJson { family: run.family, layers: run.layers, units: run.value })
            .collect(),
        groups: groups(answer),
        batch: &plan.layout.batch,
        sync: plan.layout.sync.iter().map(sync).collect(),
        transfers: transfers(answer),
        totals: TotalsJson {
            bytes_moved: plan.bytes_moved,
            bytes_lower_bound: plan.bytes_lower_bound,
            max_sent_by_one,
            max_received_by_one,
            step_time_ratio: plan.predicted.step_time_ratio,
            throughput_ratio: plan.predicted.throughput_ratio,
        },
        memory: memory_of(answer),
        power: power(answer),
        contingency: ContingencyJson {
            k: ahead.k,
            by: ByJson { gpu: ahead.gpu, node: ahead.node, domain: ahead.domain },
        },
    };
    serde_json::to_string(&json).map_err(Failure::failed("the plan as JSON"))
}

fn groups<'a>(answer: &'a Answer<'_>) -> Vec<GroupJson<'a>> {
    let mut known: HashMap<(*const Partitions, StageId), Rc<Vec<PartitionJson>>> = HashMap::new();
    let mut json = Vec::with_capacity(answer.plan.layout.groups.len());
    for group in &answer.plan.layout.groups {
        let key = (Arc::as_ptr(&group.partitions), group.stage);
        let partitions = known.entry(key).or_insert_with(|| Rc::new(partitions(answer, group)));
        let slots = (0..).zip(&group.slots).filter_map(|(slot, member)| {
            let place = group.place(Slot(slot));
            let gpu = answer.seating.seats.get(place)?;
            Some(SlotJson { slot, gpu, active: member.is_some() })
        });
        json.push(GroupJson {
            replica: group.replica.0,
            stage: group.stage.0,
            degree: group.degree(),
            slots: slots.collect(),
            partitions: Rc::clone(partitions),
        });
    }
    json
}

/// A group that does not train owns nothing of every axis.
fn partitions(answer: &Answer<'_>, group: &Group) -> Vec<PartitionJson> {
    let nothing = vec![Units::new(); group.slots.len()];
    let axes = ascending(answer.job, group.stage);
    let owned = axes.into_iter().map(|axis| (axis, group.partitions.get(&axis).unwrap_or(&nothing)));
    let runs = runs(owned).into_iter();
    runs.map(|run| PartitionJson { family: run.family, layers: run.layers, owned: run.value.clone() })
        .collect()
}

fn sync(sync: &SyncColumns) -> SyncJson<'_> {
    let axes: BTreeMap<Axis, &[Units]> =
        sync.axes.iter().map(|of| (of.axis, of.columns.as_slice())).collect();
    let partitions = runs(axes).into_iter();
    SyncJson {
        stage: sync.stage.0,
        columns: sync.columns,
        hosts: &sync.hosts,
        partitions: partitions
            .map(|run| SyncPartitionJson { family: run.family, layers: run.layers, columns: run.value })
            .collect(),
    }
}

/// Those of neighbouring layers that are alike are one.
fn transfers<'a>(answer: &'a Answer<'_>) -> Vec<TransferJson<'a>> {
    type End<'a> = (Option<Place>, &'a WorkerKey);
    let end = |worker: &'a WorkerKey| (answer.place_of(worker), worker);
    let mut by_ends: BTreeMap<(FamilyJson, End<'a>, End<'a>), Vec<&Transfer>> = BTreeMap::new();
    for transfer in &answer.plan.transfers {
        let key = (transfer.axis.into(), end(&transfer.from), end(&transfer.to));
        by_ends.entry(key).or_default().push(transfer);
    }
    let mut json = Vec::new();
    for ((family, (_, from), (place, to)), mut alike) in by_ends {
        let mut add = |layers, units, bytes| {
            let (from, to) = (answer.name_of(from), answer.name_of(to));
            json.push(TransferJson { family, layers, units, from, to, bytes });
        };
        let stage = place.map(|place| answer.job.stage_layers(place.stage));
        for norms in alike.extract_if(.., |transfer| transfer.axis.is_none()) {
            add(stage.as_ref().map(|layers| (layers.start, layers.end)), &norms.units, norms.bytes);
        }
        alike.sort_by_key(|transfer| transfer.axis);
        let mut bytes = alike.iter().map(|transfer| transfer.bytes);
        for run in runs(alike.iter().filter_map(|transfer| Some((transfer.axis?, &transfer.units)))) {
            let layers = run.layers.map_or(1, |(start, end)| end - start);
            add(run.layers, run.value, bytes.by_ref().take(layers as usize).sum());
        }
    }
    json
}

fn memory_of(answer: &Answer<'_>) -> Vec<MemoryJson> {
    let limit = answer.topology.gpu_memory;
    active(answer)
        .map(|(group, slot)| MemoryJson {
            slot,
            bytes: memory::slot_bytes(answer.job, group, slot.slot),
            limit,
        })
        .collect()
}

fn power(answer: &Answer<'_>) -> Vec<PowerJson> {
    let ratio = |place: &Place| answer.plan.predicted.power.get(place).copied().unwrap_or(1.0);
    active(answer).map(|(_, slot)| PowerJson { slot, ratio: ratio(&slot) }).collect()
}

fn active<'a>(answer: &'a Answer<'_>) -> impl Iterator<Item = (&'a Group, Place)> {
    answer.plan.layout.groups.iter().flat_map(|group| group.members().map(move |(place, _)| (group, place)))
}
