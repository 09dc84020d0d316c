//! What was seen of a run: every figure of the summary comes from here.

use super::phases::Phases;
use reknit_proto::v1::job_event::Event;
use reknit_proto::v1::{HealthClass, Incident, JobEvent, LayoutCommitted, StepCommitted, WorkerChanged};
use std::collections::{BTreeMap, BTreeSet};

/// The events of one job, added up.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    /// The degree of each group when every slot is active.
    nominal: Vec<u32>,
    global_batch: u64,
    pub(crate) phase: String,
    pub(crate) explanation: String,
    /// By step, as first seen.
    pub(crate) steps: BTreeMap<u64, StepSeen>,
    /// In the order of commits.
    pub(crate) layouts: Vec<LayoutCommitted>,
    pub(crate) faults: Vec<Fault>,
    /// Incidents that belong to no fault of ours, by id.
    pub(crate) others: BTreeMap<u64, Incident>,
    /// Layouts that resumed from an older step than was committed: what loading a checkpoint, or any other way of
    /// going back, would show as.
    pub(crate) went_back: u64,
    /// Processes of workers that came up.
    up: BTreeSet<u32>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StepSeen {
    pub(crate) time_us: u64,
    pub(crate) epoch: u64,
    pub(crate) loss: f64,
    pub(crate) tokens: u64,
    /// How often it was reported complete: all its samples accounted for. Must be once.
    pub(crate) completed: u32,
    pub(crate) samples_missing: u64,
    pub(crate) samples_repeated: u64,
}

/// How far the job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) committed: u64,
    /// The committed layout has every slot active.
    pub(crate) whole: bool,
}

/// A fault that was made here.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    pub(crate) place: String,
    pub(crate) gpu: String,
    /// When it was made.
    pub(crate) time_us: u64,
    /// Steps committed by then.
    pub(crate) after_step: u64,
    /// The daemon's record of it, as last reported.
    pub(crate) incident: Option<Incident>,
}

impl Fault {
    /// What is wrong since then.
    pub(crate) fn words(&self) -> String {
        let place = &self.place;
        match self.kind {
            FaultKind::WorkerKilled => format!("worker {place} is gone"),
            FaultKind::Frozen => format!("worker {place} is frozen"),
            FaultKind::GpuLost => format!("the GPU of worker {place} is lost"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FaultKind {
    WorkerKilled,
    Frozen,
    GpuLost,
}

impl FaultKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::WorkerKilled => "worker_killed",
            Self::Frozen => "frozen",
            Self::GpuLost => "gpu_lost",
        }
    }
}

/// Something worth telling as it happens.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Moment {
    Step(u64),
    Phase {
        phase: String,
        explanation: String,
    },
    Layout {
        epoch: u64,
        degrees: Vec<u32>,
        batch: Vec<u32>,
        resume_step: u64,
        bytes_moved: u64,
    },
    /// The fault with this index has healed: a step was committed after it.
    Recovered(usize),
    /// A change that is no fault of ours is over: what it was, where, and how long it took until the next step.
    Changed {
        what: String,
        place: String,
        ms: f64,
    },
    Worker {
        place: String,
        node: String,
        pid: u32,
        state: String,
    },
    Note(String),
}

impl Record {
    pub(crate) fn new(nominal: Vec<u32>, global_batch: u32) -> Self {
        Self { nominal, global_batch: global_batch.into(), ..Self::default() }
    }

    pub(crate) fn committed(&self) -> u64 {
        self.steps.keys().next_back().copied().unwrap_or(0)
    }

    pub(crate) fn degrees(&self) -> &[u32] {
        self.layouts.last().map_or(&[], |layout| &layout.degrees)
    }

    pub(crate) fn standing(&self) -> Standing {
        Standing { committed: self.committed(), whole: self.degrees() == self.nominal }
    }

    pub(crate) fn fault(&mut self, kind: FaultKind, place: String, gpu: String, time_us: u64) {
        let after_step = self.committed();
        self.faults.push(Fault { kind, place, gpu, time_us, after_step, incident: None });
    }

