//! What happens, in one sentence; and what can be done where nothing is left to go on with.

use super::{MOST_NAMES, count, names};
use crate::output::bytes_text;
use crate::plan::answer::Answer;
use crate::plan::runs::{Run, runs};
use reknit_layout::{Contingency, Place, ReplicaId, Units};
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn sentence(answer: &Answer<'_>, next: &Contingency) -> String {
    let further = match next.gpu.unrecoverable {
        0 => "survives any further GPU: yes".to_owned(),
        fatal => {
            format!("survives any further GPU: no, {fatal} of {} are the last to hold a unit", next.gpu.sets)
        }
    };
    let parts = [changes(answer), moved(answer), step_time(answer), further];
    format!("{}: {}", gone(answer), parts.join("; "))
}

/// `2 of 8 GPUs gone, 1 leaves`
fn gone(answer: &Answer<'_>) -> String {
    let losses = answer.losses;
    let (failed, drained) = (losses.failed.len(), losses.drained.len());
    let spares = losses.gone.len() - failed - drained;
    let seated = seated_gone(answer, failed, drained);
    if spares == 0 { seated } else { format!("{seated}, {} gone", count(spares, "spare GPU")) }
}

fn seated_gone(answer: &Answer<'_>, failed: usize, drained: usize) -> String {
    let all = count(answer.before.seats.iter().count(), "GPU");
    match (failed, drained) {
        (0, 0) => {
            let active = answer.seating.active();
            match active.filter(|(place, _)| answer.held(*place).is_none()).count() {
                0 => format!("all of {all} there"),
                back => format!("all of {all} there, {back} of them with nothing"),
            }
        }
        (failed, 0) => format!("{failed} of {all} gone"),
        (0, drained) => format!("{drained} of {all} {}", if drained == 1 { "leaves" } else { "leave" }),
        (failed, drained) => {
            format!("{failed} of {all} gone, {drained} {}", if drained == 1 { "leaves" } else { "leave" })
        }
    }
}

/// What becomes of the replicas that are not as the nominal layout, and which places have another GPU.
fn changes(answer: &Answer<'_>) -> String {
    let tensor = answer.job.parallel.tensor;
    let mut degrees: BTreeMap<ReplicaId, (u32, u32)> = BTreeMap::new();
    for group in &answer.plan.layout.groups {
        let degree = group.degree();
        let range = degrees.entry(group.replica).or_insert((degree, degree));
        *range = (range.0.min(degree), range.1.max(degree));
    }
    let held: BTreeSet<ReplicaId> = answer.before.holdings.keys().map(|place| place.replica).collect();
    let mut said = Vec::new();
    let (mut spares, mut exchanges) = (Vec::new(), BTreeSet::new());
    for (place, _) in answer.seating.seats.iter() {
        match answer.origin(place) {
            None => spares.push(place.to_string()),
            Some(origin) if origin == place => {}
            Some(origin) => {
                let pair = [place.replica.min(origin.replica), place.replica.max(origin.replica)];
                exchanges.insert((place.stage, pair));
            }
        }
    }
    match spares.as_slice() {
        [] => {}
        [place] => said.push(format!("a spare takes {place}")),
        [_, _, ..] => said.push(format!("spares take {}", names(spares))),
    }
    if !exchanges.is_empty() {
        let groups = exchanges.iter().map(|(stage, [a, b])| format!("stage {stage} of replicas {a} and {b}"));
        said.push(format!("{} change places", names(groups)));
    }
    let mut replicas = Vec::new();
    for (replica, (least, most)) in degrees {
        match (least, most) {
            (0, _) if held.contains(&replica) => replicas.push(format!("replica {replica} stops training")),
            (0, _) => replicas.push(format!("replica {replica} does not train")),
            (least, most) if least == tensor && most == tensor => {
                if whole_again(answer, replica) {
                    replicas.push(format!("replica {replica} is whole again"));
                }
            }
            (least, most) if least == most => {
                replicas.push(format!("replica {replica} goes on with {least} of {tensor} slots"));
            }
            (least, _) => {
                replicas.push(format!(
                    "replica {replica} goes on with {least} of {tensor} slots at its smallest stage"
                ));
            }
        }
    }
    let more = replicas.len().saturating_sub(MOST_NAMES);
    said.extend(replicas.into_iter().take(MOST_NAMES));
    if more > 0 {
        said.push(format!("{} change too", count(more, "more replica")));
    }
    if said.is_empty() { "every replica goes on as before".to_owned() } else { said.join(", ") }
}

