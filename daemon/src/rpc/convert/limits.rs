//! How much of what agents and workers say is taken. The daemon keeps it, so whoever says more must not fill its memory.

use super::reports::{BadMessage, bad};
use reknit_proto::v1;

/// Of a job, a node or a GPU.
const LONGEST_NAME: usize = 256;
/// Of what is said in words, such as a cause, in characters.
const LONGEST_TEXT: usize = 500;
const MOST_GAPS: usize = 64;
/// Of one node.
pub(super) const MOST_GPUS: usize = 128;
/// Of one node, those about to be killed among them.
pub(super) const MOST_WORKERS: usize = 4096;

/// Names stand in logs and on terminals.
pub(super) fn named(field: &'static str, name: String) -> Result<String, BadMessage> {
    if name.is_empty() { Err(BadMessage::Missing(field)) } else { short(field, name) }
}

/// What tells one from another, and so cannot be cut. It may be empty.
pub(super) fn short(field: &'static str, text: String) -> Result<String, BadMessage> {
    if text.len() > LONGEST_NAME || text.chars().any(char::is_control) {
        Err(bad(field, format!("is longer than {LONGEST_NAME} bytes or holds control characters")))
    } else {
        Ok(text)
    }
}

pub(super) fn at_most(field: &'static str, found: usize, most: usize) -> Result<(), BadMessage> {
    if found > most {
        return Err(bad(field, format!("{found} are listed, and a node has at most {most}")));
    }
    Ok(())
}

/// What is said in words: the rest of a longer text is left out.
pub(super) fn cut(text: String) -> String {
    if text.chars().nth(LONGEST_TEXT).is_none() {
        return text;
    }
    text.chars().take(LONGEST_TEXT - 1).chain(['…']).collect()
}

pub(super) fn gaps(mut gaps: Vec<String>) -> Vec<String> {
    gaps.truncate(MOST_GAPS);
    gaps.shrink_to_fit();
    gaps.into_iter().map(cut).collect()
}

pub(super) fn verdict(verdict: v1::HealthVerdict) -> v1::HealthVerdict {
    v1::HealthVerdict {
        cause: cut(verdict.cause),
        evidence: cut(verdict.evidence),
        rejoin: cut(verdict.rejoin),
        action: cut(verdict.action),
        ..verdict
    }
}

pub(super) fn known_gpu(gpu: v1::Gpu) -> Result<v1::Gpu, BadMessage> {
    Ok(v1::Gpu {
        uuid: named("gpus.uuid", gpu.uuid)?,
        pci_bus_id: cut(gpu.pci_bus_id),
        name: cut(gpu.name),
        verdict: gpu.verdict.map(verdict),
        ..gpu
    })
}
