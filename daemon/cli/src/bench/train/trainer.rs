//! Steps, and how long they take.

use super::member::Member;
use crate::bench::job::OPTIMIZER;
use crate::failure::Failure;
use crate::local::median;
use reknit_layout::job::ModelSpec;
use reknit_layout::{Step, Units};
use reknit_model::{Batch, Shard, Team};
use reknit_plane::host::HostPlane;
use reknit_plane::{Plane, Reduce};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The peers' steps tell their loss too: it is the same model only if they agree.
const TOLD_STEPS: [u64; 5] = [1, 2, 3, 5, 10];
/// The first steps make the buffers.
const WARM_UP: usize = 2;

pub(super) struct Setting {
    pub(super) model: ModelSpec,
    pub(super) samples: usize,
    /// Of each rank.
    pub(super) threads: u32,
    pub(super) tensor: u32,
    pub(super) time: Duration,
}

#[derive(Debug, Serialize)]
pub(super) struct Timed {
    pub(super) steps: usize,
    pub(super) step_ms: Pair,
    pub(super) tokens_per_s: Pair,
    /// Of some of the first steps, by their number.
    pub(super) losses: BTreeMap<u64, f64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Pair {
    pub(super) best: f64,
    pub(super) median: f64,
}

/// Trains with each rank on a thread of its own; the figures are those of the first.
pub(super) fn time(setting: &Setting) -> Result<Timed, Failure> {
    let planes = (0..setting.tensor).map(|_| HostPlane::new("bench", "127.0.0.1"));
    let planes = planes.collect::<Result<Vec<_>, _>>().map_err(Failure::failed("the data plane"))?;
    let endpoints: Vec<_> = planes.iter().map(|plane| plane.endpoint()).collect();
    std::thread::scope(|scope| {
        let ranks = planes.into_iter().enumerate().map(|(rank, plane)| {
            let endpoints = endpoints.clone();
            scope.spawn(move || {
                let member =
                    Member::join(plane, endpoints, rank).map_err(Failure::failed("the data plane"))?;
                train(setting, member)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let broken = |_| Failure::Failed("a rank ended by a panic; what it said is above".to_owned());
        let timed = ranks.into_iter().map(|rank| rank.join().map_err(broken)?);
        let mut timed = timed.collect::<Result<Vec<_>, _>>()?;
        Ok(timed.swap_remove(0))
    })
}

fn train(setting: &Setting, mut member: Member) -> Result<Timed, Failure> {
    let Setting { model, samples, threads, tensor, time } = setting;
    let (rank, tensor) = (member.rank() as u32, *tensor);
    // Slots differ by at most one unit.
    let own = |units: u32| Units::range(units * rank / tensor, units * (rank + 1) / tensor);
    let owned = model.axes().into_iter().map(|axis| (axis, own(model.units(axis.family)))).collect();
    let mut shard = Shard::<f32>::init(model, 1, &owned);
    shard.set_team(Team::new(*threads as usize).map_err(Failure::failed("a thread could not be started"))?);
    let seq_len = model.seq_len as usize;
    let tokens = samples * seq_len;
    let batch = Batch {
        tokens: (0..samples * (seq_len + 1)).map(|i| (i * i % 251) as u32).collect(),
        samples: *samples,
        seq_len,
        seed: 1,
        first_sample: 0,
    };
    let last_told = TOLD_STEPS[TOLD_STEPS.len() - 1];
    let (mut times, mut losses) = (Vec::new(), BTreeMap::new());
    let begin = Instant::now();
    let mut step = 0;
    loop {
        // All ranks see the same answer.
        let over = step >= last_told && begin.elapsed() >= *time;
        let over = member.reduce(Reduce::Max, if over { 1.0 } else { 0.0 });
        if over.map_err(Failure::failed("the data plane"))? > 0.0 {
            break;
        }
        step += 1;
        let start = Instant::now();
        shard.zero_gradients();
        let loss = shard.forward_backward(&batch, 1.0 / tokens as f64, &mut member);
        let loss = loss.map_err(Failure::failed("the pass"))?;
        let norm = member.reduce(Reduce::Sum, shard.gradient_norm_squared(rank == 0));
        shard.apply(Step(step), &OPTIMIZER, norm.map_err(Failure::failed("the data plane"))?);
        times.push(start.elapsed().as_secs_f64());
        if TOLD_STEPS.contains(&step) {
            losses.insert(step, (loss / tokens as f64 * 1e6).round() / 1e6);
        }
    }
    let warm = &times[WARM_UP..];
    let best = warm.iter().copied().fold(f64::INFINITY, f64::min);
    let middle = median(warm).unwrap_or(best);
    let pair = |of: fn(f64, f64) -> f64| {
        let round = |value: f64| (value * 1e3).round() / 1e3;
        let tokens = tokens as f64;
        Pair { best: round(of(best, tokens)), median: round(of(middle, tokens)) }
    };
    Ok(Timed {
        steps: times.len(),
        step_ms: pair(|seconds, _| seconds * 1e3),
        tokens_per_s: pair(|seconds, tokens| tokens / seconds),
        losses,
    })
}
