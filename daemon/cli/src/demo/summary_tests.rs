use super::*;
use reknit_proto::v1::job_event::Event;
use reknit_proto::v1::{Incident, JobEvent, LayoutCommitted, StepCommitted};

const STEPS: u64 = 6;

fn event(time_us: u64, event: Event) -> JobEvent {
    JobEvent { time_us, job: "demo".to_owned(), event: Some(event) }
}

/// Six steps; a worker killed after step 2, its GPU back after step 4.
fn run() -> Record {
    let mut record = Record::new(vec![4, 4], 16);
    for epoch in 1..=3 {
        let degrees = if epoch == 2 { vec![4, 3] } else { vec![4, 4] };
        let resume_step = 2 * (epoch - 1);
        let bytes_moved = if epoch == 1 { 0 } else { 500 };
        let layout =
            LayoutCommitted { epoch, degrees, bytes_moved, resume_step, ..LayoutCommitted::default() };
        record.observe(&event(resume_step * 100_000 + 1, Event::Layout(layout)));
        for step in resume_step + 1..=resume_step + 2 {
            let committed = StepCommitted {
                epoch,
                step,
                loss: 5.5 - step as f64 / 2.0,
                tokens: 1024,
                step_ms: 100,
                complete: true,
                samples_missing: 0,
                samples_repeated: 0,
            };
            record.observe(&event(step * 100_000, Event::Step(committed)));
        }
        if epoch == 1 {
            record.fault(FaultKind::WorkerKilled, "1.0.2".to_owned(), "GPU-6".to_owned(), 210_000);
            let incident = Incident {
                id: 1,
                kind: "worker_killed".to_owned(),
                place: "1.0.2".to_owned(),
                detected_us: 212_500,
                quiesced_us: 220_000,
                fenced_us: 221_000,
                planned_us: 222_000,
                ready_us: 240_000,
                committed_us: 241_000,
                recovered_us: 300_000,
                steps_lost: 1,
                ..Incident::default()
            };
            record.observe(&event(300_000, Event::Incident(incident)));
        }
    }
    record
}

#[test]
fn the_json_shape_is_the_promised_one() {
    let summary = Summary::of(&run(), Some(2.5e-6));
    let json = serde_json::to_string(&summary).unwrap();
    assert_eq!(
        json,
        concat!(
            r#"{"faults":[{"kind":"worker_killed","steps_lost":1,"samples_lost":0,"samples_repeated":0,"#,
            r#""recovery_ms":{"detect":2.5,"quiesce":7.5,"fence":1.0,"plan":1.0,"reshard":18.0,"commit":60.0,"total":90.0}}],"#,
            r#""degrees_seen":[[4,4],[4,3],[4,4]],"steps":6,"step_ms_median":100.0,"loss_first":5.0,"loss_last":2.5,"#,
            r#""parity_max_rel":2.5e-6,"checkpoint_loads":0,"bytes_moved":1000}"#
        )
    );
}

#[test]
fn without_a_comparison_the_parity_is_null() {
    let json = serde_json::to_value(Summary::of(&run(), None)).unwrap();
    assert!(json["parity_max_rel"].is_null());
}

#[test]
fn a_good_run_has_no_problems() {
    let record = run();
    let summary = Summary::of(&record, Some(1e-6));
    assert_eq!(summary.problems(&record, STEPS), Vec::<String>::new());
}

#[test]
fn each_thing_that_goes_wrong_is_named() {
    let problems = |change: fn(&mut Record), parity: Option<f64>| {
        let mut record = run();
        change(&mut record);
        let summary = Summary::of(&record, parity);
        summary.problems(&record, STEPS).join("\n")
    };
    let keep = |_: &mut Record| ();
    assert!(problems(keep, Some(2e-4)).contains("differs from the run without faults"));
    assert!(problems(keep, Some(f64::NAN)).contains("differs"), "not a number is no parity");
    assert!(
        problems(
            |record| {
                record.steps.remove(&6);
            },
            None
        )
        .contains("5 steps were seen")
    );
    assert!(
        problems(
            |record| {
                record.layouts.pop();
            },
            None
        )
        .contains("TP4+TP3, not whole")
    );
    assert!(problems(|record| record.went_back = 1, None).contains("older state"));
    assert!(problems(|record| record.faults[0].incident = None, None).contains("as nothing"));
    let lost = |record: &mut Record| record.steps.values_mut().for_each(|step| step.samples_missing = 1);
    assert!(problems(lost, None).contains("6 samples were lost"));
    let two = |record: &mut Record| {
        record.faults[0].incident.iter_mut().for_each(|incident| incident.steps_lost = 2)
    };
    assert!(problems(two, None).contains("cost 2 steps"));
}

#[test]
fn people_see_the_phases() {
    let record = run();
    let lines = Summary::of(&record, None).lines(&record);
    assert!(lines[1].starts_with("worker_killed  1.0.2"), "{}", lines[1]);
    assert!(lines[1].contains("90.0"), "{}", lines[1]);
    assert!(lines.iter().any(|line| line.ends_with("TP4+TP4 -> TP4+TP3 -> TP4+TP4")));
    let longest = lines.iter().map(|line| line.chars().count()).max();
    assert!(longest <= Some(80), "{lines:#?}");
}
