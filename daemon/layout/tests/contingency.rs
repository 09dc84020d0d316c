//! Contingency against the planner itself: every set of losses is planned, and some unit has no live holder or not.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Cluster, job, worker};
use proptest::prelude::*;
use reknit_layout::topology::{Domain, Node};
use reknit_layout::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The GPU of each place is on this node, in this domain; `None`: the topology does not know it.
type Spot = Option<(u8, u8)>;

fn topology(spots: &BTreeMap<Place, Spot>) -> Topology {
    let mut domains: BTreeMap<u8, BTreeMap<u8, Vec<GpuId>>> = BTreeMap::new();
    for (place, spot) in spots {
        if let Some((domain, node)) = spot {
            let gpu = worker(*place, 0).gpu;
            domains.entry(*domain).or_default().entry(*node).or_default().push(gpu);
        }
    }
    let domain = |(domain, nodes): (u8, BTreeMap<u8, Vec<GpuId>>)| Domain {
        name: DomainName(format!("domain{domain}")),
        nodes: nodes
            .into_iter()
            .map(|(node, gpus)| Node { name: NodeName(format!("node{domain}.{node}")), gpus })
            .collect(),
        power_budget: None,
    };
    Topology::new(domains.into_iter().map(domain).collect(), None)
}

/// Names of GPUs, nodes and domains, each with its places, in the order of their first places.
fn sites(cluster: &Cluster, spots: &BTreeMap<Place, Spot>) -> [Vec<(String, Vec<Place>)>; 3] {
    let mut all: [Vec<(String, Vec<Place>)>; 3] = Default::default();
    for (place, _) in cluster.plan.layout.members() {
        let alone = format!("r{}-s{}", place.replica, place.stage);
        let names = match spots[&place] {
            Some((domain, node)) => [format!("node{domain}.{node}"), format!("domain{domain}")],
            None => [alone.clone(), alone],
        };
        for (kind, name) in [place.to_string()].into_iter().chain(names).enumerate() {
            match all[kind].iter_mut().find(|(known, _)| *known == name) {
                Some((_, places)) => places.push(place),
                None => all[kind].push((name, vec![place])),
            }
        }
    }
    all
}

/// Whether some unit has no live holder when the workers at these places are gone with all they held.
fn fatal(cluster: &Cluster, lost: &BTreeSet<Place>) -> bool {
    let survivors = |place: &Place| !lost.contains(place);
    let left: BTreeMap<Place, WorkerKey> =
        cluster.plan.layout.members().map(|(place, member)| (place, member.worker.clone())).collect();
    let mut holdings = cluster.holdings.clone();
    for place in lost {
        holdings.remove(&left[place]);
    }
    let ask = |members: &BTreeMap<Place, WorkerKey>| {
        draft(&cluster.request(&candidates(members.clone(), holdings.clone())))
    };
    // New workers that hold nothing take the places: no replica has too few slots to be planned.
    let again = left.iter().map(|(place, worker)| {
        let incarnation = if survivors(place) { worker.incarnation } else { Incarnation(1 << 40) };
        (*place, WorkerKey { gpu: worker.gpu.clone(), incarnation })
    });
    let fatal = !ask(&again.collect()).unwrap().missing.is_empty();
    let without = left.iter().filter(|(place, _)| survivors(place));
    match ask(&without.map(|(place, worker)| (*place, worker.clone())).collect()) {
        Ok(draft) => assert_eq!(fatal, !draft.missing.is_empty()),
        Err(DraftError::TooFew { .. }) => {}
        Err(error @ DraftError::Memory { .. }) => panic!("{error}"),
    }
    fatal
}

fn by_trial(cluster: &Cluster, sites: &[(String, Vec<Place>)], k: u32) -> Exposure {
    let mut exposure = Exposure { sets: 0, unrecoverable: 0, examples: Vec::new() };
    let mut judge = |set: &[&(String, Vec<Place>)]| {
        exposure.sets += 1;
        if fatal(cluster, &set.iter().flat_map(|(_, places)| places).copied().collect()) {
            exposure.unrecoverable += 1;
            exposure.examples.push(set.iter().map(|(name, _)| name.clone()).collect());
        }
    };
    for (index, one) in sites.iter().enumerate() {
        if k == 1 {
            judge(&[one]);
        } else {
            sites[index + 1..].iter().for_each(|two| judge(&[one, two]));
        }
    }
    exposure.examples.truncate(8);
    exposure
}

#[derive(Debug)]
struct Case {
    job: JobSpec,
    spots: BTreeMap<Place, Spot>,
    lost: Vec<prop::sample::Index>,
    k: u32,
}

fn case() -> impl Strategy<Value = Case> {
    let shape = (1..=4_u32, 1..=4_u32, 1..=2_u32, 1..=2_u32)
        .prop_filter("few GPUs", |(data, tensor, stages, _)| data * tensor * stages <= 16);
    shape.prop_flat_map(|(data, tensor, stages, min_tensor)| {
        let units = move || tensor..=tensor + 3;
        let places = (data * tensor * stages) as usize;
        // Anything goes: groups of several replicas on a node, groups over several domains, GPUs nobody knows of.
        let spot = prop_oneof![9 => (0..4_u8, 0..3_u8).prop_map(Some), 1 => Just(None)];
        let scattered = prop::collection::vec(spot, places);
        let groups = prop::collection::vec((0..6_u8, 0..2_u8), (data * stages) as usize);
        let together = groups.prop_map(move |groups| {
            groups.into_iter().flat_map(|spot| vec![Some(spot); tensor as usize]).collect::<Vec<_>>()
        });
        let spots = prop_oneof![scattered, together];
        let lost = prop::collection::vec(any::<prop::sample::Index>(), 0..4);
        (units(), units(), units(), spots, lost, 1..=2_u32).prop_map(
            move |(attn, ffn, vocab, spots, lost, k)| {
                let mut job = job(data, tensor, attn, ffn, vocab);
                (job.model.layers, job.parallel.pipeline) = (2, stages);
                job.parallel.min_tensor = min_tensor.min(tensor);
                let each = (0..data).flat_map(|replica| (0..stages).map(move |stage| (replica, stage)));
                let each = each.flat_map(|(replica, stage)| {
                    (0..tensor).map(move |slot| Place::new(replica, stage, slot))
                });
                Case { job, spots: each.zip(spots).collect(), lost, k }
            },
        )
    })
}

