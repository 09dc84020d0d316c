//! The job's life, told as short stories with the exact commands.

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::*;

#[test]
fn starts_all_places_and_trains() {
    let mut world = World::with_spec(1, spec("demo", 2, 1_000));
    world.run_until_phase(Phase::Running);
    assert_eq!(
        world.told,
        [
            "persist Pending layout=0 last=0",
            "phase Pending",
            "phase Pending",
            "persist Starting layout=0 last=0",
            "spawn node-0 g00#1",
            "spawn node-0 g01#2",
            "spawn node-1 g10#3",
            "spawn node-1 g11#4",
            "phase Starting",
            "persist Resharding layout=0 last=1",
            "plan 1 members=4 holders=0 fresh",
            "phase Resharding",
            "prepare 1 g00#1 at 0",
            "prepare 1 g01#2 at 0",
            "prepare 1 g10#3 at 0",
            "prepare 1 g11#4 at 0",
            "persist Running layout=1 last=1",
            "resume 1 g00#1",
            "resume 1 g01#2",
            "resume 1 g10#3",
            "resume 1 g11#4",
            "layout 1 [2, 2]",
            "phase Running",
        ]
    );
    world.run_until_step(3);
}

#[test]
fn a_killed_worker_costs_a_reshard_and_its_gpu_comes_back() {
    let mut world = running(2);
    let before = world.now();
    world.kill(&gpu(1, 1));
    world.run_until_degrees(&[2, 1]);
    assert_eq!(
        world.told[..18],
        [
            "persist Quiescing layout=1 last=1",
            "close 1 g00#1",
            "close 1 g01#2",
            "close 1 g10#3",
            "persist incident 1 WorkerKilled",
            "phase Quiescing",
            "persist Resharding layout=1 last=2",
            "plan 2 members=3 holders=3",
            "phase Resharding",
            "prepare 2 g00#1 at 3",
            "prepare 2 g01#2 at 3",
            "prepare 2 g10#3 at 3",
            "persist Running layout=2 last=2",
            "resume 2 g00#1",
            "resume 2 g01#2",
            "resume 2 g10#3",
            "layout 2 [2, 1]",
            "phase Running",
        ]
    );
    let incident = fault(&world);
    assert_eq!(incident.kind, IncidentKind::WorkerKilled);
    assert_eq!(incident.place, Some(Place::new(1, 0, 1)));
    assert_eq!(incident.gpu, Some(gpu(1, 1)));
    assert_eq!(incident.node, Some(node(1)));
    assert_eq!(incident.signal, "killed by signal 9");
    assert_eq!((incident.epoch_before, incident.epoch_after), (Epoch(1), Some(Epoch(2))));
    assert_eq!(incident.degrees_before, [2, 2]);
    assert_eq!(incident.degrees_after, [2, 1]);
    assert!(incident.bytes_moved >= incident.bytes_lower_bound && incident.bytes_moved > 0);
    // No deadline was waited for: all of it took less than the shortest of them.
    let took = incident.recovered.expect("recovered").0 - before.0;
    assert!(took < 200 * MS, "{took} us");

    world.told.clear();
    world.run_until_degrees(&[2, 2]);
    assert_eq!(
        world.told[..23],
        [
            "persist Running layout=2 last=2",
            "spawn node-1 g11#5",
            // The members train on while everything but the transfers gets ready.
            "persist Running layout=2 last=3",
            "plan 3 members=4 holders=3",
            "join 3 g00#1",
            "join 3 g01#2",
            "join 3 g10#3",
            "join 3 g11#5",
            "persist Quiescing layout=2 last=3",
            "pause 2 g00#1",
            "pause 2 g01#2",
            "pause 2 g10#3",
            "persist incident 2 Planned",
            "phase Quiescing",
            "prepare 3 g00#1 at 7",
            "prepare 3 g01#2 at 7",
            "prepare 3 g10#3 at 7",
            "prepare 3 g11#5 at 7",
            "phase Resharding",
            "persist Running layout=3 last=3",
            "resume 3 g00#1",
            "resume 3 g01#2",
            "resume 3 g10#3",
        ]
    );
    let all = world.incidents();
    let planned = all.last().expect("the rejoin");
    assert_eq!(planned.kind, IncidentKind::Planned);
    assert_eq!(planned.signal, "gpu returned");
    assert_eq!(planned.steps_lost, 0);
}

