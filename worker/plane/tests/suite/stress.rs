//! Many operations of every kind in several groups of each rank, waited for in any order, against a model that runs them
//! one after the other.

use super::{PATIENCE, part, ranks, values};
use reknit_plane::{Buffer, Element, Group, Op, Plane, Reduce, Work};
use std::ops::Range;
use std::thread;

const GROUPS: usize = 3;
const OPERATIONS: u64 = 300;
/// Operations of one rank that nobody has waited for, over all groups.
const IN_FLIGHT: usize = 24;

/// Numbers that are a function of the seed.
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 24) as usize % bound
    }

    /// Mostly short, now and then longer than a chunk, often nothing.
    fn len(&mut self) -> usize {
        match self.below(6) {
            0 => 0,
            1..4 => self.below(300),
            4 => self.below(20_000),
            _ => self.below(200_000),
        }
    }

    fn lens(&mut self, count: usize) -> Vec<usize> {
        (0..count).map(|_| self.len() / count).collect()
    }
}

/// What one rank submits and what it must get back, as far as that is told.
struct Turn {
    op: Op,
    result: Vec<f32>,
    told: Range<usize>,
}

impl Turn {
    fn new(op: impl FnOnce(Buffer) -> Op, given: Vec<f32>, result: Vec<f32>) -> Turn {
        let told = 0..result.len();
        Turn { op: op(f32::wrap(given)), result, told }
    }
}

/// What each rank does in the operation that the seed stands for; `None` for those that have no part in it.
fn play(seed: u64, size: usize) -> Vec<Option<Turn>> {
    let mut dice = Dice::new(seed);
    let given = |len: usize| -> Vec<Vec<f32>> { (0..size).map(|rank| values(rank, len, seed)).collect() };
    let all = |turn: &dyn Fn(usize) -> Turn| (0..size).map(|rank| Some(turn(rank))).collect();
    match dice.below(7) {
        0 => {
            let reduce = if dice.below(3) == 0 { Reduce::Max } else { Reduce::Sum };
            let given = given(dice.len());
            let result = reduced(reduce, &given);
            all(&|rank| {
                let op = |buffer| Op::AllReduce { reduce, buffer };
                Turn::new(op, given[rank].clone(), result.clone())
            })
        }
        1 => {
            let counts = dice.lens(size);
            let given = given(counts.iter().sum());
            let result = reduced(Reduce::Sum, &given);
            all(&|rank| {
                let op = |buffer| Op::ReduceScatterV { buffer, counts: counts.clone() };
                Turn { told: part(&counts, rank), ..Turn::new(op, given[rank].clone(), result.clone()) }
            })
        }
        2 => {
            let counts = dice.lens(size);
            let given = given(counts.iter().sum());
            let result: Vec<f32> =
                (0..size).flat_map(|rank| given[rank][part(&counts, rank)].to_vec()).collect();
            all(&|rank| {
                let op = |buffer| Op::AllGatherV { buffer, counts: counts.clone() };
                Turn::new(op, given[rank].clone(), result.clone())
            })
        }
        3 => all_to_all(&mut dice, seed, size),
        4 => {
            let root = dice.below(size);
            let given = given(dice.len());
            all(&|rank| {
                let op = |buffer| Op::Broadcast { root, buffer };
                Turn::new(op, given[rank].clone(), given[root].clone())
            })
        }
        5 if size > 1 => {
            let from = dice.below(size);
            let to = (from + 1 + dice.below(size - 1)) % size;
            let given = given(dice.len());
            let turn = |rank: usize| {
                let op = |buffer| match rank == from {
                    true => Op::Send { to, buffer },
                    false => Op::Recv { from, buffer },
                };
                Turn::new(op, given[rank].clone(), given[from].clone())
            };
            (0..size).map(|rank| (rank == from || rank == to).then(|| turn(rank))).collect()
        }
        _ => all(&|_| Turn::new(|_| Op::Barrier, Vec::new(), Vec::new())),
    }
}

