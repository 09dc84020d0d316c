//! The host plane over both of its transports.

#![allow(clippy::unwrap_used)]

mod suite;

use reknit_plane::{HostPlane, Plane};

fn planes(size: usize, node: impl Fn(usize) -> String) -> Vec<Box<dyn Plane>> {
    (0..size)
        .map(|rank| Box::new(HostPlane::new(&node(rank), "127.0.0.1").unwrap()) as Box<dyn Plane>)
        .collect()
}

#[test]
fn on_one_node() {
    suite::conformance(|size| planes(size, |_| "node".into()));
}

#[test]
fn across_nodes() {
    suite::conformance(|size| planes(size, |rank| format!("node-{rank}")));
}

#[test]
fn on_two_nodes() {
    suite::conformance(|size| planes(size, |rank| format!("node-{}", rank % 2)));
}

#[test]
fn a_rank_that_does_not_arrive_is_told_while_the_others_wait() {
    use reknit_plane::Op;
    let planes = planes(3, |rank| format!("node-{}", rank % 2));
    let mut groups = suite::ranks(&planes, 3, "waits", |group| group);
    let mut late = groups.pop().unwrap();
    let aborters: Vec<_> = groups.iter().map(|group| group.aborter()).collect();
    assert!(aborters.iter().all(|aborter| aborter.waiting_for().is_empty()));
    let works: Vec<_> = groups.iter_mut().map(|group| group.submit(Op::Barrier, suite::PATIENCE)).collect();
    let until = std::time::Instant::now() + suite::PATIENCE;
    while !aborters.iter().all(|aborter| aborter.waiting_for() == [2]) {
        let seen: Vec<_> = aborters.iter().map(|aborter| aborter.waiting_for()).collect();
        assert!(std::time::Instant::now() < until, "{seen:?}");
        std::thread::yield_now();
    }
    late.submit(Op::Barrier, suite::PATIENCE).wait().unwrap();
    for work in works {
        work.wait().unwrap();
    }
    while !aborters.iter().all(|aborter| aborter.waiting_for().is_empty()) {
        assert!(std::time::Instant::now() < until, "nobody is waited for any more");
        std::thread::yield_now();
    }
}
