//! What the daemon has not acknowledged. Pure.

use std::collections::VecDeque;

/// More would mean a daemon that was away for days; the newest matter most.
pub(crate) const KEPT: usize = 4096;

/// Numbers items and keeps them until they are acknowledged.
#[derive(Debug)]
pub(crate) struct Outbox<T> {
    next: u64,
    waiting: VecDeque<(u64, T)>,
}

impl<T> Outbox<T> {
    /// Numbers from `first` on.
    pub(crate) fn new(first: u64) -> Self {
        Self { next: first, waiting: VecDeque::new() }
    }

    /// The next item's number.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// From now on numbers are at least this.
    pub(crate) fn not_below(&mut self, number: u64) {
        self.next = self.next.max(number);
    }

    /// Numbers must grow. Returns the oldest item's when there was no more room for it.
    pub(crate) fn put(&mut self, number: u64, item: T) -> Option<u64> {
        self.not_below(number + 1);
        let full = self.waiting.len() == KEPT;
        let dropped = if full { self.waiting.pop_front() } else { None };
        self.waiting.push_back((number, item));
        dropped.map(|(number, _)| number)
    }

    /// False when it was acknowledged before.
    pub(crate) fn acknowledge(&mut self, number: u64) -> bool {
        match self.waiting.binary_search_by_key(&number, |(waiting, _)| *waiting) {
            Ok(place) => self.waiting.remove(place).is_some(),
            Err(_) => false,
        }
    }

    /// Oldest first.
    pub(crate) fn waiting(&self) -> impl ExactSizeIterator<Item = &(u64, T)> {
        self.waiting.iter()
    }
}
