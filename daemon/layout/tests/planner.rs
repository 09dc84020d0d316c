//! The planner on named cases.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Cluster, job};
use reknit_layout::*;
use std::collections::BTreeMap;
use std::sync::Arc;

fn sizes(group: &Group, axis: Axis) -> Vec<u32> {
    group.partitions[&axis].iter().map(Units::len).collect()
}

fn group(cluster: &Cluster, replica: u32) -> &Group {
    cluster.plan.layout.group(ReplicaId(replica), StageId(0)).unwrap()
}

#[test]
fn a_fresh_job_gets_contiguous_ranges() {
    let cluster = Cluster::start(job(2, 4, 12, 12, 16));
    let ranges = [(0, 3), (3, 6), (6, 9), (9, 12)].map(|(start, end)| Units::range(start, end));
    assert_eq!(group(&cluster, 1).partitions[&Axis::attn(3)], ranges);
    assert_eq!(cluster.plan.layout.batch, [16, 16]);
    assert!(cluster.plan.fresh && cluster.plan.transfers.is_empty());
    assert_eq!(cluster.plan.bytes_lower_bound, 0);
    assert_eq!(cluster.plan.layout.handover_bytes(&cluster.job), 0);
}

#[test]
fn a_lost_slot_is_fetched_from_the_same_slot_of_the_other_replica() {
    let mut cluster = Cluster::start(job(2, 4, 12, 12, 12));
    let source = cluster.members[&Place::new(1, 0, 2)].clone();
    cluster.lose(Place::new(0, 0, 2));
    cluster.replan().unwrap();
    let reduced = group(&cluster, 0);
    assert_eq!(reduced.degree(), 3);
    assert_eq!(sizes(reduced, Axis::ffn(0)), [4, 4, 0, 4]);
    let plan = &cluster.plan;
    assert!(plan.transfers.iter().all(|transfer| transfer.from == source));
    // Three units of each of 5 layers' two axes and of the vocabulary.
    let params = |family| 3 * cluster.job.model.unit_params(family);
    let layers = 5 * (params(Family::Attn) + params(Family::Ffn));
    assert_eq!(plan.bytes_moved, 12 * (layers + params(Family::Vocab)));
    assert_eq!(plan.bytes_moved, plan.bytes_lower_bound);
    // TP3 needs 4/3 of the time for a micro-batch: of 8, 3 * 4 = 12 and 5 * 3 = 15.
    assert_eq!(plan.layout.batch, [12, 20]);
    assert_eq!(plan.predicted.step_time_ratio, 5.0 / 4.0);
    assert_eq!(plan.predicted.throughput_ratio, 4.0 / 5.0);
}

#[test]
fn with_one_reduced_replica_only_the_extra_slot_hands_over() {
    let mut cluster = Cluster::start(job(2, 4, 12, 12, 12));
    cluster.lose(Place::new(1, 0, 0));
    cluster.replan().unwrap();
    let sync = &cluster.plan.layout.sync[0];
    assert_eq!(sync.columns, 3);
    let slots = |slots: &[u32]| slots.iter().copied().map(Slot).collect::<Vec<_>>();
    assert_eq!(sync.hosts, [slots(&[1, 2, 3]), slots(&[1, 2, 3])]);
    let params = |family| 3 * cluster.job.model.unit_params(family);
    let extra = 5 * (params(Family::Attn) + params(Family::Ffn)) + params(Family::Vocab);
    assert_eq!(cluster.plan.layout.handover_bytes(&cluster.job), 4 * extra);
}

#[test]
fn a_slot_that_returns_gets_its_own_units_back() {
    for lost in 0..4 {
        let mut cluster = Cluster::start(job(2, 4, 13, 18, 15));
        let before = group(&cluster, 0).partitions.clone();
        cluster.lose(Place::new(0, 0, lost));
        cluster.replan().unwrap();
        cluster.restore(Place::new(0, 0, lost));
        let plan = cluster.replan().unwrap().clone();
        assert_eq!(group(&cluster, 0).partitions, before);
        let replicated: Vec<_> = plan.transfers.iter().filter(|transfer| transfer.axis.is_none()).collect();
        assert_eq!(replicated.len(), 1);
        assert_eq!(replicated[0].bytes, 12 * cluster.job.model.replicated_params());
        // Everything comes from the group itself.
        let own = |worker: &WorkerKey| cluster.plan.layout.place_of(worker).unwrap().replica == ReplicaId(0);
        assert!(plan.transfers.iter().all(|transfer| own(&transfer.from)));
    }
}

