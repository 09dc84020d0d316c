//! The ranks of a job without a daemon: planned, joined, and driven by hand.

use crate::Way;
use crate::link::LinkPlane;
use reknit_layout::{
    Circle, Circles, Epoch, GpuId, Incarnation, JobSpec, Place, Plan, PlanRequest, Step, Topology, WorkerKey,
    candidates,
};
use reknit_model::{Batch, Shard, TensorParallel};
use reknit_plane::host::HostPlane;
use reknit_plane::{Plane, Ticket};
use reknit_worker::abort::Aborts;
use reknit_worker::exchange::{Exchange, SumGroups};
use reknit_worker::groups::{CommError, Communicator, Joined, Joiner, Team, join_all};
use reknit_worker::messages::{Participant, Prepare, Timeouts};
use reknit_worker::pace::Pace;
use reknit_worker::parcels::{PARCEL_BYTES, Parcel};
use reknit_worker::sync::SyncPlan;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) const TIMEOUTS: Timeouts = Timeouts {
    operation: Duration::from_secs(60),
    join: Duration::from_secs(60),
    progress: Duration::from_secs(1),
    stall: Duration::from_secs(1),
};

/// About 10 million parameters.
pub(crate) fn job(data: u32, tensor: u32, files: &str) -> JobSpec {
    let toml = format!(
        r#"
name = "bench"
[model]
kind = "decoder"
layers = 4
hidden = 384
heads = 12
kv_heads = 12
ffn = 1536
ffn_block = 64
vocab = 256
vocab_block = 16
seq_len = 128
dtype = "f32"
[parallel]
data = {data}
tensor = {tensor}
min_tensor = 1
[batch]
global = 6
micro = 6
[optimizer]
lr = 1e-5
warmup_steps = 5
decay_steps = 200
min_lr = 0.0
betas = [0.9, 0.95]
eps = 1e-8
weight_decay = 0.1
grad_clip = 1.0
[data]
files = ["{files}"]
[run]
steps = 1000000
seed = 11
"#
    );
    JobSpec::parse(&toml, "bench.toml").expect("the job is sound")
}

/// What everyone is told to prepare.
pub(crate) struct Orders {
    pub(crate) plan: Plan,
    circles: Circles,
    participants: Vec<Participant>,
}

impl Orders {
    pub(crate) fn new(job: &JobSpec, members: &[(Place, WorkerKey, Arc<dyn Plane>)]) -> Self {
        let places = members.iter().map(|(place, worker, _)| (*place, worker.clone()));
        let request = PlanRequest {
            job,
            topology: &Topology::default(),
            epoch: Epoch(1),
            workers: &candidates(places, BTreeMap::new()),
            fresh: true,
        };
        let plan = reknit_layout::plan(&request).expect("there are enough ranks");
        let peer = |(_, worker, plane): &(Place, WorkerKey, Arc<dyn Plane>)| Participant {
            worker: worker.clone(),
            endpoint: plane.endpoint(),
        };
        Self { circles: Circles::new(&plan), participants: members.iter().map(peer).collect(), plan }
    }

    pub(crate) fn of(&self, worker: &WorkerKey, epoch: Epoch) -> Prepare {
        let part = self.circles.part(worker).cloned().unwrap_or_default();
        let peers = |circle: Option<&Circle>| {
            let found = circle.into_iter().flatten();
            let found = found.filter_map(|key| self.participants.iter().find(|peer| peer.worker == *key));
            found.cloned().collect::<Vec<_>>()
        };
        let layout = &self.plan.layout;
        Prepare {
            epoch,
            layout: part.tensor.map(|group| layout.cut_to(&layout.groups[group])),
            fresh: true,
            checkpoint: None,
            transfers: Vec::new(),
            tensor: peers(part.tensor.map(|at| &self.circles.tensor[at])),
            column: peers(part.column.map(|at| &self.circles.columns[at])),
            speakers: peers(part.speaks.then_some(&self.circles.speakers)),
            movers: Vec::new(),
            ticket: Ticket([epoch.0 as u8; 32]),
            resume_step: Step(0),
            vote: None,
        }
    }
}

