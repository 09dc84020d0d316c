//! Events: what NVML's event sets deliver, and the line that the kernel logs beside.

use super::gpu::BusNumbers;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

/// An event of the GPU at `gpu` in the file's list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    pub sequence: u64,
    pub gpu: usize,
    pub kind: EventKind,
    /// The XID, or the recovery action's number; 0 for the other kinds.
    pub data: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    Xid,
    RecoveryAction,
    SingleBitEcc,
    DoubleBitEcc,
}

impl EventKind {
    /// The header's `nvmlEventType` bit.
    pub(crate) fn bit(self) -> u64 {
        match self {
            Self::SingleBitEcc => 0x1,
            Self::DoubleBitEcc => 0x2,
            Self::Xid => 0x8,
            Self::RecoveryAction => 0x8000,
        }
    }
}

/// The bits of the events that this driver can raise.
pub(crate) const EVENT_BITS: u64 = 0x1 | 0x2 | 0x8 | 0x8000;

/// XIDs whose log line tells of an NVLink and of no process.
const NVLINK_XIDS: std::ops::RangeInclusive<u64> = 144..=150;

/// What NVIDIA's kernel driver logs for an XID. `message` is what follows the number, and for XIDs that
/// name a process what follows that name.
pub(super) fn kernel_line(bus: BusNumbers, xid: u64, message: Option<&str>) -> String {
    let BusNumbers { domain, bus, device } = bus;
    let head = format!("NVRM: Xid (PCI:{domain:04x}:{bus:02x}:{device:02x}): {xid}");
    let message = message.or((xid == 79).then_some("GPU has fallen off the bus."));
    let rest = message.map(|text| format!(", {text}")).unwrap_or_default();
    if NVLINK_XIDS.contains(&xid) {
        format!("{head}{rest}")
    } else {
        format!("{head}, pid='<unknown>', name=<unknown>{rest}")
    }
}

/// Appends `text` to the file at `path` as `/dev/kmsg` would give it: `level,sequence,microseconds,-;text`.
pub(super) fn append_record(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::options().append(true).create(true).open(path)?;
    let sequence = fs::read(path)?.iter().filter(|byte| **byte == b'\n').count();
    // As the kernel does: what is not printable, and the backslash, are written as \xNN.
    let plain = |byte: u8| (b' '..=b'~').contains(&byte) && byte != b'\\';
    let escaped = text.bytes().map(|byte| match plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("\\x{byte:02x}"),
    });
    let line = format!("4,{sequence},{},-;{}\n", microseconds_up(), escaped.collect::<String>());
    // In one write: a reader of the log never sees a part.
    file.write_all(line.as_bytes())
}

/// Time since the machine started, which the kernel's records count from.
fn microseconds_up() -> u64 {
    let up = Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default();
    u64::try_from(up.as_micros()).unwrap_or(u64::MAX)
}