#[test]
fn extras_rotate_over_the_layers() {
    let cluster = Cluster::start(job(1, 4, 13, 14, 16));
    let totals = |group: &Group| {
        let mut totals = vec![0; 4];
        for sets in group.partitions.values() {
            totals.iter_mut().zip(sets).for_each(|(total, set)| *total += set.len());
        }
        totals
    };
    let totals = totals(group(&cluster, 0));
    assert!(totals.iter().max().unwrap() - totals.iter().min().unwrap() <= 2, "{totals:?}");

    // 16 units on 3 slots after a loss: each survivor carries the extra unit in some layer.
    let mut cluster = Cluster::start(job(2, 4, 16, 16, 16));
    cluster.lose(Place::new(0, 0, 1));
    cluster.replan().unwrap();
    let carriers: Vec<_> = (0..5)
        .map(|layer| sizes(group(&cluster, 0), Axis::attn(layer)).iter().position(|size| *size == 6).unwrap())
        .collect();
    assert_eq!(carriers, [2, 3, 0, 2, 3]);
}

#[test]
fn counts_that_do_not_divide() {
    let mut cluster = Cluster::start(job(2, 8, 64, 64, 64));
    cluster.lose(Place::new(0, 0, 5));
    cluster.replan().unwrap();
    assert_eq!(sizes(group(&cluster, 0), Axis::attn(0)), [9, 10, 9, 9, 9, 0, 9, 9]);

    let mut cluster = Cluster::start(job(2, 32, 128, 128, 128));
    cluster.lose(Place::new(1, 0, 0));
    cluster.lose(Place::new(1, 0, 31));
    cluster.replan().unwrap();
    let sizes = sizes(group(&cluster, 1), Axis::ffn(2));
    assert_eq!(sizes.iter().filter(|size| **size == 5).count(), 8);
    assert_eq!(sizes.iter().filter(|size| **size == 4).count(), 22);
    assert_eq!(cluster.plan.bytes_moved, cluster.plan.bytes_lower_bound);
}

#[test]
fn replicas_of_eight_seven_and_six_train_together() {
    let mut cluster = Cluster::start(job(3, 8, 56, 56, 56));
    cluster.lose(Place::new(1, 0, 3));
    cluster.lose(Place::new(2, 0, 0));
    cluster.lose(Place::new(2, 0, 7));
    cluster.replan().unwrap();
    let layout = &cluster.plan.layout;
    assert_eq!(layout.degrees(), [8, 7, 6]);
    assert_eq!(layout.sync[0].columns, 6);
    // The slowest slots have 7, 8 and 10 units: of 8 micro-batches 3 * 7, 3 * 8 and 2 * 10.
    assert_eq!(layout.batch, [12, 12, 8]);
    // Surviving slots own their nominal units still, so only what the six left over travels.
    let handed = layout.handover_bytes(&cluster.job);
    let everything = 4
        * 3
        * (cluster.job.model.units(Family::Attn) as u64)
        * (5 * (cluster.job.model.unit_params(Family::Attn) + cluster.job.model.unit_params(Family::Ffn))
            + cluster.job.model.unit_params(Family::Vocab));
    assert!(handed * 4 < everything, "{handed} of {everything}");
}

#[test]
fn lost_units_are_spread_over_the_senders() {
    let mut cluster = Cluster::start(job(4, 4, 12, 12, 12));
    cluster.lose(Place::new(0, 0, 1));
    cluster.replan().unwrap();
    let mut sent: BTreeMap<&WorkerKey, u64> = BTreeMap::new();
    for transfer in &cluster.plan.transfers {
        *sent.entry(&transfer.from).or_default() += transfer.bytes;
    }
    assert_eq!(sent.len(), 3);
    assert!(sent.keys().all(|worker| cluster.plan.layout.place_of(worker).unwrap().slot == Slot(1)));
    let unit = cluster
        .job
        .unit_bytes(StageId(0), Family::Ffn)
        .max(cluster.job.unit_bytes(StageId(0), Family::Attn))
        .max(cluster.job.unit_bytes(StageId(0), Family::Vocab));
    assert!(sent.values().max().unwrap() - sent.values().min().unwrap() <= unit, "{sent:?}");
}

