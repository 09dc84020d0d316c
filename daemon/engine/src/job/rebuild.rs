//! A new daemon: everybody is heard before anything is declared lost.

use super::incidents::{Open, Sighting};
use super::worker::{Completed, Worker};
use super::{Closing, Job, Stage};
use crate::state::Ctx;
use crate::{HealthClass, Incident, IncidentKind, JobRecord, Phase, Time, Timeouts, WorkerPhase};
use reknit_layout::{GpuId, NodeName, WorkerKey};
use std::collections::BTreeSet;

impl Job {
    /// A job as the store has it.
    pub(crate) fn restored(
        record: JobRecord,
        incidents: Vec<Incident>,
        now: Time,
        timeouts: &Timeouts,
    ) -> Self {
        let phase = record.phase;
        let mut job = Self::new(record);
        if let Some(layout) = &job.record.layout {
            job.ledger.begin_epoch(layout);
        }
        let deadline = now.after(timeouts.rebuild());
        job.stage = match phase {
            Phase::Stopped | Phase::Completed | Phase::Failed => Stage::Ended,
            Phase::Draining => Stage::Draining { not_before: deadline },
            Phase::Pending
            | Phase::Starting
            | Phase::Running
            | Phase::Quiescing
            | Phase::Resharding
            | Phase::Waiting
            | Phase::Rebuilding => {
                job.record.phase = Phase::Rebuilding;
                Stage::Rebuilding { deadline, unheard: None }
            }
        };
        for incident in incidents {
            // Not every incident is stored with its record.
            job.record.last_incident = job.record.last_incident.max(incident.id);
            let lasts = incident.recovered.is_none() && !phase.ended();
            if lasts && !incident.told {
                job.incidents.open.push(Open { incident, worker: None });
            } else {
                if lasts {
                    job.still_told(&incident);
                }
                job.incidents.end(incident);
            }
        }
        job
    }

    /// A worker that its agent has running and no daemon told this one of.
    pub(crate) fn adopt(&mut self, now: Time, node: &NodeName, key: &WorkerKey, pid: u32) {
        let mut worker = Worker::new(node.clone(), now);
        worker.pid = pid;
        worker.member_since = self.is_member(key).then_some(now);
        self.workers.insert(key.clone(), worker);
    }

    /// Nothing more is to be heard of the GPU's worker: it reported, or its agent says there is none.
    fn heard_of(&self, ctx: &Ctx<'_>, gpu: &GpuId) -> bool {
        match self.worker_on(gpu) {
            Some((_, worker)) => worker.session,
            None => ctx.cluster.gpu(gpu).is_some_and(|(_, node, _)| node.connected()),
        }
    }

    /// A GPU that must be heard of and was not. Looked for from the last one that was found on, so that hearing many
    /// thousands does not mean to ask for all of them as often.
    fn unheard(&self, ctx: &Ctx<'_>) -> Option<GpuId> {
        let Stage::Rebuilding { unheard: last, .. } = &self.stage else {
            return None;
        };
        let first_from =
            |first: &GpuId| self.expected_from(first).find(|gpu| !self.heard_of(ctx, gpu)).cloned();
        let later = last.as_ref().and_then(first_from);
        later.or_else(|| first_from(&GpuId::from("")))
    }

