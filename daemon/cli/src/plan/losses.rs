//! Who fails and who drains, and whether that can be asked.

use super::PlanArgs;
use crate::failure::Failure;
use reknit_layout::{GpuId, JobSpec, Place, Seats, Topology};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(crate) struct Losses {
    /// Gone with what they hold.
    pub(crate) failed: BTreeSet<Place>,
    /// Leaving; what they hold can still be read.
    pub(crate) drained: BTreeSet<Place>,
    /// The GPUs of both, and those of a failed node that hold no place.
    pub(crate) gone: BTreeSet<GpuId>,
}

impl Losses {
    pub(crate) fn find(
        args: &PlanArgs,
        job: &JobSpec,
        topology: &Topology,
        seats: &Seats,
    ) -> Result<Self, Failure> {
        let named = args.fail.len() + args.drain.len();
        let places =
            job.parallel.data as usize * job.parallel.pipeline as usize * job.parallel.tensor as usize;
        if named > places {
            return Err(Failure::Usage(format!(
                "--fail and --drain name {named} places, but the job has {places} (parallel: data x pipeline x tensor)"
            )));
        }
        let mut losses = Self::default();
        let mut asked: BTreeMap<Place, String> = BTreeMap::new();
        for (option, places, into) in
            [("--fail", &args.fail, &mut losses.failed), ("--drain", &args.drain, &mut losses.drained)]
        {
            for place in places {
                job.expect_place(*place).map_err(|none| Failure::Usage(format!("{option} {none}")))?;
                once(&mut asked, *place, option.to_owned())?;
                into.insert(*place);
                losses.gone.extend(seats.get(*place).cloned());
            }
        }
        losses.fail_nodes(&args.fail_node, topology, seats, asked)?;
        Ok(losses)
    }

    fn fail_nodes(
        &mut self,
        names: &[String],
        topology: &Topology,
        seats: &Seats,
        mut asked: BTreeMap<Place, String>,
    ) -> Result<(), Failure> {
        if names.is_empty() {
            return Ok(());
        }
        let nodes = topology.domains().iter().flat_map(|domain| &domain.nodes);
        let nodes: BTreeMap<&str, _> = nodes.map(|node| (node.name.0.as_str(), node)).collect();
        let mut seen = BTreeSet::new();
        for name in names {
            let Some(node) = nodes.get(name.as_str()) else {
                return Err(Failure::Usage(unknown_node(name, nodes.keys().copied())));
            };
            if !seen.insert(name) {
                return Err(Failure::Usage(format!(
                    "--fail-node {name} is given twice: name each node once"
                )));
            }
            for gpu in &node.gpus {
                self.gone.insert(gpu.clone());
                if let Some(place) = seats.place_of(gpu) {
                    once(&mut asked, place, format!("--fail-node {name}"))?;
                    self.failed.insert(place);
                }
            }
        }
        Ok(())
    }
}

fn once(asked: &mut BTreeMap<Place, String>, place: Place, by: String) -> Result<(), Failure> {
    match asked.insert(place, by.clone()) {
        None => Ok(()),
        Some(before) if before == by => {
            Err(Failure::Usage(format!("{by} {place} is given twice: name each place once")))
        }
        Some(before) => Err(Failure::Usage(format!(
            "{place} is named by {before} and by {by}: a GPU fails once or drains, name each place once"
        ))),
    }
}

/// With the names that are most like it.
fn unknown_node<'a>(name: &str, nodes: impl Iterator<Item = &'a str>) -> String {
    const MOST: usize = 3;
    let mut close: Vec<_> = nodes.map(|node| (distance(name, node), node)).collect();
    close.sort_unstable();
    let count = close.len();
    // Names that share less than half are no help; when there are few nodes, all are named.
    let near = |(far, node): &&(usize, &str)| count <= MOST || far * 2 <= node.chars().count();
    let names: Vec<_> = close.iter().filter(near).take(MOST).map(|(_, node)| *node).collect();
    let hint = match names.as_slice() {
        [] => format!("the topology has {count} nodes, none has a name like it"),
        names => format!("allowed are the topology's {count} nodes, such as {}", names.join(", ")),
    };
    format!("--fail-node {name}: no such node; {hint}")
}

/// How many letters must be put in, taken out or changed to make `b` of `a` (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let changed = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("node-1", "node-1"), 0);
    }

    #[test]
    fn close_names_are_told() {
        let nodes = ["rack-0-a", "rack-0-b", "rack-1-a", "login"];
        let text = unknown_node("rack-0c", nodes.into_iter());
        assert!(text.ends_with("4 nodes, such as rack-0-a, rack-0-b, rack-1-a"), "{text}");
        let text = unknown_node("zzzzzzzzzz", nodes.into_iter());
        assert!(text.ends_with("none has a name like it"), "{text}");
    }
}
