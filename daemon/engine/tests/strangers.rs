//! Workers of a job that the daemon's store does not know.

use reknit_control_sim::{gpu, node, spec};
use reknit_engine::*;
use reknit_layout::*;

/// An agent connects that runs a worker of the job `elsewhere`.
fn connects(state: &mut State) -> Vec<Command> {
    let report = GpuReport {
        gpu: gpu(0, 0),
        index: 0,
        name: "model".to_owned(),
        health: HealthClass::Healthy,
        cause: String::new(),
        action: String::new(),
        shards_readable: true,
    };
    let worker = WorkerKey { gpu: gpu(0, 0), incarnation: Incarnation(7) };
    let workers = vec![(JobName("elsewhere".to_owned()), worker, 4242)];
    step(state, Time(1_000_000), Event::AgentConnected { node: node(0), gpus: vec![report], workers })
}

fn fences(commands: &[Command]) -> usize {
    commands.iter().filter(|command| matches!(command, Command::Fence { .. })).count()
}

#[test]
fn a_store_without_any_job_ends_nobody_before_one_is_submitted() {
    let mut state = State::new(Timeouts::default());
    step(&mut state, Time(0), Event::Started { jobs: Vec::new(), incidents: Vec::new() });
    let told = connects(&mut state);
    assert_eq!(fences(&told), 0);
    let text = told.iter().find_map(|command| match command {
        Command::Announce(text) => Some(text.as_str()),
        _ => None,
    });
    assert!(text.is_some_and(|text| text.contains("node-0 runs 1 workers of elsewhere")), "{told:?}");
    // Seen twice, ended once.
    connects(&mut state);
    let submitted = step(&mut state, Time(2_000_000), Event::Submit { spec: Box::new(spec("demo", 2, 100)) });
    assert_eq!(fences(&submitted), 1, "{submitted:?}");
}

#[test]
fn a_store_with_another_job_ends_them() {
    let mut state = State::new(Timeouts::default());
    step(&mut state, Time(0), Event::Submit { spec: Box::new(spec("demo", 2, 100)) });
    assert_eq!(fences(&connects(&mut state)), 1);
}