    /// The GPUs of all members, or before the first layout those that shall have a worker; in order, from `first` on.
    fn expected_from<'a>(&'a self, first: &'a GpuId) -> Box<dyn Iterator<Item = &'a GpuId> + 'a> {
        if self.record.layout.is_some() {
            Box::new(self.members_from(first).map(|key| &key.gpu))
        } else {
            Box::new(self.workers.seated_from(first))
        }
    }

    pub(crate) fn rebuild(&mut self, ctx: &mut Ctx<'_>, deadline: Time) -> bool {
        if ctx.now < deadline {
            let unheard = self.unheard(ctx);
            if let (Stage::Rebuilding { unheard: seen, .. }, Some(_)) = (&mut self.stage, &unheard) {
                *seen = unheard;
                return false;
            }
        }
        if self.record.layout.is_some() && self.undisturbed() {
            self.go_on(ctx);
        } else if self.record.places.is_empty() {
            self.stage = Stage::Pending;
        } else {
            self.recover_from_reports(ctx);
        }
        true
    }

    /// Every member trains, has trained to the end, or is ready for the committed layout.
    fn undisturbed(&self) -> bool {
        let epoch = self.epoch();
        self.members().iter().all(|key| {
            let worker = self.workers.get(key);
            let state = worker.filter(|worker| worker.alive()).and_then(|worker| worker.state.as_ref());
            state.is_some_and(|state| match state.phase {
                WorkerPhase::Training | WorkerPhase::Completed => state.epoch == epoch,
                WorkerPhase::Ready => state.ready_epoch == epoch,
                WorkerPhase::Opening | WorkerPhase::Idle | WorkerPhase::Quiesced | WorkerPhase::Preparing => {
                    false
                }
            })
        })
    }

    /// Nothing happened to the training while no daemon was there.
    fn go_on(&mut self, ctx: &mut Ctx<'_>) {
        let members = self.members();
        self.set_phase(ctx, Phase::Running, "");
        self.persist(ctx);
        for key in &members {
            let Some(mut worker) = self.workers.get_mut(key) else {
                continue;
            };
            worker.last_progress = ctx.now;
            worker.member_since.get_or_insert(ctx.now);
            worker.stopped = false;
            match worker.state.as_ref().map(|state| state.phase) {
                Some(WorkerPhase::Ready) => {
                    drop(worker);
                    self.resume(ctx, key);
                }
                Some(WorkerPhase::Completed) => {
                    worker.completed.get_or_insert(Completed { digest: None });
                }
                Some(
                    WorkerPhase::Opening
                    | WorkerPhase::Idle
                    | WorkerPhase::Training
                    | WorkerPhase::Quiesced
                    | WorkerPhase::Preparing,
                )
                | None => {}
            }
        }
        for open in &mut self.incidents.open {
            open.incident
                .epoch_after
                .get_or_insert(self.record.layout.as_ref().map(|layout| layout.epoch).unwrap_or_default());
        }
        self.resume_step = self.committed;
        self.stage = Stage::Running;
        self.end_strangers(ctx, &members);
        self.expect_newcomers(ctx);
    }

    /// It is engaged in nothing, and says so when it can be.
    pub(crate) fn await_no_more(&mut self, key: &WorkerKey) {
        if let Stage::Closing(closing) = &mut self.stage {
            closing.awaited.remove(key);
        }
    }

    /// Workers with neither a place in the layout nor the chance to get one.
    fn end_strangers(&mut self, ctx: &mut Ctx<'_>, members: &BTreeSet<WorkerKey>) {
        let strangers: Vec<_> = self
            .workers
            .iter()
            .filter(|(key, worker)| !members.contains(key) && worker.session && !worker.stopped)
            .filter(|(_, worker)| !worker.opening())
            .map(|(key, _)| key.clone())
            .collect();
        for key in strangers {
            self.stop_worker(ctx, &key, "it has no place any more");
        }
    }

    /// A change was under way, or somebody was lost meanwhile: everyone stops, then a new epoch is made of what is held.
    fn recover_from_reports(&mut self, ctx: &mut Ctx<'_>) {
        let reason = "the daemon came back to an unfinished change";
        self.set_phase(ctx, Phase::Quiescing, reason);
        self.persist(ctx);
        let present: BTreeSet<_> = self.workers.keys().cloned().collect();
        let lost: Vec<_> = self.members().into_iter().filter(|key| !self.workers.is_alive(key)).collect();
        self.stage = Stage::Closing(Closing {
            epoch: self.record.last_epoch,
            paused: false,
            reason: reason.to_owned(),
            awaited: present.clone(),
            deadline: Some(ctx.now.after(ctx.timeouts.quiesce())),
        });
        self.blame(ctx, &lost);
        for key in &present {
            self.stop_if_engaged(ctx, key, reason);
        }
        self.expect_newcomers(ctx);
    }

    /// Workers without a session that are no members have as long as any new one, and nobody waits for them.
    fn expect_newcomers(&mut self, ctx: &Ctx<'_>) {
        let members = self.members();
        let joined_by = ctx.now.after(ctx.timeouts.start());
        let away = self.workers.iter().filter(|(key, worker)| !worker.session && !members.contains(*key));
        let away: Vec<_> = away.map(|(key, _)| key.clone()).collect();
        for key in &away {
            if let Some(mut worker) = self.workers.get_mut(key) {
                worker.joined_by = Some(joined_by);
            }
            if let Stage::Closing(closing) = &mut self.stage {
                closing.awaited.remove(key);
            }
        }
    }

    /// `lost`: gone, or being killed since its GPU was reported lost.
    fn blame(&mut self, ctx: &mut Ctx<'_>, lost: &[WorkerKey]) {
        for key in lost {
            let (kind, signal) = match ctx.cluster.gpu(&key.gpu) {
                Some((_, _, gpu)) if gpu.health == HealthClass::Fatal => {
                    (IncidentKind::GpuLost, gpu.cause.as_str())
                }
                Some((_, node, _)) if node.connected() => match self.losses.get(&key.gpu) {
                    Some(loss) => (loss.sighting.kind, loss.sighting.signal.as_str()),
                    None => (IncidentKind::WorkerExited, "was gone when the daemon came back"),
                },
                Some(_) | None => {
                    (IncidentKind::NodeLost, "neither it nor its agent reported to the new daemon in time")
                }
            };
            let sighting = Sighting { kind, signal: signal.to_owned(), reporter: "reknitd".to_owned() };
            self.accuse(ctx, key, sighting);
        }
        if self.record.ever_committed {
            let sighting = Sighting {
                kind: IncidentKind::PlaneFailed,
                signal: "members had stopped when the daemon came back".to_owned(),
                reporter: "reknitd".to_owned(),
            };
            self.suspect(ctx, sighting);
        }
    }

    fn stop_if_engaged(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey, reason: &str) {
        let Some(state) = self.workers.get(key).and_then(|worker| worker.state.clone()) else {
            return;
        };
        match state.phase {
            WorkerPhase::Opening => self.await_no_more(key),
            WorkerPhase::Idle | WorkerPhase::Quiesced | WorkerPhase::Completed => {
                self.quiesced(ctx, key, state);
            }
            WorkerPhase::Training | WorkerPhase::Preparing | WorkerPhase::Ready => {
                self.close_own(ctx, key, &state, reason);
            }
        }
    }
}
