//! How a value is written: as JSON, packed by gzip, so that `gunzip` shows it and its checksum tells what is damaged.

use super::Snapshot;
use super::record::decode_job;
use flate2::Compression;
use flate2::bufread::{GzDecoder, GzEncoder};
use std::io::Read;

const GZIP: [u8; 2] = [0x1f, 0x8b];
/// No record unpacks to more: that of a large job is some megabytes.
const LARGEST: u64 = 256 << 20;

pub(super) fn encode<T: serde::Serialize>(value: &T) -> Result<Vec<u8>, String> {
    let json = serde_json::to_vec(value).map_err(|error| error.to_string())?;
    let mut packed = Vec::new();
    GzEncoder::new(json.as_slice(), Compression::fast())
        .read_to_end(&mut packed)
        .map_err(|error| error.to_string())?;
    Ok(packed)
}

/// Format 1 did not pack: what was not written since is plain JSON.
pub(super) fn is_packed(value: &[u8]) -> bool {
    value.starts_with(&GZIP)
}

pub(super) fn decode<T: serde::de::DeserializeOwned>(value: &[u8]) -> Result<T, String> {
    if !is_packed(value) {
        return serde_json::from_slice(value).map_err(|error| error.to_string());
    }
    let mut json = Vec::new();
    let mut decoder = GzDecoder::new(value);
    decoder.by_ref().take(LARGEST + 1).read_to_end(&mut json).map_err(|error| error.to_string())?;
    if json.len() as u64 > LARGEST {
        return Err(format!("it unpacks to more than {LARGEST} bytes"));
    }
    if !decoder.into_inner().is_empty() {
        return Err("something follows its end".to_owned());
    }
    serde_json::from_slice(&json).map_err(|error| error.to_string())
}

impl Snapshot {
    /// `key`: the job's name as the store's key tells it.
    pub(super) fn add_job(&mut self, key: &str, value: &[u8]) -> Result<(), String> {
        let record = decode_job(value)?;
        if record.name.0 != key {
            return Err(format!("it is the record of job `{}`", record.name));
        }
        self.jobs.push(record);
        Ok(())
    }

    /// `job` and `id` as the store's key tells them.
    pub(super) fn add_incident(&mut self, job: &str, id: u64, value: &[u8]) -> Result<(), String> {
        let incident: reknit_engine::Incident = decode(value)?;
        if (incident.job.0.as_str(), incident.id) != (job, id) {
            return Err(format!("it is incident {} of job `{}`", incident.id, incident.job));
        }
        self.incidents.push(incident);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_back_packed_or_as_format_1_wrote_it() {
        let value = vec!["the same again"; 1000];
        let packed = encode(&value).unwrap();
        assert!(packed.len() < 500, "{} bytes", packed.len());
        let plain = serde_json::to_vec(&value).unwrap();
        for written in [&packed, &plain] {
            assert_eq!(decode::<Vec<String>>(written).unwrap(), value);
        }
    }

    #[test]
    fn damage_anywhere_is_found() {
        let value: Vec<u32> = (0..1000).map(|number: u32| number.wrapping_mul(2_654_435_769)).collect();
        let packed = encode(&value).unwrap();
        for length in 0..packed.len() {
            decode::<Vec<u32>>(&packed[..length]).unwrap_err();
        }
        let mut harmless = 0;
        // The header's ten bytes have parts that say nothing: a time, a kind of machine.
        for at in 10..packed.len() {
            let mut damaged = packed.clone();
            damaged[at] ^= 0x10;
            // A few bits between the end and the checksum say nothing.
            if let Ok(read) = decode::<Vec<u32>>(&damaged) {
                assert_eq!(read, value, "byte {at}");
                harmless += 1;
            }
        }
        assert!(harmless <= 1, "{harmless} of {} bytes", packed.len());
        decode::<Vec<u32>>(&[packed.as_slice(), b"x"].concat()).unwrap_err();
    }

    #[test]
    fn what_grows_without_end_is_refused() {
        let mut bomb = Vec::new();
        let zeros = std::io::BufReader::new(std::io::repeat(b'0').take(LARGEST + 1));
        GzEncoder::new(zeros, Compression::fast()).read_to_end(&mut bomb).unwrap();
        let problem = decode::<u32>(&bomb).unwrap_err();
        assert!(problem.contains("more than"), "{problem}");
    }
}