/// One worker for each place, with a data plane of its own; the last place stays empty if it is lost.
pub(crate) fn hire(job: &JobSpec, lost: bool, link: f64) -> Vec<(Place, WorkerKey, Arc<dyn Plane>)> {
    let places = (0..job.parallel.data)
        .flat_map(|replica| (0..job.parallel.tensor).map(move |slot| Place::new(replica, 0, slot)));
    let mut places: Vec<_> = places.collect();
    if lost {
        places.pop();
    }
    let member = |place: Place| {
        let worker = WorkerKey {
            gpu: GpuId(format!("GPU-{}-{}", place.replica, place.slot)),
            incarnation: Incarnation(1),
        };
        let plane: Arc<dyn Plane> =
            Arc::new(HostPlane::new("node", "127.0.0.1").expect("the data plane listens"));
        let plane: Arc<dyn Plane> = match link {
            0.0 => plane,
            rate => Arc::new(LinkPlane { inner: plane, bytes_per_second: rate * 1e6 }),
        };
        (place, worker, plane)
    };
    places.into_iter().map(member).collect()
}

/// The parts of a worker that compute and communicate, and nothing else.
pub(crate) struct Rank {
    job: Arc<JobSpec>,
    shard: Shard<f32>,
    team: Team<f32>,
    /// The sums without the hand-over; `None` where no group hands over anything.
    alone: Option<Exchange<f32>>,
    parcels: Vec<Parcel>,
    batch: Batch,
    step: Step,
    /// They end when they are dropped.
    _idle: Vec<Communicator>,
    _plane: Arc<dyn Plane>,
}

pub(crate) fn line_up(data: u32, tensor: u32, lost: bool, link: f64) -> Vec<Rank> {
    let job = Arc::new(job(data, tensor, "none"));
    let members = hire(&job, lost, link);
    let orders = Orders::new(&job, &members);
    std::thread::scope(|scope| {
        let joining: Vec<_> = members
            .iter()
            .map(|(place, worker, plane)| {
                let (job, orders) = (&job, &orders);
                scope.spawn(move || Rank::join(job, orders, lost, *place, worker, plane))
            })
            .collect();
        joining.into_iter().map(|rank| rank.join().expect("a rank could not join")).collect()
    })
}

impl Rank {
    fn join(
        job: &Arc<JobSpec>,
        orders: &Orders,
        lost: bool,
        place: Place,
        worker: &WorkerKey,
        plane: &Arc<dyn Plane>,
    ) -> Self {
        let (pace, aborts) = (Arc::<Pace>::default(), Aborts::new(Arc::clone(plane)));
        let join = |epoch| {
            let prepare = orders.of(worker, epoch);
            let joiner = Joiner {
                job,
                me: worker,
                prepare: &prepare,
                timeouts: TIMEOUTS,
                pace: &pace,
                aborts: &aborts,
            };
            let Joined { team, .. } = join_all::<f32>(joiner, &**plane).expect("all are there");
            team.expect("it has a place")
        };
        let team = join(Epoch(1));
        let layout = &orders.plan.layout;
        let sync = SyncPlan::new(layout, place).expect("it trains");
        let parcels = Parcel::all::<f32>(&job.model, &sync, PARCEL_BYTES).expect("the layout is sound");
        let mut idle = Vec::new();
        let alone = lost.then(|| {
            let Team { tensor, exchange, .. } = join(Epoch(2));
            let groups = exchange.into_groups();
            idle.extend([Some(tensor), groups.handover, groups.giveback].into_iter().flatten());
            let groups = SumGroups { column: groups.column, ..SumGroups::default() };
            let mut parcels = parcels.clone();
            for parcel in &mut parcels {
                parcel.crossing = false;
                parcel.take.clear();
            }
            Exchange::new(groups, parcels, &sync, team.speaks_for_norm)
        });
        let seq_len = job.model.seq_len as usize;
        let samples = layout.samples_of(place.replica).len();
        Self {
            shard: Shard::init(&job.model, 1, &sync.owned),
            job: Arc::clone(job),
            team,
            alone,
            parcels,
            batch: Batch {
                tokens: (0..samples * (seq_len + 1)).map(|i| (i * i % 251) as u32).collect(),
                samples,
                seq_len,
                first_sample: 0,
                seed: 1,
            },
            step: Step(0),
            _idle: idle,
            _plane: Arc::clone(plane),
        }
    }

