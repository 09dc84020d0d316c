//! What a shard takes of memory, and that a step takes no buffer more.
#![allow(unsafe_code)]

use reknit_layout::job::{Dtype, ModelKind, ModelSpec, OptimizerSpec};
use reknit_layout::memory::slot_bytes;
use reknit_layout::{
    Axis, GpuId, Group, Incarnation, JobSpec, Member, ReplicaId, Slot, StageId, Step, Units, WorkerKey,
};
use reknit_model::{Alone, Batch, Bucket, GradientSink, Shard, Team};
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The system's allocator, with a count of what it is asked for.
struct Counting;

/// Buffers, that is: not the few words with which the pool of threads is told of work, nor what the library packs matrices
/// into, which it aligns to vector registers and gives back when the product is made.
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);

fn count(layout: Layout) {
    let buffer = layout.size() >= 4096 && layout.align() <= 8;
    ALLOCATIONS.fetch_add(usize::from(buffer), Ordering::Relaxed);
    LIVE_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

/// The counts are the whole process's: one test at a time.
static TURN: Mutex<()> = Mutex::new(());

const OPTIMIZER: OptimizerSpec = OptimizerSpec {
    lr: 1e-3,
    warmup_steps: 2,
    decay_steps: 50,
    min_lr: 1e-4,
    betas: [0.9, 0.95],
    eps: 1e-8,
    weight_decay: 0.1,
    grad_clip: 1.0,
};

fn model() -> ModelSpec {
    ModelSpec {
        kind: ModelKind::Decoder,
        layers: 4,
        hidden: 256,
        heads: 8,
        kv_heads: 8,
        head_dim: None,
        ffn: 704,
        ffn_block: 32,
        vocab: 512,
        vocab_block: 32,
        seq_len: 64,
        tie_embeddings: false,
        dtype: Dtype::F32,
        dropout: 0.0,
        recompute: false,
    }
}

/// The units from `from` to `to` of sixteen, in each axis.
fn sixteenths(model: &ModelSpec, from: u32, to: u32) -> BTreeMap<Axis, Units> {
    let axes = model.axes().into_iter();
    axes.map(|axis| {
        let units = model.units(axis.family);
        (axis, Units::range(units * from / 16, units * to / 16))
    })
    .collect()
}

fn batch(model: &ModelSpec, samples: usize, step: u64) -> Batch {
    let seq_len = model.seq_len as usize;
    let tokens = (0..samples * (seq_len + 1)).map(|i| ((i * i + step as usize) % 509) as u32).collect();
    Batch { tokens, samples, seq_len, seed: 1, first_sample: step * samples as u64 }
}

/// Moves each bucket out and in again, as an exchange does.
struct ThereAndBack;

impl GradientSink<f32> for ThereAndBack {
    type Error = Infallible;

    fn ready(&mut self, shard: &mut Shard<f32>, bucket: Bucket) -> Result<(), Infallible> {
        match bucket {
            Bucket::Axis(axis) => {
                let values = shard.take_gradients(axis);
                shard.put_gradients(axis, values).expect("as taken");
            }
            Bucket::Replicated => {
                let values = shard.take_replicated_gradients();
                shard.put_replicated_gradients(values).expect("as taken");
            }
        }
        Ok(())
    }
}

fn train(shard: &mut Shard<f32>, batch: &Batch, step: u64) {
    shard.zero_gradients();
    shard.forward_backward(batch, 1e-3, &mut Alone).expect("alone");
    shard.forward_backward_into(batch, 1e-3, &mut Alone, &mut ThereAndBack).expect("alone");
    let norm = shard.gradient_norm_squared(true);
    shard.apply(Step(step), &OPTIMIZER, norm);
}

#[test]
fn a_step_allocates_no_buffer_after_warm_up() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for (threads, dropout, recompute, dtype) in
        [(1, 0.0, false, Dtype::F32), (1, 0.1, true, Dtype::Bf16), (3, 0.1, false, Dtype::F32)]
    {
        let model = ModelSpec { dropout, recompute, dtype, ..model() };
        let mut shard = Shard::<f32>::init(&model, 1, &sixteenths(&model, 0, 12));
        shard.set_team(Team::new(threads).expect("threads"));
        let batch = batch(&model, 2, 1);
        // A helper makes its buffers when it first gets something to do, which is chance.
        let mut quiet = 0;
        for step in 1..=200 {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            train(&mut shard, &batch, step);
            let made = ALLOCATIONS.load(Ordering::Relaxed) - before;
            assert!(threads > 1 || step <= 2 || made == 0, "step {step} allocated {made} times");
            quiet = if made == 0 { quiet + 1 } else { 0 };
            if quiet == 5 {
                break;
            }
        }
        assert_eq!(quiet, 5, "{threads} threads never stop to allocate");
    }
}