/// What is sent and what comes lie in any order.
fn all_to_all(dice: &mut Dice, seed: u64, size: usize) -> Vec<Option<Turn>> {
    let counts: Vec<Vec<usize>> = (0..size).map(|_| dice.lens(size)).collect();
    let mut place = |me: usize| {
        let mut ranges = vec![0..0; 2 * size];
        let mut order: Vec<usize> = (0..2 * size).collect();
        let mut end = 0;
        while !order.is_empty() {
            let next = order.swap_remove(dice.below(order.len()));
            let len = if next < size { counts[me][next] } else { counts[next - size][me] };
            ranges[next] = end..end + len;
            end += len;
        }
        (ranges.split_off(size), ranges, end)
    };
    let places: Vec<_> = (0..size).map(&mut place).collect();
    let given: Vec<Vec<f32>> = (0..size).map(|rank| values(rank, places[rank].2, seed)).collect();
    let turn = |rank: usize| {
        let (receive, send, _) = places[rank].clone();
        let mut result = given[rank].clone();
        for (from, range) in receive.iter().enumerate() {
            result[range.clone()].copy_from_slice(&given[from][places[from].1[rank].clone()]);
        }
        Turn::new(|buffer| Op::AllToAllV { buffer, send, receive }, given[rank].clone(), result)
    };
    (0..size).map(|rank| Some(turn(rank))).collect()
}

fn reduced(reduce: Reduce, given: &[Vec<f32>]) -> Vec<f32> {
    let mut total = given[0].clone();
    for values in &given[1..] {
        for (total, value) in total.iter_mut().zip(values) {
            *total = match reduce {
                Reduce::Sum => *total + value,
                Reduce::Max => total.max(*value),
            };
        }
    }
    total
}

/// An operation under way, and what must come of it.
struct InFlight {
    work: Box<dyn Work>,
    result: Vec<f32>,
    told: Range<usize>,
    what: String,
}

impl InFlight {
    fn end(self) {
        let what = self.what;
        let buffer = self.work.wait().unwrap_or_else(|error| panic!("{what}: {error}"));
        if let Some(got) = f32::unwrap(buffer) {
            assert_eq!(got.len(), self.result.len(), "{what}");
            let told = self.told;
            let bits = |values: &[f32]| values[told.clone()].iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(bits(&got) == bits(&self.result), "{what}: other bits");
        } else {
            assert!(self.result.is_empty(), "{what}: another type");
        }
    }
}

/// All ranks submit the same operations in the same order, whichever group each is for: so there is always one rank that
/// waits for nothing but what all others have submitted. Each waits as its own dice will have it, for half of the
/// operations on another thread.
pub fn stress(planes: &[Box<dyn Plane>], seed: u64) {
    let size = planes.len();
    let mut groups: Vec<Vec<Box<dyn Group>>> = (0..size).map(|_| Vec::new()).collect();
    for number in 0..GROUPS {
        let joined = ranks(planes, 6, &format!("stress {seed} {number}"), |group| group);
        groups.iter_mut().zip(joined).for_each(|(groups, group)| groups.push(group));
    }
    thread::scope(|scope| {
        for (rank, groups) in groups.into_iter().enumerate() {
            scope.spawn(move || one_rank(rank, size, seed, groups));
        }
    });
}

fn one_rank(rank: usize, size: usize, seed: u64, mut groups: Vec<Box<dyn Group>>) {
    let (mut common, mut own) = (Dice::new(seed), Dice::new(!seed ^ (rank as u64) << 8));
    let mut in_flight = Vec::new();
    thread::scope(|scope| {
        let mut helper = None;
        for count in 0..OPERATIONS {
            let number = common.below(GROUPS);
            let Some(Turn { op, result, told }) = play(seed << 32 | count, size).swap_remove(rank) else {
                continue;
            };
            let what = format!("seed {seed}, operation {count}, in group {number}: rank {rank}");
            let work = groups[number].submit(op, PATIENCE);
            in_flight.push(InFlight { work, result, told, what });
            if in_flight.len() < IN_FLIGHT {
                continue;
            }
            let one = in_flight.swap_remove(own.below(IN_FLIGHT));
            if own.below(2) == 0 {
                one.end();
            } else if let Some(before) = helper.replace(scope.spawn(move || one.end())) {
                before.join().unwrap();
            }
        }
    });
    while !in_flight.is_empty() {
        in_flight.swap_remove(own.below(in_flight.len())).end();
    }
    for group in groups {
        assert_eq!(group.health(), None);
        group.retire();
    }
}
