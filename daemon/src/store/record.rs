//! How a job's record is written: nothing twice that is long.

use super::value::{decode, encode, is_packed};
use reknit_engine::JobRecord;
use reknit_layout::{GpuId, Place};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Serialize, Deserialize)]
struct Written {
    /// Of the record's places only those are written whose GPU is not a member of the layout there: in a job of
    /// thousands that trains, a few.
    lean: bool,
    record: JobRecord,
}

pub(super) fn encode_job(record: &JobRecord) -> Result<Vec<u8>, String> {
    let mut record = record.clone();
    let layout = record.layout.clone();
    let members = layout.iter().flat_map(|layout| layout.members());
    let seated: BTreeMap<Place, &GpuId> =
        members.map(|(place, member)| (place, &member.worker.gpu)).collect();
    let lean = seated.keys().all(|place| record.places.contains_key(place));
    if lean {
        record.places.retain(|place, gpu| seated.get(place) != Some(&&*gpu));
    }
    encode(&Written { lean, record })
}

/// Format 1 wrote the record as it is.
pub(super) fn decode_job(value: &[u8]) -> Result<JobRecord, String> {
    if !is_packed(value) {
        return decode(value);
    }
    let Written { lean, mut record } = decode(value)?;
    if lean {
        for (place, member) in record.layout.iter().flat_map(|layout| layout.members()) {
            record.places.entry(place).or_insert_with(|| member.worker.gpu.clone());
        }
    }
    Ok(record)
}
