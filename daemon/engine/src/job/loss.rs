//! What is lost, and what that means where the job stands.

use super::incidents::{Open, Sighting};
use super::worker::Fate;
use super::{Closing, Job, Loss, Stage};
use crate::cluster::Cluster;
use crate::state::Ctx;
use crate::{ExitStatus, IncidentKind, Phase, Time, Timeouts, WorkerState};
use reknit_layout::{Epoch, GpuId, NodeName, WorkerKey};

impl Job {
    /// The process is gone: confirmed, or taken as gone after its fence deadline.
    pub(crate) fn gone(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey, sighting: Sighting) {
        let Some(worker) = self.workers.get(key) else {
            return;
        };
        let expected = match worker.fate {
            Fate::Stopping { .. } => true,
            Fate::Alive | Fate::Fencing { .. } => false,
        };
        let member_since = worker.member_since;
        self.notify_worker(ctx, key, &format!("gone: {}", sighting.signal));
        self.workers.remove(key);
        self.spares_due = true;
        if !expected {
            let settled = member_since.is_some_and(|since| ctx.now >= since.after(ctx.timeouts.settled()));
            let relapses = match self.losses.get(&key.gpu) {
                Some(before) if !settled => before.relapses + 1,
                Some(_) | None => u32::from(member_since.is_none()),
            };
            let loss = Loss { at: ctx.now, relapses, sighting: sighting.clone() };
            self.losses.insert(key.gpu.clone(), loss);
            if let Stage::Starting { .. } = self.stage {
                let explanation = format!("{}: {}", self.name_of(key), sighting.signal);
                self.set_phase(ctx, Phase::Starting, &explanation);
            }
            if self.concerns(key) {
                let reason = format!("{}: {}", self.name_of(key), sighting.signal);
                self.accuse(ctx, key, sighting);
                self.disturb(ctx, &reason);
            }
        }
        if let Stage::Closing(closing) = &mut self.stage {
            closing.awaited.remove(key);
        }
        self.forget_ahead_with(key);
    }

    pub(crate) fn exited(&mut self, ctx: &mut Ctx<'_>, node: &NodeName, key: &WorkerKey, exit: ExitStatus) {
        let kind = match exit.signal {
            Some(9) => IncidentKind::WorkerKilled,
            Some(_) | None => IncidentKind::WorkerExited,
        };
        let sighting = Sighting { kind, signal: exit.how, reporter: format!("agent of {node}") };
        // Only its own agent knows.
        match self.workers.get(key) {
            Some(worker) if worker.node == *node => self.gone(ctx, key, sighting),
            Some(_) => {}
            None => self.explain_end(ctx, node, key, sighting),
        }
    }

    /// Its end was noticed before, or will be when a new daemon has heard everyone: how it came explains the incident.
    fn explain_end(&mut self, ctx: &mut Ctx<'_>, node: &NodeName, key: &WorkerKey, sighting: Sighting) {
        if let (Stage::Rebuilding { .. }, true) = (&self.stage, self.is_member(key)) {
            self.losses.insert(key.gpu.clone(), Loss { at: ctx.now, relapses: 0, sighting });
            return;
        }
        let open = self.incidents.open.iter();
        // That a drained worker left explains nothing.
        let fault = |open: &&Open| open.incident.kind != IncidentKind::Planned;
        let mut own = open.filter(fault).filter(|open| open.worker.as_ref() == Some(key));
        if own.any(|open| open.incident.node.as_ref() == Some(node)) {
            self.accuse(ctx, key, sighting);
        }
    }

    /// Whether the present layout, or the one being made, needs the worker.
    fn concerns(&self, key: &WorkerKey) -> bool {
        match &self.stage {
            Stage::Running | Stage::Waiting { .. } => self.is_member(key),
            Stage::Closing(closing) => closing.awaited.contains(key) || self.is_member(key),
            Stage::Planning(planning) => {
                planning.members.values().any(|member| member == key) || planning.holders.contains(key)
            }
            Stage::Preparing(preparing) => preparing.involves(key),
            Stage::Pending
            | Stage::Starting { .. }
            | Stage::Draining { .. }
            | Stage::Ended
            | Stage::Rebuilding { .. } => false,
        }
    }