#[test]
fn a_newcomer_that_dies_while_it_joins_costs_the_members_nothing() {
    let mut world = running(2);
    world.kill(&gpu(1, 1));
    world.run_until_degrees(&[2, 1]);
    let (epoch, incidents) = (world.view().epoch, world.incidents().len());
    for round in 0..3 {
        world.told.clear();
        world.run_until("a join", |world| world.told.iter().any(|line| line.starts_with("join")));
        world.kill(&gpu(1, 1));
        world.run_ms(500);
        let view = world.view();
        assert_eq!((view.phase, view.epoch), (Phase::Running, epoch), "round {round}");
        let disturbs =
            |line: &&String| ["pause", "close", "prepare"].iter().any(|order| line.starts_with(order));
        assert_eq!(world.told.iter().find(disturbs), None, "round {round}");
        assert_eq!(world.incidents().len(), incidents, "round {round}");
    }
    world.run_until_degrees(&[2, 2]);
}

#[test]
fn a_member_that_dies_while_a_newcomer_joins_is_recovered_from_as_ever() {
    let mut world = running_from(8, 2);
    world.kill(&gpu(1, 1));
    world.run_until_degrees(&[2, 1]);
    world.run_until("a join", |world| world.told.iter().any(|line| line.starts_with("join")));
    world.kill(&gpu(0, 1));
    world.run_until("the end of both epochs", |world| {
        world.told.iter().any(|line| line.starts_with("close 3 g00"))
    });
    world.run_until_degrees(&[2, 2]);
}

#[test]
fn a_plane_failure_that_hits_nobody_reforms_with_all() {
    let mut world = running(2);
    for gpu in [gpu(0, 0), gpu(0, 1), gpu(1, 0), gpu(1, 1)] {
        world.plane_fails_at(&gpu, Epoch(1), 0);
    }
    world.run_until("epoch 2", |world| world.view().epoch == Epoch(2));
    world.run_until_degrees(&[2, 2]);
    let incident = fault(&world);
    assert_eq!(incident.kind, IncidentKind::PlaneFailed);
    assert_eq!((incident.place, &incident.gpu), (None, &None));
    assert!(incident.first_reporter.starts_with("worker "), "{incident:?}");
    assert_eq!(world.workers.len(), 4, "nobody was condemned");
}

#[test]
fn a_lost_gpu_is_fenced_named_and_taken_back_when_healthy() {
    let mut world = running(4);
    let lost = gpu(0, 2);
    world.health(&lost, HealthClass::Fatal, "XID 79: GPU has fallen off the bus");
    world.run_until_degrees(&[3, 4]);
    assert!(world.told[0].starts_with("fence node-0 g02#"), "{:?}", world.told);
    let incident = fault(&world);
    assert_eq!(incident.kind, IncidentKind::GpuLost);
    assert_eq!(incident.signal, "XID 79: GPU has fallen off the bus");
    assert_eq!(incident.place, Some(Place::new(0, 0, 2)));
    assert!(world.on(&lost).is_none());
    world.run_ms(2_000);
    assert!(world.on(&lost).is_none(), "started on a lost GPU");
    world.health(&lost, HealthClass::Healthy, "");
    world.run_until_degrees(&[4, 4]);
}

#[test]
fn the_drivers_word_explains_a_worker_that_died_first() {
    let mut world = running(4);
    world.kill(&gpu(0, 2));
    world.run_until_phase(Phase::Quiescing);
    world.health(&gpu(0, 2), HealthClass::Fatal, "XID 79: GPU has fallen off the bus");
    world.run_until_degrees(&[3, 4]);
    let incident = fault(&world);
    assert_eq!(incident.kind, IncidentKind::GpuLost);
    assert!(incident.signal.starts_with("XID 79"));
}

#[test]
fn a_second_kill_at_every_moment_of_a_reshard_ends_in_a_correct_layout() {
    for wait in 0..40 {
        let mut world = running(4);
        world.kill(&gpu(0, 1));
        let until = Time(world.now().0 + wait * MS / 2);
        world.run_until_now(until);
        world.kill(&gpu(1, 3));
        world.run_until_degrees(&[4, 4]);
        let all = world.incidents();
        let faults: Vec<_> = all.iter().filter(|i| i.kind == IncidentKind::WorkerKilled).collect();
        let places: Vec<_> = faults.iter().filter_map(|i| i.place).collect();
        assert_eq!(places.len(), 2, "after {wait}: {all:#?}");
        assert!(places.contains(&Place::new(0, 0, 1)) && places.contains(&Place::new(1, 0, 3)));
        assert!(faults.iter().all(|i| i.recovered.is_some()), "after {wait}");
    }
}

