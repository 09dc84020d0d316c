//! Who holds the others up: hangs and stragglers, from what members report of their progress.

pub(crate) mod hang;
pub(crate) mod straggler;

use super::Job;
use super::incidents::Sighting;
use crate::cluster::Cluster;
use crate::state::Ctx;
use crate::{Activity, DrainedBy, Incident, IncidentKind, StepPart, Time};
use hang::{Evidence, Limits, Member};
use reknit_layout::job::Reaction;
use reknit_layout::{Epoch, GpuId, Incarnation, Place, Step, WorkerKey};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use straggler::{Track, Verdict, median};

/// Steps whose median is the usual step time.
const STEPS: usize = 9;
/// Members are compared at most so often.
const LOOK: Duration = Duration::from_millis(500);
/// A straggler whose excess is a smaller part of the step costs nothing worth telling.
const WORTH_TELLING: f64 = 0.05;

#[derive(Debug, Clone, Default)]
pub(crate) struct Pace {
    /// The layout that the measurements are of.
    epoch: Epoch,
    newest: Step,
    /// Of steps that were not the first of their epoch.
    step_ms: VecDeque<f64>,
    /// Some step of the epoch is committed: the next one takes no longer than usual.
    settled: bool,
    /// Parameters times samples of each member's step.
    work: BTreeMap<WorkerKey, f64>,
    tracks: BTreeMap<WorkerKey, Track>,
    hangs_judged: Time,
    pace_judged: Time,
    /// What is told and not over, with its incident.
    hung: BTreeMap<WorkerKey, u64>,
    slow: BTreeMap<WorkerKey, u64>,
}

impl Job {
    /// A member reports. It has moved only if its ticks have. Returns a straggler's GPU that policy takes out.
    pub(crate) fn progress(
        &mut self,
        ctx: &mut Ctx<'_>,
        key: &WorkerKey,
        (epoch, step): (Epoch, Step),
        ticks: u64,
        activity: Activity,
    ) -> Option<GpuId> {
        let mut worker = self.workers.get_mut(key)?;
        let moved = worker.ticks != ticks;
        if moved {
            worker.ticks = ticks;
            worker.last_progress = ctx.now;
        }
        let waited = activity.waiting();
        let computed = activity.computed_us;
        worker.heard = ctx.now;
        worker.spoke = worker.spoke.map(|_| ctx.now);
        worker.activity = activity;
        drop(worker);
        self.hears(ctx);
        if !self.trains_under(epoch, key) {
            return None;
        }
        self.measure_epoch(ctx);
        if moved && let Some(id) = self.pace.hung.remove(key) {
            self.tell_over(ctx, id);
        }
        self.pace.tracks.entry(key.clone()).or_default().sample(step, computed);
        let drain = self.judge_pace(ctx);
        if let Some(limit) = self.hang_after(ctx).filter(|limit| waited >= *limit) {
            self.judge_hangs(ctx, limit);
        }
        drain
    }

    /// A step was committed in this time.
    pub(crate) fn observe_step(&mut self, ctx: &mut Ctx<'_>, epoch: Epoch, step: Step, step_ms: u32) {
        if epoch != self.epoch() {
            return;
        }
        self.measure_epoch(ctx);
        if step <= self.pace.newest {
            return;
        }
        self.pace.newest = step;
        if std::mem::replace(&mut self.pace.settled, true) {
            self.pace.step_ms.push_back(step_ms.into());
            if self.pace.step_ms.len() > STEPS {
                self.pace.step_ms.pop_front();
            }
        }
    }

    /// What an earlier daemon told of a worker and did not see end. Of one that is no member any more it is over as soon as
    /// the members are looked at.
    pub(crate) fn still_told(&mut self, incident: &Incident) {
        let Some(gpu) = incident.gpu.clone() else {
            return;
        };
        let member = self.member_on(&gpu).map(|(worker, _)| worker.clone());
        let worker = member.unwrap_or(WorkerKey { gpu, incarnation: Incarnation(0) });
        match incident.kind {
            IncidentKind::Frozen => self.pace.hung.insert(worker, incident.id),
            IncidentKind::Slow => {
                self.pace.tracks.insert(worker.clone(), Track::told_before());
                self.pace.slow.insert(worker, incident.id)
            }
            IncidentKind::WorkerKilled
            | IncidentKind::WorkerExited
            | IncidentKind::GpuLost
            | IncidentKind::PlaneFailed
            | IncidentKind::NodeLost
            | IncidentKind::Planned => None,
        };
    }

    /// Begins anew when the layout has changed: shares are others, and the first step takes longer. Whoever hung has
    /// taken part in the change or is gone.
    fn measure_epoch(&mut self, ctx: &mut Ctx<'_>) {
        let epoch = self.epoch();
        if self.pace.epoch == epoch {
            return;
        }
        self.pace.epoch = epoch;
        self.pace.settled = false;
        self.pace.newest = Step(0);
        self.pace.work = self.works();
        let members = &self.members;
        self.pace.tracks.retain(|key, _| members.contains_key(key));
        for track in self.pace.tracks.values_mut() {
            track.begin();
        }
        let slow = std::mem::take(&mut self.pace.slow);
        let (slow, left): (BTreeMap<_, _>, BTreeMap<_, _>) =
            slow.into_iter().partition(|(key, _)| members.contains_key(key));
        self.pace.slow = slow;
        for id in left.into_values().chain(std::mem::take(&mut self.pace.hung).into_values()) {
            self.tell_over(ctx, id);
        }
    }

