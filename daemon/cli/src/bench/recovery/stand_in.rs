//! What takes the processor time of a worker that is gone for good.

use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long it sleeps when it has taken what is its due.
const REST: Duration = Duration::from_millis(1);
/// Turns of the loop between two looks at the clock: some tens of microseconds.
const TURNS: u32 = 2_000;

/// Threads that together compute for so many seconds of processor time in each second, and no more, until this is dropped.
///
/// A GPU that is lost takes its arithmetic with it. Here the workers share the machine's cores, and those that are left
/// would get the lost one's share: training would not become slower at all.
#[derive(Debug)]
pub(super) struct StandIn {
    started: Instant,
    work: Arc<Work>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Work {
    stop: AtomicBool,
    /// Of all threads.
    taken_ns: AtomicU64,
}

impl StandIn {
    /// `rate`: seconds of processor time a second.
    pub(super) fn start(rate: f64) -> std::io::Result<Self> {
        let count = rate.ceil().max(1.0);
        let mut stand_in = Self { started: Instant::now(), work: Arc::default(), threads: Vec::new() };
        for _ in 0..count as usize {
            let work = Arc::clone(&stand_in.work);
            let computes = move || work.compute(rate / count);
            let thread = std::thread::Builder::new().name("stand-in".to_owned()).spawn(computes)?;
            stand_in.threads.push(thread);
        }
        Ok(stand_in)
    }

    /// What it has really taken so far, in seconds of processor time a second.
    pub(super) fn rate(&self) -> f64 {
        self.work.taken_ns.load(Ordering::Relaxed) as f64 / self.started.elapsed().as_nanos() as f64
    }
}

impl Work {
    fn compute(&self, rate: f64) {
        let started = Instant::now();
        let mut taken = Duration::ZERO;
        while !self.stop.load(Ordering::Relaxed) {
            if taken >= started.elapsed().mul_f64(rate) {
                std::thread::sleep(REST);
            } else {
                (0..TURNS).for_each(|_| std::hint::spin_loop());
            }
            let now = processor_time();
            self.taken_ns.fetch_add((now - taken).as_nanos() as u64, Ordering::Relaxed);
            taken = now;
        }
    }
}

/// Of this thread, since it began.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.work.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than its due it never takes, and less only where others have the cores.
    #[test]
    fn it_takes_its_due_and_no_more() {
        for rate in [0.2, 1.2] {
            let stand_in = StandIn::start(rate).unwrap();
            std::thread::sleep(Duration::from_millis(500));
            let taken = stand_in.rate();
            assert!(taken <= rate * 1.02 + 0.01, "{taken} of {rate}");
            assert!(taken >= rate * 0.1, "{taken} of {rate}");
        }
    }
}
