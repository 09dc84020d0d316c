//! What /proc tells of processes.

use super::environment;
use std::fs;

/// Of /proc/PID/stat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) group: u32,
    /// Clock ticks since boot.
    pub(super) start_time: u64,
}

/// `None` if there is no such process, or only its remains.
pub(super) fn stat(pid: u32) -> Option<Stat> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse(stat: &str) -> Option<Stat> {
    // The program's name may hold anything, so fields are counted from its closing parenthesis.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    // The state is field 3, the group field 5, the start time field 22.
    let group = fields.nth(1)?.parse().ok()?;
    let start_time = fields.nth(16)?.parse().ok()?;
    Some(Stat { group, start_time })
}

/// Every process of the machine that this one may see.
pub(super) fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Whether the process, or one that started it, was started by this spawn of a worker.
pub(super) fn is_of_spawn(pid: u32, spawn: &str) -> bool {
    let mark = format!("{}={spawn}", environment::SPAWN);
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_lines() {
        let tail = "S 1 4242 4242 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 987654 1000 2";
        let stat = parse(&format!("17 (a) b) {tail}"));
        assert_eq!(stat, Some(Stat { group: 4242, start_time: 987_654 }));
        assert_eq!(parse(&format!("17 (a) {}", tail.replacen('S', "Z", 1))), None);
        assert_eq!(parse("nonsense"), None);
        let own = super::stat(std::process::id()).unwrap();
        assert!(own.start_time > 0 && own.group > 0);
    }
}