    /// Takes in one event and says what is worth telling of it.
    pub(crate) fn observe(&mut self, event: &JobEvent) -> Option<Moment> {
        match event.event.as_ref()? {
            Event::Step(step) => self.step(event.time_us, step),
            Event::Phase(phase) => {
                self.phase.clone_from(&phase.phase);
                self.explanation.clone_from(&phase.explanation);
                Some(Moment::Phase { phase: phase.phase.clone(), explanation: phase.explanation.clone() })
            }
            Event::Layout(layout) => Some(self.layout(layout)),
            Event::Incident(incident) => self.incident(incident),
            Event::Worker(worker) => self.worker(worker),
            Event::Note(note) => Some(Moment::Note(note.text.clone())),
            Event::Health(health) => match health.health() {
                HealthClass::Predict | HealthClass::Unknown => Some(Moment::Note(format!(
                    "GPU {} on {}: {}",
                    health.gpu,
                    health.node,
                    health.verdict().cause
                ))),
                // What follows from these is told as an incident or a change.
                HealthClass::Unspecified
                | HealthClass::Healthy
                | HealthClass::Fatal
                | HealthClass::RankDied
                | HealthClass::Drain => None,
            },
        }
    }

    fn step(&mut self, time_us: u64, step: &StepCommitted) -> Option<Moment> {
        let new = !self.steps.contains_key(&step.step);
        let seen = self.steps.entry(step.step).or_insert_with(|| StepSeen {
            time_us,
            epoch: step.epoch,
            loss: step.loss,
            tokens: step.tokens,
            completed: 0,
            samples_missing: 0,
            samples_repeated: 0,
        });
        if step.complete {
            seen.completed += 1;
            seen.samples_missing += u64::from(step.samples_missing);
            seen.samples_repeated += u64::from(step.samples_repeated);
        }
        new.then_some(Moment::Step(step.step))
    }

    fn layout(&mut self, layout: &LayoutCommitted) -> Moment {
        if layout.resume_step < self.committed() {
            self.went_back += 1;
        }
        self.layouts.push(layout.clone());
        Moment::Layout {
            epoch: layout.epoch,
            degrees: layout.degrees.clone(),
            batch: layout.batch.clone(),
            resume_step: layout.resume_step,
            bytes_moved: layout.bytes_moved,
        }
    }

    /// A worker that comes up is told of by its agent ("started") and by itself ("opening", or "idle" where that was missed), whoever is first.
    fn worker(&mut self, worker: &WorkerChanged) -> Option<Moment> {
        let comes_up = matches!(worker.state.as_str(), "started" | "opening" | "idle");
        if comes_up && worker.pid != 0 && !self.up.insert(worker.pid) {
            return None;
        }
        Some(Moment::Worker {
            place: worker.place.clone(),
            node: worker.node.clone(),
            pid: worker.pid,
            state: if comes_up { "started".to_owned() } else { worker.state.clone() },
        })
    }

    /// The newest fault that no step was committed after.
    pub(crate) fn open_fault(&self) -> Option<&Fault> {
        let index = (0..self.faults.len()).rev().find(|&index| self.phases(index).is_none())?;
        self.faults.get(index)
    }

    fn incident(&mut self, incident: &Incident) -> Option<Moment> {
        let over = incident.recovered_us != 0;
        let Some(index) = self.fault_of(incident) else {
            let before = self.others.insert(incident.id, incident.clone());
            let known = before.is_some_and(|before| before.recovered_us != 0);
            return (over && !known).then(|| Moment::Changed {
                what: incident.signal.clone(),
                place: incident.place.clone(),
                ms: incident.recovered_us.saturating_sub(incident.detected_us) as f64 / 1000.0,
            });
        };
        let before = self.faults[index].incident.replace(incident.clone());
        let known = before.is_some_and(|before| before.recovered_us != 0);
        (over && !known).then_some(Moment::Recovered(index))
    }

    /// The fault that an incident tells of: known by its id, else the newest one at that place or GPU without one. That a
    /// worker is slow, or no more, tells of none.
    fn fault_of(&self, incident: &Incident) -> Option<usize> {
        let known = |fault: &Fault| fault.incident.as_ref().is_some_and(|known| known.id == incident.id);
        let fits = |fault: &Fault| {
            fault.incident.is_none()
                && !matches!(incident.kind.as_str(), "planned" | "slow")
                && (incident.gpu == fault.gpu || incident.place == fault.place)
        };
        self.faults.iter().position(known).or_else(|| self.faults.iter().rposition(fits))
    }

    pub(crate) fn phases(&self, index: usize) -> Option<Phases> {
        let fault = self.faults.get(index)?;
        Phases::of(fault.time_us, fault.incident.as_ref()?)
    }

