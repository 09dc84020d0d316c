//! What had come before a deadline is heard before it passes.

use crate::Time;
use std::time::Duration;

/// Whoever looks at a deadline so long after it stood still, or was busy.
const LATE: Duration = Duration::from_millis(10);
/// What came meanwhile gets this long to be read.
const SETTLES: Duration = Duration::from_millis(10);

/// Puts off a deadline that passed while its shell did not run: what had arrived by then lies in sockets and queues, and
/// when it is read tells only that it came before now.
#[derive(Debug, Clone, Copy, Default)]
pub struct Hold {
    until: Option<Time>,
}

impl Hold {
    /// The time at which the engine hears of something that came at `came`, or of the deadline itself. `heard`: the last
    /// such time; `deadline`: the engine's next. While it is held, time stands still just before it.
    pub fn time(&mut self, now: Time, heard: Time, deadline: Option<Time>, came: Time) -> Time {
        let time = match deadline {
            Some(deadline) if self.holds(now, heard, deadline) => {
                came.min(Time(deadline.0.saturating_sub(1)))
            }
            Some(_) | None => came,
        };
        time.max(heard)
    }

    /// Whether the deadline does not pass yet. It is held once, however many inputs there are.
    fn holds(&mut self, now: Time, heard: Time, deadline: Time) -> bool {
        let missed = heard < deadline && deadline.after(LATE) < now;
        if !missed {
            self.until = None;
            return false;
        }
        now < *self.until.get_or_insert(now.after(SETTLES))
    }

    /// When to wake up for the deadline.
    pub fn wake(&self, deadline: Time) -> Time {
        self.until.map_or(deadline, |until| until.max(deadline))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000;

    fn ms(ms: u64) -> Time {
        Time(ms * MS)
    }

    #[test]
    fn a_deadline_that_is_met_passes() {
        let mut hold = Hold::default();
        let deadline = Some(ms(100));
        assert_eq!(hold.time(ms(90), ms(80), deadline, ms(90)), ms(90));
        assert_eq!(hold.time(ms(105), ms(90), deadline, ms(105)), ms(105));
        assert_eq!(hold.wake(ms(100)), ms(100));
    }

    #[test]
    fn what_came_during_a_standstill_is_heard_before_its_end() {
        let mut hold = Hold::default();
        let deadline = Some(ms(100));
        let held = Time(100 * MS - 1);
        assert_eq!(hold.time(ms(400), ms(80), deadline, ms(400)), held);
        assert_eq!(hold.wake(ms(100)), ms(410));
        assert_eq!(hold.time(ms(409), held, deadline, ms(95)), held, "never backwards");
        assert_eq!(hold.time(ms(410), held, deadline, ms(410)), ms(410), "it passes, whatever still comes");
        // The engine has heard of it: what is left undone by then is not held again.
        assert_eq!(hold.time(ms(440), ms(410), deadline, ms(440)), ms(440));
        assert_eq!(hold.wake(ms(600)), ms(600));
    }
}
