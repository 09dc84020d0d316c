//! Every deadline of the system, derived from a few base values.
//!
//! None of them paces a normal recovery: a killed worker is seen by its peers' sockets and its agent's pidfd, and
//! everybody's answer is awaited as an event. Deadlines only end waits for somebody who does not answer.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A member is waited for this many usual steps: no step that is only slow takes so long.
const HANG_FACTOR: u32 = 4;

/// The base values. Everything else is derived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// A collective that takes longer is stuck. Must exceed the longest step.
    pub operation_ms: u32,
    /// How long a GPU that may rejoin waits before its worker is started again.
    pub rejoin_hold_ms: u32,
    /// How long a started worker may take to open its session, and be silent while it opens its data after that.
    pub start_ms: u32,
    /// How long a new daemon waits for reports before it declares anything lost. Must exceed the longest pause
    /// between two attempts of agents and workers to reconnect.
    pub rebuild_ms: u32,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { operation_ms: 10_000, rejoin_hold_ms: 2_000, start_ms: 60_000, rebuild_ms: 10_000 }
    }
}

impl Timeouts {
    pub fn operation(&self) -> Duration {
        Duration::from_millis(self.operation_ms.into())
    }

    /// A share of the operation deadline, in percent.
    fn operations(&self, percent: u64) -> Duration {
        Duration::from_millis(u64::from(self.operation_ms) * percent / 100)
    }

    /// How often a training worker reports progress: twenty reports fit into an operation deadline, so that one
    /// or two late ones mean nothing. At least every second, at most every 20 ms.
    pub fn progress(&self) -> Duration {
        self.operations(5).clamp(Duration::from_millis(20), Duration::from_secs(1))
    }

    /// The shortest wait for a member that does not move that is a hang: longer than a pause of the operating system.
    pub fn hang(&self) -> Duration {
        Duration::from_millis(500).min(self.operation() / 2)
    }

    /// A wait of a member becomes a hang after this, where steps usually take `step`. Never beyond the operation,
    /// when the plane speaks.
    pub fn hang_after(&self, step: Duration) -> Duration {
        (step * HANG_FACTOR).max(self.hang()).min(self.operation())
    }

    /// A worker whose operation has waited for so long says whom for, and again after each half of it: a hang is then
    /// seen with three reports.
    pub fn stall(&self) -> Duration {
        self.hang() / 2
    }

    /// A member that has shown no progress for so long does not move: it reports more often than that when it does.
    pub fn silence_of_a_member(&self) -> Duration {
        self.progress() + self.progress() / 5
    }

    /// A member without progress for so long is suspected. Longer than an operation: the plane, which knows which
    /// peer is missing, speaks first.
    pub fn suspicion(&self) -> Duration {
        self.operations(125)
    }

    /// Members asked to pause reach their step boundary within this, or the change becomes a loss. A step is
    /// shorter than an operation deadline; what is suspicious while training is suspicious here.
    pub fn pause(&self) -> Duration {
        self.suspicion()
    }

    /// A member that was told to stop and neither answers nor exits for so long is fenced. Longer than the
    /// suspicion, so that one that is only slow has had every chance.
    pub fn quiesce(&self) -> Duration {
        self.operations(150)
    }

    /// A worker that a change waits for and that has said nothing for so long, while others have, is frozen: it speaks five
    /// times as often. At least two seconds, in which the session's thread of a worker on a loaded machine gets its turn.
    pub fn mute(&self) -> Duration {
        (self.progress() * 5).max(Duration::from_secs(2)).min(self.quiesce() / 3)
    }

    /// A fence that is not confirmed for so long counts as done. Longer than a quiesce, so that a worker that
    /// stopped by itself is known to have. Safe without the confirmation: see [`crate::job`].
    pub fn fence(&self) -> Duration {
        self.operations(200)
    }

    /// An agent that is away for longer has lost its lease, and its workers without a session are lost with it.
    /// Not shorter than a fence: an agent that comes back late must find its fences still awaited.
    pub fn lease(&self) -> Duration {
        self.operations(200)
    }

    /// How long an agent is away before people are told.
    pub fn silence(&self) -> Duration {
        Duration::from_secs(1).min(self.lease() / 2)
    }

    /// How long a node is gone before it is forgotten, unless a job needs it: long enough for people to see that it is.
    pub fn forget(&self) -> Duration {
        Duration::from_secs(24 * 60 * 60)
    }

