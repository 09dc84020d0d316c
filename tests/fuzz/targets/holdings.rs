//! Holdings files: no text makes the parser panic, what it takes is possible, prints back to the same, and can be planned from.
//!
//! The first byte says which job it is and the second which places are lost; the rest is the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reknit_fuzz::lose;
use reknit_layout::{HoldingsFile, JobSpec, Mode, Topology, job, seat};
use std::collections::BTreeSet;

fn read(job: &JobSpec, text: &str) -> Result<HoldingsFile, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let file = HoldingsFile::read(job, &mut reader)?;
    reader.end().map(|()| file)
}

fuzz_target!(|input: (u8, u8, &str)| {
    let (kind, mask, text) = input;
    let mut job = JobSpec::parse(job::EXAMPLE, "example").expect("the example");
    job.parallel.pipeline = 1 + u32::from(kind & 1);
    job.parallel.min_tensor = 1;
    job.recovery.spares = u32::from(kind >> 1 & 1);
    let Ok(file) = read(&job, text) else { return };
    for (place, holding) in &file.holdings {
        assert_eq!(job.expect_place(*place), Ok(()));
        let axes = job.stage_axes(place.stage);
        for (axis, units) in holding.units.iter() {
            let last = units.intervals().last().expect("empty sets are not kept");
            assert!(axes.contains(axis) && last.1 <= job.model.units(axis.family));
        }
    }
    let printed = serde_json::to_string(&file.holdings).expect("it is plain data");
    assert_eq!(read(&job, &printed).expect("it was valid").holdings, file.holdings);

    let topology = Topology::nominal(&job);
    let mut seats = seat(&job, &topology).expect("the nominal topology has room");
    if let Some(read) = &file.seats {
        if read.values().any(|gpu| topology.domain_of(gpu).is_none()) {
            return;
        }
        seats.take(read.clone().into_iter().collect());
    }
    let places = seats.iter().map(|(place, _)| place).enumerate();
    let lost = places.filter(|(index, _)| mask >> (index % 8) & 1 == 1).map(|(_, place)| place);
    let lost: BTreeSet<_> = lost.collect();
    lose(&job, &topology, &seats, &file.holdings, &lost, Mode::ALL[usize::from(kind >> 2 & 3)]);
});