#[test]
fn a_drained_worker_is_still_a_source() {
    let mut cluster = Cluster::start(job(1, 4, 12, 12, 12));
    let leaving = cluster.members[&Place::new(0, 0, 3)].clone();
    cluster.drain(Place::new(0, 0, 3));
    let plan = cluster.replan().unwrap();
    assert!(plan.transfers.iter().all(|transfer| transfer.from == leaving));
    assert_eq!(plan.layout.place_of(&leaving), None);
}

#[test]
fn units_that_nobody_holds_are_named() {
    let mut cluster = Cluster::start(job(2, 4, 12, 12, 12));
    cluster.lose(Place::new(0, 0, 1));
    cluster.lose(Place::new(1, 0, 1));
    let error = cluster.replan().unwrap_err();
    let PlanError::Unrecoverable(missing) = &error else {
        panic!("{error}");
    };
    assert_eq!(missing.len(), 11);
    assert!(missing.values().all(|units| *units == Units::range(3, 6)));
    assert!(error.to_string().starts_with("no live GPU holds attn/0 units 3-5"), "{error}");
}

#[test]
fn a_holding_of_an_older_step_does_not_count() {
    let mut cluster = Cluster::start(job(1, 2, 4, 4, 8));
    let behind = cluster.members[&Place::new(0, 0, 0)].clone();
    cluster.holdings.get_mut(&behind).unwrap().step = Step(0);
    assert!(matches!(cluster.replan(), Err(PlanError::Unrecoverable(_))));
}

#[test]
fn a_replica_below_min_tensor_does_not_train_but_is_a_source() {
    let mut four = job(2, 4, 12, 12, 12);
    four.parallel.min_tensor = 3;
    let mut cluster = Cluster::start(four.clone());
    cluster.lose(Place::new(0, 0, 1));
    cluster.lose(Place::new(0, 0, 2));
    cluster.lose(Place::new(1, 0, 0));
    let plan = cluster.replan().unwrap();
    assert_eq!(plan.layout.degrees(), [0, 3]);
    assert_eq!(plan.layout.batch, [0, 32]);
    assert!(plan.layout.sync[0].hosts[0].is_empty());
    let sources: Vec<_> = plan.transfers.iter().map(|transfer| transfer.from.clone()).collect();
    assert!(sources.iter().all(|from| *from == common::worker(Place::new(0, 0, 0), 1)));

    // That nobody holds some units is the graver reason, and more slots would not help.
    cluster.lose(Place::new(1, 0, 1));
    assert!(matches!(cluster.replan(), Err(PlanError::Unrecoverable(_))));

    let mut halves = Cluster::start(four);
    for lost in [Place::new(0, 0, 1), Place::new(0, 0, 2), Place::new(1, 0, 0), Place::new(1, 0, 3)] {
        halves.lose(lost);
    }
    assert_eq!(halves.replan().unwrap_err(), DraftError::TooFew { needed: 3, found: 2 }.into());
}

#[test]
fn shrink_scales_the_share_of_a_reduced_replica() {
    let mut shrink = job(2, 4, 12, 12, 12);
    shrink.batch.policy = job::BatchPolicy::Shrink;
    let mut cluster = Cluster::start(shrink);
    cluster.lose(Place::new(1, 0, 1));
    assert_eq!(cluster.replan().unwrap().layout.batch, [16, 12]);
}

#[test]
fn pipeline_stages_are_planned_each_on_its_own() {
    let mut two = job(2, 2, 4, 4, 8);
    two.parallel.pipeline = 2;
    let mut cluster = Cluster::start(two);
    cluster.lose(Place::new(0, 1, 0));
    let plan = cluster.replan().unwrap();
    assert_eq!(plan.layout.degrees(), [2, 1, 2, 2]);
    let columns: Vec<_> = plan.layout.sync.iter().map(|sync| sync.columns).collect();
    assert_eq!(columns, [2, 1]);
    // Layers 0-2 and the embedding; layers 3-4 and the head.
    let axes = |group: &Group| group.partitions.keys().map(Axis::to_string).collect::<Vec<_>>().join(" ");
    let groups: Vec<_> = plan.layout.groups.iter().map(axes).collect();
    assert_eq!(groups[0], "attn/0 attn/1 attn/2 ffn/0 ffn/1 ffn/2 vocab");
    assert_eq!(groups[1], "attn/3 attn/4 ffn/3 ffn/4 vocab");
}

