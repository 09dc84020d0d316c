//! What the NVIDIA driver writes into the kernel log when a GPU fails. Pure.

use std::fmt;

/// Where a GPU is on the PCI bus. The driver leaves the function out, which is always 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BusId {
    pub(crate) domain: u32,
    pub(crate) bus: u8,
    pub(crate) device: u8,
}

/// An XID error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct XidLine {
    pub(crate) bus: BusId,
    pub(crate) xid: u64,
    /// What follows the number, such as `pid=1234, name=python, GPU has fallen off the bus.`
    pub(crate) rest: String,
}

impl BusId {
    /// Reads `domain:bus:device` or `domain:bus:device.function`, hexadecimal, however many zeros it is
    /// written with: `0000:3b:00` and `00000000:3B:00.0` are one place.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() {
            return None;
        }
        let device = match device.split_once('.') {
            Some((device, function)) => {
                hexadecimal(function)?;
                device
            }
            None => device,
        };
        Some(Self {
            domain: hexadecimal(domain)?,
            bus: u8::try_from(hexadecimal(bus)?).ok()?,
            device: u8::try_from(hexadecimal(device)?).ok()?,
        })
    }
}

impl fmt::Display for BusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}", self.domain, self.bus, self.device)
    }
}

/// Reads a line such as `NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off
/// the bus.`, wherever in `text` it begins.
pub(crate) fn parse(text: &str) -> Option<XidLine> {
    let (_, line) = text.split_once("NVRM: Xid (")?;
    let (place, line) = line.split_once("):")?;
    // A GPU instance may follow: `PCI:0000:3b:00 GPU-I:01`.
    let place = place.split_whitespace().next()?;
    let bus = BusId::parse(place.strip_prefix("PCI:").unwrap_or(place))?;
    let line = line.trim_start();
    let end = line.find(|c: char| !c.is_ascii_digit()).unwrap_or(line.len());
    let (number, rest) = line.split_at(end);
    let rest = rest.strip_prefix(',').unwrap_or(rest).trim();
    Some(XidLine { bus, xid: number.parse().ok()?, rest: rest.to_owned() })
}

/// Unlike the standard library's, takes no sign.
fn hexadecimal(text: &str) -> Option<u32> {
    if text.starts_with('+') { None } else { u32::from_str_radix(text, 16).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BUS: BusId = BusId { domain: 0, bus: 0x3b, device: 0 };

    #[test]
    fn every_form_of_the_line_is_read() {
        let table = [
            (
                "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
                79,
                "pid=1234, name=python, GPU has fallen off the bus.",
            ),
            (
                "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
                79,
                "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            ),
            (
                "NVRM: Xid (PCI:0000:3b:00 GPU-I:01): 94, pid=7, name=python, Contained: SM (0x1).",
                94,
                "pid=7, name=python, Contained: SM (0x1).",
            ),
            ("NVRM: Xid (0000:3b:00): 31, Ch 0000001c", 31, "Ch 0000001c"),
            ("NVRM: Xid (PCI:0000:3b:00.0): 48,DBE at 0x1", 48, "DBE at 0x1"),
            ("NVRM: Xid (PCI:00000000:3B:00.0): 48", 48, ""),
            ("[ 1234.567890] NVRM: Xid (PCI:0000:3b:00): 63, Row remapper", 63, "Row remapper"),
            (
                "NVRM: Xid (PCI:0000:3b:00): 145, RLW_CTRL Nonfatal XC0 i0 Link 04 (0x00000004)",
                145,
                "RLW_CTRL Nonfatal XC0 i0 Link 04 (0x00000004)",
            ),
            ("NVRM: Xid (PCI:0000:3b:00): 154 GPU recovery action", 154, "GPU recovery action"),
        ];
        for (text, xid, rest) in table {
            let read = parse(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(read, XidLine { bus: BUS, xid, rest: rest.to_owned() }, "{text}");
        }
        let far = parse("NVRM: Xid (PCI:0009:01:1f): 79, x").unwrap();
        assert_eq!(far.bus, BusId { domain: 9, bus: 1, device: 0x1f });
        assert_eq!(far.bus.to_string(), "0009:01:1f");
    }

    #[test]
    fn other_lines_are_none() {
        for text in [
            "",
            "NVRM: Xid",
            "NVRM: Xid (PCI:0000:3b:00)",
            "NVRM: Xid (PCI:0000:3b:00): ",
            "NVRM: Xid (PCI:0000:3b:00): GPU",
            "NVRM: Xid (PCI:0000:3b): 79, x",
            "NVRM: Xid (PCI:0000:3b:00:1): 79, x",
            "NVRM: Xid (PCI:0000:zz:00): 79, x",
            "NVRM: Xid (PCI:0000:1ff:00): 79, x",
            "NVRM: Xid (PCI:0000:+b:00): 79, x",
            "NVRM: Xid (PCI:0000:3b:00): 99999999999999999999999, x",
            "NVRM: Xid (): 79, x",
            "NVRM: GPU at PCI:0000:3b:00: GPU-1234",
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_is_too_much(text in ".*", tail in ".*") {
            let _read = parse(&text);
            let _read = BusId::parse(&text);
            let _read = parse(&format!("NVRM: Xid ({text}): {tail}"));
            let _read = parse(&format!("NVRM: Xid (PCI:0000:3b:00{text}): 79{tail}"));
        }

        #[test]
        fn what_is_written_is_read(domain: u32, bus: u8, device in 0_u8..32, xid: u64, rest in "[a-z =.]*") {
            let bus = BusId { domain, bus, device };
            let read = parse(&format!("4,1,2,-;NVRM: Xid (PCI:{bus}): {xid}, {rest}"));
            prop_assert_eq!(read, Some(XidLine { bus, xid, rest: rest.trim().to_owned() }));
        }
    }
}