#[test]
fn both_holders_of_a_unit_lost_is_a_wait_that_names_the_units_and_the_ways_out() {
    let mut world = running(4);
    world.kill(&gpu(0, 1));
    world.kill(&gpu(1, 1));
    world.run_until_phase(Phase::Waiting);
    world.run_ms(5_000);
    let view = world.view();
    assert_eq!(view.phase, Phase::Waiting, "NO-GUESS");
    let text = view.explanation;
    assert!(text.contains("units") && text.contains("submit it again"), "{text}");
    let survivors = [gpu(0, 0), gpu(0, 2), gpu(0, 3), gpu(1, 0)];
    assert!(survivors.iter().all(|gpu| world.on(gpu).is_some()), "survivors stay");
    assert!(world.state().refuse_stop(&job_name()).is_none());
    world.tell(Event::StopJob { job: job_name() });
    world.run_until_phase(Phase::Stopped);
    assert!(world.workers.is_empty());
}

#[test]
fn too_few_is_a_wait_that_ends_by_itself() {
    let mut strict = spec("demo", 2, 1_000);
    strict.parallel.min_tensor = 2;
    let mut world = World::with_spec(3, strict);
    world.run_until_step(3);
    // Every unit is still held, but neither replica has its two slots.
    world.kill(&gpu(0, 0));
    world.kill(&gpu(1, 1));
    world.run_until_phase(Phase::Waiting);
    let text = world.view().explanation;
    assert!(text.contains("goes on by itself"), "{text}");
    world.run_until_degrees(&[2, 2]);
}

#[test]
fn slots_that_do_not_fit_are_a_wait_that_shows_the_figures_and_ends_by_itself() {
    let mut world = running(2);
    let nominal = world.stored().layout.clone().expect("a layout");
    let needs =
        [Slot(0), Slot(1)].map(|slot| memory::slot_bytes(&spec("demo", 2, 1), &nominal.groups[0], slot));
    world.gpu_memory = needs.into_iter().max();
    // Alone its neighbour would hold twice as much.
    world.kill(&gpu(1, 1));
    world.run_until_phase(Phase::Waiting);
    let text = world.view().explanation;
    assert!(text.contains("the slot at 1.0.0 would need") && text.contains("goes on by itself"), "{text}");
    world.run_until_degrees(&[2, 2]);
}

#[test]
fn a_second_job_waits_for_free_gpus_and_a_name_is_used_once() {
    let mut world = running(2);
    let refused = world.state().refuse_submit(&spec("demo", 2, 5));
    assert!(matches!(refused, Some(Refusal::AlreadyExists(_))));
    let mut other = spec("demo", 2, 1_000);
    other.name = "other".to_owned();
    world.tell(Event::Submit { spec: Box::new(other) });
    let other = |world: &World| world.state().job(&JobName("other".to_owned())).expect("it");
    assert_eq!(other(&world).phase, Phase::Pending);
    let text = other(&world).explanation;
    assert!(text.contains("0 free healthy GPUs, 4 of other jobs"), "{text}");
    world.tell(Event::DrainGpu { gpu: gpu(0, 1) });
    let text = other(&world).explanation;
    assert!(text.contains("0 free healthy GPUs, 1 drained, 3 of other jobs"), "{text}");
}

#[test]
fn a_restarted_daemon_disturbs_nothing_while_the_job_trains() {
    let mut world = running(4);
    let keys: Vec<_> = world.workers.keys().cloned().collect();
    world.restart_daemon();
    assert_eq!(world.view().phase, Phase::Rebuilding);
    world.run_until_phase(Phase::Running);
    world.run_until_step(20);
    assert_eq!(world.view().epoch, Epoch(1));
    assert_eq!(world.workers.keys().cloned().collect::<Vec<_>>(), keys);
    assert!(world.incidents().is_empty());
    let orders = ["close", "pause", "prepare", "resume", "stop", "fence", "spawn"];
    let given = world.told.iter().any(|line| orders.iter().any(|o| line.starts_with(o)));
    assert!(!given, "{:?}", world.told);
}

#[test]
fn a_daemon_killed_at_every_moment_of_a_recovery_finishes_it() {
    for wait in 0..40 {
        let mut world = running(4);
        world.kill(&gpu(0, 1));
        let until = Time(world.now().0 + wait * MS / 2);
        world.run_until_now(until);
        world.restart_daemon();
        world.run_until_degrees(&[4, 4]);
        let all = world.incidents();
        assert!(all.iter().all(|i| i.recovered.is_some()), "after {wait}: {all:#?}");
        let own = all.iter().any(|i| i.place == Some(Place::new(0, 0, 1)));
        assert!(own, "after {wait}: {all:#?}");
    }
}

