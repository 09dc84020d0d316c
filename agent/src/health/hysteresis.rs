//! How much of a signal must be seen before it is believed, and before it counts as gone.

use crate::clock::Millis;
use crate::policy::When;
use std::collections::VecDeque;

/// One rule's memory of its signal.
#[derive(Debug, Default)]
pub(super) struct Watch {
    active: bool,
    /// Of the hits in a row that go on: how many, and the first.
    row: u32,
    first: Option<Millis>,
    clean: u32,
    /// The hits that still count for `When::Hits`, and one of each bad window for `When::Windows`.
    hits: VecDeque<Millis>,
}

impl Watch {
    /// A rule that held when the agent last ran holds until it is seen not to.
    pub(super) fn held() -> Self {
        Self { active: true, ..Self::default() }
    }

    /// Takes in one look and returns whether the rule holds.
    pub(super) fn see(&mut self, now: Millis, hit: bool, when: When, clear: u32) -> bool {
        if hit {
            self.row = self.row.saturating_add(1);
            self.first.get_or_insert(now);
            self.clean = 0;
        } else {
            self.row = 0;
            self.first = None;
            self.clean = self.clean.saturating_add(1);
        }
        // What made it hold is forgotten when it is gone; hits that have not made it hold yet still count.
        if self.active && self.clean >= clear && matches!(when, When::Hits(_)) {
            self.hits.clear();
        }
        let enough = match when {
            When::Polls(polls) => self.row >= polls,
            When::Lasting(span) => self.first.is_some_and(|first| now.since(first) >= span.0),
            When::Hits(hits) => {
                if hit {
                    self.hits.push_back(now);
                }
                self.keep(now, hits.within.0, hits.count);
                self.hits.len() >= hits.count as usize
            }
            When::Windows(windows) => {
                let length = windows.length.0;
                let new = self.hits.back().is_none_or(|last| now.since(*last) >= length);
                if hit && new {
                    self.hits.push_back(now);
                }
                self.keep(now, length.saturating_mul(windows.of), windows.of);
                self.hits.len() >= windows.bad as usize
            }
        };
        self.active = enough || (self.active && self.clean < clear);
        self.active
    }

    fn keep(&mut self, now: Millis, within: std::time::Duration, most: u32) {
        while self.hits.len() > most as usize
            || self.hits.front().is_some_and(|first| now.since(*first) > within)
        {
            self.hits.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Hits, Span, Windows};
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    /// Feeds one look a second and returns the seconds at which the rule held.
    fn held(when: When, clear: u32, looks: &str) -> Vec<usize> {
        let mut watch = Watch::default();
        let mut held = Vec::new();
        for (second, look) in looks.bytes().enumerate() {
            let now = Millis(1000 * second as u64);
            if watch.see(now, look == b'x', when, clear) {
                held.push(second);
            }
        }
        held
    }

    #[test]
    fn so_many_reads_in_a_row() {
        assert_eq!(held(When::Polls(3), 1, "xx.xxxx.x"), [5, 6]);
        assert_eq!(held(When::Polls(1), 3, "x..x...."), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn for_so_long_without_a_clean_read() {
        let when = When::Lasting(Span(3 * SECOND));
        assert_eq!(held(when, 1, "xxx.xxxxx."), [7, 8]);
    }

    #[test]
    fn so_often_within_a_time() {
        let when = When::Hits(Hits { count: 3, within: Span(5 * SECOND) });
        assert_eq!(held(when, 2, "x..x..x.x.x......."), [8, 9, 10, 11]);
    }

    #[test]
    fn in_so_many_windows() {
        let when = When::Windows(Windows { bad: 2, of: 3, length: Span(2 * SECOND) });
        // Two hits in one window count once.
        assert_eq!(held(when, 1, "xx......xxx....."), [10, 11, 12, 13, 14]);
    }
}
