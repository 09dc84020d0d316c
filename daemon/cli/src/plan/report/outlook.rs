//! What the new layout costs, and what it would survive.

use super::{MOST_NAMES, count, names};
use crate::output::bytes_text;
use crate::plan::answer::Answer;
use reknit_layout::{Contingency, Exposure, Place, memory};
use std::collections::BTreeMap;

pub(super) fn lines(answer: &Answer<'_>, ahead: &[Contingency]) -> Vec<String> {
    let layout = &answer.plan.layout;
    let predicted = &answer.plan.predicted;
    let step = format!(
        "{:.3} of the nominal step time, {:.3} of the nominal throughput",
        predicted.step_time_ratio, predicted.throughput_ratio
    );
    let sync = match layout.handover_bytes(answer.job) {
        0 => "every slot hosts what it owns: no gradient is handed over".to_owned(),
        bytes => format!(
            "in each step {} of gradients go to another slot of their group and come back, {} each way at the busiest \
             GPU; the speed above leaves this out",
            bytes_text(bytes),
            bytes_text(layout.busiest_handover_bytes(answer.job))
        ),
    };
    let mut lines = vec![
        line("batch", &batch(&layout.batch)),
        line("speed", &step),
        line("sync", &sync),
        line("memory", &most_memory(answer)),
    ];
    if answer.job.recovery.power_boost {
        lines.push(line("power", &power(&predicted.power)));
    }
    let titles = std::iter::once("survives").chain(std::iter::repeat(""));
    let exposures = ahead.iter().flat_map(|ahead| [&ahead.gpu, &ahead.node, &ahead.domain]);
    let some_yes = exposures.into_iter().any(|exposure| exposure.sets > 0 && exposure.unrecoverable == 0);
    let meaning = some_yes.then(|| "(yes: every unit keeps a live holder)".to_owned());
    let rows = ahead.iter().flat_map(survivals).chain(meaning);
    lines.extend(titles.zip(rows).map(|(title, text)| line(title, &text)));
    lines
}

fn line(title: &str, text: &str) -> String {
    format!("{title:<9} {text}")
}

/// `12+20 samples`; equal shares are counted where there are many: `10 replicas of 9, 241 of 8 samples`.
fn batch(shares: &[u32]) -> String {
    const MOST: usize = 16;
    if shares.len() <= MOST {
        return shares.iter().map(ToString::to_string).collect::<Vec<_>>().join("+") + " samples";
    }
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for share in shares {
        *counts.entry(*share).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().rev().collect();
    let few = counts.split_off(counts.len().min(MOST_NAMES));
    let parts = counts.into_iter().zip(0..).map(|((share, replicas), at)| match at {
        0 => format!("{} of {share}", count(replicas, "replica")),
        _ => format!("{replicas} of {share}"),
    });
    let parts: Vec<_> = parts.collect();
    let rest = few.first().map(|(most, _)| {
        let replicas: usize = few.iter().map(|(_, replicas)| replicas).sum();
        format!(" and {replicas} of at most {most}")
    });
    parts.join(", ") + &rest.unwrap_or_default() + " samples"
}

fn most_memory(answer: &Answer<'_>) -> String {
    let Some((place, bytes)) = memory::most(answer.job, &answer.plan.layout.groups) else {
        return "none".to_owned();
    };
    let limit = match answer.topology.gpu_memory {
        Some(limit) => format!("of {}", bytes_text(limit)),
        None => "(what a GPU has is not known)".to_owned(),
    };
    format!("{} {limit} at {place}, which needs most", bytes_text(bytes))
}

fn power(above: &BTreeMap<Place, f64>) -> String {
    if above.is_empty() {
        return "every GPU as usual".to_owned();
    }
    let mut by_ratio: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (place, ratio) in above {
        by_ratio.entry(format!("{ratio:.3}")).or_default().push(place.to_string());
    }
    let parts =
        by_ratio.into_iter().map(|(ratio, places)| format!("{ratio} of nominal at {}", names(places)));
    parts.collect::<Vec<_>>().join("; ")
}

/// Of GPUs, nodes and domains in this order: a line for each, but one for neighbours that are survived.
fn survivals(ahead: &Contingency) -> Vec<String> {
    let kinds = [("GPU", &ahead.gpu), ("node", &ahead.node), ("domain", &ahead.domain)];
    let alike = kinds.chunk_by(|(_, one), (_, next)| one.unrecoverable == 0 && next.unrecoverable == 0);
    let line = |kinds: &[(&str, &Exposure)]| {
        let texts = kinds.iter().map(|(kind, exposure)| survival(ahead.k, kind, exposure));
        texts.collect::<Vec<_>>().join("; ")
    };
    alike.map(line).collect()
}

/// `any 2 GPUs: no, 12 of 28 pairs hold the last copy of a unit, for example 0.0.1 with 1.0.1`
fn survival(k: u32, kind: &str, exposure: &Exposure) -> String {
    let plural = if k == 1 { "" } else { "s" };
    let any = format!("any {k} {kind}{plural}");
    match exposure.unrecoverable {
        _ if exposure.sets == 0 => format!("any {k} {kind}{plural}: there are fewer"),
        0 => format!("{any}: yes"),
        fatal => {
            let set = if k == 1 { kind } else { "pair" };
            let lose = match (fatal, exposure.sets) {
                (_, 1) => format!("the only {set} holds the last copy of a unit"),
                (1, sets) => format!("1 of {sets} {set}s holds the last copy of a unit"),
                (fatal, sets) => format!("{fatal} of {sets} {set}s hold the last copy of a unit"),
            };
            let example =
                exposure.examples.first().map(|set| format!(", for example {}", set.join(" with ")));
            format!("{any}: no, {lose}{}", example.unwrap_or_default())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survival_in_words() {
        let exposure = |sets, unrecoverable, example: &[&str]| Exposure {
            sets,
            unrecoverable,
            examples: vec![example.iter().map(|name| (*name).to_owned()).collect()],
        };
        assert_eq!(survival(1, "GPU", &exposure(8, 0, &[])), "any 1 GPU: yes");
        assert_eq!(
            survival(2, "GPU", &exposure(28, 12, &["0.0.1", "1.0.1"])),
            "any 2 GPUs: no, 12 of 28 pairs hold the last copy of a unit, for example 0.0.1 with 1.0.1"
        );
        assert_eq!(
            survival(1, "node", &exposure(2, 1, &["n0"])),
            "any 1 node: no, 1 of 2 nodes holds the last copy of a unit, for example n0"
        );
        assert_eq!(survival(2, "domain", &exposure(0, 0, &[])), "any 2 domains: there are fewer");
        assert_eq!(
            survival(2, "domain", &exposure(1, 1, &["a", "b"])),
            "any 2 domains: no, the only pair holds the last copy of a unit, for example a with b"
        );
    }

    #[test]
    fn a_batch_of_many_replicas_is_counted() {
        assert_eq!(batch(&[14, 18]), "14+18 samples");
        let mut shares = vec![8; 255];
        shares.push(7);
        assert_eq!(batch(&shares), "255 replicas of 8, 1 of 7 samples");
        shares.extend([1, 2, 2, 3, 4, 5, 6]);
        assert_eq!(batch(&shares), "255 replicas of 8, 1 of 7, 1 of 6, 1 of 5 and 5 of at most 4 samples");
    }
}