#[test]
fn the_same_request_gives_the_same_plan_and_json_keeps_it() {
    let mut cluster = Cluster::start(job(3, 5, 17, 23, 16));
    cluster.lose(Place::new(2, 0, 4));
    cluster.lose(Place::new(0, 0, 1));
    let first = plan(&cluster.request(&cluster.workers())).unwrap();
    assert_eq!(first, plan(&cluster.request(&cluster.workers())).unwrap());
    let json = serde_json::to_string(&first).unwrap();
    assert_eq!(first, serde_json::from_str::<Plan>(&json).unwrap());
}

/// The linter finds what is wrong with plans that are wrong.
#[test]
fn the_linter_finds_faults() {
    let mut cluster = Cluster::start(job(2, 4, 12, 12, 12));
    cluster.lose(Place::new(0, 0, 2));
    let good = plan(&cluster.request(&cluster.workers())).unwrap();
    let rules = |change: &dyn Fn(&mut Plan)| {
        let mut bad = good.clone();
        change(&mut bad);
        check(&cluster.request(&cluster.workers()), &bad)
            .iter()
            .map(|violation| violation.rule)
            .collect::<Vec<_>>()
    };
    assert_eq!(rules(&|_| ()), []);
    let has = |rule: Rule, change: &dyn Fn(&mut Plan)| {
        let found = rules(change);
        assert!(found.contains(&rule), "{rule:?} is not in {found:?}");
    };
    has(Rule::Cover, &|plan| {
        Arc::make_mut(&mut plan.layout.groups[0].partitions).get_mut(&Axis::vocab()).unwrap()[0].insert(11);
    });
    has(Rule::Balance, &|plan| {
        let sets = Arc::make_mut(&mut plan.layout.groups[1].partitions).get_mut(&Axis::ffn(1)).unwrap();
        sets[0] = Units::range(0, 5);
        sets[1] = Units::range(5, 6);
    });
    has(Rule::Batch, &|plan| plan.layout.batch[0] += 1);
    has(Rule::Members, &|plan| plan.layout.groups[0].slots[0] = None);
    has(Rule::Source, &|plan| drop(plan.transfers.pop()));
    has(Rule::Source, &|plan| plan.transfers.push(plan.transfers[0].clone()));
    has(Rule::Source, &|plan| plan.transfers[0].from = common::worker(Place::new(1, 0, 0), 5));
    has(Rule::Bytes, &|plan| plan.transfers[0].bytes -= 1);
    has(Rule::Bytes, &|plan| plan.bytes_moved += 1);
    has(Rule::Bytes, &|plan| plan.bytes_to_balance += 1);
    has(Rule::Sync, &|plan| plan.layout.sync[0].hosts[1][0] = plan.layout.sync[0].hosts[1][1]);
    has(Rule::Sync, &|plan| drop(plan.layout.sync[0].axes[0].columns.pop()));
    has(Rule::Sync, &|plan| plan.layout.sync[0].axes[0].columns.swap(0, 1));
    has(Rule::Batch, &|plan| plan.layout.batch = vec![13, 19]);
}

#[test]
fn a_job_that_starts_short_of_a_slot_grows_into_the_nominal_layout() {
    let mut cluster = Cluster::start(job(2, 4, 13, 14, 15));
    let nominal = group(&cluster, 1).partitions.clone();
    cluster.lose(Place::new(1, 0, 2));
    let workers = cluster.workers();
    let mut request = cluster.request(&workers);
    request.fresh = true;
    let short = plan(&request).unwrap();
    assert!(check(&request, &short).is_empty());
    assert_eq!(short.layout.degrees(), [4, 3]);
    assert_eq!(short.bytes_moved, 0);

    cluster.plan = short;
    cluster.commit(Step(9));
    cluster.restore(Place::new(1, 0, 2));
    cluster.replan().unwrap();
    assert_eq!(group(&cluster, 1).partitions, nominal);
}
