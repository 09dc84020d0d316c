//! What every event does where a job can stand, letter by letter: golden/transitions.txt.
//!
//! After a wanted change run this once with REKNIT_UPDATE_GOLDEN=1, and look at what git shows.

// The test's own switch and file.
#![allow(clippy::disallowed_methods)]

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::*;
use std::collections::BTreeSet;

/// Where a job stands, how it is called, and a world in which it does.
fn scenes() -> Vec<(&'static str, World)> {
    let submitted = |nodes: &[u32]| {
        let mut world = World::story(7, nodes, Topology::default());
        world.run_ms(50);
        world.tell(Event::Submit { spec: Box::new(spec("demo", 2, 1_000)) });
        world
    };
    let lost = || {
        let mut world = running(2);
        world.tell(exited(1));
        world
    };
    let stand = |phase: Phase| {
        let mut world = running(2);
        match phase {
            Phase::Pending => world = submitted(&[2]),
            Phase::Starting => world = submitted(&[2, 2]),
            Phase::Running => {}
            Phase::Quiescing => world = lost(),
            Phase::Resharding => {
                world = lost();
                world.run_until_phase(Phase::Resharding);
            }
            Phase::Waiting => {
                world.kill(&gpu(0, 1));
                world.kill(&gpu(1, 1));
                world.run_until_phase(Phase::Waiting);
            }
            Phase::Draining => {
                world.tell(Event::StopJob { job: job_name() });
            }
            Phase::Stopped => {
                world.tell(Event::StopJob { job: job_name() });
                world.run_until_phase(Phase::Stopped);
            }
            Phase::Completed => {
                world = World::with_spec(7, spec("demo", 2, 5));
                world.run_until_phase(Phase::Completed);
            }
            Phase::Failed => {
                world = lost();
                world.lie_about_digests = true;
                world.run_until_phase(Phase::Failed);
            }
            Phase::Rebuilding => world.restart_daemon(),
        }
        assert_eq!(world.view().phase, phase);
        world
    };
    let first_step = || {
        let mut world = running(2);
        world.kill(&gpu(0, 1));
        world.run_until("the layout without it", |world| world.degrees() == [1, 2]);
        assert_eq!(world.view().phase, Phase::Running);
        world
    };
    let draining = || {
        let mut world = running(2);
        world.tell(Event::DrainGpu { gpu: gpu(0, 0) });
        assert_eq!(world.view().phase, Phase::Running);
        world
    };
    let joining = || {
        let mut world = draining();
        world.run_until("a join", |world| world.told.iter().any(|line| line.starts_with("join")));
        assert_eq!(world.view().phase, Phase::Running);
        world
    };
    let pausing = || {
        let mut world = draining();
        world.run_until_phase(Phase::Quiescing);
        world
    };
    let preparing = || {
        let mut world = lost();
        world.run_until("a preparation", |world| world.told.iter().any(|line| line.starts_with("prepare")));
        assert_eq!(world.view().phase, Phase::Resharding);
        world
    };
    vec![
        ("Pending: too few GPUs are known", stand(Phase::Pending)),
        ("Starting: workers are being started", stand(Phase::Starting)),
        ("Running", stand(Phase::Running)),
        ("Running: the first step without 0.0.1, which was lost", first_step()),
        ("Running: a drain is planned in the background", draining()),
        ("Running: the groups without the drained GPU are joined in the background", joining()),
        ("Quiescing, paused: a drain waits for the step boundary", pausing()),
        ("Quiescing: worker 0.0.1 was lost", stand(Phase::Quiescing)),
        ("Resharding, planning", stand(Phase::Resharding)),
        ("Resharding, preparing", preparing()),
        ("Waiting: both holders of some units are lost", stand(Phase::Waiting)),
        ("Draining: an operator stops it", stand(Phase::Draining)),
        ("Stopped", stand(Phase::Stopped)),
        ("Completed", stand(Phase::Completed)),
        ("Failed", stand(Phase::Failed)),
        ("Rebuilding: a new daemon has heard nobody yet", stand(Phase::Rebuilding)),
    ]
}

/// A checkpoint's name.
fn saved(step: u64) -> CheckpointId {
    CheckpointId { step: Step(step), digest: format!("{step:016x}") }
}

/// The worker of the first incarnations: 0 to 3 for places 0.0.0, 0.0.1, 1.0.0, 1.0.1.
fn worker(index: u32) -> WorkerKey {
    WorkerKey { gpu: gpu(index / 2, index % 2), incarnation: Incarnation(u64::from(index) + 1) }
}

