//! The threads of one worker: a loop's items are dealt out to all of them.
//!
//! Which thread takes which item is chance; what an item computes does not depend on it. So results have the same
//! bits for any number of threads as long as every item writes to places of its own.
#![allow(unsafe_code)]

use std::fmt;
use std::hint;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// How often a thread looks again before it sleeps: some tens of microseconds. The rounds of a pass follow each other
/// faster; what takes longer is an exchange with other ranks, which may need the core.
const LOOKS: u32 = 4_000;

/// The thread that asks and its helpers, which sleep in between.
pub struct Team {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// Held by the thread that asks: one round at a time.
    asking: Mutex<()>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// `state.round` for those who look without the lock.
    round: AtomicUsize,
    /// Helpers that have not finished the round.
    busy: AtomicUsize,
    begun: Condvar,
    done: Condvar,
}

#[derive(Default)]
struct State {
    round: usize,
    job: Option<Job>,
    asleep: usize,
    asker_waits: bool,
    panicked: bool,
    ended: bool,
}

/// A borrowed closure whose lifetime is hidden.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn() + Sync));

// SAFETY: the closure is `Sync`, so it may be called from any thread; `Team::run` sees to it that it lives as long as needed.
unsafe impl Send for Job {}

impl Team {
    /// A team of that many threads, the one that asks among them; 0 counts as 1.
    ///
    /// # Errors
    /// The system gives no more threads.
    pub fn new(threads: usize) -> io::Result<Arc<Self>> {
        // From here on dropping the team ends the helpers that are there.
        let mut team = Self { shared: Arc::default(), helpers: Vec::new(), asking: Mutex::new(()) };
        for number in 1..threads {
            let shared = Arc::clone(&team.shared);
            let helper = thread::Builder::new().name(format!("compute-{number}"));
            team.helpers.push(helper.spawn(move || shared.help())?);
        }
        Ok(Arc::new(team))
    }

    /// A team of the thread that asks.
    pub fn alone() -> Arc<Self> {
        Arc::new(Self { shared: Arc::default(), helpers: Vec::new(), asking: Mutex::new(()) })
    }

    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Does `job` for each item, on all threads, and returns when all are done.
    pub(crate) fn each<I>(&self, items: I, job: impl Fn(I::Item) + Sync)
    where
        I: IntoIterator<Item: Send, IntoIter: Send>,
    {
        let mut items = items.into_iter();
        if self.helpers.is_empty() {
            return items.for_each(job);
        }
        // One item needs nobody's help.
        let (Some(first), second) = (items.next(), items.next()) else { return };
        let Some(second) = second else { return job(first) };
        let items = Mutex::new([first, second].into_iter().chain(items));
        let next = || lock(&items).next();
        self.run(&|| {
            while let Some(item) = next() {
                job(item);
            }
        });
    }

    /// Every thread of the team calls `job` once; returns when all calls have.
    fn run(&self, job: &(dyn Fn() + Sync)) {
        let _asking = lock(&self.asking);
        let job: *const (dyn Fn() + Sync + '_) = job;
        // SAFETY: only the lifetime of what the closure borrows changes. The pointer is used by helpers in the round begun
        // here alone, and `Round` does not let this function end, not even by a panic, before the last of them is done.
        let job: *const (dyn Fn() + Sync + 'static) = unsafe { std::mem::transmute(job) };
        let round = Round(&self.shared);
        self.shared.begin(Job(job), self.helpers.len());
        // SAFETY: the closure is borrowed by the caller of this function.
        unsafe { (*job)() };
        drop(round);
        let panicked = std::mem::take(&mut lock(&self.shared.state).panicked);
        assert!(!panicked, "a thread of the team panicked");
    }
}

/// Ends only when no helper is busy any more.
struct Round<'a>(&'a Shared);

impl Drop for Round<'_> {
    fn drop(&mut self) {
        let shared = self.0;
        for _ in 0..LOOKS {
            if shared.busy.load(Ordering::Acquire) == 0 {
                return;
            }
            hint::spin_loop();
        }
        let mut state = lock(&shared.state);
        state.asker_waits = true;
        while shared.busy.load(Ordering::Acquire) != 0 {
            state = shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.asker_waits = false;
    }
}

impl Shared {
    fn begin(&self, job: Job, helpers: usize) {
        let mut state = lock(&self.state);
        self.busy.store(helpers, Ordering::Relaxed);
        state.job = Some(job);
        state.round = state.round.wrapping_add(1);
        self.round.store(state.round, Ordering::Release);
        if state.asleep > 0 {
            self.begun.notify_all();
        }
    }

    /// A helper's life.
    fn help(&self) {
        let mut seen = 0;
        while let Some((job, round)) = self.next_round(seen) {
            seen = round;
            // SAFETY: `Team::run` keeps the closure alive until `busy` is 0, which needs this thread's part below.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*job.0)() }));
            if result.is_err() {
                lock(&self.state).panicked = true;
            }
            if self.busy.fetch_sub(1, Ordering::AcqRel) == 1 && lock(&self.state).asker_waits {
                self.done.notify_all();
            }
        }
    }

    /// Waits for a round after the one that was seen; `None` at the team's end.
    fn next_round(&self, seen: usize) -> Option<(Job, usize)> {
        for _ in 0..LOOKS {
            if self.round.load(Ordering::Acquire) != seen {
                break;
            }
            hint::spin_loop();
        }
        let mut state = lock(&self.state);
        loop {
            if state.ended {
                return None;
            }
            if state.round != seen {
                return state.job.map(|job| (job, state.round));
            }
            state.asleep += 1;
            state = self.begun.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.asleep -= 1;
        }
    }
}

/// A panic elsewhere leaves nothing half done under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Team {
    fn drop(&mut self) {
        {
            let mut state = lock(&self.shared.state);
            state.ended = true;
            // Also for those who still look: they see a round and then the end.
            state.round = state.round.wrapping_add(1);
            self.shared.round.store(state.round, Ordering::Release);
            self.shared.begun.notify_all();
        }
        for helper in self.helpers.drain(..) {
            // A helper catches its panics.
            let _ = helper.join();
        }
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
    use std::sync::atomic::AtomicU64;

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
    fn helpers_take_part_and_sleep_in_between() {
        let team = Team::new(3).expect("threads");
        for _ in 0..3 {
            // Nobody gets on before all three are here.
            let here = std::sync::Barrier::new(3);
            team.each(0..3, |_| {
                here.wait();
            });
            let asleep = || lock(&team.shared.state).asleep;
            while asleep() < 2 {
                thread::yield_now();
            }
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