proptest! {
    #![proptest_config(common::cases(800))]

    #[test]
    fn as_every_set_planned(case in case()) {
        let mut cluster = Cluster::start(case.job);
        cluster.topology = topology(&case.spots);
        for at in &case.lost {
            let places: Vec<Place> = cluster.members.keys().copied().collect();
            if places.len() > 1 {
                cluster.lose(places[at.index(places.len())]);
            }
        }
        // Too little is left to have a layout.
        prop_assume!(case.lost.is_empty() || cluster.replan().is_ok());
        let found = contingency(&cluster.plan.layout, &cluster.topology, case.k);
        let kinds = [&found.gpu, &found.node, &found.domain];
        for (sites, exposure) in sites(&cluster, &case.spots).iter().zip(kinds) {
            prop_assert_eq!(exposure, &by_trial(&cluster, sites, case.k));
        }
    }
}

/// A layout of groups that are split alike, two replicas' groups of a stage to each node of 16 GPUs, and four nodes to a domain.
fn large(data: u32, stages: u32) -> (Layout, Topology) {
    let partitions = |stage: u32| -> Arc<Partitions> {
        let sets =
            |units: u32| (0..8).map(|slot| Units::range(slot * units / 8, (slot + 1) * units / 8)).collect();
        let layers = stage * 10..stage * 10 + 10;
        layers
            .flat_map(|layer| [(Axis::attn(layer), sets(8)), (Axis::ffn(layer), sets(1792))])
            .collect::<Partitions>()
            .into()
    };
    let partitions: Vec<_> = (0..stages).map(partitions).collect();
    let gpu = |replica: u32, stage: u32, slot: u32| {
        GpuId(format!("n{}-{stage}/{}", replica / 2, replica % 2 * 8 + slot))
    };
    let groups = (0..data).flat_map(|replica| (0..stages).map(move |stage| (replica, stage))).map(
        |(replica, stage)| Group {
            replica: ReplicaId(replica),
            stage: StageId(stage),
            slots: (0..8)
                .map(|slot| {
                    Some(Member {
                        worker: WorkerKey { gpu: gpu(replica, stage, slot), incarnation: Incarnation(1) },
                    })
                })
                .collect(),
            partitions: partitions[stage as usize].clone(),
        },
    );
    let layout =
        Layout { epoch: Epoch(1), groups: groups.collect(), batch: vec![1; data as usize], sync: Vec::new() };
    let node = |number: u32, stage: u32| Node {
        name: NodeName(format!("n{number}-{stage}")),
        gpus: (0..16).map(|index| gpu(number * 2 + index / 8, stage, index % 8)).collect(),
    };
    let nodes: Vec<Node> =
        (0..data / 2).flat_map(|number| (0..stages).map(move |stage| node(number, stage))).collect();
    let domain = |(number, nodes): (usize, &[Node])| Domain {
        name: DomainName(format!("d{number}")),
        nodes: nodes.to_vec(),
        power_budget: None,
    };
    let domains = nodes.chunks(4).enumerate().map(domain).collect();
    (layout, Topology::new(domains, None))
}

#[test]
fn many_replicas_survive_any_two_losses() {
    let (layout, topology) = large(256, 8);
    let found = contingency(&layout, &topology, 2);
    assert_eq!(
        [found.gpu.sets, found.node.sets, found.domain.sets],
        [16_384 * 16_383 / 2, 1024 * 1023 / 2, 256 * 255 / 2]
    );
    for exposure in [found.gpu, found.node, found.domain] {
        assert_eq!((exposure.unrecoverable, exposure.examples), (0, Vec::new()));
    }
}

#[test]
fn two_replicas_on_one_node_go_together() {
    // Two replicas: each node has both groups of its stage, each domain four stages.
    let (layout, topology) = large(2, 8);
    let one = contingency(&layout, &topology, 1);
    assert_eq!((one.gpu.sets, one.gpu.unrecoverable), (128, 0));
    assert_eq!((one.node.sets, one.node.unrecoverable), (8, 8));
    assert_eq!(one.node.examples[..2], [["n0-0"], ["n0-1"]]);
    assert_eq!((one.domain.sets, one.domain.unrecoverable), (2, 2));
    let two = contingency(&layout, &topology, 2);
    // Each of 64 slots of the first replica with its match in the other.
    assert_eq!((two.gpu.sets, two.gpu.unrecoverable), (128 * 127 / 2, 64));
    assert_eq!(two.gpu.examples.len(), 8);
    assert_eq!(two.gpu.examples[..2], [["0.0.0", "1.0.0"], ["0.0.1", "1.0.1"]]);
    assert_eq!((two.node.sets, two.node.unrecoverable), (28, 28));
    assert_eq!(two.node.examples[7], ["n0-1", "n0-2"]);
}