/// Whether some place of a complete replica held nothing before.
fn whole_again(answer: &Answer<'_>, replica: ReplicaId) -> bool {
    let groups = answer.plan.layout.groups.iter().filter(|group| group.replica == replica);
    let mut places = groups
        .flat_map(|group| group.active().into_iter().map(|slot| Place { replica, stage: group.stage, slot }));
    places.any(|place| answer.origin(place).is_some() && answer.held(place).is_none())
}

fn moved(answer: &Answer<'_>) -> String {
    let transfers = &answer.plan.transfers;
    if transfers.is_empty() {
        return "nothing moves".to_owned();
    }
    let senders: BTreeSet<_> = transfers.iter().map(|transfer| &transfer.from).collect();
    let bytes = bytes_text(answer.plan.bytes_moved);
    format!("{bytes} are fetched from {}", count(senders.len(), "GPU"))
}

fn step_time(answer: &Answer<'_>) -> String {
    let ratio = answer.plan.predicted.step_time_ratio;
    if (ratio - 1.0).abs() < 0.005 {
        "a step takes as long as at full strength".to_owned()
    } else {
        format!("a step takes {ratio:.2} times as long as at full strength")
    }
}

/// For stderr, on one line: what is lost.
pub(crate) fn unrecoverable(answer: &Answer<'_>) -> String {
    format!(
        "no live GPU holds {}: load a checkpoint, or wait for a GPU that holds them",
        names(lost_units(answer))
    )
}

/// `attn layers 0-3 units 3-5`
fn lost_units(answer: &Answer<'_>) -> Vec<String> {
    let runs = runs(answer.missing.iter().map(|(axis, units)| (*axis, units)));
    let text = |run: Run<&Units>| {
        let family = run.family;
        match run.layers {
            Some((start, end)) if end == start + 1 => format!("{family} layer {start} units {}", run.value),
            Some((start, end)) => format!("{family} layers {start}-{} units {}", end - 1, run.value),
            None => format!("{family} units {}", run.value),
        }
    };
    runs.into_iter().map(text).collect()
}

/// All that is to say where units are lost: which, and what can be done.
pub(super) fn lost(answer: &Answer<'_>) -> Vec<String> {
    const MOST_LOST: usize = 12;
    let lost = lost_units(answer);
    let mut lines = vec![
        format!("{}: the job cannot go on", gone(answer)),
        String::new(),
        "no live GPU holds".to_owned(),
    ];
    lines.extend(lost.iter().take(MOST_LOST).map(|units| format!("  {units}")));
    if lost.len() > MOST_LOST {
        lines.push(format!("  and {} more; --format json lists all", lost.len() - MOST_LOST));
    }
    lines.extend([String::new(), "choices".to_owned()]);
    let dir = &answer.job.checkpoint.dir;
    lines.push(if dir.is_empty() {
        "  load the newest checkpoint: this job keeps none ([checkpoint] dir is empty)".to_owned()
    } else {
        format!("  load the newest checkpoint of {dir}")
    });
    let holds = |place: &&Place| {
        let holding = answer.before.holdings.get(place);
        holding.is_some_and(|holding| {
            answer.missing.iter().any(|(axis, units)| !holding.of(*axis).intersection(units).is_empty())
        })
    };
    let held: Vec<_> = answer.losses.failed.iter().filter(holds).map(ToString::to_string).collect();
    lines.push(match held.is_empty() {
        true => "  wait for a GPU that holds them".to_owned(),
        false => format!("  wait for a GPU that held them: {}", names(held)),
    });
    lines
}
