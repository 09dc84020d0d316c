//! What agents and their silence mean for nodes and GPUs.

use reknit_control_sim::*;
use reknit_engine::*;

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
