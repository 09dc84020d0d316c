//! Workers, sessions and daemons that come back at an awkward moment.

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::*;

fn orders(world: &World, verb: &str) -> usize {
    world.told.iter().filter(|line| line.starts_with(verb)).count()
}

#[test]
fn a_rebalance_is_a_planned_change_that_costs_no_step() {
    let mut world = running(2);
    assert_eq!(world.state().refuse_rebalance(&job_name()), None);
    let before = world.view().epoch;
    world.tell(Event::Rebalance { job: job_name() });
    let again = world.state().refuse_rebalance(&job_name());
    assert!(matches!(again, Some(Refusal::FailedPrecondition(_))), "{again:?}");
    world.run_until("a new epoch", |world| world.view().epoch > before);
    world.run_until_degrees(&[2, 2]);
    let all = world.incidents();
    assert_eq!(all.len(), 1);
    assert_eq!((all[0].kind, all[0].signal.as_str()), (IncidentKind::Planned, "rebalance"));
    assert_eq!((all[0].steps_lost, all[0].bytes_moved), (0, 0));
}

#[test]
fn a_replica_that_stays_too_small_does_not_disturb_the_others() {
    let mut strict = spec("demo", 2, 1_000);
    strict.parallel.min_tensor = 2;
    let mut world = World::with_spec(11, strict);
    world.run_until_step(3);
    world.health(&gpu(0, 0), HealthClass::Fatal, "XID 79");
    world.run_until_degrees(&[0, 2]);
    let epoch = world.view().epoch;
    world.run_ms(5_000);
    assert_eq!((world.view().epoch, orders(&world, "pause")), (epoch, 0), "{:?}", world.told);
    assert!(world.on(&gpu(0, 1)).is_some(), "the other slot waits");
    world.health(&gpu(0, 0), HealthClass::Healthy, "");
    world.run_until_degrees(&[2, 2]);
    assert_eq!(world.view().epoch.0, epoch.0 + 1, "both slots join in one change");
}

/// TP2 without a second replica, just grown back from TP1: the order to resume has gone out to both.
fn grown(seed: u64) -> (World, Who, Who) {
    let mut alone = spec("demo", 2, 1_000);
    alone.parallel.data = 1;
    let mut world = World::story(seed, &[2], Topology::default());
    world.tell(Event::Submit { spec: Box::new(alone) });
    world.run_until_step(3);
    world.tell(Event::DrainGpu { gpu: gpu(0, 1) });
    world.run_until_degrees(&[1]);
    world.told.clear();
    world.tell(Event::RestoreGpu { gpu: gpu(0, 1) });
    world.run_until("resume", |world| world.told.iter().any(|line| line.starts_with("resume 3 g01")));
    let (stayed, new) = (world.on(&gpu(0, 0)).expect("it"), world.on(&gpu(0, 1)).expect("it"));
    (world, stayed, new)
}

/// The change that follows comes to rest with both slots.
fn keeps_the_only_copy(mut world: World) {
    world
        .run_until("epoch 4", |world| world.view().epoch == Epoch(4) || world.view().phase == Phase::Waiting);
    assert_eq!(world.view().phase, Phase::Running, "ONLY-COPY: {}", world.view().explanation);
    world.run_until_degrees(&[2]);
}

#[test]
fn a_member_that_missed_resume_keeps_what_it_was_sent() {
    let (mut world, stayed, new) = grown(12);
    // The order is lost with the session; the other one swaps, drops what it gave away, and sees the plane fail.
    world.flap_worker(&new, 30);
    world.plane_fails_at(&stayed.key.gpu, Epoch(3), 20);
    keeps_the_only_copy(world);
}

#[test]
fn a_member_that_missed_resume_keeps_what_it_was_sent_through_a_daemons_death() {
    let (mut world, stayed, new) = grown(13);
    world.flap_worker(&new, 400);
    world.run_until("the other trains", |world| world.workers[&stayed].state.epoch == Epoch(3));
    world.plane_fails_at(&stayed.key.gpu, Epoch(3), 0);
    world.run_until("it stops", |world| world.workers[&stayed].state.phase == WorkerPhase::Quiesced);
    world.restart_daemon();
    keeps_the_only_copy(world);
}

#[test]
fn workers_that_are_heard_after_all_patience_are_members_again() {
    let mut world = running(2);
    world.restart_daemon_unheard_for(3_000);
    // Nobody is there: taken as lost, and the job waits for what they hold.
    world.run_until_phase(Phase::Waiting);
    world.run_until_degrees(&[2, 2]);
}

#[test]
fn a_gpu_lost_while_no_daemon_listened_is_no_source_and_is_named() {
    let mut world = running(2);
    let lost = gpu(1, 1);
    let key = world.on(&lost).expect("it");
    world.restart_daemon();
    world.health_unheard(&lost, HealthClass::Fatal, "XID 79: GPU has fallen off the bus");
    // The agent says so before any worker speaks.
    world.dials_now(&node(1));
    world.run_until_degrees(&[2, 1]);
    assert!(!world.workers.contains_key(&key), "its worker goes on");
    let incident = fault(&world);
    assert_eq!((incident.kind, incident.gpu), (IncidentKind::GpuLost, Some(lost)));
    assert!(incident.signal.starts_with("XID 79"), "{}", incident.signal);
    assert!(world.told.iter().any(|line| line.starts_with("plan 2 members=3 holders=3")), "{:?}", world.told);
}