    /// Of each member: the parameters that it computes with, times the samples of its replica.
    fn works(&self) -> BTreeMap<WorkerKey, f64> {
        let Some(layout) = &self.record.layout else {
            return BTreeMap::new();
        };
        let everywhere = self.spec.model.replicated_params();
        let groups = layout.groups.iter().flat_map(|group| {
            let mut params = vec![everywhere; group.slots.len()];
            for (axis, sets) in group.partitions.iter() {
                let unit = self.spec.unit_params(group.stage, axis.family);
                for (sum, owned) in params.iter_mut().zip(sets) {
                    *sum += u64::from(owned.len()) * unit;
                }
            }
            let samples = layout.samples_of(group.replica).len() as f64;
            let works = group.members().map(move |(place, member)| {
                let params = params.get(place.slot.0 as usize).copied().unwrap_or(everywhere);
                (member.worker.clone(), params as f64 * samples)
            });
            works.collect::<Vec<_>>()
        });
        groups.collect()
    }

    /// How long a member may be waited for; `None` while the usual step time is not known. The first step of an epoch
    /// gets twice the time.
    fn hang_after(&self, ctx: &Ctx<'_>) -> Option<Duration> {
        let usual = median(self.pace.step_ms.iter().copied())?;
        let limit = ctx.timeouts.hang_after(Duration::from_secs_f64(usual / 1e3));
        Some(if self.pace.settled { limit } else { limit * 2 })
    }

    fn judge_hangs(&mut self, ctx: &mut Ctx<'_>, limit: Duration) {
        // A stuck job's members all report at the same time: one look serves them all.
        if ctx.now < self.pace.hangs_judged.after(ctx.timeouts.stall() / 5) {
            return;
        }
        self.pace.hangs_judged = ctx.now;
        let limits =
            Limits { stall: ctx.timeouts.stall(), hang: limit, silence: ctx.timeouts.silence_of_a_member() };
        let since = |time: Time| Duration::from_micros(ctx.now.0.saturating_sub(time.0));
        // Of reports that come together one is the first, and one may be late: a wait told before still lasts.
        let lately = limits.stall.max(limits.silence);
        let members = self.members.keys().filter_map(|key| {
            let worker = self.workers.get(key)?;
            let said = since(worker.heard) < lately;
            let waited = if said { worker.activity.waiting() } else { Duration::ZERO };
            let still = (worker.session && worker.alive()).then(|| since(worker.last_progress));
            Some((key, Member { waiting_for: &worker.activity.waiting_for, waited, still }))
        });
        let accused = hang::accused(&members.collect(), limits);
        for (key, evidence) in accused {
            let sighting = Sighting {
                kind: IncidentKind::Frozen,
                signal: self.describe_hang(ctx, &key, &evidence),
                reporter: self.name_of(&evidence.longest.0),
            };
            let (act, sighting) = match self.spec.recovery.on_hang {
                Reaction::Act if self.can_do_without(&key) => (true, sighting),
                Reaction::Act => {
                    let signal =
                        format!("{}; nobody else holds what it holds, so it is not killed", sighting.signal);
                    (false, Sighting { signal, ..sighting })
                }
                Reaction::Report => (false, sighting),
            };
            if act {
                // The fence goes out before anything that is only told.
                self.fence(ctx, &key);
                let reason = format!("{} hangs", self.name_of(&key));
                self.accuse(ctx, &key, sighting);
                self.disturb(ctx, &reason);
            } else if !self.pace.hung.contains_key(&key) {
                let id = self.tell(ctx, &key, sighting);
                self.pace.hung.insert(key, id);
            }
        }
    }

    /// "worker 0.0.1 (GPU-1 on node-0) does not arrive: 3 of 3 others wait for it since 812 ms, in the backward pass of
    /// micro-batch 2 of step 41; it last moved 830 ms ago".
    fn describe_hang(&self, ctx: &Ctx<'_>, key: &WorkerKey, evidence: &Evidence) -> String {
        let (witness, waited) = &evidence.longest;
        let activity = self.workers.get(witness).map(|worker| worker.activity.clone()).unwrap_or_default();
        let at = match (activity.part, activity.micro_batch) {
            (Some(StepPart::Forward), batch) => format!("the forward pass of micro-batch {batch}"),
            (Some(StepPart::Backward), batch) => format!("the backward pass of micro-batch {batch}"),
            (Some(StepPart::Sums), _) => "the sum of gradients".to_owned(),
            (Some(StepPart::Vote), _) => "the vote".to_owned(),
            (Some(StepPart::Apply), _) => "the optimizer".to_owned(),
            (None, _) => "an operation".to_owned(),
        };
        let moved =
            self.workers.get(key).map_or(0, |worker| ctx.now.0.saturating_sub(worker.last_progress.0));
        format!(
            "{} does not arrive: {} of {} others wait for it since {} ms, in {at} of step {}; it last showed progress {} ms ago",
            self.full_name_of(key),
            evidence.waiters.len(),
            self.size().saturating_sub(1),
            waited.as_millis(),
            self.committed.0 + 1,
            moved / 1_000,
        )
    }