fn exited(index: u32) -> Event {
    let node = node(index / 2);
    Event::WorkerExited { node, job: job_name(), worker: worker(index), exit: killed() }
}

fn report(gpu: GpuId, index: u32, health: HealthClass, cause: &str) -> GpuReport {
    GpuReport {
        gpu,
        index,
        name: "model".to_owned(),
        health,
        cause: cause.to_owned(),
        action: String::new(),
        shards_readable: health != HealthClass::Fatal,
    }
}

/// Every kind of event, with what makes a difference in it. `epoch`: of the committed layout.
fn events(epoch: Epoch, committed: Step) -> Vec<(&'static str, Event)> {
    let job = job_name;
    let next = Epoch(epoch.0 + 1);
    let state = |phase, ready_epoch, step: u64| WorkerState {
        phase,
        epoch,
        ready_epoch,
        holding: Holding { step: Step(step), ..Holding::default() },
        prepared: Step(step),
        attempted: Step(step),
        vote: None,
    };
    let connected = |worker: WorkerKey, on: u32, state| Event::WorkerConnected {
        job: job(),
        worker,
        node: node(on),
        endpoint: Endpoint { node: node(on).0, unix: String::new(), tcp: String::new() },
        pid: 9,
        state,
    };
    let agent = |workers| Event::AgentConnected {
        node: node(1),
        gpus: vec![
            report(gpu(1, 0), 0, HealthClass::Healthy, ""),
            report(gpu(1, 1), 1, HealthClass::Healthy, ""),
        ],
        workers,
    };
    let health = |health, cause: &str| Event::HealthChanged {
        node: node(1),
        gpu: gpu(1, 1),
        health,
        cause: cause.to_owned(),
        action: String::new(),
        shards_readable: health != HealthClass::Fatal,
    };
    let plane_failed = |epoch, peer| Event::PlaneFailed {
        job: job(),
        worker: worker(2),
        epoch,
        peer,
        reason: "a socket ended".to_owned(),
    };
    let ready = |epoch| Event::Ready {
        job: job(),
        worker: worker(2),
        epoch,
        step: committed,
        replicated_digest: "d".to_owned(),
    };
    let prepare_failed = |epoch| Event::PrepareFailed {
        job: job(),
        worker: worker(2),
        epoch,
        peer: Some(worker(3)),
        reason: "no answer".to_owned(),
    };
    let committed_step = |epoch, step: u64| Event::Committed {
        job: job(),
        worker: worker(2),
        epoch,
        step: Step(step),
        vote: StepVote { grad_norm_squared: 1.0, loss: 2.0 },
        first_sample: 0,
        samples: 4,
        step_ms: 50,
        tokens: 1,
        rolled_forward: false,
    };
    let unknown = WorkerKey { gpu: GpuId("g99".to_owned()), incarnation: Incarnation(99) };
    let both = vec![(job(), worker(2), 7), (job(), worker(3), 8)];
    let too_few = PlanError::Draft(DraftError::TooFew { needed: 1, found: 0 });
    let other = || spec("other", 1, 10);
    let (training, idle) = (WorkerPhase::Training, WorkerPhase::Idle);
    let now = committed.0;
    vec![
        ("Started: a store without jobs", Event::Started { jobs: Vec::new(), incidents: Vec::new() }),
        ("AgentConnected: with both workers", agent(both)),
        ("AgentConnected: without 1.0.1", agent(vec![(job(), worker(2), 7)])),
        ("AgentConnected: with a worker nobody knows", agent(vec![(job(), unknown.clone(), 7)])),
        ("AgentDisconnected", Event::AgentDisconnected { node: node(1) }),
        (
            "GpusListed: 1.0.1's GPU is lost",
            Event::GpusListed {
                node: node(1),
                gpus: vec![
                    report(gpu(1, 0), 0, HealthClass::Healthy, ""),
                    report(gpu(1, 1), 1, HealthClass::Fatal, "gone"),
                ],
            },
        ),
        ("HealthChanged: 1.0.1 fatal", health(HealthClass::Fatal, "XID 79")),
        ("HealthChanged: 1.0.1 drain", health(HealthClass::Drain, "pages")),
        ("HealthChanged: 1.0.1 predict", health(HealthClass::Predict, "rate")),
        ("HealthChanged: 1.0.1 unknown", health(HealthClass::Unknown, "no answer")),
        ("HealthChanged: 1.0.1 rank died", health(HealthClass::RankDied, "XID 13")),
        ("HealthChanged: 1.0.1 healthy", health(HealthClass::Healthy, "")),
        (
            "WorkerSpawned: 1.0.1",
            Event::WorkerSpawned { node: node(1), job: job(), worker: worker(3), pid: 9 },
        ),
        (
            "WorkerExited: 1.0.1",
            Event::WorkerExited { node: node(1), job: job(), worker: worker(3), exit: killed() },
        ),
        (
            "WorkerExited: told by another node's agent",
            Event::WorkerExited { node: node(0), job: job(), worker: worker(3), exit: killed() },
        ),
        ("WorkerConnected: 1.0.1 trains", connected(worker(3), 1, state(training, Epoch(0), now))),
        (
            "WorkerConnected: 1.0.1 opens its data",
            connected(worker(3), 1, state(WorkerPhase::Opening, Epoch(0), 0)),
        ),
        ("WorkerConnected: 1.0.1 holds nothing", connected(worker(3), 1, state(idle, Epoch(0), 0))),
        (
            "WorkerConnected: 1.0.1 has stopped",
            connected(worker(3), 1, state(WorkerPhase::Quiesced, Epoch(0), now)),
        ),
        (
            "WorkerConnected: 1.0.1 is ready for the next epoch",
            connected(worker(3), 1, state(WorkerPhase::Ready, next, now)),
        ),
        ("WorkerConnected: nobody knows it", connected(unknown, 1, state(idle, Epoch(0), 0))),
        ("WorkerDisconnected: 1.0.1", Event::WorkerDisconnected { job: job(), worker: worker(3) }),
        ("PlaneFailed: this epoch, about 1.0.1", plane_failed(epoch, Some(worker(3)))),
        ("PlaneFailed: an older epoch", plane_failed(Epoch(epoch.0.saturating_sub(1)), None)),
        (
            "Quiesced: 1.0.0",
            Event::Quiesced {
                job: job(),
                worker: worker(2),
                state: state(WorkerPhase::Quiesced, Epoch(0), now),
            },
        ),
        ("Joined: 1.0.0, the next epoch", Event::Joined { job: job(), worker: worker(2), epoch: next }),
        ("Ready: 1.0.0, the next epoch", ready(next)),
        ("Ready: 1.0.0, this epoch again", ready(epoch)),
        ("PrepareFailed: 1.0.0 about 1.0.1, the next epoch", prepare_failed(next)),
        ("PrepareFailed: 1.0.0 about 1.0.1, this epoch again", prepare_failed(epoch)),
        ("Committed: 1.0.0, the next step", committed_step(epoch, now + 1)),
        ("Committed: 1.0.0, a step beyond the last", committed_step(epoch, 1 << 40)),
        (
            "Progress: 1.0.0",
            Event::Progress {
                job: job(),
                worker: worker(2),
                epoch,
                step: committed,
                ticks: 5,
                activity: Activity::default(),
            },
        ),
        ("Alive: 1.0.0", Event::Alive { job: job(), worker: worker(2) }),
        (
            "Completed: 1.0.0, before the last step",
            Event::Completed {
                job: job(),
                worker: worker(2),
                epoch,
                step: committed,
                replicated_digest: "d".to_owned(),
            },
        ),
        (
            "Planned: too few, the next epoch",
            Event::Planned { job: job(), epoch: next, result: Err(too_few.clone()) },
        ),
        ("Planned: an older epoch", Event::Planned { job: job(), epoch, result: Err(too_few) }),
        (
            "Checkpoints: 1.0.0 finds one",
            Event::Checkpoints { job: job(), worker: worker(2), ids: vec![saved(4)], written: Time(1) },
        ),
        (
            "NoCheckpoint: 1.0.0's disk is full",
            Event::NoCheckpoint {
                job: job(),
                worker: worker(2),
                step: committed,
                reason: "the disk is full".to_owned(),
            },
        ),
        ("RestoreJob: the last checkpoint", Event::RestoreJob { job: job(), step: None }),
        ("RestoreJob: of a step without one", Event::RestoreJob { job: job(), step: Some(Step(77)) }),
        ("Submit: under this name", Event::Submit { spec: Box::new(spec("demo", 2, 1_000)) }),
        ("Submit: another job", Event::Submit { spec: Box::new(other()) }),
        ("StopJob", Event::StopJob { job: job() }),
        ("Rebalance", Event::Rebalance { job: job() }),
        ("DrainGpu: 1.0.1's", Event::DrainGpu { gpu: gpu(1, 1) }),
        ("RestoreGpu: 0.0.0's", Event::RestoreGpu { gpu: gpu(0, 0) }),
        ("Tick: now", Event::Tick),
        ("Tick: every deadline is over", Event::Tick),
    ]
}

