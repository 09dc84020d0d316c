//! Everyone is told of whom it meets, and of nobody else.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Cluster, job};
use reknit_layout::*;
use std::collections::{BTreeMap, BTreeSet};

/// What must hold of the circles of any plan.
fn check_circles(plan: &Plan, circles: &Circles) {
    let layout = &plan.layout;
    for (place, member) in layout.members() {
        let part = circles.part(&member.worker).expect("a member has a part");
        let group = layout.group(place.replica, place.stage).unwrap();
        let tensor = &circles.tensor[part.tensor.unwrap()];
        assert!(tensor.iter().eq(group.members().map(|(_, member)| &member.worker)), "the order of slots");
        assert_eq!(part.speaks, tensor.first() == Some(&member.worker));
        let cut = layout.cut_to(&layout.groups[part.tensor.unwrap()]);
        assert_eq!(cut.place_of(&member.worker), Some(place));
        assert_eq!(cut.samples_of(place.replica), layout.samples_of(place.replica));
        if let Some(column) = part.column {
            let hosts = layout.sync.iter().find(|sync| sync.stage == place.stage).unwrap();
            let own = hosts.hosts[place.replica.0 as usize].iter().position(|slot| *slot == place.slot);
            let column = &circles.columns[column];
            let at = |key| layout.place_of(key).unwrap();
            for key in column {
                let slot = hosts.hosts[at(key).replica.0 as usize][own.unwrap()];
                assert_eq!((at(key).stage, at(key).slot), (place.stage, slot));
            }
            assert!(column.is_sorted_by_key(|key| at(key).replica));
        }
    }
    let trains = layout.groups.iter().filter(|group| group.degree() > 0).count();
    assert_eq!(circles.speakers.len(), trains);
    let mut told: BTreeMap<usize, BTreeSet<&WorkerKey>> = BTreeMap::new();
    for (number, transfer) in plan.transfers.iter().enumerate() {
        let [from, to] = [&transfer.from, &transfer.to].map(|worker| circles.part(worker).unwrap());
        assert!(from.transfers.contains(&number) && to.transfers.contains(&number));
        assert_eq!(from.movers, to.movers);
        told.entry(from.movers.unwrap()).or_default().extend([&transfer.from, &transfer.to]);
    }
    for (number, circle) in circles.movers.iter().enumerate() {
        assert!(
            circle.is_sorted() && circle.iter().eq(told[&number].iter().copied()),
            "no more than those who move"
        );
    }
}

#[test]
fn a_loss_concerns_its_group_and_the_senders_alone() {
    let mut cluster = Cluster::start(job(3, 4, 12, 12, 12));
    let nominal = Circles::new(&cluster.plan);
    check_circles(&cluster.plan, &nominal);
    assert!(nominal.movers.is_empty() && nominal.columns.iter().all(|column| column.len() == 3));
    cluster.lose(Place::new(0, 0, 2));
    cluster.replan().unwrap();
    let circles = Circles::new(&cluster.plan);
    check_circles(&cluster.plan, &circles);
    assert_eq!((circles.tensor[0].len(), circles.columns.len()), (3, 3));
    let [movers] = circles.movers.as_slice() else { panic!("{:?}", circles.movers) };
    let survivors = movers.iter().filter(|worker| circles.tensor[0].contains(worker)).count();
    assert_eq!(survivors, 3);
    let without = cluster.members.values().filter(|worker| !movers.contains(worker));
    assert!(without.clone().count() > 0);
    for worker in without {
        let part = circles.part(worker).unwrap();
        assert!(part.movers.is_none() && part.transfers.is_empty());
    }
}

#[test]
fn losses_that_share_no_sender_are_mended_apart() {
    let mut cluster = Cluster::start(pipelined());
    for stage in 0..2 {
        cluster.lose(Place::new(0, stage, 1));
    }
    cluster.replan().unwrap();
    let circles = Circles::new(&cluster.plan);
    check_circles(&cluster.plan, &circles);
    assert_eq!(circles.movers.len(), 2);
}

fn pipelined() -> JobSpec {
    let mut job = job(2, 4, 12, 12, 12);
    job.parallel.pipeline = 2;
    job
}

#[test]
fn one_replica_sums_over_nobody() {
    let cluster = Cluster::start(job(1, 4, 12, 12, 12));
    let circles = Circles::new(&cluster.plan);
    check_circles(&cluster.plan, &circles);
    assert!(circles.columns.is_empty() && circles.speakers.len() == 1);
}
