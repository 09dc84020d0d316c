//! Power limits that an operator set for a time. Pure.

use crate::clock::Millis;
use reknit_layout::GpuId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// After the driver refused.
const RETRY: Duration = Duration::from_secs(10);
/// A default that the driver refuses so often is given up: a GPU that was reset meanwhile has it anyway.
const REFUSALS: u32 = 30;

/// A limit that holds until its time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lease {
    pub(crate) limit_mw: u32,
    pub(crate) until: Millis,
}

/// What outlives the agent: by GPU its lease, or `None` where the GPU's default is still to be restored.
pub(crate) type Kept = BTreeMap<GpuId, Option<Lease>>;

/// Every lease, and how far each has come.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    gpus: BTreeMap<GpuId, Wanted>,
}

#[derive(Debug)]
struct Wanted {
    lease: Option<Lease>,
    state: State,
    /// Orders that the probe has not answered. Answers come in order: only the last one counts.
    asked: u32,
    /// In a row.
    refusals: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    ToSet,
    Asked,
    /// To this many milliwatts, as the driver said.
    Set {
        mw: u32,
    },
    Failed {
        again: Millis,
    },
}

impl Wanted {
    fn new(lease: Option<Lease>) -> Self {
        Self { lease, state: State::ToSet, asked: 0, refusals: 0 }
    }
}

impl Leases {
    pub(crate) fn restored(kept: Kept) -> Self {
        let gpus = kept.into_iter().map(|(gpu, lease)| (gpu, Wanted::new(lease)));
        Self { gpus: gpus.collect() }
    }

    pub(crate) fn kept(&self) -> Kept {
        self.gpus.iter().map(|(gpu, wanted)| (gpu.clone(), wanted.lease)).collect()
    }

    /// `None`: the GPU's default shall hold.
    pub(crate) fn want(&mut self, gpu: &GpuId, lease: Option<Lease>) {
        let wanted = self.gpus.entry(gpu.clone()).or_insert_with(|| Wanted::new(None));
        wanted.lease = lease;
        wanted.state = State::ToSet;
    }

    /// What to set now: by GPU the limit, or `None` for its default. Each is returned once.
    pub(crate) fn due(&mut self, now: Millis) -> Vec<(GpuId, Option<u32>)> {
        let mut due = Vec::new();
        for (gpu, wanted) in &mut self.gpus {
            if wanted.lease.is_some_and(|lease| lease.until <= now) {
                wanted.lease = None;
                wanted.state = State::ToSet;
            }
            match wanted.state {
                State::Failed { again } if again <= now => {}
                State::ToSet => {}
                State::Asked | State::Set { .. } | State::Failed { .. } => continue,
            }
            wanted.state = State::Asked;
            wanted.asked += 1;
            due.push((gpu.clone(), wanted.lease.map(|lease| lease.limit_mw)));
        }
        due
    }

    /// When `due` has something next, if nothing else happens.
    pub(crate) fn next(&self) -> Option<Millis> {
        let next = self.gpus.values().filter_map(|wanted| {
            let until = wanted.lease.map(|lease| lease.until);
            match wanted.state {
                State::ToSet => Some(Millis(0)),
                State::Failed { again } => Some(until.map_or(again, |until| until.min(again))),
                State::Asked | State::Set { .. } => until,
            }
        });
        next.min()
    }

    /// The probe's answer: the limit that holds, or none that was set. True when it answers the newest order for this
    /// GPU.
    pub(crate) fn answered(&mut self, now: Millis, gpu: &GpuId, set: Option<u32>) -> bool {
        let Some(wanted) = self.gpus.get_mut(gpu) else {
            return false;
        };
        wanted.asked = wanted.asked.saturating_sub(1);
        if wanted.asked > 0 || wanted.state != State::Asked {
            return false;
        }
        wanted.refusals = if set.is_some() { 0 } else { wanted.refusals + 1 };
        match (set, wanted.lease) {
            (Some(mw), Some(_)) => wanted.state = State::Set { mw },
            // The default holds: nothing is left to do.
            (Some(_), None) => drop(self.gpus.remove(gpu)),
            (None, None) if wanted.refusals == REFUSALS => drop(self.gpus.remove(gpu)),
            (None, _) => wanted.state = State::Failed { again: now.after(RETRY) },
        }
        true
    }

    /// The limit that a GPU was read to have. One that was reset has lost what was set.
    pub(crate) fn read(&mut self, gpu: &GpuId, limit_mw: u32) {
        if let Some(wanted) = self.gpus.get_mut(gpu)
            && let State::Set { mw } = wanted.state
            && mw != limit_mw
        {
            wanted.state = State::ToSet;
        }
    }

