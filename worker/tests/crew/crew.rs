//! The ranks, and the script that leads them.

use crate::fault::{Fault, FaultPlane, Tally, Trigger};
use reknit_layout::{
    Circle, Circles, Epoch, GpuId, Holding, Incarnation, JobSpec, Place, Plan, PlanRequest, Step, Topology,
    WorkerKey, candidates,
};
use reknit_model::Real;
use reknit_plane::host::HostPlane;
use reknit_plane::{Element, Plane, Ticket};
use reknit_worker::abort::Aborts;
use reknit_worker::control::Desk;
use reknit_worker::messages::{Committed, Participant, Phase, Prepare, StepVote, Timeouts, WorkerState};
use reknit_worker::pace::Pace;
use reknit_worker::rank::{Rank, Setting};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(crate) const TIMEOUTS: Timeouts = Timeouts {
    operation: Duration::from_secs(20),
    join: Duration::from_secs(20),
    progress: Duration::from_secs(1),
    stall: Duration::from_secs(1),
};

pub(crate) struct Seat<T: Real + Element> {
    pub(crate) worker: WorkerKey,
    pub(crate) place: Place,
    pub(crate) rank: Rank<T>,
    pub(crate) plane: Arc<dyn Plane>,
    pub(crate) pace: Arc<Pace>,
    pub(crate) trigger: Arc<Trigger>,
    /// An error in the last run.
    pub(crate) failed: Option<String>,
}

impl<T: Real + Element> Seat<T> {
    /// What a worker's own loop needs to take its place.
    pub(crate) fn desk(&self) -> Desk {
        Desk {
            worker: self.worker.clone(),
            plane: Arc::clone(&self.plane),
            aborts: Arc::new(Aborts::new(Arc::clone(&self.plane))),
            status: Arc::default(),
            outbox: Arc::default(),
            threads: reknit_model::Team::alone(),
            summons: Arc::default(),
        }
    }
}

pub(crate) struct Crew<T: Real + Element> {
    pub(crate) job: Arc<JobSpec>,
    pub(crate) seats: Vec<Seat<T>>,
    pub(crate) epoch: Epoch,
    pub(crate) committed: Step,
    /// The loss of every committed step, and the samples that went into it by replica.
    pub(crate) losses: Vec<f64>,
    pub(crate) samples: BTreeMap<Step, BTreeMap<u32, (u64, u32)>>,
    pub(crate) rolled_forward: usize,
    pub(crate) degrees: Vec<Vec<u32>>,
    /// Bytes of a reshard that travel at once between two ranks.
    pub(crate) chunk: usize,
    started: u64,
    commits: Arc<Tally>,
}

pub(crate) fn job(dir: &Path, dtype: &str, data: u32, tensor: u32, steps: u64) -> JobSpec {
    let text = dir.join("text.txt");
    let words: String = (0..4000).map(|i| format!("line {i} of {} words, ", i * 7919 % 1013)).collect();
    std::fs::write(&text, words).unwrap();
    spec(&text, dtype, data, tensor, steps)
}

/// The same over a text that need not be there.
pub(crate) fn spec(text: &Path, dtype: &str, data: u32, tensor: u32, steps: u64) -> JobSpec {
    let toml = format!(
        r#"
name = "crew"
[model]
kind = "decoder"
layers = 2
hidden = 48
heads = 12
kv_heads = 12
head_dim = 4
ffn = 96
ffn_block = 8
vocab = 256
vocab_block = 16
seq_len = 16
dtype = "{dtype}"
[parallel]
data = {data}
tensor = {tensor}
min_tensor = 1
[batch]
global = 10
micro = 3
[optimizer]
lr = 3e-3
warmup_steps = 5
decay_steps = 200
min_lr = 3e-4
betas = [0.9, 0.95]
eps = 1e-8
weight_decay = 0.1
grad_clip = 1.0
[data]
files = ["{}"]
[run]
steps = {steps}
seed = 11
"#,
        text.display()
    );
    JobSpec::parse(&toml, "crew.toml").unwrap()
}

/// A plan and what everyone is told of it.
pub(crate) struct Orders {
    pub(crate) epoch: Epoch,
    pub(crate) plan: Plan,
    pub(crate) resume_step: Step,
    circles: Circles,
    participants: Vec<Participant>,
    pub(crate) vote: Option<StepVote>,
    checkpoint: Option<PathBuf>,
}

