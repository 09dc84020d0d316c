//! Job files: no text makes the parser panic, what it takes prints back to the same, and can be planned.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reknit_fuzz::{is_small, lose, nominal};
use reknit_layout::{JobSpec, Mode, Place, Topology, seat};
use std::collections::BTreeSet;

fuzz_target!(|text: &str| {
    let job = match JobSpec::parse(text, "job.toml") {
        Ok(job) => job,
        Err(error) => {
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
            return;
        }
    };
    assert_eq!(JobSpec::parse(&job.to_toml(), "again"), Ok(job.clone()));
    let _ = job.trainable();
    if is_small(&job) {
        let topology = Topology::nominal(&job);
        let seats = seat(&job, &topology).expect("the nominal topology has room");
        let held = nominal(&job, &topology, &seats).expect("without a limit nothing is too large");
        let last = Place::new(job.parallel.data - 1, job.parallel.pipeline - 1, job.parallel.tensor - 1);
        for mode in Mode::ALL {
            for lost in [BTreeSet::new(), BTreeSet::from([last]), BTreeSet::from([Place::default(), last])] {
                lose(&job, &topology, &seats, &held, &lost, mode);
            }
        }
    }
});
