//! What operators have asked and what is not answered yet. Pure.

use crate::clock::Millis;
use reknit_layout::GpuId;
use std::collections::BTreeSet;
use std::time::Duration;

/// Shorter than the operator's own patience, so that the agent says what holds it up.
const LIMIT: Duration = Duration::from_secs(8);

/// What a request waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Awaited {
    /// The probe's exit.
    Quiesce { seconds: u32 },
    /// The limit is set.
    PowerLimit { gpu: GpuId, asked_mw: Option<u32>, seconds: u32 },
    /// A full reading of each of these.
    Readings { missing: BTreeSet<GpuId> },
}

#[derive(Debug)]
struct Request {
    number: u64,
    deadline: Millis,
    awaited: Awaited,
}

/// Each request ends in exactly one answer.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    waiting: Vec<Request>,
}

/// A request's number, and what was done or why not.
pub(crate) type Answer = (u64, Result<String, String>);

impl Requests {
    pub(crate) fn wait(&mut self, now: Millis, number: u64, awaited: Awaited) {
        self.waiting.push(Request { number, deadline: now.after(LIMIT), awaited });
    }

    /// The session has ended: whoever asked has been told so.
    pub(crate) fn forget(&mut self) {
        self.waiting.clear();
    }

    pub(crate) fn next(&self) -> Option<Millis> {
        self.waiting.iter().map(|request| request.deadline).min()
    }

    pub(crate) fn quiesced(&mut self) -> Vec<Answer> {
        self.take(|awaited| match awaited {
            Awaited::Quiesce { seconds } => Some(Ok(format!(
                "every handle of the driver is closed for {}, or until `reknit node resume`",
                span(*seconds)
            ))),
            Awaited::PowerLimit { .. } | Awaited::Readings { .. } => None,
        })
    }

    /// A quiesce ended before it was confirmed.
    pub(crate) fn resumed(&mut self) -> Vec<Answer> {
        self.take(|awaited| match awaited {
            Awaited::Quiesce { .. } => Some(Err("the quiesce was ended before it was confirmed".to_owned())),
            Awaited::PowerLimit { .. } | Awaited::Readings { .. } => None,
        })
    }

    /// The limit in force now, in milliwatts, or why it was not set.
    pub(crate) fn power_limit(&mut self, of: &GpuId, set: &Result<u32, String>) -> Vec<Answer> {
        self.take(|awaited| match awaited {
            Awaited::PowerLimit { gpu, asked_mw, seconds } if gpu == of => Some(match set {
                Ok(mw) => Ok(limit_set(gpu, *mw, *asked_mw, *seconds)),
                Err(why) => Err(format!("the power limit of {gpu} was not set: {why}")),
            }),
            Awaited::PowerLimit { .. } | Awaited::Quiesce { .. } | Awaited::Readings { .. } => None,
        })
    }

    /// A GPU was read, whatever came of it.
    pub(crate) fn read(&mut self, gpu: &GpuId) -> Vec<Answer> {
        self.take(|awaited| match awaited {
            Awaited::Readings { missing } => {
                missing.remove(gpu);
                missing.is_empty().then(|| Ok("every GPU was read".to_owned()))
            }
            Awaited::Quiesce { .. } | Awaited::PowerLimit { .. } => None,
        })
    }

    /// Those that took too long.
    pub(crate) fn late(&mut self, now: Millis) -> Vec<Answer> {
        let (late, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.waiting).into_iter().partition(|request| request.deadline <= now);
        self.waiting = waiting;
        let answers = late.into_iter().map(|request| {
            let problem = match request.awaited {
                Awaited::Quiesce { .. } => {
                    "the probe hangs in the driver and still holds the GPUs; it cannot be killed before its call \
                     returns: look at the kernel log"
                        .to_owned()
                }
                Awaited::PowerLimit { gpu, .. } => {
                    format!("the driver does not answer for {gpu}; the limit is set once it does")
                }
                Awaited::Readings { missing } => {
                    let names: Vec<_> = missing.iter().map(|gpu| gpu.0.as_str()).collect();
                    format!("no reading came of {}", names.join(", "))
                }
            };
            (request.number, Err(problem))
        });
        answers.collect()
    }

    fn take(
        &mut self,
        mut answer: impl FnMut(&mut Awaited) -> Option<Result<String, String>>,
    ) -> Vec<Answer> {
        let mut answers = Vec::new();
        self.waiting.retain_mut(|request| match answer(&mut request.awaited) {
            Some(result) => {
                answers.push((request.number, result));
                false
            }
            None => true,
        });
        answers
    }
}

fn limit_set(gpu: &GpuId, mw: u32, asked_mw: Option<u32>, seconds: u32) -> String {
    let watts = f64::from(mw) / 1_000.0;
    match asked_mw {
        None => format!("the power limit of {gpu} is its default again, {watts} W"),
        Some(asked) if asked == mw => format!("the power limit of {gpu} is {watts} W for {}", span(seconds)),
        Some(asked) => format!(
            "the power limit of {gpu} is {watts} W for {}: the GPU does not allow {} W",
            span(seconds),
            f64::from(asked) / 1_000.0
        ),
    }
}

fn span(seconds: u32) -> String {
    if seconds.is_multiple_of(60) { format!("{} min", seconds / 60) } else { format!("{seconds} s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_is_answered_once() {
        let gpus = ["GPU-0", "GPU-1"].map(GpuId::from);
        let mut requests = Requests::default();
        let start = Millis(1_000);
        requests.wait(start, 1, Awaited::Quiesce { seconds: 600 });
        requests.wait(start, 2, Awaited::Readings { missing: gpus.iter().cloned().collect() });
        let asked_mw = Some(900_000);
        requests.wait(start, 3, Awaited::PowerLimit { gpu: gpus[0].clone(), asked_mw, seconds: 90 });
        assert_eq!(requests.read(&gpus[0]), []);
        assert_eq!(requests.read(&gpus[1])[0].0, 2);
        assert_eq!(requests.power_limit(&gpus[1], &Ok(1)), []);
        let (number, words) = requests.power_limit(&gpus[0], &Ok(700_000)).remove(0);
        assert_eq!(number, 3);
        assert_eq!(
            words.unwrap(),
            "the power limit of GPU-0 is 700 W for 90 s: the GPU does not allow 900 W"
        );
        assert_eq!(requests.late(Millis(8_999)), []);
        let (number, words) = requests.late(Millis(9_000)).remove(0);
        assert_eq!(number, 1);
        assert!(words.unwrap_err().contains("still holds the GPUs"));
        assert_eq!((requests.quiesced(), requests.next()), (vec![], None));
    }
}
