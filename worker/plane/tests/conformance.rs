//! The host plane over each of its transports.

#![allow(clippy::unwrap_used)]

mod suite;

use reknit_plane::{HostPlane, Plane, Transport};

fn over(transport: Transport, size: usize, node: impl Fn(usize) -> String) -> Vec<Box<dyn Plane>> {
    (0..size)
        .map(|rank| {
            let plane = HostPlane::over(transport, &node(rank), "127.0.0.1").unwrap();
            Box::new(plane) as Box<dyn Plane>
        })
        .collect()
}

fn planes(size: usize, node: impl Fn(usize) -> String) -> Vec<Box<dyn Plane>> {
    over(Transport::Shared, size, node)
}

#[test]
fn on_one_node() {
    suite::conformance(|size| planes(size, |_| "node".into()));
}

#[test]
fn on_one_node_over_unix_sockets() {
    suite::conformance(|size| over(Transport::Unix, size, |_| "node".into()));
}

#[test]
fn on_one_node_over_tcp() {
    suite::conformance(|size| over(Transport::Tcp, size, |_| "node".into()));
}

/// A rank that may not share memory gets on with those that would.
#[test]
fn on_one_node_with_and_without_shared_memory() {
    suite::conformance(|size| {
        let transport = |rank| if rank % 2 == 0 { Transport::Shared } else { Transport::Unix };
        (0..size).flat_map(|rank| over(transport(rank), 1, |_| "node".into())).collect()
    });
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
