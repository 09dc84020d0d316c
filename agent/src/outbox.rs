//! Transitions that the daemon has not acknowledged. Pure.

use crate::health::Transition;
use std::collections::VecDeque;

/// More would mean a daemon that was away for days; the newest matter most.
pub(crate) const KEPT: usize = 4096;

/// Numbers transitions and keeps them until they are acknowledged.
#[derive(Debug)]
pub(crate) struct Outbox {
    next: u64,
    waiting: VecDeque<(u64, Transition)>,
}

impl Outbox {
    /// Numbers from `first` on.
    pub(crate) fn new(first: u64) -> Self {
        Self { next: first, waiting: VecDeque::new() }
    }

    pub(crate) fn push(&mut self, transition: Transition) -> u64 {
        let sequence = self.next;
        self.next += 1;
        if self.waiting.len() == KEPT {
            self.waiting.pop_front();
        }
        self.waiting.push_back((sequence, transition));
        sequence
    }

    pub(crate) fn acknowledge(&mut self, sequence: u64) {
        self.waiting.retain(|(waiting, _)| *waiting != sequence);
    }

    /// Oldest first.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = &(u64, Transition)> {
        self.waiting.iter()
    }
}
