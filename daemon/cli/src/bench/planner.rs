//! `reknit bench planner`: a job of N GPUs loses one, again and again from its nominal layout.

use super::job::OPTIMIZER;
use super::spread::Spread;
use crate::failure::Failure;
use crate::output::{Format, Progress, bytes_text, print_lines};
use crate::plan::{State, worker};
use crate::table::Table;
use reknit_layout::job::{
    BatchPolicy, BatchSpec, CheckpointSpec, DataSpec, Dtype, ModelKind, ModelSpec, ParallelSpec,
    RecoverySpec, RunSpec,
};
use reknit_layout::{
    Candidate, Epoch, GpuId, JobSpec, Mode, Place, Plan, PlanRequest, Topology, WorkerKey, candidates,
    contingency, draft, reseat,
};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::hint::black_box;
use std::time::{Duration, Instant};

const PIPELINE: u32 = 8;
const TENSOR: u32 = 8;
/// GPUs of one replica.
const REPLICA: u32 = PIPELINE * TENSOR;
/// Replicas in the largest job.
const MOST_REPLICAS: u32 = 1 << 14;

#[derive(Debug, clap::Args)]
pub(crate) struct PlannerArgs {
    /// GPUs of the job: replicas of 8 stages of 8, so a multiple of 64 from 128 to 1048576.
    #[arg(long, value_name = "N")]
    gpus: u32,
    /// How often a GPU is lost, each time another one.
    #[arg(long, value_name = "R", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: u32,
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Debug, Serialize)]
struct Measured {
    gpus: u32,
    /// Of [`replan`] after one loss.
    replan_ms: Spread,
    /// Both k = 1 and k = 2, over GPUs, nodes and domains.
    contingency_ms: f64,
    /// The most that one of the plans moves.
    bytes_planned: u64,
}

/// To the microsecond.
fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

pub(crate) fn run(args: &PlannerArgs) -> Result<(), Failure> {
    let most = MOST_REPLICAS * REPLICA;
    if !args.gpus.is_multiple_of(REPLICA) || !(2 * REPLICA..=most).contains(&args.gpus) {
        return Err(Failure::Usage(format!(
            "--gpus {}: allowed are the multiples of {REPLICA} (one replica) from {} to {most}",
            args.gpus,
            2 * REPLICA
        )));
    }
    let measured = measure(args.gpus, args.runs)?;
    match args.format {
        Format::Json => {
            let json = serde_json::to_string(&measured).map_err(Failure::failed("the figures as JSON"))?;
            print_lines(&[json])
        }
        Format::Table => print_lines(&table(&measured).lines()),
    }
}

fn measure(gpus: u32, runs: u32) -> Result<Measured, Failure> {
    let job = job(gpus / REPLICA);
    let progress = Progress::default();
    progress.show("nominal layout");
    let topology = Topology::nominal(&job);
    let before = State::nominal(&job, &topology)?;
    let members = before.seats.iter().map(|(place, gpu)| (place, worker(gpu.clone())));
    let known = candidates(members, before.workers(|_| true));
    let mut times = Vec::new();
    let mut bytes_planned = 0;
    let mut last = None;
    for run in 0..runs {
        progress.show(&format!("loss {} of {runs}", run + 1));
        let gone: BTreeSet<_> = before.seats.get(lost(gpus, run, runs)).cloned().into_iter().collect();
        let mut known = known.clone();
        let start = Instant::now();
        let plan = replan(&job, &topology, &before, &mut known, &gone)?;
        times.push(milliseconds(start.elapsed()));
        bytes_planned = bytes_planned.max(plan.bytes_moved);
        last = Some(plan);
    }
    progress.show("next losses");
    let start = Instant::now();
    for (plan, k) in last.iter().flat_map(|plan| [(plan, 1), (plan, 2)]) {
        black_box(contingency(&plan.layout, &topology, k));
    }
    let contingency_ms = milliseconds(start.elapsed());
    let replan_ms = Spread::of(&times).ok_or_else(|| Failure::Failed("nothing was measured".to_owned()))?;
    Ok(Measured { gpus, replan_ms, contingency_ms, bytes_planned })
}

/// What is measured: who sits where without the GPUs that are gone, the list of workers changed to that, and the draft
/// of the plan. The list as it was before the loss is there already, its copy for this run is not measured.
fn replan(
    job: &JobSpec,
    topology: &Topology,
    before: &State,
    known: &mut BTreeMap<WorkerKey, Candidate>,
    gone: &BTreeSet<GpuId>,
) -> Result<Plan, Failure> {
    let seating = reseat(job, topology, &before.seats, gone, Mode::Ntp);
    for gpu in gone {
        known.remove(&worker(gpu.clone()));
    }
    let idle = seating.inactive.iter().filter_map(|place| seating.seats.get(*place));
    let idle = idle.map(|gpu| (gpu, None));
    for (gpu, place) in seating.seats.moved().map(|(place, gpu)| (gpu, Some(place))).chain(idle) {
        if let Some(candidate) = known.get_mut(&worker(gpu.clone())) {
            candidate.place = place;
        }
    }
    let draft = draft(&PlanRequest { job, topology, epoch: Epoch(2), workers: known, fresh: false });
    draft.map(|draft| draft.plan).map_err(Failure::failed("no plan after the loss of one GPU"))
}

/// The place that is lost in one of `runs`: spread over the job, and over the slots of groups.
fn lost(gpus: u32, run: u32, runs: u32) -> Place {
    let at = u64::from(run) * u64::from(gpus) / u64::from(runs) + u64::from(run);
    let at = (at % u64::from(gpus)) as u32;
    Place::new(at / REPLICA, at / TENSOR % PIPELINE, at % TENSOR)
}

/// 80 layers of a model of 70 billion parameters, but with a KV head for each head: eight heads are no challenge to TP8.
pub(super) fn job(replicas: u32) -> JobSpec {
    JobSpec {
        name: "bench".to_owned(),
        model: ModelSpec {
            kind: ModelKind::Decoder,
            layers: 80,
            hidden: 8192,
            heads: 64,
            kv_heads: 64,
            head_dim: None,
            ffn: 28672,
            ffn_block: 128,
            vocab: 128_256,
            vocab_block: 128,
            seq_len: 8192,
            tie_embeddings: false,
            dtype: Dtype::Bf16,
            dropout: 0.0,
            recompute: false,
        },
        parallel: ParallelSpec { data: replicas, tensor: TENSOR, pipeline: PIPELINE, min_tensor: 1 },
        batch: BatchSpec { global: 16 * replicas, micro: 1, policy: BatchPolicy::KeepGlobal },
        optimizer: OPTIMIZER,
        data: DataSpec { files: vec!["none".to_owned()], tokenizer: "bytes".to_owned() },
        recovery: RecoverySpec::default(),
        checkpoint: CheckpointSpec::default(),
        run: RunSpec { steps: 1, seed: 1 },
    }
}

fn table(measured: &Measured) -> Table {
    let Spread { min, median, max } = &measured.replan_ms;
    let mut table = Table::new(["GPUS", "REPLAN MIN", "MEDIAN", "MAX", "CONTINGENCY", "MOVED"]);
    table.row([
        measured.gpus.to_string(),
        format!("{min:.2} ms"),
        format!("{median:.2} ms"),
        format!("{max:.2} ms"),
        format!("{:.2} ms", measured.contingency_ms),
        bytes_text(measured.bytes_planned),
    ]);
    table
}