    /// The present epoch, or the change under way, cannot go on as it is.
    pub(crate) fn disturb(&mut self, ctx: &mut Ctx<'_>, reason: &str) {
        match &self.stage {
            Stage::Running => {
                let (members, epoch) = (self.members(), self.epoch());
                // What is joined in the background ends with it.
                let ahead = self.ahead.as_ref().filter(|ahead| ahead.deadline().is_some());
                let epoch = ahead.map_or(epoch, |ahead| ahead.epoch.max(epoch));
                self.close(ctx, epoch, members, reason);
            }
            Stage::Closing(_) => self.escalate(ctx, reason),
            Stage::Planning(_) => self.plan(ctx),
            Stage::Preparing(preparing) => {
                let epoch = preparing.epoch;
                let engaged = preparing.participants.iter();
                let engaged = engaged.map(|p| p.worker.clone()).collect();
                self.close(ctx, epoch, engaged, reason);
            }
            Stage::Pending
            | Stage::Starting { .. }
            | Stage::Waiting { .. }
            | Stage::Draining { .. }
            | Stage::Ended
            | Stage::Rebuilding { .. } => {}
        }
    }

    /// A report of the plane is only a suspicion: it ends the epoch and condemns nobody.
    pub(crate) fn plane_failed(
        &mut self,
        ctx: &mut Ctx<'_>,
        key: &WorkerKey,
        epoch: Epoch,
        peer: Option<&WorkerKey>,
        reason: &str,
    ) {
        // While rebuilding, the Quiesced that follows counts: it says what is held.
        let paused = matches!(&self.stage, Stage::Closing(Closing { paused: true, .. }));
        if (self.running() || paused) && epoch == self.epoch() && self.is_member(key) {
            self.suspect_plane(ctx, key, peer, reason);
        }
    }

    /// `peer`: whom the reporter does not reach any more, if it can tell.
    pub(crate) fn suspect_plane(
        &mut self,
        ctx: &mut Ctx<'_>,
        key: &WorkerKey,
        peer: Option<&WorkerKey>,
        reason: &str,
    ) {
        let reporter = self.name_of(key);
        let text = match peer {
            Some(peer) => format!("{reporter} no longer reaches {}", self.name_of(peer)),
            None => format!("{reporter}: {reason}"),
        };
        let sighting = Sighting { kind: IncidentKind::PlaneFailed, signal: reason.to_owned(), reporter };
        self.suspect(ctx, sighting);
        self.disturb(ctx, &text);
    }

    pub(crate) fn quiesced(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey, state: WorkerState) {
        if self.trains_under(state.epoch, key) {
            // Its report of the failure did not arrive.
            self.suspect_plane(ctx, key, None, "it stopped by itself");
        }
        self.learn_committed(key, &state);
        let member = self.is_member(key);
        let Some(mut worker) = self.workers.get_mut(key) else {
            return;
        };
        // It has opened its data.
        worker.joined_by = None;
        match &mut self.stage {
            Stage::Closing(closing) if closing.awaited.contains(key) => {
                worker.state = Some(state);
                worker.stopped = true;
                // A worker that is being killed is awaited until that is confirmed.
                if !worker.fencing() {
                    closing.awaited.remove(key);
                }
            }
            Stage::Rebuilding { .. } => worker.state = Some(state),
            // A member that was taken as lost is one again.
            Stage::Waiting { .. } => {
                worker.state = Some(state);
                worker.stopped = true;
            }
            // Nobody waits for it, but now it can be prepared.
            Stage::Closing(_) | Stage::Planning(_) | Stage::Preparing(_) if !member || !worker.stopped => {
                worker.state = Some(state);
                worker.stopped = true;
            }
            Stage::Running | Stage::Starting { .. } if !member => {
                worker.state = Some(state);
                worker.stopped = true;
            }
            // Repeated, or about an epoch that is over (ONE-EPOCH).
            Stage::Closing(_)
            | Stage::Running
            | Stage::Pending
            | Stage::Starting { .. }
            | Stage::Planning(_)
            | Stage::Preparing(_)
            | Stage::Draining { .. }
            | Stage::Ended => {}
        }
    }

    pub(crate) fn prepare_failed(
        &mut self,
        ctx: &mut Ctx<'_>,
        key: &WorkerKey,
        epoch: Epoch,
        peer: Option<&WorkerKey>,
        reason: &str,
    ) {
        if self.join_failed(ctx, key, epoch, peer) {
            return;
        }
        let Stage::Preparing(preparing) = &self.stage else {
            return;
        };
        if preparing.epoch != epoch {
            return;
        }
        let blamed = peer.filter(|peer| preparing.involves(peer)).unwrap_or(key);
        self.suspect_plane(ctx, key, peer, reason);
        self.strike(ctx, blamed);
    }

