//! The threads of one worker: a loop's items are dealt out to all of them.
//!
//! Which thread takes which item is chance; what an item computes does not depend on it. So results have the same
//! bits for any number of threads as long as every item writes to places of its own.

use rayon::{ThreadPool, ThreadPoolBuilder};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

/// The thread that asks and its helpers, which sleep in between.
pub struct Team {
    /// Without helpers there is no pool.
    helpers: Option<ThreadPool>,
}

impl Team {
    /// A team of that many threads, the one that asks among them; 0 counts as 1.
    ///
    /// # Errors
    /// The system gives no more threads.
    pub fn new(threads: usize) -> io::Result<Arc<Self>> {
        if threads <= 1 {
            return Ok(Self::alone());
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads - 1)
            .thread_name(|number| format!("compute-{}", number + 1));
        Ok(Arc::new(Self { helpers: Some(pool.build().map_err(io::Error::other)?) }))
    }

    /// A team of the thread that asks.
    pub fn alone() -> Arc<Self> {
        Arc::new(Self { helpers: None })
    }

    pub fn threads(&self) -> usize {
        self.helpers.as_ref().map_or(0, ThreadPool::current_num_threads) + 1
    }

    /// Does `job` for each item, on all threads, and returns when all are done.
    pub(crate) fn each<I>(&self, items: I, job: impl Fn(I::Item) + Sync)
    where
        I: IntoIterator<Item: Send, IntoIter: Send>,
    {
        let mut items = items.into_iter();
        let Some(helpers) = &self.helpers else { return items.for_each(job) };
        // One item needs nobody's help.
        let (Some(first), second) = (items.next(), items.next()) else { return };
        let Some(second) = second else { return job(first) };
        let items = Mutex::new([first, second].into_iter().chain(items));
        // A panic elsewhere leaves nothing half done under the lock.
        let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            while let Some(item) = next() {
                job(item);
            }
        };
        helpers.in_place_scope(|scope| {
            for _ in 0..helpers.current_num_threads() {
                scope.spawn(|_| work());
            }
            work();
        });
    }
}

impl fmt::Debug for Team {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Team({} threads)", self.threads())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn every_item_is_done_once_in_every_round() {
        for threads in [0, 1, 2, 5] {
            let team = Team::new(threads).expect("threads");
            assert_eq!(team.threads(), threads.max(1));
            let mut done = [0_u32; 37];
            for round in 0..500 {
                let len = round % done.len();
                done.fill(0);
                team.each(done[..len].iter_mut(), |item| *item += 1);
                assert!(done[..len].iter().all(|&item| item == 1));
                assert!(done[len..].iter().all(|&item| item == 0));
            }
        }
    }

    #[test]
    fn every_helper_takes_part() {
        let team = Team::new(3).expect("threads");
        for _ in 0..3 {
            // Nobody gets on before all three are here.
            let here = Barrier::new(3);
            team.each(0..3, |_| {
                here.wait();
            });
        }
    }

    #[test]
    fn a_panic_reaches_the_asker_after_everyone_is_done_and_the_team_goes_on() {
        let team = Team::new(2).expect("threads");
        for guilty in 0..8 {
            let done = AtomicU64::new(0);
            let round = AssertUnwindSafe(|| {
                team.each(0..8, |item| {
                    assert_ne!(item, guilty, "as planned");
                    done.fetch_add(1, Ordering::Relaxed);
                });
            });
            assert!(catch_unwind(round).is_err());
            assert_eq!(done.load(Ordering::Relaxed), 7);
        }
        let mut items = [0; 9];
        team.each(items.iter_mut().enumerate(), |(number, item)| *item = number);
        assert_eq!(items, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
