//! How much the agent sees at present, and what was last read of each GPU. Pure.

use crate::clock::Millis;
use crate::probe::protocol::Reading;
use reknit_layout::GpuId;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Observability {
    Full,
    /// The gaps say what is missing.
    Degraded,
    Blind,
    Quiesced,
}

impl Observability {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Degraded => "degraded",
            Self::Blind => "blind",
            Self::Quiesced => "quiesced",
        }
    }
}

/// Whether there is a probe that reads.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
enum Probe {
    #[default]
    Starting,
    Ready,
    Ended {
        why: String,
    },
    Quiesced {
        until: Millis,
    },
}

/// What was last read of a GPU.
#[derive(Debug, Clone, Default)]
pub(crate) struct LastRead {
    pub(crate) at: Option<Millis>,
    pub(crate) temperature: Option<u32>,
    pub(crate) power_mw: Option<u32>,
    pub(crate) power_limit_mw: Option<u32>,
    /// The driver did not answer.
    blind: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Sight {
    probe: Probe,
    gpus: BTreeMap<GpuId, LastRead>,
    /// What this probe cannot see, and of which GPUs.
    gaps: BTreeMap<String, BTreeSet<GpuId>>,
    /// Why the kernel log cannot be read.
    pub(crate) no_kernel_log: Option<String>,
    /// Why the policy file is not in force.
    pub(crate) bad_policy: Option<String>,
}

impl Sight {
    /// A new probe reads these GPUs, and tells anew what it cannot see.
    pub(crate) fn ready<'a>(&mut self, gpus: impl Iterator<Item = &'a GpuId>) {
        self.probe = Probe::Ready;
        self.gaps.clear();
        let mut before = std::mem::take(&mut self.gpus);
        self.gpus = gpus.map(|gpu| (gpu.clone(), before.remove(gpu).unwrap_or_default())).collect();
    }

    pub(crate) fn ended(&mut self, why: String) {
        self.probe = Probe::Ended { why };
    }

    pub(crate) fn quiesced(&mut self, until: Millis) {
        self.probe = Probe::Quiesced { until };
    }

    /// The quiesce is over; a probe is being started.
    pub(crate) fn resumed(&mut self) {
        self.probe = Probe::Starting;
    }

    pub(crate) fn quiesced_until(&self) -> Option<Millis> {
        match self.probe {
            Probe::Quiesced { until } => Some(until),
            Probe::Starting | Probe::Ready | Probe::Ended { .. } => None,
        }
    }

    pub(crate) fn reading(&mut self, now: Millis, gpu: &GpuId, reading: &Reading) {
        let Some(last) = self.gpus.get_mut(gpu) else {
            return;
        };
        // Whatever was told of the probe before, it reads.
        if self.probe == Probe::Starting {
            self.probe = Probe::Ready;
        }
        last.blind = false;
        match reading {
            Reading::Answers { fast, slow, reset: _ } => {
                last.at = Some(now);
                last.temperature = fast.temperature;
                last.power_mw = fast.power_mw;
                if let Some(slow) = slow {
                    last.power_limit_mw = slow.power_limit_mw;
                }
            }
            Reading::Gone { .. } | Reading::ResetRequired | Reading::Suspect { .. } => {}
            Reading::Blind { .. } => last.blind = true,
        }
    }

    pub(crate) fn gap(&mut self, gpu: &GpuId, what: String) {
        self.gaps.entry(what).or_default().insert(gpu.clone());
    }

    pub(crate) fn gap_closed(&mut self, gpu: &GpuId, what: &str) {
        if let Some(of) = self.gaps.get_mut(what) {
            of.remove(gpu);
            if of.is_empty() {
                self.gaps.remove(what);
            }
        }
    }

    pub(crate) fn of(&self, gpu: &GpuId) -> Option<&LastRead> {
        self.gpus.get(gpu)
    }

    /// No GPU can be read or set now.
    pub(crate) fn sees_nothing(&self) -> bool {
        match &self.probe {
            Probe::Quiesced { .. } | Probe::Starting | Probe::Ended { .. } => true,
            // Also where there is no GPU.
            Probe::Ready => self.gpus.values().all(|last| last.blind),
        }
    }

