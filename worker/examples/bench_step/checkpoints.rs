//! How long training stops for a checkpoint, by the worker's own word, beside a step and a plain copy of as many bytes.

use crate::lineup::{Orders, hire, job};
use crate::orchestrated::Orchestrated;
use crate::{median, write_text};
use std::collections::BTreeMap;
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Steps from one checkpoint to the next; most are written by then.
const EVERY: u64 = 8;

/// What the worker logs of its copies: by step, what each rank copied and for how long.
#[derive(Debug, Default)]
struct Copies(Mutex<BTreeMap<String, Vec<Copied>>>);

#[derive(Debug, Default)]
struct Copied {
    step: String,
    bytes: u64,
    pause_us: Option<u64>,
}

impl Visit for Copied {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "bytes" => self.bytes = value,
            "pause_us" => self.pause_us = Some(value),
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "step" {
            self.step = format!("{value:?}");
        }
    }
}

struct Listener(Arc<Copies>);

impl<S: tracing::Subscriber> Layer<S> for Listener {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut copied = Copied::default();
        event.record(&mut copied);
        if copied.pause_us.is_some() {
            let mut all = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
            all.entry(copied.step.clone()).or_default().push(copied);
        }
    }
}

pub(crate) fn checkpoints(rounds: usize) {
    let copies = Arc::<Copies>::default();
    tracing_subscriber::registry().with(Listener(Arc::clone(&copies))).init();
    for (data, tensor) in [(1, 1), (2, 2)] {
        copies.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let steps = train(data, tensor, rounds);
        let copies = std::mem::take(&mut *copies.0.lock().unwrap_or_else(PoisonError::into_inner));
        // All wait for the slowest.
        let pauses: Vec<_> = copies
            .values()
            .map(|ranks| ranks.iter().filter_map(|copied| copied.pause_us).max().unwrap_or_default())
            .map(Duration::from_micros)
            .collect();
        assert!(pauses.len() > 2, "only {} of {rounds} checkpoints were made", pauses.len());
        let ranks = copies.values().next().into_iter().flatten();
        let sizes: Vec<_> = ranks.map(|copied| copied.bytes as usize).collect();
        let copy = median((0..rounds).map(|_| plain_copies(&sizes)));
        let bare = steps.iter().enumerate().filter(|(at, _)| !(*at as u64 + 1).is_multiple_of(EVERY));
        // In the later half of the way to the next one it has been written, mostly.
        let bare = bare.filter(|(at, _)| *at as u64 % EVERY >= EVERY / 2);
        let (step, pause) = (median(bare.map(|(_, step)| *step)), median(pauses[1..].iter().copied()));
        println!(
            "{data}x{tensor}: training stops for {pause:.1} ms ({} checkpoints; the first, in new memory, {:.1} ms): {:.0}% of a step of {step:.1} ms, {:.2} times a plain copy of as many bytes ({:.0} MB in {copy:.1} ms)",
            pauses.len(),
            pauses[0].as_secs_f64() * 1e3,
            pause / step * 100.0,
            pause / copy,
            sizes.iter().sum::<usize>() as f64 / 1e6,
        );
    }
}

/// Each step's time on rank 0.
fn train(data: u32, tensor: u32, rounds: usize) -> Vec<Duration> {
    let folder = tempfile::tempdir().expect("there is room for files");
    let mut job = job(data, tensor, &write_text(folder.path()));
    job.checkpoint.dir = folder.path().join("checkpoints").display().to_string();
    job.checkpoint.every_steps = EVERY;
    let job = Arc::new(job);
    let members = hire(&job, false, 0.0);
    let orders = Orders::new(&job, &members);
    let train = |member| {
        let mut rank = Orchestrated::join(&job, &orders, member);
        (0..(rounds + 1) as u64 * EVERY).map(|_| rank.step()).collect::<Vec<_>>()
    };
    let train = &train;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = members.iter().map(|member| scope.spawn(move || train(member))).collect();
        let mut times = ranks.into_iter().map(|rank| rank.join().expect("a rank failed"));
        let first = times.next().expect("there are ranks");
        times.for_each(drop);
        first
    })
}

/// Each rank copies so many bytes at the same time, into memory that is there. The slowest counts.
fn plain_copies(sizes: &[usize]) -> Duration {
    let start = Barrier::new(sizes.len());
    let copy = |size: usize| {
        let (from, mut to) = (vec![1_u8; size], vec![2_u8; size]);
        start.wait();
        let begun = Instant::now();
        to.copy_from_slice(&from);
        let took = begun.elapsed();
        std::hint::black_box(to);
        took
    };
    let copy = &copy;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = sizes.iter().map(|size| scope.spawn(move || copy(*size))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a copy failed")).max().unwrap_or_default()
    })
}