impl Orders {
    pub(crate) fn of(&self, worker: &WorkerKey) -> Prepare {
        let part = self.circles.part(worker).cloned().unwrap_or_default();
        let peers = |circle: Option<&Circle>| {
            let found = circle.into_iter().flatten();
            let found = found.filter_map(|key| self.participants.iter().find(|p| p.worker == *key));
            found.cloned().collect::<Vec<_>>()
        };
        let layout = &self.plan.layout;
        Prepare {
            epoch: self.epoch,
            layout: part.tensor.map(|group| layout.cut_to(&layout.groups[group])),
            fresh: self.plan.fresh,
            checkpoint: self.checkpoint.clone(),
            transfers: part.transfers.iter().map(|at| (*at, self.plan.transfers[*at].clone())).collect(),
            tensor: peers(part.tensor.map(|at| &self.circles.tensor[at])),
            column: peers(part.column.map(|at| &self.circles.columns[at])),
            speakers: peers(part.speaks.then_some(&self.circles.speakers)),
            movers: peers(part.movers.map(|at| &self.circles.movers[at])),
            ticket: Ticket([self.epoch.0 as u8; 32]),
            resume_step: self.resume_step,
            vote: self.vote,
        }
    }
}

impl<T: Real + Element> Crew<T> {
    /// Every place filled, epoch 1 running.
    pub(crate) fn start(job: JobSpec) -> Self {
        let mut crew = Self::hired(job);
        crew.reform(true).unwrap();
        crew
    }

    /// Every place filled, and nobody has anything.
    pub(crate) fn hired(job: JobSpec) -> Self {
        let mut crew = Self {
            seats: Vec::new(),
            epoch: Epoch(0),
            committed: Step(0),
            losses: Vec::new(),
            samples: BTreeMap::new(),
            rolled_forward: 0,
            degrees: Vec::new(),
            chunk: 1 << 10,
            started: 0,
            commits: Arc::default(),
            job: Arc::new(job),
        };
        for replica in 0..crew.job.parallel.data {
            for slot in 0..crew.job.parallel.tensor {
                crew.hire(Place::new(replica, 0, slot));
            }
        }
        crew
    }

    /// A new worker for an empty place. It takes part from the next [`Crew::reform`] on.
    pub(crate) fn hire(&mut self, place: Place) {
        self.started += 1;
        let worker = WorkerKey {
            gpu: GpuId(format!("GPU-{}-{}", place.replica, place.slot)),
            incarnation: Incarnation(self.started),
        };
        // Replicas are nodes: tensor groups use Unix sockets, the sums over replicas TCP.
        let node = format!("node-{}", place.replica);
        let trigger = Arc::new(Trigger { commits: Arc::clone(&self.commits), ..Trigger::default() });
        let plane: Arc<dyn Plane> = Arc::new(FaultPlane {
            inner: Arc::new(HostPlane::new(&node, "127.0.0.1").unwrap()),
            trigger: Arc::clone(&trigger),
        });
        let pace = Arc::<Pace>::default();
        let setting = Setting {
            worker: worker.clone(),
            job: Arc::clone(&self.job),
            timeouts: TIMEOUTS,
            plane: Arc::clone(&plane),
            aborts: Arc::new(Aborts::new(Arc::clone(&plane))),
            pace: Arc::clone(&pace),
            outbox: Arc::default(),
            threads: reknit_model::Team::alone(),
            chunk: self.chunk,
        };
        let rank = Rank::new(setting).unwrap();
        self.seats.push(Seat { worker, place, rank, plane, pace, trigger, failed: None });
        self.seats.sort_by_key(|seat| seat.place);
    }

    pub(crate) fn seat(&mut self, place: Place) -> &mut Seat<T> {
        self.seats.iter_mut().find(|seat| seat.place == place).expect("the place is filled")
    }

    pub(crate) fn arm(&mut self, place: Place, fault: Fault) {
        let others = self.seats.len() as u64 - 1;
        let trigger = &self.seat(place).trigger;
        trigger.wait_for.store(trigger.commits.now() + others, Ordering::SeqCst);
        trigger.arm(fault);
    }

    /// Forgets the fault; true if it has fired.
    pub(crate) fn disarm(&mut self, place: Place) -> bool {
        self.seat(place).trigger.disarm()
    }