/// The variant's name; a new one does not compile before the table has it.
fn kind(event: &Event) -> &'static str {
    match event {
        Event::Started { .. } => "Started",
        Event::AgentConnected { .. } => "AgentConnected",
        Event::AgentDisconnected { .. } => "AgentDisconnected",
        Event::GpusListed { .. } => "GpusListed",
        Event::HealthChanged { .. } => "HealthChanged",
        Event::WorkerSpawned { .. } => "WorkerSpawned",
        Event::WorkerExited { .. } => "WorkerExited",
        Event::WorkerConnected { .. } => "WorkerConnected",
        Event::WorkerDisconnected { .. } => "WorkerDisconnected",
        Event::PlaneFailed { .. } => "PlaneFailed",
        Event::Quiesced { .. } => "Quiesced",
        Event::Joined { .. } => "Joined",
        Event::Ready { .. } => "Ready",
        Event::PrepareFailed { .. } => "PrepareFailed",
        Event::Committed { .. } => "Committed",
        Event::Progress { .. } => "Progress",
        Event::Alive { .. } => "Alive",
        Event::Completed { .. } => "Completed",
        Event::Checkpoints { .. } => "Checkpoints",
        Event::NoCheckpoint { .. } => "NoCheckpoint",
        Event::RestoreJob { .. } => "RestoreJob",
        Event::Planned { .. } => "Planned",
        Event::Submit { .. } => "Submit",
        Event::StopJob { .. } => "StopJob",
        Event::Rebalance { .. } => "Rebalance",
        Event::DrainGpu { .. } => "DrainGpu",
        Event::RestoreGpu { .. } => "RestoreGpu",
        Event::Tick => "Tick",
    }
}

