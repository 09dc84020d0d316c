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
