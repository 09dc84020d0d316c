//! Workers that fall silent while a change is under way.
//!
//! A worker says something at least every `progress`, whatever it does, from a thread that does nothing else: one that is
//! only busy is heard, a frozen one is not. It is judged by what the others say meanwhile, and not by the clock alone: where
//! nothing was heard of anybody, it is the daemon that slept, or the machine, and everyone's silence begins anew.

use super::incidents::Sighting;
use super::{Job, Stage};
use crate::state::Ctx;
use crate::{IncidentKind, Time};
use reknit_layout::WorkerKey;
use reknit_layout::job::Reaction;
use std::time::Duration;

/// Since when the job's workers have been heard without a gap.
#[derive(Debug, Clone, Default)]
pub(crate) struct Listening {
    since: Time,
    last: Time,
    judged: Time,
}

impl Listening {
    /// Somebody is heard. A longer gap than this is nobody's silence.
    fn hears(&mut self, now: Time, gap: Duration) {
        if now > self.last.after(gap) {
            self.since = now;
        }
        self.last = now;
    }
}

impl Job {
    /// A worker speaks, and the silence of the others is looked at.
    pub(crate) fn said_something(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey) {
        let Some(mut worker) = self.workers.get_mut(key) else {
            return;
        };
        worker.spoke = Some(ctx.now);
        // One that opens its data may take as long as that takes, as long as it says that it lives.
        if worker.opening() {
            worker.joined_by = worker.joined_by.map(|_| ctx.now.after(ctx.timeouts.start()));
        }
        drop(worker);
        self.hears(ctx);
    }

    /// The same of a worker that trains.
    pub(crate) fn hears(&mut self, ctx: &mut Ctx<'_>) {
        let limit = ctx.timeouts.mute();
        self.listening.hears(ctx.now, limit / 2);
        // One look serves all that speak at the same time.
        if ctx.now < self.listening.judged.after(limit / 20) {
            return;
        }
        self.listening.judged = ctx.now;
        match self.spec.recovery.on_hang {
            Reaction::Act => self.judge_silence(ctx, limit),
            // It is told of when it has had `quiesce` to stop.
            Reaction::Report => {}
        }
    }

    /// Those that the change under way waits for.
    fn awaited(&self) -> Vec<WorkerKey> {
        match &self.stage {
            Stage::Closing(closing) => closing.awaited.iter().cloned().collect(),
            Stage::Preparing(preparing) => preparing.participants.iter().map(|p| p.worker.clone()).collect(),
            Stage::Pending
            | Stage::Starting { .. }
            | Stage::Running
            | Stage::Planning(_)
            | Stage::Waiting { .. }
            | Stage::Draining { .. }
            | Stage::Ended
            | Stage::Rebuilding { .. } => Vec::new(),
        }
    }

    fn judge_silence(&mut self, ctx: &mut Ctx<'_>, limit: Duration) {
        for key in self.awaited() {
            let Some(worker) = self.workers.get(&key).filter(|worker| worker.session && worker.alive())
            else {
                continue;
            };
            let Some(spoke) = worker.spoke else { continue };
            let silent = ctx.now >= spoke.max(self.listening.since).after(limit);
            if !silent || !self.can_do_without(&key) {
                continue;
            }
            let ms = ctx.now.0.saturating_sub(spoke.0) / 1_000;
            let sighting = Sighting {
                kind: IncidentKind::Frozen,
                signal: format!("{} has said nothing for {ms} ms, and others have", self.full_name_of(&key)),
                reporter: "reknitd".to_owned(),
            };
            // The fence goes out before anything that is only told.
            self.fence(ctx, &key);
            let reason = format!("{} is silent", self.name_of(&key));
            self.accuse(ctx, &key, sighting);
            self.disturb(ctx, &reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_in_what_is_heard_begins_everyones_silence_anew() {
        let mut listening = Listening::default();
        let mut since = |ms: u64| {
            listening.hears(Time(ms * 1_000), Duration::from_millis(1_000));
            listening.since.0 / 1_000
        };
        assert_eq!([5_000, 5_500, 6_500, 7_501, 7_600].map(&mut since), [5_000, 5_000, 5_000, 7_501, 7_501]);
    }
}
