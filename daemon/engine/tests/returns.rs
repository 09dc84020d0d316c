//! Workers, sessions and daemons that come back at an awkward moment.

mod world;

use reknit_engine::*;
use reknit_layout::*;
use world::stories::*;
use world::*;

fn orders(world: &World, verb: &str) -> usize {
    world.trace.iter().filter(|line| line.starts_with(verb)).count()
}

#[test]
fn a_rebalance_is_a_planned_change_that_costs_no_step() {
    let mut world = running(2);
    assert_eq!(world.state.refuse_rebalance(&job_name()), None);
    let before = world.view().epoch;
    world.tell(Event::Rebalance { job: job_name() });
    let again = world.state.refuse_rebalance(&job_name());
    assert!(matches!(again, Some(Refusal::FailedPrecondition(_))), "{again:?}");
    world.run_until("a new epoch", |world| world.view().epoch > before);
    run_until_degrees(&mut world, &[2, 2]);
    let all = world.state.incidents(&job_name());
    assert_eq!(all.len(), 1);
    assert_eq!((all[0].kind, all[0].signal.as_str()), (IncidentKind::Planned, "rebalance"));
    assert_eq!((all[0].steps_lost, all[0].bytes_moved), (0, 0));
    assert_no_gap(&world);
}

#[test]
fn a_replica_that_stays_too_small_does_not_disturb_the_others() {
    let mut strict = spec(2, 1_000);
    strict.parallel.min_tensor = 2;
    let mut world = World::with_spec(11, strict);
    world.run_until_step(3);
    world.health(&gpu(0, 0), HealthClass::Fatal, "XID 79");
    run_until_degrees(&mut world, &[0, 2]);
    let epoch = world.view().epoch;
    world.run_ms(5_000);
    assert_eq!((world.view().epoch, orders(&world, "pause")), (epoch, 0), "{:?}", world.trace);
    assert!(world.on(&gpu(0, 1)).is_some(), "the other slot waits");
    world.health(&gpu(0, 0), HealthClass::Healthy, "");
    run_until_degrees(&mut world, &[2, 2]);
    assert_eq!(world.view().epoch.0, epoch.0 + 1, "both slots join in one change");
    assert_no_gap(&world);
}

/// TP2 without a second replica, just grown back from TP1: the order to resume has gone out to both.
fn grown(seed: u64) -> (World, WorkerKey, WorkerKey) {
    let mut alone = spec(2, 1_000);
    alone.parallel.data = 1;
    let mut world = World::with_spec(seed, alone);
    world.run_until_step(3);
    world.tell(Event::DrainGpu { gpu: gpu(0, 1) });
    run_until_degrees(&mut world, &[1]);
    world.trace.clear();
    world.tell(Event::RestoreGpu { gpu: gpu(0, 1) });
    world.run_until("resume", |world| world.trace.iter().any(|line| line.starts_with("resume 3 g01")));
    let (stayed, new) = (world.on(&gpu(0, 0)).expect("it"), world.on(&gpu(0, 1)).expect("it"));
    (world, stayed, new)
}

/// The change that follows comes to rest with both slots.
fn keeps_the_only_copy(mut world: World) {
    world
        .run_until("epoch 4", |world| world.view().epoch == Epoch(4) || world.view().phase == Phase::Waiting);
    assert_eq!(world.view().phase, Phase::Running, "ONLY-COPY: {}", world.view().explanation);
    run_until_degrees(&mut world, &[2]);
    assert_no_gap(&world);
}

#[test]
fn a_member_that_missed_resume_keeps_what_it_was_sent() {
    let (mut world, stayed, new) = grown(12);
    // The order is lost with the session; the other one swaps, drops what it gave away, and sees the plane fail.
    world.flap_worker(&new, 30);
    world.at(20 * MS, Happening::NoticesFailure(stayed, Epoch(3)));
    keeps_the_only_copy(world);
}

#[test]
fn a_member_that_missed_resume_keeps_what_it_was_sent_through_a_daemons_death() {
    let (mut world, stayed, new) = grown(13);
    world.cut_worker(&new);
    world.run_until("the other trains", |world| world.processes[&stayed].state.epoch == Epoch(3));
    world.at(0, Happening::NoticesFailure(stayed.clone(), Epoch(3)));
    world.run_until("it stops", |world| world.processes[&stayed].state.phase == WorkerPhase::Quiesced);
    world.restart_daemon();
    keeps_the_only_copy(world);
}

#[test]
fn workers_that_are_heard_after_all_patience_are_members_again() {
    let mut world = running(2);
    world.restart_daemon_unheard_for(3_000);
    // Nobody is there: taken as lost, and the job waits for what they hold.
    world.run_until_phase(Phase::Waiting);
    run_until_degrees(&mut world, &[2, 2]);
    assert_no_gap(&world);
}