    /// What everybody holds, as far as it can be told apart.
    pub(crate) fn held(&self) -> Vec<(WorkerKey, String)> {
        let of = |seat: &Seat<T>| {
            let shard = seat.rank.shard()?;
            let units =
                shard.owned().iter().flat_map(|(axis, units)| units.iter().map(move |unit| (*axis, unit)));
            let digests: Vec<_> =
                units.map(|(axis, unit)| (axis, unit, shard.digest(axis, unit).unwrap())).collect();
            let WorkerState { epoch, holding, prepared, vote, .. } = seat.rank.state(Phase::Quiesced);
            let state = (epoch, holding, prepared, vote);
            Some((seat.worker.clone(), format!("{digests:?} {} {state:?}", shard.replicated_digest())))
        };
        self.seats.iter().filter_map(of).collect()
    }

    /// Takes a rank out that has no fault.
    pub(crate) fn dismiss(&mut self, place: Place) -> Seat<T> {
        let at = self.seats.iter().position(|seat| seat.place == place).expect("the place is filled");
        self.seats.remove(at)
    }

    /// Buries the rank whose fault has fired.
    pub(crate) fn bury(&mut self, place: Place) -> WorkerKey {
        let seat = self.dismiss(place);
        assert!(seat.trigger.fired.load(Ordering::SeqCst), "the fault at {place} did not happen");
        seat.worker
    }

    /// Trains up to and including `step`, or until an error; true if all got there.
    pub(crate) fn train_to(&mut self, step: u64) -> bool {
        let outcomes = self.everyone(|seat| {
            let mut done = Vec::new();
            while seat.rank.committed().0 < step {
                match seat.rank.train_step(&|| false) {
                    Ok(step) => {
                        seat.trigger.commits.add();
                        done.push((seat.place.replica.0, step.committed));
                    }
                    Err(error) => {
                        println!("{}: {error}", seat.place);
                        return (done, Some(error.to_string()));
                    }
                }
            }
            (done, None)
        });
        let mut well = true;
        for (index, (done, error)) in outcomes.into_iter().enumerate() {
            well &= error.is_none();
            self.seats[index].failed = error;
            for (replica, committed) in done {
                self.note(replica, committed);
            }
        }
        well
    }

    fn note(&mut self, replica: u32, committed: Committed) {
        let Committed { step, vote, share, .. } = committed;
        if step.0 as usize == self.losses.len() + 1 {
            self.losses.push(vote.loss);
        }
        assert_eq!(
            self.losses[step.0 as usize - 1].to_bits(),
            vote.loss.to_bits(),
            "step {step} has two losses"
        );
        let before = self.samples.entry(step).or_default().insert(replica, (share.first, share.count));
        assert!(before.is_none_or(|before| before == (share.first, share.count)), "step {step} ran twice");
        self.committed = self.committed.max(step);
    }

    /// A new epoch of everyone who sits: plan from what is held, prepare, commit, resume.
    pub(crate) fn reform(&mut self, fresh: bool) -> Result<Plan, String> {
        let orders = self.plan(fresh)?;
        self.carry_out(orders)
    }

    /// The same from a checkpoint, whatever is held.
    pub(crate) fn restore(&mut self, folder: &Path, step: Step) -> Result<Plan, String> {
        let orders = self.plan(true)?;
        let plan = self.carry_out(Orders {
            resume_step: step,
            vote: None,
            checkpoint: Some(folder.into()),
            ..orders
        })?;
        self.committed = step;
        self.losses.resize(step.0 as usize, f64::NAN);
        self.samples.retain(|of, _| *of <= step);
        Ok(plan)
    }

    /// Prepare, commit, resume.
    pub(crate) fn carry_out(&mut self, orders: Orders) -> Result<Plan, String> {
        let outcomes = self.everyone(|seat| {
            let prepare = orders.of(&seat.worker);
            seat.rank.leave_epoch();
            let rolled = seat.rank.roll_forward(&prepare).map_err(|error| error.to_string())?;
            let prepared = seat.rank.prepare(&prepare).map_err(|error| error.to_string())?;
            Ok::<_, String>((seat.place.replica.0, rolled, prepared))
        });
        let mut digests = Vec::new();
        let mut failed = Vec::new();
        for outcome in outcomes {
            match outcome {
                Ok((replica, rolled, prepared)) => {
                    if let Some(committed) = rolled {
                        assert!(committed.rolled_forward);
                        self.rolled_forward += 1;
                        self.note(replica, committed);
                    }
                    digests.push(prepared.replicated_digest);
                }
                Err(error) => failed.push(error),
            }
        }
        if !failed.is_empty() {
            return Err(failed.join("; "));
        }
        digests.dedup();
        assert_eq!(digests.len(), 1, "REPLICATED");
        for seat in &mut self.seats {
            assert!(seat.rank.resume(orders.epoch));
        }
        self.degrees.push(orders.plan.layout.degrees());
        Ok(orders.plan)
    }

