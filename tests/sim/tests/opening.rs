//! Stories of workers whose data takes longer to open than a start may take.

use reknit_control_sim::*;
use reknit_engine::*;
use reknit_layout::*;

/// Two workers that need four times as long as a start may take.
fn slow_to_open() -> World {
    let mut world = World::story(7, &[1, 1], Topology::default());
    world.opens_later_ms = 4 * u64::from(TIMEOUTS.start_ms);
    world.tell(Event::Submit { spec: Box::new(spec("demo", 1, 1_000)) });
    world.run_until("both workers", |world| world.workers.len() == 2);
    world
}

#[test]
fn who_opens_its_data_is_waited_for_as_long_as_it_says_that_it_lives() {
    let mut world = slow_to_open();
    let first = world.workers.keys().cloned().collect::<Vec<_>>();
    world.run_ms(u64::from(TIMEOUTS.start_ms) + 1_000);
    let says = world.view().explanation;
    assert!(says.contains("2 of 2 workers still open their data"), "{says}");
    world.run_until_phase(Phase::Running);
    assert_eq!(world.view().explanation, "");
    assert_eq!(world.workers.keys().cloned().collect::<Vec<_>>(), first, "nobody was started again");
}

#[test]
fn who_falls_silent_while_it_opens_its_data_is_started_again() {
    let mut world = slow_to_open();
    world.run_ms(u64::from(TIMEOUTS.start_ms) + 1_000);
    let frozen = world.on(&gpu(0, 0)).unwrap();
    world.freeze(&gpu(0, 0));
    world.run_ms(u64::from(TIMEOUTS.start_ms) + 1_000);
    assert!(!world.workers.contains_key(&frozen), "it is killed");
    world.run_until_phase(Phase::Running);
}

#[test]
fn why_workers_ended_is_said_as_long_as_the_job_has_not_started() {
    let mut world = slow_to_open();
    for who in world.workers.keys().cloned().collect::<Vec<_>>() {
        let how = "status 66: data: no text".to_owned();
        world.ends(&who, ExitStatus { how, signal: None, status: Some(66) });
    }
    world.run_ms(2 * u64::from(TIMEOUTS.start_ms));
    let says = world.view().explanation;
    assert!(says.contains("still open their data") && says.ends_with("status 66: data: no text"), "{says}");
    world.run_until_phase(Phase::Running);
}
