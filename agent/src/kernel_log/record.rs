//! The kernel log's record format, as /dev/kmsg gives it: `priority,sequence,microseconds,flags;text`, and
//! then lines that begin with a space, which say more. Pure.

/// No record is longer; the rest of a line is cut off.
pub(super) const TEXT_LIMIT: usize = 8 << 10;

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) sequence: Option<u64>,
    /// Microseconds since the boot.
    pub(super) at_us: Option<u64>,
    pub(super) text: String,
}

/// Reads a record or its first line. A line in another format, such as of `dmesg`, is taken as a whole.
pub(super) fn parse(raw: &[u8]) -> Record {
    let line = raw.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(&line[..line.len().min(TEXT_LIMIT)]);
    let header = line.split_once(';').and_then(|(header, text)| {
        let mut numbers = header.split(',');
        let _priority: u64 = numbers.next()?.parse().ok()?;
        let sequence = numbers.next()?.parse().ok()?;
        let at_us = numbers.next()?.parse().ok()?;
        Some(Record { sequence: Some(sequence), at_us: Some(at_us), text: text.to_owned() })
    });
    header.unwrap_or_else(|| Record { sequence: None, at_us: None, text: line.into_owned() })
}

/// Is this a line that the NVIDIA driver writes when something fails? Continuation lines are none.
pub(super) fn matters(record: &Record) -> bool {
    !record.text.starts_with(' ') && (record.text.contains("NVRM: Xid") || record.text.contains("SXid"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_its_header_and_its_first_line() {
        let raw = b"4,1234,5678901,-;NVRM: Xid (PCI:0000:3b:00): 79, a;b\n SUBSYSTEM=pci\n DEVICE=+pci\n";
        let text = "NVRM: Xid (PCI:0000:3b:00): 79, a;b".to_owned();
        let record = parse(raw);
        assert_eq!(record, Record { sequence: Some(1234), at_us: Some(5_678_901), text });
        assert!(matters(&record));
        assert!(!matters(&parse(b" NVRM: Xid continued")));
        assert!(!matters(&parse(b"6,1,2,-;usb 1-1: new device")));
        assert!(matters(&parse(b"3,9,9,-,caller=T1;nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 1, x")));
    }

    #[test]
    fn other_formats_are_whole_lines() {
        for text in ["[ 12.5] NVRM: Xid (PCI:0000:3b:00): 79, a", "a;b", "4,x,3,-;NVRM: Xid", ",,,;", "", ";"]
        {
            let record = parse(text.as_bytes());
            assert_eq!(record, Record { sequence: None, at_us: None, text: text.to_owned() });
        }
        let garbage = parse(b"4,1,2,-;\xff\xfe\0 NVRM: Xid \x80");
        assert!(matters(&garbage), "{garbage:?}");
        let long = [b'x'; 3 * TEXT_LIMIT];
        assert_eq!(parse(&long).text.len(), TEXT_LIMIT);
    }
}