    /// "worker 0.0.1 (GPU-1 on node-0)".
    pub(crate) fn full_name_of(&self, key: &WorkerKey) -> String {
        let node = self.workers.get(key).map(|worker| format!(" on {}", worker.node)).unwrap_or_default();
        format!("{} ({}{node})", self.name_of(key), key.gpu)
    }

    /// Compares everyone's computing with that of the others of the stage, by the work that each has.
    fn judge_pace(&mut self, ctx: &mut Ctx<'_>) -> Option<GpuId> {
        if ctx.now < self.pace.pace_judged.after(LOOK) {
            return None;
        }
        self.pace.pace_judged = ctx.now;
        let step_us = median(self.pace.step_ms.iter().copied())? * 1e3;
        let mut rates: Vec<(Place, &WorkerKey, f64, f64)> = Vec::new();
        for (key, track) in &self.pace.tracks {
            let found = (self.members.get(key), self.pace.work.get(key), track.typical());
            if let (Some(place), Some(work), Some(typical)) = found
                && *work > 0.0
            {
                rates.push((*place, key, typical, typical / work));
            }
        }
        let mut usual = BTreeMap::new();
        for (place, ..) in &rates {
            usual.entry(place.stage).or_insert_with(|| {
                let peers = rates.iter().filter(|(other, ..)| other.stage == place.stage);
                median_below(peers.map(|(.., rate)| *rate))
            });
        }
        let looks: Vec<_> = rates
            .iter()
            .filter_map(|(place, key, typical, rate)| {
                let usual = usual.get(&place.stage).copied().flatten().filter(|usual| *usual > 0.0)?;
                let factor = rate / usual;
                let excess = typical * (1.0 - 1.0 / factor);
                let told = self.pace.tracks.get(*key).is_some_and(Track::told);
                let counts = told || excess >= step_us * WORTH_TELLING;
                Some(((*key).clone(), if counts { factor } else { 1.0 }, *typical))
            })
            .collect();
        for (key, factor, typical) in looks {
            let verdict = match self.pace.tracks.get_mut(&key) {
                Some(track) => track.judge(factor),
                None => Verdict::Nothing,
            };
            match verdict {
                Verdict::Nothing => {}
                Verdict::Named => self.name_straggler(ctx, &key, factor, typical),
                Verdict::Cleared => {
                    if let Some(id) = self.pace.slow.remove(&key) {
                        self.tell_over(ctx, id);
                    }
                }
            }
        }
        self.straggler_to_drain(ctx.cluster)
    }

    /// A straggler without whom all replicas go on. One at a time: while an operator has not taken it back, others are only
    /// told of. It is slow, not lost, and redundancy is worth more than its share.
    fn straggler_to_drain(&self, cluster: &Cluster) -> Option<GpuId> {
        match self.spec.recovery.on_straggler {
            Reaction::Report => return None,
            Reaction::Act => {}
        }
        let mut by_policy = cluster.drained.iter().filter(|(_, by)| **by == DrainedBy::Policy);
        if by_policy.any(|(gpu, _)| self.has_gpu(gpu)) {
            return None;
        }
        let replicas = |but: Option<&WorkerKey>| {
            let stays = |key: &WorkerKey| cluster.may_train(&key.gpu) && Some(key) != but;
            let stay = self.members.iter().filter(|(key, _)| stays(key)).map(|(_, place)| *place);
            self.spec.training(stay).map_or(0, |training| training.len())
        };
        let mut slow = self.pace.slow.keys().filter(|key| cluster.may_train(&key.gpu));
        slow.find(|key| replicas(Some(key)) == replicas(None)).map(|key| key.gpu.clone())
    }

    fn name_straggler(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey, factor: f64, typical: f64) {
        let signal = format!(
            "{} is slow: it computes {:.1} ms a step, {factor:.2} times as long as its peers take for such a share",
            self.full_name_of(key),
            typical / 1e3,
        );
        let sighting = Sighting { kind: IncidentKind::Slow, signal, reporter: "reknitd".to_owned() };
        let id = self.tell(ctx, key, sighting);
        if let Some(before) = self.pace.slow.insert(key.clone(), id) {
            self.tell_over(ctx, before);
        }
    }
}

/// The median, the lower one of two in the middle: of two members the slower one shows.
fn median_below(values: impl Iterator<Item = f64>) -> Option<f64> {
    median(values.map(|value| -value)).map(|value| -value)
}