    /// How often an agent sends a heartbeat: ten fit into its lease.
    pub fn heartbeat(&self) -> Duration {
        self.lease() / 10
    }

    /// How long the members of a new epoch may take to find each other. Everyone is told at the same time, so
    /// one operation deadline is plenty.
    pub fn join(&self) -> Duration {
        self.operation()
    }

    /// Prepare to Ready: joining, and fetching what is missing, which takes longest for a new member of a large model.
    pub fn ready(&self) -> Duration {
        self.join() + self.operations(500)
    }

    /// The same where state comes from a checkpoint: reading it takes as long as a start may.
    pub fn load(&self) -> Duration {
        self.ready() + self.start()
    }

    /// Spawn to the first session.
    pub fn start(&self) -> Duration {
        Duration::from_millis(self.start_ms.into())
    }

    /// Stop to exit: the operation in hand ends first.
    pub fn stop(&self) -> Duration {
        self.operation()
    }

    pub fn rebuild(&self) -> Duration {
        Duration::from_millis(self.rebuild_ms.into())
    }

    pub fn rejoin_hold(&self) -> Duration {
        Duration::from_millis(self.rejoin_hold_ms.into())
    }

    /// A member for so long has lasted: its next loss is no relapse.
    pub fn settled(&self) -> Duration {
        self.rejoin_hold() * 20
    }

    /// The hold after `relapses` losses in a row, none of a worker that had lasted: it doubles, up to a minute.
    pub fn rejoin_hold_after(&self, relapses: u32) -> Duration {
        let doubled = self.rejoin_hold().saturating_mul(1u32.checked_shl(relapses).unwrap_or(u32::MAX));
        doubled.min(Duration::from_secs(60).max(self.rejoin_hold()))
    }

    /// Every derived value, in the order of [`Self::validate`], then the others.
    pub fn rungs(&self) -> Vec<Rung> {
        let rung = |name, value, formula, reason| Rung { name, value, formula, reason };
        vec![
            rung(
                "progress",
                self.progress(),
                "operation / 20, 20 ms to 1 s",
                "how often a training worker reports: one or two late reports mean nothing",
            ),
            rung(
                "hang",
                self.hang(),
                "operation / 2, at most 500 ms",
                "the least that others wait for a member that does not move before it hangs: a pause is shorter; where 4 usual steps take longer, it is those",
            ),
            rung(
                "stall",
                self.stall(),
                "hang / 2",
                "a worker whose operation waits for so long says whom for, and again after each half of it",
            ),
            rung(
                "suspicion",
                self.suspicion(),
                "operation x 1.25",
                "a member without progress is suspected: after the plane, which knows which peer is missing",
            ),
            rung(
                "pause",
                self.pause(),
                "suspicion",
                "members asked to pause reach a step boundary, or the planned change becomes a loss",
            ),
            rung(
                "quiesce",
                self.quiesce(),
                "operation x 1.5",
                "a member told to stop answers or exits, or is killed: after the suspicion, so that a slow one had its chance",
            ),
            rung(
                "mute",
                self.mute(),
                "progress x 5, at least 2 s, at most quiesce / 3",
                "a worker that a change waits for and that says nothing, while others do, is frozen: a busy one speaks all the same",
            ),
            rung(
                "fence",
                self.fence(),
                "operation x 2",
                "a kill that is not confirmed counts as done: after the quiesce, when a worker has stopped by itself",
            ),
            rung(
                "lease",
                self.lease(),
                "operation x 2",
                "an agent that is away for longer loses its workers without a session: not before its fences are over",
            ),
            rung(
                "silence",
                self.silence(),
                "lease / 2, at most 1 s",
                "when people are told of a silent agent",
            ),
            rung(
                "forget",
                self.forget(),
                "a day",
                "a node whose lease has ended for so long is not listed any more, unless a job has a place or a worker on it",
            ),
            rung(
                "heartbeat",
                self.heartbeat(),
                "lease / 10",
                "how often an agent speaks: ten fit into its lease",
            ),
            rung(
                "join",
                self.join(),
                "operation",
                "the members of a new epoch find each other: all are told at the same time",
            ),
            rung(
                "ready",
                self.ready(),
                "join + operation x 5",
                "prepare to ready: joining, and fetching what is missing, which takes a new member of a large model longest",
            ),
            rung("stop", self.stop(), "operation", "stop to exit: the operation in hand ends first"),
            rung(
                "settled",
                self.settled(),
                "rejoin_hold x 20",
                "a member for so long has lasted: its next loss does not double its hold",
            ),
        ]
    }