#[test]
fn a_gpu_lost_while_no_daemon_listened_is_no_source_and_is_named() {
    let mut world = running(2);
    let lost = gpu(1, 1);
    let key = world.on(&lost).expect("it");
    world.restart_daemon();
    for reports in world.agents.values_mut() {
        for report in reports.iter_mut().filter(|report| report.gpu == lost) {
            report.health = HealthClass::Fatal;
            report.cause = "XID 79: GPU has fallen off the bus".to_owned();
        }
    }
    // The agent says so before any worker speaks.
    world.at(0, Happening::AgentConnects(node(1)));
    run_until_degrees(&mut world, &[2, 1]);
    assert!(!world.processes.contains_key(&key), "its worker goes on");
    let incident = fault(&world);
    assert_eq!((incident.kind, incident.gpu), (IncidentKind::GpuLost, Some(lost)));
    assert!(incident.signal.starts_with("XID 79"), "{}", incident.signal);
    assert!(
        world.trace.iter().any(|line| line.starts_with("plan 2 members=3 holders=3")),
        "{:?}",
        world.trace
    );
    assert_no_gap(&world);
}

#[test]
fn a_worker_that_reports_late_from_an_older_change_still_joins() {
    let mut world = running(2);
    world.kill(&gpu(0, 1));
    run_until_degrees(&mut world, &[1, 2]);
    world.run_until("the newcomer prepares", |world| {
        let new = world.on(&gpu(0, 1)).map(|key| world.processes[&key].state.phase);
        new == Some(WorkerPhase::Preparing)
    });
    let new = world.on(&gpu(0, 1)).expect("it");
    // It does not find the new daemon until that has given up waiting for reports.
    world.processes.get_mut(&new).expect("it").frozen = true;
    world.restart_daemon();
    world.run_until_phase(Phase::Running);
    assert_eq!(degrees(&world), [1, 2]);
    world.processes.get_mut(&new).expect("it").frozen = false;
    world.at(0, Happening::WorkerConnects(new.clone()));
    run_until_degrees(&mut world, &[2, 2]);
    assert_eq!(world.on(&gpu(0, 1)), Some(new), "it was not replaced");
    assert_no_gap(&world);
}

#[test]
fn a_plane_failure_told_to_a_new_daemon_says_nothing_of_what_is_held() {
    let mut world = running(2);
    let (first, second) = (world.on(&gpu(0, 0)).expect("it"), world.on(&gpu(1, 1)).expect("it"));
    world.restart_daemon();
    // The second one trains, and takes its time to find the new daemon.
    world.sessions.insert(Link::Worker(second.clone()), 0);
    world.run_ms(700);
    assert_eq!(world.view().phase, Phase::Rebuilding);
    world.tell(Event::PlaneFailed {
        job: job_name(),
        worker: first,
        epoch: Epoch(1),
        peer: None,
        reason: "a peer's socket ended".to_owned(),
        timed_out: false,
    });
    world.kill(&second.gpu);
    run_until_degrees(&mut world, &[2, 1]);
    assert!(
        world.trace.iter().any(|line| line.starts_with("plan 2 members=3 holders=3")),
        "{:?}",
        world.trace
    );
    assert_no_gap(&world);
}

#[test]
fn a_pause_at_the_last_step_ends_with_the_job() {
    let mut world = World::new(14, 2, 12);
    world.run_until_step(11);
    world.run_until("the last step", |world| world.processes.values().all(|p| p.state.attempted == Step(12)));
    let before = world.now;
    world.tell(Event::DrainGpu { gpu: gpu(0, 1) });
    world.run_until_phase(Phase::Completed);
    assert!(world.now.0 - before.0 < 500 * MS, "a deadline was waited for");
    let all = world.state.incidents(&job_name());
    assert!(all.iter().all(|incident| incident.kind == IncidentKind::Planned), "{all:#?}");
    assert_no_gap(&world);
}

/// Two GPUs return: the members pause for one, and the other one, which is given, has come up meanwhile.
fn second_newcomer() -> (World, WorkerKey) {
    let mut world = running(2);
    let both = [gpu(0, 1), gpu(1, 1)];
    for gpu in &both {
        world.tell(Event::DrainGpu { gpu: gpu.clone() });
    }
    run_until_degrees(&mut world, &[1, 1]);
    for gpu in &both {
        world.tell(Event::RestoreGpu { gpu: gpu.clone() });
    }
    // One comes first, and the members pause for it. The other one comes up meanwhile.
    world.run_until_phase(Phase::Quiescing);
    let idle = |world: &World| {
        let workers = world.view().workers;
        workers
            .into_iter()
            .filter(|worker| worker.state == "idle")
            .map(|worker| worker.worker)
            .collect::<Vec<_>>()
    };
    world.run_until("the second one", |world| idle(world).len() == 2);
    assert_eq!(world.view().phase, Phase::Quiescing);
    let second = idle(&world)[1].clone();
    (world, second)
}