    /// The part of the summed values that does not leave with the last parcel.
    pub(crate) fn hideable(&self) -> f64 {
        let columns: Vec<_> = self.parcels.iter().map(|parcel| parcel.column as f64).collect();
        1.0 - columns.last().unwrap_or(&0.0) / columns.iter().sum::<f64>()
    }

    pub(crate) fn step(&mut self, way: Way) -> Times {
        let Self { job, shard, team, alone, batch, .. } = self;
        let begun = Instant::now();
        shard.zero_gradients();
        let Team { tensor, exchange, .. } = team;
        let exchange = match (way, alone) {
            (Way::Alone, Some(alone)) => alone,
            _ => exchange,
        };
        exchange.begin();
        let scale = 1.0 / (f64::from(job.batch.global) * f64::from(job.model.seq_len));
        let mut timed = Timed { tensor, backward: begun };
        let loss = match way {
            Way::Under | Way::Alone => {
                shard.forward_backward_into(batch, scale, &mut timed, exchange).expect("the pass succeeds")
            }
            Way::After | Way::Without => {
                shard.forward_backward(batch, scale, &mut timed).expect("the pass succeeds")
            }
        };
        let Timed { tensor, backward } = timed;
        let backward = backward.elapsed();
        let passed = Instant::now();
        let norm = match way {
            Way::Under | Way::After | Way::Alone => {
                exchange.finish(shard, tensor).expect("the sum succeeds");
                exchange.norm_squared()
            }
            Way::Without if team.speaks_for_norm => shard.gradient_norm_squared(false),
            Way::Without => 0.0,
        };
        let sums_took = passed.elapsed();
        let sums = team.sum(vec![norm, loss]).expect("the vote succeeds");
        self.step.0 += 1;
        shard.apply(self.step, &job.optimizer, sums[0]);
        Times { way, step: begun.elapsed(), backward, sums: sums_took, processor: Duration::ZERO }
    }
}

/// How long a step and parts of it took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) way: Way,
    pub(crate) step: Duration,
    pub(crate) backward: Duration,
    /// From the end of the backward pass until all sums are there.
    pub(crate) sums: Duration,
    /// Of all ranks together.
    pub(crate) processor: Duration,
}

/// Notes when the backward pass begins.
struct Timed<'a> {
    tensor: &'a mut Communicator,
    backward: Instant,
}

impl TensorParallel<f32> for Timed<'_> {
    type Error = CommError;

    fn all_reduce_sum(&mut self, values: &mut Vec<f32>) -> Result<(), CommError> {
        self.tensor.all_reduce_sum(values)
    }

    fn all_reduce_max(&mut self, values: &mut Vec<f32>) -> Result<(), CommError> {
        self.tensor.all_reduce_max(values)
    }

    fn begin_sum(&mut self, values: &mut Vec<f32>) -> Result<(), CommError> {
        self.tensor.begin_sum(values)
    }

    fn finish_sum(&mut self, values: &mut Vec<f32>) -> Result<(), CommError> {
        self.tensor.finish_sum(values)
    }

    fn backward_begins(&mut self) {
        self.backward = Instant::now();
    }
}