#[test]
fn a_worker_that_reports_late_from_an_older_change_still_joins() {
    let mut world = running(2);
    world.kill(&gpu(0, 1));
    world.run_until_degrees(&[1, 2]);
    world.run_until("the newcomer prepares", |world| {
        let new = world.on(&gpu(0, 1)).map(|key| world.workers[&key].state.phase);
        new == Some(WorkerPhase::Preparing)
    });
    let new = world.on(&gpu(0, 1)).expect("it");
    // It does not find the new daemon until that has given up waiting for reports.
    world.freeze(&gpu(0, 1));
    world.restart_daemon();
    world.dials_now(&node(0));
    world.run_until_phase(Phase::Running);
    assert_eq!(world.degrees(), [1, 2]);
    world.thaw(&gpu(0, 1));
    world.run_until_degrees(&[2, 2]);
    assert_eq!(world.on(&gpu(0, 1)), Some(new), "it was not replaced");
}

#[test]
fn a_plane_failure_told_to_a_new_daemon_says_nothing_of_what_is_held() {
    let mut world = running(2);
    let (first, second) = (world.on(&gpu(0, 0)).expect("it"), world.on(&gpu(1, 1)).expect("it"));
    // The second one trains, and takes its time to find the new daemon.
    world.mute_worker(&second, 60_000);
    world.restart_daemon();
    world.run_ms(700);
    assert_eq!(world.view().phase, Phase::Rebuilding);
    world.tell(Event::PlaneFailed {
        job: job_name(),
        worker: first.key,
        epoch: Epoch(1),
        peer: None,
        reason: "a peer's socket ended".to_owned(),
    });
    world.kill(&second.key.gpu);
    world.run_until_degrees(&[2, 1]);
    assert!(world.told.iter().any(|line| line.starts_with("plan 2 members=3 holders=3")), "{:?}", world.told);
}

#[test]
fn a_pause_at_the_last_step_ends_with_the_job() {
    let mut world = World::with_spec(14, spec("demo", 2, 12));
    world.run_until_step(11);
    world.run_until("the last step", |world| world.workers.values().all(|p| p.state.attempted == Step(12)));
    let before = world.now();
    world.tell(Event::DrainGpu { gpu: gpu(0, 1) });
    world.run_until_phase(Phase::Completed);
    assert!(world.now().0 - before.0 < 500 * MS, "a deadline was waited for");
    let all = world.incidents();
    assert!(all.iter().all(|incident| incident.kind == IncidentKind::Planned), "{all:#?}");
}

/// Two GPUs return: the members pause for one, and the other one, which is given, has come up meanwhile.
fn second_newcomer() -> (World, Who) {
    let found = (0..100).find_map(|seed| {
        let mut world = running_from(seed, 2);
        let both = [gpu(0, 1), gpu(1, 1)];
        for gpu in &both {
            world.tell(Event::DrainGpu { gpu: gpu.clone() });
        }
        world.run_until_degrees(&[1, 1]);
        for gpu in &both {
            world.tell(Event::RestoreGpu { gpu: gpu.clone() });
        }
        // One comes first, and the members pause for it. The other one comes up meanwhile.
        world.run_until_phase(Phase::Quiescing);
        let idle = |world: &World| {
            let workers = world.view().workers.into_iter();
            workers.filter(|worker| worker.state == "idle").map(|worker| worker.worker).collect::<Vec<_>>()
        };
        world.run_until("its end", |world| idle(world).len() == 2 || world.view().phase != Phase::Quiescing);
        let second = idle(&world).get(1).map(|key| Who::new(&job_name(), key))?;
        (world.view().phase == Phase::Quiescing).then_some((world, second))
    });
    found.expect("a seed for which the second one is in time")
}

#[test]
fn nobody_waits_for_a_newcomer_that_is_away() {
    let (mut world, second) = second_newcomer();
    world.flap_worker(&second, 3_000);
    let (step, until) = (world.view().committed_step.0, Time(world.now().0 + 2_000 * MS));
    world.run_until_now(until);
    assert!(world.view().committed_step.0 > step + 10, "training stands still: {:?}", world.told);
    world.run_until_degrees(&[2, 2]);
}

#[test]
fn a_newcomer_that_stays_away_is_replaced() {
    let (mut world, second) = second_newcomer();
    world.freeze(&second.key.gpu);
    world.flap_worker(&second, NEVER);
    world.run_until_degrees(&[2, 2]);
    assert!(!world.workers.contains_key(&second));
}

