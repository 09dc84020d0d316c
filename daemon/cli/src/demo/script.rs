//! Which fault comes when. Positions are committed steps, so the same run has the same faults.

use crate::local::Standing;
use reknit_layout::Place;
use std::time::Duration;

/// What the demo does to the cluster next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// SIGKILL to the worker at this place.
    KillWorker(Place),
    /// The driver reports the GPU at this place lost.
    LoseGpu(Place),
    /// The driver reports that GPU healthy again.
    GiveBack,
}

/// A worker killed, then a GPU lost and given back; each only when the job is whole again.
#[derive(Debug, Clone)]
pub(crate) struct Script {
    kill_at: u64,
    lose_at: u64,
    reduced_steps: u64,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    BeforeKill,
    Killed,
    HealingKill,
    BeforeLoss,
    Lost,
    /// Reduced since this step.
    WithoutGpu(u64),
    GivenBack,
    Over,
}

impl Script {
    /// With fewer steps the run could end before everything has healed.
    pub(crate) const LEAST_STEPS: u64 = 40;

    pub(crate) const KILLED: Place = Place::new(1, 0, 2);
    pub(crate) const LOST: Place = Place::new(0, 0, 1);

    pub(crate) fn new(steps: u64) -> Self {
        Self {
            kill_at: steps / 5,
            lose_at: steps * 2 / 5,
            reduced_steps: (steps / 12).min(10),
            stage: Stage::BeforeKill,
        }
    }

    /// How long a GPU waits before it rejoins. A twelfth of the run at the usual speed of ten steps a second: long
    /// enough to see the job train reduced, short enough for everything to heal.
    pub(crate) fn rejoin_hold(steps: u64) -> Duration {
        Duration::from_millis((steps * 100 / 12).clamp(300, 1_500))
    }

    /// To be asked after every event until it answers `None`.
    pub(crate) fn next(&mut self, now: Standing) -> Option<Action> {
        loop {
            let (stage, action) = self.advance(now)?;
            self.stage = stage;
            if action.is_some() {
                return action;
            }
        }
    }

    /// The stage that follows, if it is time.
    fn advance(&self, now: Standing) -> Option<(Stage, Option<Action>)> {
        match self.stage {
            Stage::BeforeKill if now.whole && now.committed >= self.kill_at => {
                Some((Stage::Killed, Some(Action::KillWorker(Self::KILLED))))
            }
            Stage::Killed if !now.whole => Some((Stage::HealingKill, None)),
            Stage::HealingKill if now.whole => Some((Stage::BeforeLoss, None)),
            Stage::BeforeLoss if now.whole && now.committed >= self.lose_at => {
                Some((Stage::Lost, Some(Action::LoseGpu(Self::LOST))))
            }
            Stage::Lost if !now.whole => Some((Stage::WithoutGpu(now.committed), None)),
            Stage::WithoutGpu(since) if now.committed >= since + self.reduced_steps => {
                Some((Stage::GivenBack, Some(Action::GiveBack)))
            }
            Stage::GivenBack if now.whole => Some((Stage::Over, None)),
            Stage::BeforeKill
            | Stage::Killed
            | Stage::HealingKill
            | Stage::BeforeLoss
            | Stage::Lost
            | Stage::WithoutGpu(_)
            | Stage::GivenBack
            | Stage::Over => None,
        }
    }

    /// What has not happened yet, for a run that ended too early.
    pub(crate) fn missing(&self) -> Option<&'static str> {
        match self.stage {
            Stage::BeforeKill => Some("no worker was killed"),
            Stage::Killed => Some("the killed worker's group was not reduced"),
            Stage::HealingKill => Some("the killed worker's GPU had not rejoined"),
            Stage::BeforeLoss => Some("no GPU was lost"),
            Stage::Lost => Some("the lost GPU's group was not reduced"),
            Stage::WithoutGpu(_) => Some("the lost GPU was not given back"),
            Stage::GivenBack => Some("the lost GPU had not rejoined"),
            Stage::Over => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(committed: u64, whole: bool) -> Standing {
        Standing { committed, whole }
    }

    #[test]
    fn each_fault_waits_for_the_one_before_to_heal() {
        let mut script = Script::new(120);
        assert_eq!(script.next(at(23, true)), None);
        assert_eq!(script.next(at(24, true)), Some(Action::KillWorker(Script::KILLED)));
        assert_eq!(script.next(at(25, true)), None, "the loss is not yet seen in the layout");
        assert_eq!(script.next(at(25, false)), None);
        assert_eq!(script.next(at(60, false)), None, "it is time, but the group is reduced");
        assert_eq!(script.next(at(62, true)), Some(Action::LoseGpu(Script::LOST)));
        assert_eq!(script.next(at(62, true)), None);
        assert_eq!(script.next(at(63, false)), None);
        assert_eq!(script.next(at(72, false)), None);
        assert_eq!(script.next(at(73, false)), Some(Action::GiveBack));
        assert_eq!(script.missing(), Some("the lost GPU had not rejoined"));
        assert_eq!(script.next(at(80, true)), None);
        assert_eq!(script.missing(), None);
    }

    #[test]
    fn nothing_happens_before_the_first_layout() {
        assert_eq!(Script::new(80).next(at(0, false)), None);
    }
}
