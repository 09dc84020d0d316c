//! The published cases of nonuniform tensor parallelism (Megatron-LM, `core/distributed/nonuniform_tp.py` and its tests),
//! restated: which ranks are inactive, and who hands whose gradients to whom.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Cluster, job};
use reknit_layout::*;
use std::collections::{BTreeMap, BTreeSet};

/// The inactive slots and the degree of each replica of a TP8 job when these slots have failed.
fn reduced(mode: Mode, failed: &[(u32, &[u32])]) -> Vec<(Vec<u32>, u32)> {
    let job = job(3, 8, 8, 8, 8);
    let topology = Topology::nominal(&job);
    let seats = seat(&job, &topology).unwrap();
    let places =
        failed.iter().flat_map(|(replica, slots)| slots.iter().map(|slot| Place::new(*replica, 0, *slot)));
    let gone = places.map(|place| seats.get(place).unwrap().clone()).collect();
    let after = reseat(&job, &topology, &seats, &gone, mode);
    let inactive = |replica| {
        let of = after.inactive.iter().filter(|place| place.replica == ReplicaId(replica));
        of.map(|place| place.slot.0).collect::<Vec<_>>()
    };
    let degree =
        |replica| after.active().filter(|(place, _)| place.replica == ReplicaId(replica)).count() as u32;
    (0..3).map(|replica| (inactive(replica), degree(replica))).collect()
}

fn whole() -> (Vec<u32>, u32) {
    (vec![], 8)
}

#[test]
fn no_failure_no_reduction() {
    for mode in Mode::ALL {
        assert_eq!(reduced(mode, &[]), [whole(), whole(), whole()]);
    }
}

#[test]
fn two_failures_in_each_of_two_replicas() {
    for mode in [Mode::UniformReduction, Mode::Ntp] {
        let after = reduced(mode, &[(0, &[2, 5]), (1, &[1, 3])]);
        assert_eq!(after, [(vec![2, 5], 6), (vec![1, 3], 6), whole()]);
    }
}

#[test]
fn a_replica_hit_less_pads_with_its_highest_healthy_rank() {
    let failed: [(u32, &[u32]); 2] = [(0, &[2, 5]), (1, &[1])];
    let after = reduced(Mode::UniformReduction, &failed);
    assert_eq!(after, [(vec![2, 5], 6), (vec![1, 7], 6), whole()]);
    // What nonuniform means: nobody pads.
    assert_eq!(reduced(Mode::Ntp, &failed), [(vec![2, 5], 6), (vec![1], 7), whole()]);
}

/// Replica 0 has lost its highest slots; replica 1 is whole. Every family has `units` units.
fn half_reduced(units: u32, tensor: u32, reduced: u32) -> Cluster {
    let mut cluster = Cluster::start(job(2, tensor, units, units, units));
    for slot in reduced..tensor {
        cluster.lose(Place::new(0, 0, slot));
    }
    cluster.replan().unwrap();
    cluster
}

#[test]
fn packed_tp2_and_tp4_number_their_ranks_over_active_slots() {
    let cluster = half_reduced(8, 4, 2);
    let layout = &cluster.plan.layout;
    let ranks: BTreeMap<Place, usize> = layout.members().map(|(place, _)| place).zip(0..).collect();
    let rank = |replica: usize, slot: &Slot| ranks[&Place::new(replica as u32, 0, slot.0)];
    let tensor_groups: Vec<Vec<usize>> = layout
        .groups
        .iter()
        .enumerate()
        .map(|(replica, group)| group.active().iter().map(|slot| rank(replica, slot)).collect())
        .collect();
    assert_eq!(tensor_groups, [vec![0, 1], vec![2, 3, 4, 5]]);
    let sync = &layout.sync[0];
    let host = |column: usize| {
        let hosts = sync.hosts.iter().enumerate();
        hosts.map(|(replica, hosts)| rank(replica, &hosts[column])).collect::<Vec<_>>()
    };
    let columns: Vec<_> = (0..sync.columns as usize).map(host).collect();
    assert_eq!(columns, [[0, 2], [1, 3]]);
    let hosted: BTreeSet<usize> = columns.into_iter().flatten().collect();
    let alone: Vec<usize> = ranks.into_values().filter(|rank| !hosted.contains(rank)).collect();
    assert_eq!(alone, [4, 5]);
}

/// `sends[from][to]`: what slots of the replica hand over of one axis, in elements. What a slot owns outside its own column
/// goes to the column's host.
fn sends(layout: &Layout, replica: u32, axis: Axis, width: u32) -> Vec<Vec<u32>> {
    let group = layout.group(ReplicaId(replica), StageId(0)).unwrap();
    let sync = &layout.sync[0];
    let columns = &sync.axes.iter().find(|entry| entry.axis == axis).unwrap().columns;
    let hosts = &sync.hosts[replica as usize];
    let to = |owned: &Units, from: usize, slot: usize| {
        let hosted = hosts.iter().zip(columns).filter(|(host, _)| host.0 as usize == slot && slot != from);
        hosted.map(|(_, column)| owned.intersection(column).len() * width).sum()
    };
    let sets = group.partitions[&axis].iter().enumerate();
    sets.map(|(from, owned)| (0..group.slots.len()).map(|slot| to(owned, from, slot)).collect()).collect()
}

/// The table of every axis of the whole replica, which must be the same, with what holds for all tables.
fn table(units: u32, tensor: u32, reduced: u32, local_width: u32) -> Vec<Vec<u32>> {
    let cluster = half_reduced(units, tensor, reduced);
    let layout = &cluster.plan.layout;
    let width = local_width * tensor / units;
    let tables: Vec<_> = cluster.job.model.axes().iter().map(|axis| sends(layout, 1, *axis, width)).collect();
    let table = tables[0].clone();
    assert!(tables.iter().all(|other| *other == table));

    let small = layout.group(ReplicaId(0), StageId(0)).unwrap();
    for axis in cluster.job.model.axes() {
        // Nothing travels in the reduced replica.
        assert!(sends(layout, 0, axis, width).iter().flatten().all(|elements| *elements == 0));
        for slot in 0..tensor as usize {
            let received: u32 = table.iter().map(|row| row[slot]).sum();
            let sent: u32 = table[slot].iter().sum();
            if slot < reduced as usize {
                assert_eq!(sent, 0, "sync ranks send nothing");
                assert_eq!(
                    local_width + received,
                    small.partitions[&axis][slot].len() * width,
                    "main and side"
                );
            } else {
                assert_eq!((sent, received), (local_width, 0), "extra ranks send all they have");
            }
        }
    }
    table
}

#[test]
fn twenty_four_units_from_tp8_to_tp6() {
    let table = table(24, 8, 6, 384);
    assert_eq!(table[6], [128, 128, 128, 0, 0, 0, 0, 0]);
    assert_eq!(table[7], [0, 0, 0, 128, 128, 128, 0, 0]);
}

#[test]
fn a_hundred_and_twenty_eight_units_from_tp4_to_tp2() {
    let table = table(128, 4, 2, 128);
    assert_eq!(table[2], [64, 64, 0, 0]);
    assert_eq!(table[3], [64, 64, 0, 0]);
}

#[test]
fn fifty_six_units_from_tp8_to_tp7() {
    let table = table(56, 8, 7, 7);
    assert_eq!(table[7], [1, 1, 1, 1, 1, 1, 1, 0]);
}
