//! Lowered programs, run in lockstep without any transport.

use super::*;
use crate::Buffer;
use crate::host::memory::Memory;

const AROUND_TINY: usize = TINY / 4;

fn lower_all(size: usize, op: impl Fn(usize) -> Op) -> Vec<Program> {
    (0..size).map(|rank| lower(&op(rank), rank, size).unwrap()).collect()
}

/// Runs the programs of all ranks in lockstep, without any transport.
fn simulate(size: usize, op: impl Fn(usize) -> (Op, Buffer)) -> Vec<Buffer> {
    let programs = lower_all(size, |rank| op(rank).0);
    let mut memories: Vec<Memory> = programs
        .iter()
        .enumerate()
        .map(|(rank, program)| Memory { data: op(rank).1, scratch: vec![0; program.scratch.div_ceil(8)] })
        .collect();
    for round in 0..programs[0].rounds.len() {
        let mut messages = Vec::new();
        for (from, program) in programs.iter().enumerate() {
            for send in &program.rounds[round].sends {
                messages.push((from, send.peer, memories[from].bytes(send.span).to_vec()));
            }
        }
        for (to, program) in programs.iter().enumerate() {
            for receive in &program.rounds[round].receives {
                let wanted = |(from, peer, _): &(usize, usize, _)| *from == receive.peer && *peer == to;
                let at = messages.iter().position(wanted).unwrap();
                let (_, _, bytes) = messages.swap_remove(at);
                memories[to].bytes_mut(receive.span).copy_from_slice(&bytes);
            }
            for step in &program.rounds[round].then {
                memories[to].run(step, program.kind);
            }
        }
        assert_eq!(messages, [], "every send has its receive");
    }
    memories.into_iter().map(|memory| memory.data).collect()
}

#[test]
fn all_reduce_is_exact_on_both_sides_of_the_threshold() {
    for size in 1..=6 {
        for len in [0, 1, 5, AROUND_TINY, AROUND_TINY + 1, AROUND_TINY + 7] {
            // Adding in another order would lose the ones.
            let value = |rank: usize| [1e8_f32, 1.0, -1e8, 3.0, 0.1, -0.0][rank];
            let buffer = |rank| Buffer::F32(vec![value(rank); len]);
            let all_reduce = |rank| {
                let (reduce, buffer) = (Reduce::Sum, buffer(rank));
                Op::AllReduce { reduce, buffer }
            };
            let expected = (1..size).fold(value(0), |sum, rank| sum + value(rank));
            let results = simulate(size, |rank| (all_reduce(rank), buffer(rank)));
            assert_eq!(results, vec![Buffer::F32(vec![expected; len]); size]);
            let rounds = lower_all(size, all_reduce)[0].rounds.len();
            let expected = match (size, len * 4 <= TINY) {
                (1, _) => 0,
                (_, true) => 1,
                (_, false) => 2,
            };
            assert_eq!(rounds, expected);
        }
    }
}

/// However long its parts are, an operation needs no more memory than is kept for the next one.
#[test]
fn scratch_memory_is_bounded() {
    let size = 4;
    for len in [1, TINY, PART, 10 * size * PART] {
        let buffer = || Buffer::F32(vec![0.0; len]);
        let all_reduce = Op::AllReduce { reduce: Reduce::Sum, buffer: buffer() };
        let reduce_scatter = Op::ReduceScatterV { buffer: buffer(), counts: vec![0, len, 0, 0] };
        for op in [all_reduce, reduce_scatter] {
            for rank in 0..size {
                assert!(lower(&op, rank, size).unwrap().scratch <= (size - 1) * PART, "{len} {op:?}");
            }
        }
    }
}

#[test]
fn the_greatest_of_numbers_and_not_numbers_is_not_a_number() {
    for place in 0..3 {
        let buffer = |rank| Buffer::F64(vec![if rank == place { f64::NAN } else { 1.0 }]);
        let op = |rank| {
            let (reduce, buffer) = (Reduce::Max, buffer(rank));
            Op::AllReduce { reduce, buffer }
        };
        for result in simulate(3, |rank| (op(rank), buffer(rank))) {
            assert!(matches!(result, Buffer::F64(values) if values[0].is_nan()));
        }
    }
}

#[test]
fn digests_tell_operations_apart() {
    let of = |op: Op| lower(&op, 0, 2).unwrap().digest;
    let floats = |len| Buffer::F32(vec![0.0; len]);
    let all_reduce = |reduce, buffer| Op::AllReduce { reduce, buffer };
    let digests = [
        of(all_reduce(Reduce::Sum, floats(4))),
        of(all_reduce(Reduce::Max, floats(4))),
        of(all_reduce(Reduce::Sum, floats(5))),
        of(all_reduce(Reduce::Sum, Buffer::F64(vec![0.0; 4]))),
        of(Op::ReduceScatterV { buffer: floats(4), counts: vec![1, 3] }),
        of(Op::ReduceScatterV { buffer: floats(4), counts: vec![3, 1] }),
        of(Op::AllGatherV { buffer: floats(4), counts: vec![1, 3] }),
        of(Op::Broadcast { root: 0, buffer: floats(4) }),
        of(Op::Broadcast { root: 1, buffer: floats(4) }),
        of(Op::Send { to: 1, buffer: floats(4) }),
        of(Op::Barrier),
    ];
    for (number, digest) in digests.iter().enumerate() {
        assert!(!digests[..number].contains(digest), "{number}");
    }
    let receive = of(Op::Recv { from: 1, buffer: floats(4) });
    assert_eq!(receive, of(Op::Send { to: 1, buffer: floats(4) }));
}
