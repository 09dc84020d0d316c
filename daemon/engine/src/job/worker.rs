//! What is known of one worker process.

use crate::{Activity, Endpoint, Time, WorkerPhase, WorkerState};
use reknit_layout::NodeName;

#[derive(Debug, Clone)]
pub(crate) struct Worker {
    pub(crate) node: NodeName,
    /// 0 until its agent said.
    pub(crate) pid: u32,
    pub(crate) fate: Fate,
    pub(crate) session: bool,
    /// Its agent, which came back, does not have it: it has ended, and its session is only not known to have.
    pub(crate) unlisted: bool,
    /// Until when it must open a session, its first one or, while it is no member, the next, and, while it opens its data, say
    /// that it lives; `None` once it has done so.
    pub(crate) joined_by: Option<Time>,
    pub(crate) endpoint: Option<Endpoint>,
    /// Since when it is or was a member of committed layouts.
    pub(crate) member_since: Option<Time>,
    /// The last state it reported.
    pub(crate) state: Option<WorkerState>,
    /// It has stopped under the state above, or is new and holds nothing: it can be prepared.
    pub(crate) stopped: bool,
    pub(crate) last_progress: Time,
    /// As last reported: grows while it moves.
    pub(crate) ticks: u64,
    /// What it last said that it does, and when.
    pub(crate) activity: Activity,
    pub(crate) heard: Time,
    /// When it last said anything; `None` until it has said so outside of training.
    pub(crate) spoke: Option<Time>,
    pub(crate) completed: Option<Completed>,
}

/// What the engine wants of it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fate {
    Alive,
    /// Told to leave; fenced after the deadline.
    Stopping {
        deadline: Time,
    },
    /// Being killed; taken as gone after the deadline.
    Fencing {
        deadline: Time,
    },
}

/// All steps are committed. The digest is unknown when only a new session said so.
#[derive(Debug, Clone)]
pub(crate) struct Completed {
    pub(crate) digest: Option<String>,
}

impl Worker {
    pub(crate) fn new(node: NodeName, now: Time) -> Self {
        Self {
            node,
            pid: 0,
            fate: Fate::Alive,
            session: false,
            unlisted: false,
            joined_by: None,
            endpoint: None,
            member_since: None,
            state: None,
            stopped: false,
            last_progress: now,
            ticks: 0,
            activity: Activity::default(),
            heard: now,
            spoke: None,
            completed: None,
        }
    }

    pub(crate) fn alive(&self) -> bool {
        match self.fate {
            Fate::Alive => true,
            Fate::Stopping { .. } | Fate::Fencing { .. } => false,
        }
    }

    /// It still reads its data.
    pub(crate) fn opening(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.phase == WorkerPhase::Opening)
    }

    pub(crate) fn fencing(&self) -> bool {
        match self.fate {
            Fate::Fencing { .. } => true,
            Fate::Alive | Fate::Stopping { .. } => false,
        }
    }

    /// A short loss of a member's session does not matter: orders are sent again when it is back.
    pub(crate) fn can_prepare(&self) -> bool {
        self.alive() && self.stopped && self.endpoint.is_some()
    }

    pub(crate) fn deadline(&self) -> Option<Time> {
        match self.fate {
            Fate::Alive => self.joined_by,
            Fate::Stopping { deadline } | Fate::Fencing { deadline } => Some(deadline),
        }
    }

    /// For people.
    pub(crate) fn describe(&self) -> &'static str {
        match (self.fate, self.state.as_ref().map(|state| state.phase)) {
            (Fate::Stopping { .. }, _) => "stopping",
            (Fate::Fencing { .. }, _) => "being killed",
            (Fate::Alive, None) => "starting",
            (Fate::Alive, Some(WorkerPhase::Opening)) => "opening",
            (Fate::Alive, Some(WorkerPhase::Idle)) => "idle",
            (Fate::Alive, Some(WorkerPhase::Training)) => "training",
            (Fate::Alive, Some(WorkerPhase::Quiesced)) => "quiesced",
            (Fate::Alive, Some(WorkerPhase::Preparing)) => "preparing",
            (Fate::Alive, Some(WorkerPhase::Ready)) => "ready",
            (Fate::Alive, Some(WorkerPhase::Completed)) => "completed",
        }
    }
}

/// The epoch that a worker in this state would have to give up.
pub(crate) fn epoch_in_hand(state: &WorkerState) -> reknit_layout::Epoch {
    match state.phase {
        WorkerPhase::Preparing | WorkerPhase::Ready => state.ready_epoch,
        WorkerPhase::Opening
        | WorkerPhase::Idle
        | WorkerPhase::Training
        | WorkerPhase::Quiesced
        | WorkerPhase::Completed => state.epoch,
    }
}