#[test]
fn nobody_waits_for_a_newcomer_that_is_away() {
    let (mut world, second) = second_newcomer();
    world.flap_worker(&second, 3_000);
    let (step, until) = (world.view().committed_step.0, Time(world.now.0 + 2_000 * MS));
    while world.next(until) {}
    assert!(world.view().committed_step.0 > step + 10, "training stands still: {:?}", world.trace);
    run_until_degrees(&mut world, &[2, 2]);
    assert_no_gap(&world);
}

#[test]
fn a_newcomer_that_stays_away_is_replaced() {
    let (mut world, second) = second_newcomer();
    world.freeze(&second.gpu);
    world.cut_worker(&second);
    run_until_degrees(&mut world, &[2, 2]);
    assert!(!world.processes.contains_key(&second));
    assert_no_gap(&world);
}

#[test]
fn a_worker_that_does_not_last_is_started_less_and_less_often() {
    let mut world = running(2);
    let frail = gpu(1, 1);
    let mut absences = Vec::new();
    for _ in 0..3 {
        world.kill(&frail);
        run_until_degrees(&mut world, &[2, 1]);
        let gone = world.now;
        run_until_degrees(&mut world, &[2, 2]);
        absences.push(world.now.0 - gone.0);
    }
    let hold = TIMEOUTS.rejoin_hold().as_micros() as u64;
    assert!(absences[0] < 2 * hold, "{absences:?}");
    assert!(absences[1] > absences[0] + hold / 2 && absences[2] > absences[1] + hold, "{absences:?}");

    world.run_ms(TIMEOUTS.settled().as_millis() as u64 + 1_000);
    world.kill(&frail);
    run_until_degrees(&mut world, &[2, 1]);
    let gone = world.now;
    run_until_degrees(&mut world, &[2, 2]);
    assert!(world.now.0 - gone.0 < 2 * hold, "one that had lasted is no relapse");
}

#[test]
fn a_worker_that_dies_right_after_its_start_is_not_started_in_a_tight_loop() {
    let mut world = running(2);
    let broken = gpu(1, 1);
    world.kill(&broken);
    let begun = world.now;
    let mut starts = Vec::new();
    while world.now.0 - begun.0 < 30_000 * MS {
        if let Some(key) = world.on(&broken) {
            starts.push((world.now.0 - begun.0) / MS);
            let exit = ExitStatus { how: "exit status 66".to_owned(), signal: None, status: Some(66) };
            world.process_ends(&key, exit);
        }
        assert!(starts.len() < 20, "{starts:?}");
        let soon = Time(world.now.0 + MS);
        while world.next(soon) {}
    }
    // Holds of 0.2, 0.4, ... 12.8 s are over; that of 25.6 s is not.
    assert_eq!(starts.len(), 7, "{starts:?}");
    let gaps: Vec<_> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.windows(2).all(|pair| pair[1] > pair[0] * 3 / 2), "{gaps:?}");
    assert_eq!(degrees(&world), [2, 1], "the others train on");
    assert_no_gap(&world);
}

#[test]
fn a_job_whose_worker_dies_at_every_start_does_not_loop_either() {
    let mut world = World::new(9, 2, 1_000);
    let broken = gpu(0, 0);
    let mut starts = 0;
    for _ in 0..10_000 {
        if let Some(key) = world.on(&broken) {
            starts += 1;
            let exit = ExitStatus { how: "exit status 66".to_owned(), signal: None, status: Some(66) };
            world.process_ends(&key, exit);
        }
        let soon = Time(world.now.0 + MS);
        while world.next(soon) {}
    }
    assert!((4..=6).contains(&starts), "{starts} starts in 10 s");
    assert_eq!(degrees(&world), [1, 2], "the others began without it");
}

#[test]
fn what_an_agent_learns_later_of_a_lost_gpu_is_in_the_record() {
    let mut world = running(2);
    let lost = gpu(0, 1);
    world.health(&lost, HealthClass::Fatal, "the GPU does not answer");
    world.health(&lost, HealthClass::Fatal, "XID 79: GPU has fallen off the bus");
    run_until_degrees(&mut world, &[1, 2]);
    world.run_until("the record", |world| fault(world).recovered.is_some());
    assert_eq!(fault(&world).kind, IncidentKind::GpuLost);
    assert_eq!(fault(&world).signal, "XID 79: GPU has fallen off the bus");
}

#[test]
fn a_worker_killed_while_no_daemon_listened_is_named_with_its_signal() {
    let mut world = running(2);
    world.restart_daemon();
    world.kill(&gpu(1, 0));
    run_until_degrees(&mut world, &[2, 1]);
    world.run_until("the record", |world| fault(world).recovered.is_some());
    let fault = fault(&world);
    assert_eq!((fault.kind, fault.signal.as_str()), (IncidentKind::WorkerKilled, "killed by signal 9"));
    assert_eq!(fault.place, Some(Place::new(1, 0, 0)));
}
