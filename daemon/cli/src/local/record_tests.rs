use super::*;
use reknit_proto::v1::PhaseChanged;

fn event(time_us: u64, event: Event) -> JobEvent {
    JobEvent { time_us, job: "demo".to_owned(), event: Some(event) }
}

fn step(epoch: u64, step: u64, complete: bool, missing: u32, repeated: u32) -> JobEvent {
    let committed = StepCommitted {
        epoch,
        step,
        loss: 5.0 - step as f64 / 10.0,
        tokens: 1000,
        step_ms: 100,
        complete,
        samples_missing: missing,
        samples_repeated: repeated,
    };
    event(step * 100_000, Event::Step(committed))
}

fn layout(epoch: u64, degrees: &[u32], resume_step: u64) -> JobEvent {
    let committed = LayoutCommitted {
        epoch,
        degrees: degrees.to_vec(),
        bytes_moved: 10,
        resume_step,
        ..LayoutCommitted::default()
    };
    event(0, Event::Layout(committed))
}

fn record() -> Record {
    Record::new(vec![4, 4], 16)
}

#[test]
fn a_step_is_told_once_and_counted_when_complete() {
    let mut record = record();
    assert_eq!(record.observe(&step(1, 1, false, 0, 0)), Some(Moment::Step(1)));
    assert_eq!(record.samples(0, 1), (16, 0), "not accounted for yet");
    assert_eq!(record.observe(&step(1, 1, true, 0, 0)), None);
    assert_eq!(record.samples(0, 1), (0, 0));
    record.observe(&step(1, 1, true, 0, 0));
    assert_eq!(record.samples(0, 1), (0, 16), "a step completed twice");
}

#[test]
fn lost_and_repeated_samples_go_to_the_latest_fault() {
    let mut record = record();
    for number in 1..=2 {
        record.observe(&step(1, number, true, 0, 0));
    }
    record.fault(FaultKind::WorkerKilled, "1.0.2".to_owned(), "GPU-6".to_owned(), 1);
    record.observe(&step(2, 3, true, 4, 0));
    record.fault(FaultKind::GpuLost, "0.0.1".to_owned(), "GPU-1".to_owned(), 2);
    record.observe(&step(3, 4, true, 0, 2));
    record.observe(&step(3, 6, true, 0, 0));
    assert_eq!(record.samples_of_fault(0), (4, 0));
    assert_eq!(record.samples_of_fault(1), (16, 2), "step 5 was never seen");
}

#[test]
fn degrees_and_going_back() {
    let mut record = record();
    record.observe(&layout(1, &[4, 4], 0));
    assert!(record.standing().whole);
    record.observe(&step(1, 1, true, 0, 0));
    record.observe(&layout(2, &[4, 3], 1));
    record.observe(&layout(3, &[4, 3], 1));
    assert!(!record.standing().whole);
    assert_eq!(record.degrees_seen(), [[4, 4], [4, 3]]);
    assert_eq!((record.went_back, record.bytes_moved()), (0, 30));
    record.observe(&layout(4, &[4, 4], 0));
    assert_eq!(record.went_back, 1);
}

#[test]
fn an_incident_belongs_to_the_fault_at_its_place() {
    let mut record = record();
    record.fault(FaultKind::WorkerKilled, "1.0.2".to_owned(), "GPU-6".to_owned(), 1_000);
    let open = Incident {
        id: 1,
        kind: "worker_killed".to_owned(),
        place: "1.0.2".to_owned(),
        gpu: "GPU-6".to_owned(),
        detected_us: 3_000,
        ..Incident::default()
    };
    let elsewhere = Incident { id: 2, place: "0.0.0".to_owned(), gpu: "GPU-0".to_owned(), ..open.clone() };
    let rejoin = Incident { id: 3, kind: "planned".to_owned(), ..open.clone() };
    let healed = Incident { recovered_us: 9_000, ..open.clone() };
    let mut told = |incident: &Incident| record.observe(&event(0, Event::Incident(incident.clone())));
    // It was slow before it was lost, and is not any more.
    let slow = Incident {
        id: 4,
        kind: "slow".to_owned(),
        signal: "slow".to_owned(),
        recovered_us: 4_000,
        ..open.clone()
    };
    let cleared = Moment::Changed { what: "slow".to_owned(), place: "1.0.2".to_owned(), ms: 1.0 };
    assert_eq!(told(&slow), Some(cleared));
    assert_eq!(told(&elsewhere), None);
    assert_eq!(told(&open), None);
    assert_eq!(told(&rejoin), None);
    assert_eq!(told(&healed), Some(Moment::Recovered(0)));
    assert_eq!(told(&healed), None);
    let rejoined = Incident { signal: "gpu returned".to_owned(), recovered_us: 7_000, ..rejoin };
    let changed = Moment::Changed { what: "gpu returned".to_owned(), place: "1.0.2".to_owned(), ms: 4.0 };
    assert_eq!(told(&rejoined), Some(changed));
    assert_eq!(record.phases(0).unwrap().total, 8.0);
    assert_eq!(record.others.keys().copied().collect::<Vec<_>>(), [2, 3, 4]);
}

#[test]
fn step_times_leave_recoveries_out() {
    let mut record = record();
    for (epoch, number) in [(1, 1), (1, 2), (2, 3), (2, 4)] {
        record.observe(&step(epoch, number, true, 0, 0));
    }
    assert_eq!(record.step_ms(), [100.0, 100.0]);
    assert_eq!(record.tokens_per_second(8), Some(10_000.0));
}

#[test]
fn the_phase_is_kept_with_its_explanation() {
    let mut record = record();
    let waiting = PhaseChanged { phase: "Waiting".to_owned(), explanation: "too few GPUs".to_owned() };
    record.observe(&event(0, Event::Phase(waiting)));
    assert_eq!((record.phase.as_str(), record.explanation.as_str()), ("Waiting", "too few GPUs"));
}

#[test]
fn medians() {
    assert_eq!(median(&[]), None);
    assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
    assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
}

#[test]
fn a_worker_that_comes_up_is_told_of_once() {
    let mut record = record();
    let mut told = |pid, state: &str| {
        let changed = WorkerChanged { pid, state: state.to_owned(), ..WorkerChanged::default() };
        match record.observe(&event(0, Event::Worker(changed))) {
            Some(Moment::Worker { state, .. }) => state,
            Some(_) | None => String::new(),
        }
    };
    assert_eq!(told(7, "idle"), "started");
    assert_eq!(told(7, "started"), "");
    assert_eq!(told(8, "started"), "started");
    assert_eq!(told(8, "idle"), "");
    assert_eq!(told(8, "gone: killed by signal 9"), "gone: killed by signal 9");
}

#[test]
fn a_fault_is_open_until_a_step_is_committed_after_it() {
    let mut record = record();
    assert!(record.open_fault().is_none());
    record.fault(FaultKind::WorkerKilled, "1.0.2".to_owned(), "GPU-6".to_owned(), 100);
    assert_eq!(record.open_fault().unwrap().words(), "worker 1.0.2 is gone");
    let mut incident = Incident { id: 1, place: "1.0.2".to_owned(), ..Incident::default() };
    record.observe(&event(0, Event::Incident(incident.clone())));
    assert!(record.open_fault().is_some());
    incident.recovered_us = 300;
    record.observe(&event(0, Event::Incident(incident)));
    assert!(record.open_fault().is_none());
}