const KINDS: usize = 28;

/// Commands in short; what goes to several workers in a row is written once.
fn told(commands: &[Command]) -> String {
    let mut said: Vec<(String, Vec<String>)> = Vec::new();
    for line in commands.iter().filter_map(brief) {
        let to: Vec<_> = line.split(' ').filter(|word| word.contains('#')).map(str::to_owned).collect();
        let what: Vec<_> = line.split(' ').filter(|word| !word.contains('#')).collect();
        let what = what.join(" ");
        match said.last_mut() {
            Some((last, workers)) if *last == what && !to.is_empty() => workers.extend(to),
            Some(_) | None => said.push((what, to)),
        }
    }
    let lines = said.into_iter().map(|(what, to)| match to.is_empty() {
        true => what,
        false => format!("{what} -> {}", to.join(" ")),
    });
    lines.collect::<Vec<_>>().join("; ")
}

fn table() -> String {
    let mut text = String::new();
    let mut phases = BTreeSet::new();
    for (name, world) in scenes() {
        let view = world.view();
        phases.insert(format!("{:?}", view.phase));
        text += &format!("{name}\n");
        let mut kinds = BTreeSet::new();
        for (label, event) in events(view.epoch, view.committed_step) {
            assert!(label.starts_with(kind(&event)), "{label}");
            kinds.insert(kind(&event));
            let mut state = world.state().clone();
            let late = if label.ends_with("over") { 3_600_000 * MS } else { 0 };
            let commands = step(&mut state, Time(world.now().0 + late), event);
            let after = state.job(&job_name()).expect("the job").phase;
            let stays = if after == view.phase { "stays".to_owned() } else { format!("{after:?}") };
            let told = told(&commands);
            let line = format!("  {label:<52} {stays:<11} {told}");
            text += &format!("{}\n", line.trim_end());
        }
        assert_eq!(kinds.len(), KINDS, "an event is missing: {kinds:?}");
        text += "\n";
    }
    assert_eq!(phases.len(), 11, "a phase is missing: {phases:?}");
    text
}

#[test]
fn every_event_in_every_phase() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/transitions.txt");
    let found = table();
    if std::env::var_os("REKNIT_UPDATE_GOLDEN").is_some() {
        std::fs::write(path, found).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(path).unwrap();
    for (line, (expected, found)) in expected.lines().zip(found.lines()).enumerate() {
        assert_eq!(expected, found, "line {} of {path}", line + 1);
    }
    assert_eq!(expected.lines().count(), found.lines().count(), "lines of {path}");
}