    pub(crate) fn observability(&self) -> Observability {
        match &self.probe {
            Probe::Quiesced { .. } => Observability::Quiesced,
            Probe::Starting | Probe::Ended { .. } => Observability::Blind,
            Probe::Ready if self.sees_nothing() => Observability::Blind,
            Probe::Ready if self.gaps().is_empty() => Observability::Full,
            Probe::Ready => Observability::Degraded,
        }
    }

    /// What cannot be seen, in words.
    pub(crate) fn gaps(&self) -> Vec<String> {
        let mut gaps = Vec::new();
        match &self.probe {
            Probe::Ready if self.gpus.is_empty() => gaps.push("the driver counts no GPU".to_owned()),
            Probe::Ready => {
                let blind = self.gpus.values().filter(|last| last.blind).count();
                if blind > 0 {
                    let all = self.gpus.len();
                    gaps.push(format!("the driver does not let {blind} of {all} GPUs be read"));
                }
            }
            Probe::Starting => gaps.push("the driver has not answered yet".to_owned()),
            Probe::Ended { why } => gaps.push(why.clone()),
            Probe::Quiesced { until: _ } => gaps.push("quiesced by an operator".to_owned()),
        }
        gaps.extend(self.no_kernel_log.clone());
        gaps.extend(self.bad_policy.clone());
        for (what, of) in &self.gaps {
            let (some, all) = (of.len(), self.gpus.len());
            gaps.push(if some == all { what.clone() } else { format!("{what} ({some} of {all} GPUs)") });
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::protocol::{FastSet, SlowSet};

    fn answers(temperature: u32, slow: Option<SlowSet>) -> Reading {
        let fast = FastSet { temperature: Some(temperature), ..FastSet::default() };
        Reading::Answers { fast, slow: slow.map(Box::new), reset: false }
    }

    #[test]
    fn what_is_seen_and_what_is_not() {
        let gpus = ["GPU-0", "GPU-1"].map(GpuId::from);
        let mut sight = Sight::default();
        assert_eq!(sight.observability(), Observability::Blind);
        sight.ready(gpus.iter());
        assert_eq!((sight.observability(), sight.gaps()), (Observability::Full, vec![]));
        sight.gap(&gpus[1], "XID events: no permission".to_owned());
        assert_eq!(sight.observability(), Observability::Degraded);
        assert_eq!(sight.gaps(), ["XID events: no permission (1 of 2 GPUs)"]);
        sight.gap(&gpus[0], "XID events: no permission".to_owned());
        assert_eq!(sight.gaps(), ["XID events: no permission"]);
        sight.ready(gpus.iter());
        sight.no_kernel_log = Some("no kernel log".to_owned());
        assert_eq!((sight.observability(), sight.gaps().len()), (Observability::Degraded, 1));
        for gpu in &gpus {
            sight.reading(Millis(5), gpu, &Reading::Blind { error: String::new() });
        }
        assert_eq!(sight.observability(), Observability::Blind);
        sight.quiesced(Millis(9));
        assert_eq!(
            (sight.observability(), sight.quiesced_until()),
            (Observability::Quiesced, Some(Millis(9)))
        );
        sight.resumed();
        assert_eq!((sight.observability(), sight.quiesced_until()), (Observability::Blind, None));
    }

    #[test]
    fn the_last_values_stay_while_nothing_new_is_read() {
        let gpu = GpuId::from("GPU-0");
        let mut sight = Sight::default();
        sight.ready([&gpu].into_iter());
        let slow = SlowSet { power_limit_mw: Some(700), ..SlowSet::default() };
        sight.reading(Millis(1), &gpu, &answers(40, Some(slow)));
        sight.reading(Millis(2), &gpu, &answers(41, None));
        sight.ended("the probe is gone".to_owned());
        sight.ready([&gpu].into_iter());
        let last = sight.of(&gpu).unwrap();
        assert_eq!((last.at, last.temperature, last.power_limit_mw), (Some(Millis(2)), Some(41), Some(700)));
    }
}
