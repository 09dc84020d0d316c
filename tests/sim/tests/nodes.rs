//! What agents and their silence mean for nodes and GPUs.

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::*;
use std::time::Duration;

#[test]
fn a_node_that_falls_silent_and_comes_back_is_told_and_costs_nothing() {
    let mut world = running(2);
    let silence = u64::try_from(TIMEOUTS.silence().as_millis()).unwrap();
    world.flap_agent(&node(1), silence + 50);
    world.run_ms(5);
    let link = |world: &World| world.state().nodes()[1].link;
    let NodeLink::Silent { since, lease } = link(&world) else { panic!("{:?}", link(&world)) };
    assert_eq!(lease, since.after(TIMEOUTS.lease()));
    world.run_ms(2 * silence);
    assert!(matches!(link(&world), NodeLink::Connected { .. }), "{:?}", link(&world));
    let told = told_of_node_1(&world);
    assert_eq!(told.len(), 2, "{told:?}");
    let left = TIMEOUTS.lease() - TIMEOUTS.silence();
    assert!(told[0].contains("is silent"), "{told:?}");
    assert!(told[0].ends_with(&format!("lost in {} ms", left.as_millis())), "{told:?}");
    let back = told[1].strip_prefix("node node-1 is back after ").and_then(|rest| rest.strip_suffix(" ms"));
    let away: u64 = back.unwrap_or_else(|| panic!("{told:?}")).parse().unwrap();
    // The hello takes a little on its way.
    assert!((silence + 45..silence + 60).contains(&away), "{told:?}");
    assert_eq!(world.degrees(), [2, 2]);
}

fn told_of_node_1(world: &World) -> Vec<String> {
    world.told.iter().filter(|line| line.starts_with("node node-1")).cloned().collect()
}

#[test]
fn a_silence_that_is_soon_over_is_not_told() {
    let mut world = running(2);
    let silence = u64::try_from(TIMEOUTS.silence().as_millis()).unwrap();
    world.flap_agent(&node(1), silence - 50);
    world.run_ms(4 * silence);
    assert!(matches!(world.state().nodes()[1].link, NodeLink::Connected { .. }));
    assert_eq!(told_of_node_1(&world), [""; 0]);
}

#[test]
fn a_list_of_gpus_in_an_open_session_drops_a_lost_gpu_and_ends_no_worker_it_does_not_name() {
    let mut world = running(4);
    let connected = world.state().nodes()[1].link;
    let before: Vec<_> = world.workers.keys().cloned().collect();
    world.list_with(&gpu(1, 0), HealthClass::Predict, "warm");
    world.run_ms(500);
    assert_eq!(world.state().nodes()[1].gpus[0].health, HealthClass::Predict);
    assert_eq!(world.state().nodes()[1].link, connected, "the session goes on");
    assert_eq!(world.workers.keys().cloned().collect::<Vec<_>>(), before);
    world.list_with(&gpu(1, 0), HealthClass::Fatal, "it is not listed by the driver");
    world.run_until_degrees(&[4, 3]);
    let incident = fault(&world);
    assert_eq!((incident.kind, incident.gpu), (IncidentKind::GpuLost, Some(gpu(1, 0))));
}

#[test]
fn the_time_of_a_change_stays_while_the_same_is_said_again() {
    let mut world = running(2);
    let changed = |world: &World| world.state().nodes()[0].gpus[0].changed;
    world.health(&gpu(0, 0), HealthClass::Predict, "warm");
    world.run_ms(100);
    let first = changed(&world);
    world.list_with(&gpu(0, 0), HealthClass::Predict, "warm");
    world.run_ms(100);
    assert_eq!(changed(&world), first);
    world.health(&gpu(0, 0), HealthClass::Predict, "hot");
    world.run_ms(100);
    assert!(changed(&world) > first);
}

/// Lets time pass, and says which nodes were forgotten and when.
fn pass(state: &mut State, now: &mut Time, wait: Duration) -> Vec<(NodeName, Time)> {
    let (end, mut forgotten) = (now.after(wait), Vec::new());
    while let Some(at) = state.next_deadline().filter(|at| *at <= end) {
        assert!(at > *now, "a deadline that has passed stays: the daemon would spin");
        *now = at;
        for command in step(state, at, Event::Tick) {
            if let Command::Forget { node } = command {
                forgotten.push((node, at));
            }
        }
    }
    *now = end;
    forgotten
}

#[test]
fn a_node_that_is_gone_for_a_day_is_forgotten_unless_a_job_needs_it() {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let (mut state, mut now) = (State::new(TIMEOUTS), Time(1));
    let lists = |number: u32| -> Vec<GpuReport> {
        let listed = |index| GpuReport {
            gpu: gpu(number, index),
            index,
            name: "H".to_owned(),
            health: HealthClass::Fatal,
            cause: "it fell off the bus".to_owned(),
            action: String::new(),
            shards_readable: false,
        };
        let fit = |gpu| GpuReport { health: HealthClass::Healthy, ..gpu };
        (0..2).map(listed).map(|gpu| if number < 2 { fit(gpu) } else { gpu }).collect()
    };
    let connect = |state: &mut State, now, number| {
        let connected =
            Event::AgentConnected { node: node(number), gpus: lists(number), workers: Vec::new() };
        step(state, now, connected)
    };
    let known = |state: &State| state.nodes().into_iter().map(|node| node.name).collect::<Vec<_>>();
    for number in 0..4 {
        connect(&mut state, now, number);
    }
    // The job's places are on the first two.
    step(&mut state, now, Event::Submit { spec: Box::new(spec("demo", 2, 1_000)) });
    for number in 0..4 {
        step(&mut state, now, Event::AgentDisconnected { node: node(number) });
    }
    let left = now;
    assert_eq!(pass(&mut state, &mut now, DAY), []);
    // It is back in time.
    connect(&mut state, now, 2);
    assert_eq!(
        pass(&mut state, &mut now, TIMEOUTS.lease()),
        [(node(3), left.after(TIMEOUTS.lease()).after(DAY))]
    );
    assert_eq!(known(&state), [node(0), node(1), node(2)]);
    assert_eq!((state.node_of(&gpu(3, 0)), state.node_of(&gpu(2, 0))), (None, Some(node(2))));
    step(&mut state, now, Event::AgentDisconnected { node: node(2) });
    assert_eq!(pass(&mut state, &mut now, 3 * DAY).len(), 1);
    assert_eq!(
        known(&state),
        [node(0), node(1)],
        "a job has places there, and when it needs them they may come back"
    );

    // As a new one.
    connect(&mut state, now, 3);
    assert_eq!((known(&state).len(), state.index_of(&node(3), &gpu(3, 1))), (3, Some(1)));
    step(&mut state, now, Event::StopJob { job: job_name() });
    assert_eq!(pass(&mut state, &mut now, 2 * DAY).len(), 2, "the job has ended");
    assert_eq!(known(&state), [node(3)]);
    assert_eq!(state.next_deadline(), None);
}
