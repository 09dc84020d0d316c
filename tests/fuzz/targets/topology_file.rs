//! Topology files: no text makes the parser panic, and what it takes can seat a job.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reknit_fuzz::{lose, nominal};
use reknit_layout::{JobSpec, Mode, Topology, job, seat};
use std::collections::BTreeSet;

fuzz_target!(|text: &str| {
    let topology = match Topology::parse(text, "topology.toml") {
        Ok(topology) => topology,
        Err(error) => {
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
            return;
        }
    };
    let mut gpus = 0;
    for (index, domain) in topology.domains().iter().enumerate() {
        for node in &domain.nodes {
            for gpu in &node.gpus {
                assert_eq!(topology.domain_of(gpu), Some(index));
                assert_eq!(topology.node_of(gpu), Some(node));
                gpus += 1;
            }
        }
    }
    if gpus > 1024 {
        return;
    }
    let mut job = JobSpec::parse(job::EXAMPLE, "example").expect("the example");
    job.parallel.pipeline = 2;
    job.recovery.spares = 2;
    job.recovery.power_boost = true;
    let Ok(seats) = seat(&job, &topology) else { return };
    let Some(held) = nominal(&job, &topology, &seats) else { return };
    let places: Vec<_> = seats.iter().map(|(place, _)| place).collect();
    for lost in [&places[..1], &places[3..6], &places[..4]] {
        let lost: BTreeSet<_> = lost.iter().copied().collect();
        lose(&job, &topology, &seats, &held, &lost, Mode::Ntp);
    }
});
