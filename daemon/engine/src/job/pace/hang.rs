//! Who holds the others up: whoever is waited for, waits for nobody, and does not move.

use reknit_layout::WorkerKey;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What is known of a member at this moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Member<'a> {
    /// Whose contribution the operation in hand misses; empty unless the member said so lately.
    pub(crate) waiting_for: &'a [WorkerKey],
    /// How long it had waited when it said so.
    pub(crate) waited: Duration,
    /// How long nothing of it has shown that it moves. `None`: it cannot report, and is not judged.
    pub(crate) still: Option<Duration>,
}

/// What a wait and a stillness must last for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// A shorter wait is part of any step.
    pub(crate) stall: Duration,
    /// A longer one is a hang.
    pub(crate) hang: Duration,
    /// A member that moves says so within this.
    pub(crate) silence: Duration,
}

/// Why a member is accused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Evidence {
    /// Who waits for it, for itself or through others; never empty.
    pub(crate) waiters: BTreeSet<WorkerKey>,
    /// The one of them that has waited longest, and how long.
    pub(crate) longest: (WorkerKey, Duration),
}

/// The members that hold the others up.
///
/// From everyone who has waited for longer than a hang, the waits are followed to those who wait for nobody: A waits for
/// B and B for C, so it is C. It is accused if it has not moved for as long; one that moves is only slow. A circle
/// accuses nobody, and neither do few who accuse many: it is then the few, or what lies between, that ails.
pub(crate) fn accused(
    members: &BTreeMap<&WorkerKey, Member<'_>>,
    limits: Limits,
) -> BTreeMap<WorkerKey, Evidence> {
    let waits = |member: &Member<'_>| member.waited >= limits.stall && !member.waiting_for.is_empty();
    let mut waiters_of: BTreeMap<&WorkerKey, Vec<&WorkerKey>> = BTreeMap::new();
    for (key, member) in members.iter().filter(|(_, member)| waits(member)) {
        for target in member.waiting_for {
            waiters_of.entry(target).or_default().push(key);
        }
    }
    let patient = members.values().filter(|member| waits(member) && member.waited >= limits.hang).count();
    let motionless = |member: &Member<'_>| {
        let limit = limits.hang.max(limits.silence);
        member.still.is_some_and(|still| still >= limit)
    };
    let roots = waiters_of.keys().filter_map(|key| {
        let member = members.get(*key)?;
        (!waits(member) && motionless(member)).then_some(*key)
    });
    let mut accused = BTreeMap::new();
    for root in roots {
        let waiters = everyone_behind(root, &waiters_of);
        let longest = waiters.iter().max_by_key(|key| members[*key].waited);
        let longest = longest.map(|key| ((*key).clone(), members[*key].waited));
        if let Some(longest) = longest.filter(|(_, waited)| *waited >= limits.hang) {
            let waiters = waiters.into_iter().cloned().collect();
            accused.insert(root.clone(), Evidence { waiters, longest });
        }
    }
    if accused.len() > patient { BTreeMap::new() } else { accused }
}

/// Who waits for `root`, for itself or through others.
fn everyone_behind<'a>(
    root: &'a WorkerKey,
    waiters_of: &BTreeMap<&'a WorkerKey, Vec<&'a WorkerKey>>,
) -> BTreeSet<&'a WorkerKey> {
    let mut found = BTreeSet::new();
    let mut next = vec![root];
    while let Some(key) = next.pop() {
        for &waiter in waiters_of.get(key).into_iter().flatten() {
            if waiter != root && found.insert(waiter) {
                next.push(waiter);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use reknit_layout::{GpuId, Incarnation};

    const LIMITS: Limits = Limits {
        stall: Duration::from_millis(250),
        hang: Duration::from_millis(500),
        silence: Duration::from_millis(600),
    };

    fn key(name: char) -> WorkerKey {
        WorkerKey { gpu: GpuId(name.to_string()), incarnation: Incarnation(1) }
    }

    /// `name waits for whom, since how long, still for how long`; times in ms, 9999: no session.
    fn who(rows: &[(char, &str, u64, u64)]) -> String {
        let keys: Vec<_> = rows.iter().map(|row| key(row.0)).collect();
        let targets: Vec<Vec<_>> = rows.iter().map(|row| row.1.chars().map(key).collect()).collect();
        let members = rows.iter().enumerate().map(|(at, row)| {
            let still = (row.3 != 9999).then(|| Duration::from_millis(row.3));
            let waited = Duration::from_millis(row.2);
            (&keys[at], Member { waiting_for: &targets[at], waited, still })
        });
        let accused = accused(&members.collect(), LIMITS);
        let parts = accused.iter().map(|(root, evidence)| {
            let names: String = evidence.waiters.iter().map(|waiter| waiter.gpu.0.as_str()).collect();
            format!("{}<{names}", root.gpu.0)
        });
        parts.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn who_is_accused() {
        type Row = (char, &'static str, u64, u64);
        let cases: [(&str, &[Row], &str); 16] = [
            ("all wait for one", &[('a', "d", 510, 510), ('b', "d", 505, 505), ('d', "", 0, 610)], "d<ab"),
            ("a chain", &[('a', "b", 600, 600), ('b', "c", 550, 550), ('c', "", 0, 700)], "c<ab"),
            (
                "a long chain",
                &[('a', "b", 900, 900), ('b', "c", 800, 800), ('c', "d", 700, 700), ('d', "", 0, 900)],
                "d<abc",
            ),
            (
                "others in between wait too",
                &[('a', "bc", 600, 600), ('b', "ac", 600, 600), ('c', "", 0, 700)],
                "c<ab",
            ),
            ("a circle", &[('a', "b", 600, 600), ('b', "a", 600, 600)], ""),
            (
                "a circle that waits for one outside",
                &[('a', "b", 600, 600), ('b', "ac", 600, 600), ('c', "", 0, 650)],
                "c<ab",
            ),
            ("everyone silent", &[('a', "", 0, 9000), ('b', "", 0, 9000), ('c', "", 0, 9000)], ""),
            ("slow, but it moves", &[('a', "c", 900, 900), ('b', "c", 900, 900), ('c', "", 0, 300)], ""),
            (
                "a pause that is over in time",
                &[('a', "c", 400, 400), ('b', "c", 400, 400), ('c', "", 0, 610)],
                "",
            ),
            (
                "still, and the wait is short",
                &[('a', "c", 100, 100), ('b', "c", 100, 100), ('c', "", 0, 5000)],
                "",
            ),
            (
                "a short wait does not lead on",
                &[('a', "b", 600, 600), ('b', "c", 20, 700), ('c', "", 0, 9000)],
                "b<a",
            ),
            ("it has no session", &[('a', "c", 600, 600), ('b', "c", 600, 600), ('c', "", 0, 9999)], ""),
            (
                "two of five",
                &[
                    ('a', "de", 600, 600),
                    ('b', "d", 600, 600),
                    ('c', "e", 600, 600),
                    ('d', "", 0, 700),
                    ('e', "", 0, 700),
                ],
                "d<ab e<ac",
            ),
            ("one accuses two", &[('a', "bc", 600, 600), ('b', "", 0, 700), ('c', "", 0, 700)], ""),
            ("one of two", &[('a', "b", 600, 600), ('b', "", 0, 700)], "b<a"),
            ("waits for a stranger", &[('a', "x", 600, 600), ('b', "x", 600, 600)], ""),
        ];
        for (name, rows, expected) in cases {
            assert_eq!(who(rows), expected, "{name}");
        }
    }
}