/// The job and its only group, whose first slot owns what `owned` says.
fn alone(model: &ModelSpec, samples: u32, owned: &BTreeMap<Axis, Units>) -> (JobSpec, Group) {
    let text = reknit_layout::job::EXAMPLE;
    let mut job = JobSpec::parse(text, "example").expect("valid");
    job.model = model.clone();
    job.parallel.data = 1;
    job.batch.micro = samples;
    let worker = WorkerKey { gpu: GpuId("GPU-0".to_owned()), incarnation: Incarnation(1) };
    let partitions = owned.iter().map(|(axis, units)| (*axis, vec![units.clone()])).collect();
    let slots = vec![Some(Member { worker })];
    (job, Group { replica: ReplicaId(0), stage: StageId(0), slots, partitions: Arc::new(partitions) })
}

#[test]
fn a_shard_takes_what_the_planner_counts() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for (dropout, recompute, tie_embeddings) in
        [(0.0, false, false), (0.1, false, true), (0.0, true, false), (0.1, true, false)]
    {
        let model = ModelSpec { dropout, recompute, tie_embeddings, ..model() };
        let owned = sixteenths(&model, 2, 13);
        // The buffer for the softmax's gradient is the thread's, and there from now on.
        train(&mut Shard::<f32>::init(&model, 1, &owned), &batch(&model, 1, 1), 1);
        let before = LIVE_BYTES.load(Ordering::Relaxed);
        let train_and_count = |shard: &mut Shard<f32>, samples| {
            train(shard, &batch(&model, samples, 1), 1);
            let taken = (LIVE_BYTES.load(Ordering::Relaxed) - before) as f64;
            let (job, group) = alone(&model, samples as u32, shard.owned());
            let counted = slot_bytes(&job, &group, Slot(0)) as f64;
            assert!((taken / counted - 1.0).abs() < 0.005, "{taken} instead of {counted} bytes: {model:?}");
        };
        let mut shard = Shard::<f32>::init(&model, 1, &owned);
        train_and_count(&mut shard, 3);

        // Fewer units, and the same ones with fewer samples.
        let less = sixteenths(&model, 2, 9);
        for samples in [3, 1] {
            shard.make_room(&less).expect("known units");
            shard.adopt();
            train_and_count(&mut shard, samples);
        }
    }
}

/// Bytes of this process that are in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("there");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

const CHILD: &str = "REKNIT_TEST_MEMORY_CHILD";

/// Reshards again and again, and tells the resident memory after each, beside what the planner counts.
fn reshard_again_and_again(layers: u32, hidden: u32, ffn: u32) {
    let model = ModelSpec { layers, hidden, ffn, ..model() };
    let samples = 2;
    let batch = batch(&model, samples, 1);
    let mut shard = Shard::<f32>::init(&model, 1, &sixteenths(&model, 0, 16));
    for round in 0..12 {
        let parts = [(0, 16), (0, 8), (2, 14), (0, 10)];
        let (from, to) = parts[round % parts.len()];
        let owned = sixteenths(&model, from, to);
        let whole = Shard::<f32>::init(&model, 1, &sixteenths(&model, 0, 16));
        shard.make_room(&owned).expect("known units");
        for (&axis, units) in &owned {
            let missing = units.difference(&shard.owned()[&axis]);
            let mut bytes = Vec::new();
            whole.export_units(axis, &missing, &mut bytes).expect("owned");
            if !missing.is_empty() {
                shard.receive(Some(axis), &missing, &bytes).expect("there is room");
            }
        }
        drop(whole);
        shard.check_arrived().expect("complete");
        shard.adopt();
        train(&mut shard, &batch, 1);
        let (job, group) = alone(&model, samples as u32, &owned);
        println!("resident {} counted {}", resident(), slot_bytes(&job, &group, Slot(0)));
    }
}

/// In a process of its own, with the allocator set as the agent sets it for workers.
#[test]
fn memory_comes_back_after_reshards() {
    // Matrices that the allocator maps one by one, and such as lie side by side in its heap.
    match std::env::var(CHILD).as_deref() {
        Ok("large") => return reshard_again_and_again(3, 512, 1408),
        Ok(_) => return reshard_again_and_again(48, 128, 352),
        Err(_) => {}
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    ["large", "small"].into_iter().for_each(stays_small);
}

fn stays_small(matrices: &str) {
    let output = std::process::Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "memory_comes_back_after_reshards", "--nocapture"])
        .env(CHILD, matrices)
        .env(
            "GLIBC_TUNABLES",
            "glibc.malloc.mmap_threshold=655360:glibc.malloc.trim_threshold=1310720:glibc.malloc.hugetlb=1",
        )
        .output()
        .expect("a process");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    let figures: Vec<(f64, f64)> = text
        .lines()
        .filter_map(|line| {
            let (resident, counted) = line.split_once("resident ")?.1.split_once(" counted ")?;
            Some((resident.parse().ok()?, counted.parse().ok()?))
        })
        .collect();
    assert_eq!(figures.len(), 12, "{text}");
    // The program itself, its stacks and the buffers of its threads.
    let own = 12.0 * 1024.0 * 1024.0;
    for (round, (resident, counted)) in figures.iter().enumerate() {
        assert!(*resident < 1.1 * counted + own, "round {round}: {resident} instead of {counted}\n{text}");
    }
}