#[test]
fn a_daemon_that_dies_between_any_two_commands_comes_back_right() {
    for count in 0..14 {
        for nth in 0..6 {
            let mut world = running(2);
            world.kill(&gpu(0, 1));
            let mut seen = 0;
            world.run_until("a crash", |world| {
                seen += 1;
                seen > nth * 7 || world.view().phase == Phase::Running && seen > 100
            });
            world.crash_after(count);
            world.run_until_degrees(&[2, 2]);
        }
    }
}

#[test]
fn a_worker_lost_while_no_daemon_listens_is_found_missing() {
    let mut world = running(2);
    world.kill(&gpu(0, 1));
    world.restart_daemon();
    world.run_until_degrees(&[1, 2]);
    let incident = fault(&world);
    assert_eq!(incident.place, Some(Place::new(0, 0, 1)));
    assert_eq!(incident.kind, IncidentKind::WorkerKilled);
}

#[test]
fn a_drained_gpu_stays_a_source_and_leaves_at_a_step_boundary() {
    let mut world = running(4);
    let leaving = gpu(1, 0);
    assert_eq!(world.state().refuse_drain(&leaving), None);
    world.tell(Event::DrainGpu { gpu: leaving.clone() });
    let told = |world: &World, order: &str| world.told.iter().filter(|line| line.starts_with(order)).count();
    assert_eq!(told(&world, "pause"), 0, "all train on until everyone has joined");
    world.run_until_degrees(&[4, 3]);
    assert_eq!((told(&world, "join"), told(&world, "pause")), (8, 8));
    assert!(world.told.iter().any(|line| line.starts_with("plan 2 members=7 holders=8")));
    assert!(world.told.iter().any(|line| line.starts_with("stop g10#")));
    world.run_ms(1_000);
    assert!(world.on(&leaving).is_none());
    let all = world.incidents();
    assert_eq!((all[0].kind, all[0].signal.as_str()), (IncidentKind::Planned, "drain"));
    assert_eq!(all[0].steps_lost, 0);
    let again = world.state().refuse_drain(&leaving);
    assert!(matches!(again, Some(Refusal::FailedPrecondition(_))));
    // A new daemon remembers.
    world.restart_daemon();
    world.run_until_phase(Phase::Running);
    world.run_ms(2_000);
    assert_eq!(world.degrees(), [4, 3]);
    world.tell(Event::RestoreGpu { gpu: leaving });
    world.run_until_degrees(&[4, 4]);
}

#[test]
fn a_drain_by_the_agent_is_a_planned_change_too() {
    let mut world = running(4);
    world.health(&gpu(1, 0), HealthClass::Drain, "row remapping pending");
    world.run_until_degrees(&[4, 3]);
    let all = world.incidents();
    assert_eq!(all[0].signal, "drain: row remapping pending");
    assert_eq!(all[0].advice, "do: row remapping pending", "what the agent suggests");
    world.health(&gpu(1, 0), HealthClass::Healthy, "");
    world.run_until_degrees(&[4, 4]);
    world.run_ms(1_000);
    let all = world.incidents();
    assert_eq!((all[1].signal.as_str(), all[1].advice.as_str()), ("gpu returned", "Nothing to do."));
}

#[test]
fn a_drain_of_a_gpu_that_cannot_be_read_is_a_loss_at_once() {
    let mut world = running(2);
    let unreadable = gpu(1, 0);
    let key = world.on(&unreadable).expect("it");
    world.health_with(&unreadable, HealthClass::Drain, "XID 64: row remap failed", false);
    world.run_until_degrees(&[2, 1]);
    assert!(!world.workers.contains_key(&key), "it was waited for");
    let incident = fault(&world);
    assert_eq!((incident.kind, incident.gpu), (IncidentKind::GpuLost, Some(unreadable.clone())));
    assert_eq!(incident.advice, "do: XID 64: row remap failed");
    assert!(
        world.told.iter().any(|line| line.starts_with("plan 2 members=3 holders=3")),
        "it was a source: {:?}",
        world.told
    );
    world.run_ms(5_000);
    assert_eq!(world.on(&unreadable), None, "it must not come back before it is healthy");
}