    /// Samples lost and repeated in the steps after the fault, up to the next one.
    ///
    /// A step whose samples were never accounted for has lost all of them; one completed twice has repeated all.
    pub(crate) fn samples_of_fault(&self, index: usize) -> (u64, u64) {
        let from = if index == 0 { 0 } else { self.faults[index].after_step };
        let to = self.faults.get(index + 1).map_or(u64::MAX, |next| next.after_step);
        self.samples(from, to)
    }

    /// Samples lost and repeated in the steps `from + 1 ..= to`.
    pub(crate) fn samples(&self, from: u64, to: u64) -> (u64, u64) {
        let to = to.min(self.committed());
        let mut totals = (0, 0);
        for number in from + 1..=to {
            match self.steps.get(&number) {
                Some(step) if step.completed > 0 => {
                    totals.0 += step.samples_missing;
                    totals.1 += step.samples_repeated + u64::from(step.completed - 1) * self.global_batch;
                }
                Some(_) | None => totals.0 += self.global_batch,
            }
        }
        totals
    }

    /// The degrees of every layout, without repeats in a row.
    pub(crate) fn degrees_seen(&self) -> Vec<Vec<u32>> {
        let mut seen: Vec<_> = self.layouts.iter().map(|layout| layout.degrees.clone()).collect();
        seen.dedup();
        seen
    }

    pub(crate) fn bytes_moved(&self) -> u64 {
        self.layouts.iter().map(|layout| layout.bytes_moved).sum()
    }

    pub(crate) fn losses(&self) -> BTreeMap<u64, f64> {
        self.steps.iter().map(|(step, seen)| (*step, seen.loss)).collect()
    }

    /// Wall time between consecutive committed steps of one epoch, that is outside recoveries, in milliseconds.
    pub(crate) fn step_ms(&self) -> Vec<f64> {
        self.step_ms_of(|_| true)
    }

    /// As [`Record::step_ms`], of the layouts that have every slot active.
    pub(crate) fn whole_step_ms(&self) -> Vec<f64> {
        let whole = self.whole_epochs();
        self.step_ms_of(|epoch| whole.contains(&epoch))
    }

    /// As [`Record::step_ms`], of the others.
    pub(crate) fn uneven_step_ms(&self) -> Vec<f64> {
        let whole = self.whole_epochs();
        self.step_ms_of(|epoch| !whole.contains(&epoch))
    }

    fn whole_epochs(&self) -> BTreeSet<u64> {
        let whole = self.layouts.iter().filter(|layout| layout.degrees == self.nominal);
        whole.map(|layout| layout.epoch).collect()
    }

    fn step_ms_of(&self, wanted: impl Fn(u64) -> bool) -> Vec<f64> {
        let pairs = self.steps.values().zip(self.steps.iter().skip(1));
        let within = pairs.filter(|(before, (_, after))| before.epoch == after.epoch && wanted(after.epoch));
        within.filter_map(|(_, (step, _))| self.gap_before(*step)).collect()
    }

    /// Wall time between the step and the one before it, in milliseconds.
    pub(crate) fn gap_before(&self, step: u64) -> Option<f64> {
        let before = self.steps.get(&step.checked_sub(1)?)?;
        let gap = self.steps.get(&step)?.time_us.saturating_sub(before.time_us);
        Some(gap as f64 / 1000.0)
    }

    /// Over the last `steps` steps of the current epoch; `None` before there are two.
    pub(crate) fn tokens_per_second(&self, steps: usize) -> Option<f64> {
        let (_, newest) = self.steps.last_key_value()?;
        let recent = self.steps.values().rev().take_while(|step| step.epoch == newest.epoch);
        let recent: Vec<_> = recent.take(steps + 1).collect();
        let oldest = recent.last()?;
        let tokens: u64 = recent[..recent.len() - 1].iter().map(|step| step.tokens).sum();
        let seconds = newest.time_us.saturating_sub(oldest.time_us) as f64 / 1e6;
        (seconds > 0.0).then(|| tokens as f64 / seconds)
    }
}

/// `TP4+TP3`
pub(crate) fn degrees_text(degrees: &[u32]) -> String {
    let parts: Vec<_> = degrees.iter().map(|degree| format!("TP{degree}")).collect();
    parts.join("+")
}

/// The middle value; the mean of the two middle ones of an even number.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    if sorted.len() % 2 == 1 { Some(upper) } else { Some((sorted[middle - 1] + upper) / 2.0) }
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
