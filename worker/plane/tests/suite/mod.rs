//! What every data plane must do, whatever it is made of.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

mod endings;
mod exchange;
mod stress;

use reknit_plane::{Buffer, Element, Group, GroupSpec, Op, Plane, Reduce, Ticket};
use std::ops::Range;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn spec(planes: &[Box<dyn Plane>], rank: usize, epoch: u64, name: &str) -> GroupSpec {
    GroupSpec {
        job: "job".into(),
        epoch,
        name: name.into(),
        members: planes.iter().map(|plane| plane.endpoint()).collect(),
        rank,
        ticket: Ticket([epoch as u8; 32]),
        deadline: PATIENCE,
    }
}

/// Runs `body` once per rank, each on its own thread and in its own member of one group, once all have joined.
/// Results in rank order.
pub fn ranks<R: Send>(
    planes: &[Box<dyn Plane>],
    epoch: u64,
    name: &str,
    body: impl Fn(Box<dyn Group>) -> R + Sync,
) -> Vec<R> {
    let all_joined = Barrier::new(planes.len());
    thread::scope(|scope| {
        let threads: Vec<_> = (0..planes.len())
            .map(|rank| {
                let spec = spec(planes, rank, epoch, name);
                let (body, all_joined) = (&body, &all_joined);
                scope.spawn(move || {
                    let group = planes[rank].join(spec).unwrap();
                    all_joined.wait();
                    body(group)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs one operation to its end.
pub fn run(group: &mut dyn Group, op: Op) -> Buffer {
    group.submit(op, PATIENCE).wait().unwrap()
}

pub trait Number: Element {
    fn of(value: f64) -> Self;
}

impl Number for f32 {
    fn of(value: f64) -> f32 {
        value as f32
    }
}

impl Number for f64 {
    fn of(value: f64) -> f64 {
        value
    }
}

/// Values whose sum depends on the order of additions.
pub fn values<T: Number>(rank: usize, len: usize, salt: u64) -> Vec<T> {
    const MAGNITUDES: [f64; 4] = [1e-4, 1.0, 33.3, 1e4];
    let mut state = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            T::of(((state >> 40) as f64 - 8e6) * MAGNITUDES[state as usize % 4])
        })
        .collect()
}

/// The reduction of all ranks' values, from rank 0 upward.
fn reduced<T: Number>(reduce: Reduce, size: usize, len: usize, salt: u64) -> Vec<T> {
    let mut total = values::<T>(0, len, salt);
    for rank in 1..size {
        for (total, value) in total.iter_mut().zip(values::<T>(rank, len, salt)) {
            match reduce {
                Reduce::Sum => *total += value,
                Reduce::Max if value > *total => *total = value,
                Reduce::Max => {}
            }
        }
    }
    total
}

fn exact<T: Number>(buffer: Buffer, expected: &[T], what: &str) {
    let got = T::unwrap(buffer).unwrap();
    let (got, expected): (&[u8], &[u8]) = (bytemuck::cast_slice(&got), bytemuck::cast_slice(expected));
    assert!(got == expected, "{what}: bits differ");
}

/// Lengths that meet every path: nothing, less than one element per rank, odd, small, several segments.
const LENGTHS: [usize; 7] = [0, 1, 3, 1023, 4097, 10_007, 300_001];

pub fn conformance(make: impl Fn(usize) -> Vec<Box<dyn Plane>>) {
    for size in 1..=5 {
        let planes = make(size);
        ranks(&planes, 1, "f32", all_operations::<f32>);
        ranks(&planes, 1, "f64", all_operations::<f64>);
        ranks(&planes, 2, "queue", queued);
        done_or_not(&planes);
        two_groups_at_once(&planes);
        endings::endings(&planes);
        exchange::exchanges(&planes);
        stress::stress(&planes, size as u64);
    }
}

fn all_operations<T: Number>(mut group: Box<dyn Group>) {
    for len in LENGTHS {
        all_reduce::<T>(&mut *group, len);
        broadcast::<T>(&mut *group, len);
        pass_along::<T>(&mut *group, len);
    }
    all_reduce::<T>(&mut *group, 1_000_000);
    let size = group.size();
    for per_rank in [0, 1, 1001, 70_000] {
        let even = vec![per_rank; size];
        let ragged: Vec<usize> = (0..size).map(|rank| per_rank * (rank % 3)).collect();
        for counts in [even, ragged] {
            reduce_scatter::<T>(&mut *group, &counts);
            all_gather::<T>(&mut *group, &counts);
        }
        all_to_all::<T>(&mut *group, per_rank);
    }
    assert_eq!(run(&mut *group, Op::Barrier).len(), 0);
    assert_eq!(group.health(), None);
    group.retire();
}

fn all_reduce<T: Number>(group: &mut dyn Group, len: usize) {
    for reduce in [Reduce::Sum, Reduce::Max] {
        let expected = reduced::<T>(reduce, group.size(), len, 1);
        for _ in 0..2 {
            let buffer = T::wrap(values(group.rank(), len, 1));
            let buffer = run(group, Op::AllReduce { reduce, buffer });
            exact(buffer, &expected, &format!("all-reduce of {len}"));
        }
    }
}

fn reduce_scatter<T: Number>(group: &mut dyn Group, counts: &[usize]) {
    let (rank, total) = (group.rank(), counts.iter().sum());
    let own = part(counts, rank);
    let expected = reduced::<T>(Reduce::Sum, group.size(), total, 2);
    let op = Op::ReduceScatterV { buffer: T::wrap(values(rank, total, 2)), counts: counts.to_vec() };
    let got = T::unwrap(run(group, op)).unwrap();
    assert_eq!(got.len(), total);
    exact(T::wrap(got[own.clone()].to_vec()), &expected[own], &format!("reduce-scatter of {counts:?}"));
}

fn all_gather<T: Number>(group: &mut dyn Group, counts: &[usize]) {
    let parts = (0..group.size()).flat_map(|rank| values::<T>(rank, counts[rank], 3));
    let expected: Vec<T> = parts.collect();
    let own = part(counts, group.rank());
    let mut given = vec![T::of(-1.0); expected.len()];
    given[own.clone()].copy_from_slice(&expected[own]);
    let op = Op::AllGatherV { buffer: T::wrap(given), counts: counts.to_vec() };
    exact(run(group, op), &expected, &format!("all-gather of {counts:?}"));
}

/// Where the rank's part of a buffer lies.
pub fn part(counts: &[usize], rank: usize) -> Range<usize> {
    let start = counts[..rank].iter().sum();
    start..start + counts[rank]
}

/// Rank `from` sends `(from + 2 * to) % 3 * unit` elements to rank `to`. What it sends lies in rank order, what it gets
/// in the reverse, with an element between any two, which stays as it is.
fn all_to_all<T: Number>(group: &mut dyn Group, unit: usize) {
    let (me, size) = (group.rank(), group.size());
    let count = |from: usize, to: usize| (from + 2 * to) % 3 * unit;
    let message = |from: usize, to: usize| values::<T>(from * size + to, count(from, to), 4);
    for stays in [false, true] {
        let mut given: Vec<T> = Vec::new();
        let mut place = |values: Vec<T>| {
            given.push(T::of(0.5));
            given.extend(&values);
            given.len() - values.len()..given.len()
        };
        let send: Vec<_> = (0..size).map(|to| place(message(me, to))).collect();
        let mut receive: Vec<_> =
            (0..size).rev().map(|from| place(vec![T::of(-1.0); count(from, me)])).collect();
        receive.reverse();
        if stays {
            receive[me] = send[me].clone();
        }
        let mut expected = given.clone();
        for (from, range) in receive.iter().enumerate() {
            expected[range.clone()].copy_from_slice(&message(from, me));
        }
        let op = Op::AllToAllV { buffer: T::wrap(given), send, receive };
        exact(run(group, op), &expected, &format!("all-to-all by {unit}"));
    }
}

fn broadcast<T: Number>(group: &mut dyn Group, len: usize) {
    for root in 0..group.size() {
        let op = Op::Broadcast { root, buffer: T::wrap(values(group.rank(), len, 5)) };
        exact(run(group, op), &values::<T>(root, len, 5), &format!("broadcast of {len}"));
    }
}

/// Each rank sends to the next; the last one only receives.
fn pass_along<T: Number>(group: &mut dyn Group, len: usize) {
    let (me, size) = (group.rank(), group.size());
    if me > 0 {
        let buffer = T::wrap(vec![T::of(0.0); len]);
        let received = run(group, Op::Recv { from: me - 1, buffer });
        exact(received, &values::<T>(me - 1, len, 6), &format!("receive of {len}"));
    }
    if me + 1 < size {
        let sent = values::<T>(me, len, 6);
        let buffer = T::wrap(sent.clone());
        exact(run(group, Op::Send { to: me + 1, buffer }), &sent, "what was sent");
    }
}

/// Many operations in flight, waited for in reverse.
fn queued(mut group: Box<dyn Group>) {
    let lengths: Vec<usize> = (0..40).map(|i| i * 997 % 30_011).collect();
    let works: Vec<_> = lengths
        .iter()
        .map(|&len| {
            let buffer = f32::wrap(values(group.rank(), len, 7));
            group.submit(Op::AllReduce { reduce: Reduce::Sum, buffer }, PATIENCE)
        })
        .collect();
    for (work, len) in works.into_iter().zip(lengths).rev() {
        let expected = reduced::<f32>(Reduce::Sum, group.size(), len, 7);
        exact(work.wait().unwrap(), &expected, "queued all-reduce");
    }
    group.retire();
}

/// An operation is not done before every rank has come to it, and then it is, without being waited for.
fn done_or_not(planes: &[Box<dyn Plane>]) {
    let first_has_looked = Barrier::new(planes.len());
    ranks(planes, 2, "done", |mut group| {
        let all_reduce = || Op::AllReduce { reduce: Reduce::Sum, buffer: f32::wrap(vec![1.0; 3]) };
        if group.rank() == 0 {
            let work = group.submit(all_reduce(), PATIENCE);
            assert!(group.size() == 1 || !work.is_done(), "nobody else has come");
            first_has_looked.wait();
            run(&mut *group, Op::Barrier);
            assert!(work.is_done(), "operations run in order");
            work.wait().unwrap();
        } else {
            first_has_looked.wait();
            run(&mut *group, all_reduce());
            run(&mut *group, Op::Barrier);
        }
        group.retire();
    });
}

/// A group whose peer does not come yet must not hold up another.
fn two_groups_at_once(planes: &[Box<dyn Plane>]) {
    if planes.len() < 2 {
        return;
    }
    let slow: Vec<_> = ranks(planes, 2, "slow", |group| group);
    let mut works = Vec::new();
    let mut slow: Vec<_> = slow.into_iter().collect();
    let last = slow.len() - 1;
    let big = || Op::AllReduce { reduce: Reduce::Sum, buffer: Buffer::F32(vec![1.0; 1_000_000]) };
    for group in &mut slow[..last] {
        works.push(group.submit(big(), PATIENCE));
    }
    ranks(planes, 2, "fast", |mut group| {
        all_reduce::<f64>(&mut *group, 50_000);
        group.retire();
    });
    works.push(slow[last].submit(big(), PATIENCE));
    for work in works {
        let expected = vec![planes.len() as f32; 1_000_000];
        exact(work.wait().unwrap(), &expected, "slow group");
    }
}