    /// As a table of a configuration file: the base values, each with its reason, and what is derived from them.
    pub fn explained(&self) -> String {
        let mut text = "[timeouts]\n".to_owned();
        for (name, value, reason) in [
            (
                "operation_ms",
                self.operation_ms,
                "a collective that takes longer is stuck: longer than the longest step",
            ),
            (
                "rejoin_hold_ms",
                self.rejoin_hold_ms,
                "a GPU that may rejoin waits before its worker is started again, so that one that flaps disturbs less; doubles with each relapse, up to a minute",
            ),
            (
                "start_ms",
                self.start_ms,
                "a started worker opens its session within this, and is not silent for longer while it opens its data: that itself may take as long as it takes",
            ),
            (
                "rebuild_ms",
                self.rebuild_ms,
                "a new daemon waits for reports before it declares anything lost: longer than the pauses between attempts to reconnect",
            ),
        ] {
            text += &format!("# {reason}\n{name} = {value}\n");
        }
        text += "# Derived:\n";
        for Rung { name, value, formula, reason } in self.rungs() {
            text += &format!("#   {name:<10} {:>7} ms = {formula}: {reason}\n", value.as_millis());
        }
        text
    }

    /// Checks the ladder: operation < suspicion < quiesce < fence <= lease, and progress well below suspicion.
    ///
    /// # Errors
    /// Says which value breaks it and what is allowed.
    pub fn validate(&self) -> Result<(), String> {
        if self.operation_ms < 100 {
            let found = self.operation_ms;
            return Err(format!(
                "operation_ms = {found}: must be at least 100, and longer than the longest step"
            ));
        }
        if self.start_ms < 1_000 {
            let found = self.start_ms;
            return Err(format!("start_ms = {found}: must be at least 1000"));
        }
        if self.rebuild_ms < 500 {
            let found = self.rebuild_ms;
            return Err(format!("rebuild_ms = {found}: must be at least 500"));
        }
        let ladder = [
            ("progress", self.progress()),
            ("operation", self.operation()),
            ("suspicion", self.suspicion()),
            ("quiesce", self.quiesce()),
            ("fence", self.fence()),
        ];
        for pair in ladder.windows(2) {
            let [(low, short), (high, long)] = pair else {
                continue;
            };
            if short >= long {
                return Err(format!(
                    "{low} ({short:?}) must be shorter than {high} ({long:?}): change operation_ms"
                ));
            }
        }
        if self.hang() >= self.operation() {
            return Err("hang must be shorter than operation: change operation_ms".to_owned());
        }
        if self.fence() > self.lease() {
            return Err("fence must not be longer than lease: change operation_ms".to_owned());
        }
        Ok(())
    }
}

/// One derived value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rung {
    pub name: &'static str,
    pub value: Duration,
    /// How it follows from the base values.
    pub formula: &'static str,
    pub reason: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_explained() {
        let text = Timeouts { operation_ms: 4_000, ..Timeouts::default() }.explained();
        assert!(text.contains("\noperation_ms = 4000\n"), "{text}");
        assert!(text.contains("fence         8000 ms = operation x 2: "), "{text}");
        assert_eq!(Timeouts { operation_ms: 4_000, ..Timeouts::default() }, read_back(&text));
    }

    /// The base values of a table, by name.
    fn read_back(text: &str) -> Timeouts {
        let number = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} = ")));
            line.and_then(|value| value.parse().ok()).expect(name)
        };
        Timeouts {
            operation_ms: number("operation_ms"),
            rejoin_hold_ms: number("rejoin_hold_ms"),
            start_ms: number("start_ms"),
            rebuild_ms: number("rebuild_ms"),
        }
    }

    #[test]
    fn the_default_ladder_holds_and_a_broken_one_is_refused() {
        assert_eq!(Timeouts::default().validate(), Ok(()));
        let broken = Timeouts { operation_ms: 10, ..Timeouts::default() };
        let problem = broken.validate().unwrap_err();
        assert!(problem.contains("operation_ms = 10"), "{problem}");
    }

    #[test]
    fn the_hold_doubles_up_to_a_minute() {
        let timeouts = Timeouts::default();
        let holds: Vec<_> =
            [0, 1, 4, 5, 40].map(|relapses| timeouts.rejoin_hold_after(relapses).as_secs()).into();
        assert_eq!(holds, [2, 4, 32, 60, 60]);
    }
}