    /// What everyone who sits would be told to prepare next.
    pub(crate) fn plan(&mut self, fresh: bool) -> Result<Orders, String> {
        self.epoch = Epoch(self.epoch.0 + 1);
        let states: Vec<WorkerState> =
            self.seats.iter().map(|seat| seat.rank.state(Phase::Quiesced)).collect();
        let newest = states.iter().map(|state| state.holding.step).max().unwrap_or_default();
        let mut holdings: BTreeMap<WorkerKey, Holding> = BTreeMap::new();
        for (seat, state) in self.seats.iter().zip(&states) {
            if !state.holding.is_empty() && (state.holding.step == newest || state.prepared == newest) {
                holdings.insert(seat.worker.clone(), Holding { step: newest, ..state.holding.clone() });
            }
        }
        let members = self.seats.iter().map(|seat| (seat.place, seat.worker.clone()));
        let request = PlanRequest {
            job: &self.job,
            topology: &Topology::default(),
            epoch: self.epoch,
            workers: &candidates(members, holdings),
            fresh,
        };
        let plan = reknit_layout::plan(&request).map_err(|error| error.to_string())?;
        let vote: Option<StepVote> =
            states.iter().find(|state| state.holding.step == newest).and_then(|state| state.vote);
        let participants = self
            .seats
            .iter()
            .map(|seat| Participant { worker: seat.worker.clone(), endpoint: seat.plane.endpoint() });
        Ok(Orders {
            epoch: self.epoch,
            circles: Circles::new(&plan),
            plan,
            participants: participants.collect(),
            resume_step: newest,
            vote,
            checkpoint: None,
        })
    }

    /// Runs `work` on every seat at once.
    fn everyone<R: Send>(&mut self, work: impl Fn(&mut Seat<T>) -> R + Sync) -> Vec<R> {
        std::thread::scope(|scope| {
            let running: Vec<_> = self.seats.iter_mut().map(|seat| scope.spawn(|| work(seat))).collect();
            running.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Every unit's state is bit-equal in all replicas, and so are the replicated parameters.
    pub(crate) fn digest(&self) -> String {
        let mut units: BTreeMap<(reknit_layout::Axis, u32), Vec<(u32, u64)>> = BTreeMap::new();
        let mut replicated = Vec::new();
        for seat in &self.seats {
            let shard = seat.rank.shard().unwrap();
            replicated.push(shard.replicated_digest());
            for (axis, owned) in shard.owned() {
                for unit in owned.iter() {
                    let digest = shard.digest(*axis, unit).unwrap();
                    units.entry((*axis, unit)).or_default().push((seat.place.replica.0, digest));
                }
            }
        }
        let replicas = self.job.parallel.data as usize;
        for ((axis, unit), owners) in &units {
            assert_eq!(owners.len(), replicas, "COVER: {axis} unit {unit} has owners {owners:?}");
            assert!(
                owners.iter().all(|owner| owner.1 == owners[0].1),
                "{axis} unit {unit} differs: {owners:?}"
            );
        }
        replicated.dedup();
        assert_eq!(replicated.len(), 1, "REPLICATED");
        format!("{replicated:?} {units:?}")
    }

    /// The losses from this step on are those of another run.
    pub(crate) fn check_losses_from(&self, step: usize, other: &[f64]) {
        for (number, (ours, theirs)) in self.losses.iter().zip(other).enumerate().skip(step - 1) {
            let apart = (ours - theirs).abs() / theirs.abs();
            assert!(apart <= 1e-10, "step {}: {ours} and {theirs}", number + 1);
        }
    }

    /// SAMPLES: the committed steps cover the order without gap or repeat.
    pub(crate) fn check_samples(&self) {
        let mut next = 0;
        for (step, replicas) in &self.samples {
            let mut parts: Vec<_> = replicas.values().filter(|(_, count)| *count > 0).collect();
            parts.sort();
            for &&(first, count) in &parts {
                assert_eq!(first, next, "step {step}");
                next += u64::from(count);
            }
        }
        assert_eq!(next, self.committed.0 * u64::from(self.job.batch.global));
    }
}

/// The error of a run that should have failed.
pub(crate) fn refused(result: Result<Plan, String>) -> String {
    result.expect_err("it must fail")
}
