//! Who fails and who drains, and whether that can be asked.

use super::{PlanArgs, Target};
use crate::failure::Failure;
use reknit_layout::topology::Node;
use reknit_layout::{GpuId, JobSpec, Place, Seats, Topology};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(crate) struct Losses {
    /// Gone with what they hold.
    pub(crate) failed: BTreeSet<Place>,
    /// Leaving; what they hold can still be read.
    pub(crate) drained: BTreeSet<Place>,
    /// The GPUs of both, and those that hold no place.
    pub(crate) gone: BTreeSet<GpuId>,
}

/// GPUs and by which option each was named first.
type Named = BTreeMap<GpuId, String>;

impl Losses {
    /// A GPU may be named by its place, its name and its node at once, but not twice by the same.
    pub(crate) fn find(
        args: &PlanArgs,
        job: &JobSpec,
        topology: &Topology,
        seats: &Seats,
    ) -> Result<Self, Failure> {
        if let Some(stray) = args.stray.first() {
            let hint = match args.fail.is_empty() && args.drain.is_empty() {
                false => "an option takes one GPU, repeat --fail for each",
                true => "see reknit plan --help",
            };
            return Err(Failure::Usage(format!("unexpected argument `{stray}`: {hint}")));
        }
        let machines = Machines::of(topology);
        let gpus = |option: &str, targets: &[Target]| -> Result<Named, Failure> {
            let mut named = Named::new();
            each_once(option, targets, |target| {
                let gpu = match target {
                    Target::Place(place) => {
                        job.expect_place(*place)
                            .map_err(|none| Failure::Usage(format!("{option} {none}")))?;
                        seats.get(*place).cloned()
                    }
                    Target::Gpu(gpu) => Some(machines.expect_gpu(option, topology, gpu)?),
                };
                named.extend(gpu.map(|gpu| (gpu, option.to_owned())));
                Ok(())
            })?;
            Ok(named)
        };
        let mut failed = gpus("--fail", &args.fail)?;
        let drained = gpus("--drain", &args.drain)?;
        each_once("--fail-node", &args.fail_node, |name| {
            let by = format!("--fail-node {name}");
            for gpu in &machines.expect_node(&by, name)?.gpus {
                failed.entry(gpu.clone()).or_insert_with(|| by.clone());
            }
            Ok(())
        })?;
        for (gpu, drain) in &drained {
            if let Some(fail) = failed.get(gpu) {
                let name = seats.place_of(gpu).map_or_else(|| gpu.to_string(), |place| place.to_string());
                return Err(Failure::Usage(format!(
                    "{name} is named by {fail} and by {drain}: a GPU either fails or drains"
                )));
            }
        }
        let places = |gpus: &Named| gpus.keys().filter_map(|gpu| seats.place_of(gpu)).collect();
        let (failed_at, drained_at) = (places(&failed), places(&drained));
        let gone = failed.into_keys().chain(drained.into_keys()).collect();
        Ok(Self { failed: failed_at, drained: drained_at, gone })
    }
}

fn each_once<T: ToString>(
    option: &str,
    all: &[T],
    mut visit: impl FnMut(&T) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut seen = BTreeSet::new();
    for one in all {
        if !seen.insert(one.to_string()) {
            let name = one.to_string();
            return Err(Failure::Usage(format!("{option} {name} is given twice: name each once")));
        }
        visit(one)?;
    }
    Ok(())
}

/// The topology's nodes by their names.
struct Machines<'a>(BTreeMap<&'a str, &'a Node>);

impl<'a> Machines<'a> {
    fn of(topology: &'a Topology) -> Self {
        let nodes = topology.domains().iter().flat_map(|domain| &domain.nodes);
        Self(nodes.map(|node| (node.name.0.as_str(), node)).collect())
    }

    fn expect_node(&self, by: &str, name: &str) -> Result<&'a Node, Failure> {
        let found = self.0.get(name).copied();
        found.ok_or_else(|| Failure::Usage(unknown_node(by, name, self.0.keys().copied())))
    }

    fn expect_gpu(&self, option: &str, topology: &Topology, gpu: &GpuId) -> Result<GpuId, Failure> {
        if topology.find(gpu).is_some() {
            return Ok(gpu.clone());
        }
        let by = format!("{option} {gpu}");
        let node = gpu.0.rsplit_once('/').map_or(gpu.0.as_str(), |(node, _)| node);
        let node = self.expect_node(&by, node)?;
        let gpus = match (node.gpus.first(), node.gpus.last()) {
            (Some(first), Some(last)) => format!("allowed are {first} to {last}"),
            (None, _) | (_, None) => format!("node {} has none", node.name),
        };
        Err(Failure::Usage(format!("{by}: no such GPU; {gpus}")))
    }
}

/// With the names that are most like it.
fn unknown_node<'a>(by: &str, name: &str, nodes: impl Iterator<Item = &'a str>) -> String {
    const MOST: usize = 3;
    // No node has a longer name: it is like none, and not worth comparing.
    const LONGEST: usize = 64;
    if name.len() > LONGEST {
        return format!("--fail-node is given {} bytes: names of nodes have up to {LONGEST}", name.len());
    }
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
    format!("{by}: no such node; {hint}")
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
        let text = unknown_node("--fail-node rack-0c", "rack-0c", nodes.into_iter());
        assert!(text.ends_with("4 nodes, such as rack-0-a, rack-0-b, rack-1-a"), "{text}");
        let text = unknown_node("--fail-node zzzzzzzzzz", "zzzzzzzzzz", nodes.into_iter());
        assert!(text.ends_with("none has a name like it"), "{text}");
    }
}