    /// A GPU that was reset meanwhile has lost its limit.
    pub(crate) fn probe_started(&mut self) {
        for wanted in self.gpus.values_mut() {
            match wanted.state {
                State::Set { .. } | State::Failed { .. } => wanted.state = State::ToSet,
                State::ToSet | State::Asked => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000;

    fn lease(limit_mw: u32, until: u64) -> Option<Lease> {
        Some(Lease { limit_mw, until: Millis(until) })
    }

    fn due(leases: &mut Leases, now: u64) -> Vec<Option<u32>> {
        leases.due(Millis(now)).into_iter().map(|(_, limit)| limit).collect()
    }

    #[test]
    fn a_lease_is_set_once_and_the_default_comes_back() {
        let (mut leases, gpu) = (Leases::default(), GpuId::from("GPU-0"));
        leases.want(&gpu, lease(300, 60 * S));
        assert_eq!(leases.next(), Some(Millis(0)));
        assert_eq!(due(&mut leases, S), [Some(300)]);
        assert_eq!(due(&mut leases, S), []);
        assert!(leases.answered(Millis(S), &gpu, Some(400_000)));
        assert_eq!((due(&mut leases, 59 * S), leases.next()), (vec![], Some(Millis(60 * S))));
        assert_eq!(due(&mut leases, 60 * S), [None]);
        assert_eq!(leases.kept()[&gpu], None, "an agent that dies now restores it at its next start");
        assert!(leases.answered(Millis(60 * S), &gpu, Some(400_000)));
        assert_eq!((leases.kept().len(), leases.next()), (0, None));
    }

    #[test]
    fn what_an_earlier_start_left_is_taken_up() {
        let gpus = ["GPU-0", "GPU-1", "GPU-2"].map(GpuId::from);
        let kept = gpus.iter().cloned().zip([lease(300, 60 * S), lease(400, 10 * S), None]);
        let mut leases = Leases::restored(kept.collect());
        assert_eq!(due(&mut leases, 20 * S), [Some(300), None, None]);
        for gpu in &gpus {
            leases.answered(Millis(20 * S), gpu, Some(400_000));
        }
        assert_eq!(leases.kept().keys().collect::<Vec<_>>(), [&gpus[0]]);
        leases.probe_started();
        assert_eq!(due(&mut leases, 30 * S), [Some(300)], "the GPU may have been reset");
    }

    #[test]
    fn a_driver_that_refuses_is_asked_again_but_not_all_the_time() {
        let (mut leases, gpu) = (Leases::default(), GpuId::from("GPU-0"));
        leases.want(&gpu, lease(300, 15 * S));
        assert_eq!(due(&mut leases, 0), [Some(300)]);
        leases.answered(Millis(0), &gpu, None);
        assert_eq!((due(&mut leases, 9 * S), leases.next()), (vec![], Some(Millis(10 * S))));
        assert_eq!(due(&mut leases, 10 * S), [Some(300)]);
        leases.answered(Millis(10 * S), &gpu, None);
        assert_eq!(leases.next(), Some(Millis(15 * S)), "its end does not wait");
        assert_eq!(due(&mut leases, 15 * S), [None]);
    }

    #[test]
    fn a_default_that_can_never_be_restored_is_given_up() {
        let (mut leases, gpu) = (Leases::default(), GpuId::from("GPU-0"));
        leases.want(&gpu, None);
        let mut now = Millis(0);
        for _ in 0..REFUSALS {
            assert_eq!(leases.due(now).len(), 1);
            leases.answered(now, &gpu, None);
            now = now.after(RETRY);
        }
        assert_eq!((leases.due(now), leases.next()), (vec![], None));
    }

    #[test]
    fn only_the_newest_orders_answer_counts() {
        let (mut leases, gpu) = (Leases::default(), GpuId::from("GPU-0"));
        leases.want(&gpu, lease(300, 60 * S));
        assert_eq!(due(&mut leases, 0), [Some(300)]);
        leases.want(&gpu, None);
        assert_eq!(due(&mut leases, 0), [None]);
        assert!(!leases.answered(Millis(0), &gpu, Some(400_000)));
        assert_eq!(leases.kept().len(), 1, "the default is not restored yet");
        assert!(leases.answered(Millis(0), &gpu, Some(400_000)));
        assert_eq!(leases.kept().len(), 0);
    }

    #[test]
    fn a_reset_gpu_gets_its_limit_again() {
        let gpu = GpuId::from("GPU-0");
        let mut leases = Leases::default();
        leases.want(&gpu, Some(Lease { limit_mw: 300_000, until: Millis(60 * S) }));
        leases.due(Millis(0));
        leases.read(&gpu, 700_000);
        assert_eq!(leases.due(Millis(0)), [], "the order is on its way");
        // Clamped by the GPU.
        leases.answered(Millis(S), &gpu, Some(400_000));
        leases.read(&gpu, 400_000);
        assert_eq!(leases.due(Millis(2 * S)), []);
        leases.read(&gpu, 700_000);
        assert_eq!(leases.due(Millis(3 * S)), [(gpu, Some(300_000))]);
    }
}