    /// The driver lost the GPU, or the agent says so: its worker is killed at once, its shards count as lost.
    pub(crate) fn gpu_lost(&mut self, ctx: &mut Ctx<'_>, node: &NodeName, gpu: &GpuId, cause: &str) {
        let sighting = Sighting {
            kind: IncidentKind::GpuLost,
            signal: cause.to_owned(),
            reporter: format!("agent of {node}"),
        };
        let Some(key) = self.worker_on(gpu).map(|(key, _)| key.clone()) else {
            self.explain_late(ctx, gpu, sighting);
            return;
        };
        // The fence goes out before anything that is only told.
        self.fence(ctx, &key);
        if self.concerns(&key) {
            let reason = format!("{}: {cause}", self.name_of(&key));
            self.accuse(ctx, &key, sighting);
            self.disturb(ctx, &reason);
        }
    }

    /// Its worker is gone already: the driver's word explains the open incident, if there is one.
    fn explain_late(&mut self, ctx: &mut Ctx<'_>, gpu: &GpuId, sighting: Sighting) {
        let open = self.incidents.open.iter().rev();
        let worker = open
            .filter(|open| open.incident.kind != IncidentKind::Planned)
            .filter(|open| open.incident.gpu.as_ref() == Some(gpu))
            .find_map(|open| open.worker.clone());
        if let Some(worker) = worker {
            self.accuse(ctx, &worker, sighting);
        }
    }

    /// The agent's lease ran out: its workers are lost unless they still speak for themselves.
    pub(crate) fn node_lost(&mut self, ctx: &mut Ctx<'_>, node: &NodeName) {
        let silent: Vec<_> = self
            .workers
            .on_node(node)
            .filter(|(_, worker)| !worker.session)
            .map(|(key, _)| key.clone())
            .collect();
        for key in silent {
            let sighting = Sighting {
                kind: IncidentKind::NodeLost,
                signal: format!("nothing heard of {node} for its lease"),
                reporter: "reknitd".to_owned(),
            };
            self.gone(ctx, &key, sighting);
        }
    }

    /// Deadlines of single workers.
    pub(crate) fn expire_workers(&mut self, ctx: &mut Ctx<'_>) {
        for (key, fate) in self.workers.late(ctx.now) {
            match fate {
                // It never opened its session, or did not leave when told to.
                Fate::Alive | Fate::Stopping { .. } => self.fence(ctx, &key),
                Fate::Fencing { .. } => {
                    let (kind, why) = if self.is_out_of_reach(ctx.cluster, &key) {
                        (
                            IncidentKind::NodeLost,
                            "its node did not answer, and its end could not be confirmed",
                        )
                    } else {
                        (IncidentKind::WorkerExited, "its end could not be confirmed")
                    };
                    let sighting = Sighting {
                        kind,
                        signal: format!("{why}; it can no longer take part"),
                        reporter: "reknitd".to_owned(),
                    };
                    self.gone(ctx, &key, sighting);
                }
            }
        }
    }

    /// Neither it nor its agent is heard.
    pub(crate) fn is_out_of_reach(&self, cluster: &Cluster, key: &WorkerKey) -> bool {
        let worker = self.workers.get(key);
        worker.is_some_and(|worker| !worker.session && !cluster.connected(&worker.node))
    }

    /// The member without progress for longest, and when that becomes suspicious. Members without a session
    /// cannot report and are not judged.
    pub(crate) fn suspicion(&self, timeouts: &Timeouts) -> Option<(WorkerKey, Time)> {
        let (last, oldest) = self.workers.by_progress().find(|(_, key)| self.is_member(key))?;
        Some((oldest.clone(), last.after(timeouts.suspicion())))
    }

    /// True when a member is suspiciously long without progress; the epoch is then closed, and who does not even
    /// answer that is fenced.
    pub(crate) fn check_progress(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let Some((key, at)) = self.suspicion(ctx.timeouts) else {
            return false;
        };
        if ctx.now < at {
            return false;
        }
        let name = self.name_of(&key);
        let limit = ctx.timeouts.suspicion().as_millis();
        let signal = format!("no training progress for {limit} ms, longest at {name}");
        let sighting =
            Sighting { kind: IncidentKind::Frozen, signal: signal.clone(), reporter: "reknitd".to_owned() };
        self.suspect(ctx, sighting);
        self.disturb(ctx, &signal);
        true
    }
}