#[test]
fn a_worker_that_does_not_last_is_started_less_and_less_often() {
    let mut world = running(2);
    let frail = gpu(1, 1);
    let mut absences = Vec::new();
    for _ in 0..3 {
        world.kill(&frail);
        world.run_until_degrees(&[2, 1]);
        let gone = world.now();
        world.run_until_degrees(&[2, 2]);
        absences.push(world.now().0 - gone.0);
    }
    let hold = TIMEOUTS.rejoin_hold().as_micros() as u64;
    assert!(absences[0] < 2 * hold, "{absences:?}");
    assert!(absences[1] > absences[0] + hold / 2 && absences[2] > absences[1] + hold, "{absences:?}");

    world.run_ms(TIMEOUTS.settled().as_millis() as u64 + 1_000);
    world.kill(&frail);
    world.run_until_degrees(&[2, 1]);
    let gone = world.now();
    world.run_until_degrees(&[2, 2]);
    assert!(world.now().0 - gone.0 < 3 * hold, "one that had lasted is no relapse");
}

#[test]
fn a_worker_that_dies_right_after_its_start_is_not_started_in_a_tight_loop() {
    let mut world = running(2);
    let broken = gpu(1, 1);
    world.kill(&broken);
    let begun = world.now();
    let mut starts = Vec::new();
    while world.now().0 - begun.0 < 30_000 * MS {
        if let Some(key) = world.on(&broken) {
            starts.push((world.now().0 - begun.0) / MS);
            let exit = ExitStatus { how: "exit status 66".to_owned(), signal: None, status: Some(66) };
            world.ends(&key, exit);
        }
        assert!(starts.len() < 20, "{starts:?}");
        let soon = Time(world.now().0 + MS);
        world.run_until_now(soon);
    }
    // Holds of 0.2, 0.4, ... 12.8 s are over; that of 25.6 s is not.
    assert_eq!(starts.len(), 7, "{starts:?}");
    let gaps: Vec<_> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.windows(2).all(|pair| pair[1] > pair[0] * 3 / 2), "{gaps:?}");
    assert_eq!(world.degrees(), [2, 1], "the others train on");
}

#[test]
fn a_job_whose_worker_dies_at_every_start_does_not_loop_either() {
    let mut world = World::with_spec(9, spec("demo", 2, 1_000));
    let broken = gpu(0, 0);
    let mut starts = 0;
    for _ in 0..10_000 {
        if let Some(key) = world.on(&broken) {
            starts += 1;
            let exit = ExitStatus { how: "exit status 66".to_owned(), signal: None, status: Some(66) };
            world.ends(&key, exit);
        }
        let soon = Time(world.now().0 + MS);
        world.run_until_now(soon);
    }
    assert!((4..=6).contains(&starts), "{starts} starts in 10 s");
    assert_eq!(world.degrees(), [1, 2], "the others began without it");
}

#[test]
fn what_an_agent_learns_later_of_a_lost_gpu_is_in_the_record() {
    let mut world = running(2);
    let lost = gpu(0, 1);
    world.health(&lost, HealthClass::Fatal, "the GPU does not answer");
    world.health(&lost, HealthClass::Fatal, "XID 79: GPU has fallen off the bus");
    world.run_until_degrees(&[1, 2]);
    world.run_until("the record", |world| fault(world).recovered.is_some());
    assert_eq!(fault(&world).kind, IncidentKind::GpuLost);
    assert_eq!(fault(&world).signal, "XID 79: GPU has fallen off the bus");
}

#[test]
fn a_worker_killed_while_no_daemon_listened_is_named_with_its_signal() {
    let mut world = running(2);
    world.restart_daemon();
    world.kill(&gpu(1, 0));
    world.run_until_degrees(&[2, 1]);
    world.run_until("the record", |world| fault(world).recovered.is_some());
    let fault = fault(&world);
    assert_eq!((fault.kind, fault.signal.as_str()), (IncidentKind::WorkerKilled, "killed by signal 9"));
    assert_eq!(fault.place, Some(Place::new(1, 0, 0)));
}

#[test]
fn a_node_that_lost_its_power_and_is_back_at_once_has_lost_its_workers() {
    // All of the job is on one node: nobody is left who would miss the others.
    let mut world = World::story(7, &[4], Topology::default());
    world.tell(Event::Submit { spec: Box::new(spec("demo", 2, ENDLESS)) });
    world.run_until_step(3);
    world.loses_power(&node(0), 50);
    world.run_until_phase(Phase::Waiting);
    assert!(world.view().explanation.contains("no live GPU holds"), "{}", world.view().explanation);
    assert!(world.incidents().iter().all(|found| found.kind == IncidentKind::WorkerExited));
}

#[test]
fn workers_that_have_completed_hold_the_last_step_when_one_is_heard_late() {
    let mut world = World::with_spec(7, spec("demo", 2, 8));
    world.run_until_step(5);
    let late = world.on(&gpu(1, 1)).expect("it");
    // A new daemon hears of the others while they train, and of their end; of this one only after all patience.
    world.mute_worker(&late, 3_000);
    world.restart_daemon();
    world.run_until_phase(Phase::Quiescing);
    world.run_until_phase(Phase::Completed);
    assert_eq!(world.view().committed_step, Step(8));
}