#[test]
fn a_frozen_worker_is_found_fenced_and_replaced() {
    let mut world = running(4);
    world.freeze(&gpu(0, 3));
    world.run_until_degrees(&[3, 4]);
    let incident = fault(&world);
    assert_eq!(incident.kind, IncidentKind::Frozen);
    assert_eq!(incident.place, Some(Place::new(0, 0, 3)));
    let fences: Vec<_> = world.told.iter().filter(|line| line.starts_with("fence")).collect();
    assert_eq!(fences.len(), 1, "no false eviction: {fences:?}");
    world.run_until_degrees(&[4, 4]);
}

#[test]
fn sessions_that_end_do_not_disturb_training() {
    let mut world = running(2);
    let keys: Vec<_> = world.workers.keys().cloned().collect();
    for key in &keys {
        world.flap_worker(key, 1_500);
    }
    world.flap_agent(&node(0), 10_000);
    world.run_ms(15_000);
    assert_eq!(world.view().epoch, Epoch(1));
    assert_eq!(world.view().phase, Phase::Running);
    assert!(world.incidents().is_empty());
}

#[test]
fn a_node_that_is_gone_is_taken_as_lost_after_its_deadlines() {
    let mut world = running(2);
    // Neither the agent nor a worker says another word.
    world.loses_power(&node(1), NEVER);
    world.run_until_degrees(&[2, 0]);
    let all = world.incidents();
    assert!(all.iter().all(|i| i.kind == IncidentKind::NodeLost), "{all:#?}");
    assert_eq!(all.len(), 2);
}

#[test]
fn completes_when_every_member_has_committed_the_last_step() {
    let mut world = World::with_spec(5, spec("demo", 2, 12));
    world.run_until_step(6);
    world.kill(&gpu(0, 0));
    world.run_until_phase(Phase::Completed);
    world.run_ms(3_000);
    assert!(world.workers.is_empty(), "all were stopped");
    assert_eq!(world.view().committed_step, Step(12));
    assert!(world.state().refuse_submit(&spec("demo", 2, 12)).is_none());
    // Under the same name again: epochs and incarnations go on.
    let last = world.stored().clone();
    world.tell(Event::Submit { spec: Box::new(spec("demo", 2, 2_000)) });
    world.run_until_phase(Phase::Running);
    assert!(world.view().epoch > last.last_epoch);
}

#[test]
fn stops_from_every_phase() {
    for wait in 0..60 {
        let mut world = World::with_spec(wait, spec("demo", 2, 1_000));
        world.run_ms(wait * 10);
        if let Some(victim) = world.on(&gpu(0, 0)).filter(|_| wait % 2 == 0) {
            world.ends(&victim, killed());
            world.run_ms(wait % 7);
        }
        world.tell(Event::StopJob { job: job_name() });
        world.run_until_phase(Phase::Stopped);
        world.run_ms(5_000);
        assert!(world.workers.is_empty(), "after {wait}");
    }
}

#[test]
fn a_worker_nobody_knows_is_ended() {
    let mut world = running(2);
    let mut key = world.on(&gpu(0, 0)).expect("it").key;
    key.incarnation = Incarnation(99);
    let state = world.workers.values().next().expect("one").state.clone();
    world.tell(Event::WorkerConnected {
        job: job_name(),
        worker: key,
        node: node(0),
        endpoint: Endpoint { node: String::new(), unix: String::new(), tcp: String::new() },
        pid: 1,
        state,
    });
    assert_eq!(world.told, ["stop g00#99", "fence node-0 g00#99"]);
}

#[test]
fn a_step_some_survivor_committed_is_rolled_forward_and_any_other_is_run_again() {
    let (mut rolled, mut again) = (0, 0);
    for wait in 0..640 {
        let mut world = running(4);
        let until = Time(world.now().0 + wait * MS / 4);
        world.run_until_now(until);
        world.kill(&gpu(0, 1));
        world.run_until_degrees(&[3, 4]);
        match world.rolled_forward() {
            0 => again += 1,
            _ => rolled += 1,
        }
        assert!(fault(&world).steps_lost <= 1);
    }
    assert!(rolled > 0 && again > 0, "rolled {rolled}, again {again}");
}

#[test]
fn replicated_parameters_that_differ_twice_fail_the_job() {
    let mut world = running(2);
    world.kill(&gpu(0, 1));
    world.lie_about_digests = true;
    world.run_until_phase(Phase::Failed);
    let text = world.view().explanation;
    assert!(text.contains("REPLICATED"), "{text}");
    let resumed = world.told.iter().any(|line| line.starts_with("resume"));
    assert!(!resumed, "a wrong model was trained on");
    world.run_ms(5_000);
    assert!(world.workers.is_empty());
}
