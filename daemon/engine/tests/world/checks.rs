//! The invariants of the design that the engine keeps, checked on every command and every action of a worker.

use reknit_engine::{Command, Event, JobRecord};
use reknit_layout::{Epoch, Incarnation, Plan, Step, WorkerKey};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[derive(Default)]
pub struct Checks {
    stored: Option<JobRecord>,
    plans: BTreeMap<Epoch, Arc<Plan>>,
    pub ready: BTreeMap<Epoch, BTreeSet<WorkerKey>>,
    spawned: BTreeSet<Incarnation>,
    resumed_at: BTreeMap<Epoch, Step>,
    /// Steps the present daemon was told of, and the epoch they were committed under.
    told: BTreeMap<Step, Epoch>,
    pub commits: BTreeMap<Step, Epoch>,
    pub incidents_ended: usize,
    /// Reports of steps committed by rolling forward.
    pub rolled_forward: usize,
}

impl Checks {
    pub fn daemon_restarted(&mut self) {
        self.told.clear();
    }

    pub fn heard(&mut self, event: &Event) {
        if let Event::Committed { epoch, step, rolled_forward, .. } = event {
            self.rolled_forward += usize::from(*rolled_forward);
            if !rolled_forward {
                self.told.entry(*step).or_insert(*epoch);
            }
        }
    }

    pub fn command(&mut self, command: &Command) {
        match command {
            Command::Persist(record) if record.name != super::job_name() => {}
            Command::Persist(record) => {
                if let Some(before) = &self.stored {
                    let epoch = |r: &JobRecord| r.layout.as_ref().map(|layout| layout.epoch);
                    assert!(record.last_epoch >= before.last_epoch, "ONE-EPOCH: epochs grow");
                    assert!(epoch(record) >= epoch(before), "ONE-EPOCH: committed epochs grow");
                    assert!(record.last_incarnation >= before.last_incarnation);
                    assert!(record.ever_committed >= before.ever_committed, "NO-GUESS");
                }
                self.stored = Some((**record).clone());
            }
            Command::Spawn { worker, .. } => {
                let stored = self.stored.as_ref().expect("stored before a spawn");
                assert!(stored.last_incarnation >= worker.incarnation);
                assert!(self.spawned.insert(worker.incarnation), "an incarnation was reused");
            }
            Command::Prepare { epoch, plan, .. } => {
                let stored = self.stored.as_ref().expect("stored before a prepare");
                assert!(stored.last_epoch >= *epoch, "ONE-EPOCH: epoch not stored");
                assert!(!(plan.fresh && stored.ever_committed), "NO-GUESS");
                match self.plans.get(epoch) {
                    Some(known) => assert!(known == plan, "ONE-EPOCH: epoch {epoch} reused"),
                    None => {
                        let newest = self.plans.keys().next_back().copied().unwrap_or_default();
                        assert!(*epoch > newest, "ONE-EPOCH: epoch {epoch} after {newest}");
                        self.plans.insert(*epoch, plan.clone());
                    }
                }
            }
            Command::Resume { epoch, .. } => {
                let stored = self.stored.as_ref().expect("stored before a resume");
                let layout = stored.layout.as_ref().expect("a layout before a resume");
                assert_eq!(layout.epoch, *epoch, "resumed before it was stored");
                let ready = self.ready.get(epoch).cloned().unwrap_or_default();
                for (place, member) in layout.members() {
                    assert!(ready.contains(&member.worker), "{place} was never ready");
                }
            }
            Command::CloseEpoch { epoch, .. } => {
                let stored = self.stored.as_ref().expect("stored before a close");
                assert!(stored.last_epoch >= *epoch);
            }
            Command::Notify { notice, .. } => {
                if let reknit_engine::Notice::Incident(incident) = notice {
                    self.incident(incident);
                }
                if let reknit_engine::Notice::Step { samples_repeated, .. } = notice {
                    assert_eq!(*samples_repeated, 0, "SAMPLES");
                }
            }
            Command::PersistIncident(_)
            | Command::Announce(_)
            | Command::Fence { .. }
            | Command::Pause { .. }
            | Command::Stop { .. }
            | Command::Plan { .. } => {}
        }
    }

    /// ATTRIBUTED: the phases of a finished incident follow each other.
    fn incident(&mut self, incident: &reknit_engine::Incident) {
        self.incidents_ended += 1;
        let times = [
            Some(incident.detected),
            incident.quiesced,
            incident.fenced,
            incident.planned,
            incident.ready,
            incident.committed,
            incident.recovered,
        ];
        let known: Vec<_> = times.iter().flatten().collect();
        assert!(known.is_sorted(), "ATTRIBUTED: {incident:?}");
        assert!(!incident.advice.is_empty());
    }

    /// SAME-STEP: all members resume an epoch at the same step.
    pub fn resumes(&mut self, epoch: Epoch, step: Step) {
        let first = *self.resumed_at.entry(epoch).or_insert(step);
        assert_eq!(first, step, "SAME-STEP in epoch {epoch}");
    }

    /// A worker commits. A step that the daemon was told of is never done again (SAMPLES).
    pub fn commits(&mut self, epoch: Epoch, step: Step) {
        if let Some(before) = self.told.get(&step) {
            assert_eq!(*before, epoch, "SAMPLES: step {step} committed twice");
        }
        self.commits.insert(step, epoch);
    }
}
