//! What every data plane must do with memory that is lent to it.

use super::endings::{aborted, left_by_itself};
use super::{PATIENCE, ranks};
use reknit_plane::{AbortReason, Buffer, Lent, Op, Plane, PlaneError, Reduce};
use std::thread;
use std::time::Duration;

/// Long enough to be told by a peer, and waited out where nobody can tell.
const DISAGREE: Duration = Duration::from_secs(1);

/// Lends a few bytes at a time, and as a whole no more than it may.
struct Pieces {
    out: Vec<Vec<u8>>,
    into: Vec<Vec<u8>>,
    at_once: usize,
    left: usize,
}

impl Pieces {
    /// What rank `me` sends is a function of who sends it to whom and of its length.
    fn new(me: usize, lens: &[Vec<usize>], at_once: usize) -> Pieces {
        let size = lens.len();
        Pieces {
            out: (0..size).map(|to| message(me, to, lens[me][to])).collect(),
            into: (0..size).map(|from| vec![0xee; lens[from][me]]).collect(),
            at_once,
            left: usize::MAX,
        }
    }
}

impl Lent for Pieces {
    fn outgoing(&self, to: usize) -> usize {
        self.out[to].len()
    }

    fn incoming(&self, from: usize) -> usize {
        self.into[from].len()
    }

    fn send(&mut self, to: usize, at: usize) -> &[u8] {
        let rest = &self.out[to][at..];
        let len = rest.len().min(self.at_once).min(self.left);
        self.left -= len;
        &rest[..len]
    }

    fn receive(&mut self, from: usize, at: usize) -> &mut [u8] {
        let rest = &mut self.into[from][at..];
        let len = rest.len().min(self.at_once).min(self.left);
        self.left -= len;
        &mut rest[..len]
    }
}

fn message(from: usize, to: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * (2 * from + 3) + at / 251 + 7 * to) as u8).collect()
}

/// By sender, then receiver: nothing, odd, more than a segment.
fn lens(size: usize, salt: usize) -> Vec<Vec<usize>> {
    const LENS: [usize; 6] = [0, 1, 777, 0, 65_537, 2_300_001];
    let len =
        |from: usize, to: usize| if from == to { 0 } else { LENS[(from * 5 + to * 2 + salt) % LENS.len()] };
    (0..size).map(|from| (0..size).map(|to| len(from, to)).collect()).collect()
}

pub(super) fn exchanges(planes: &[Box<dyn Plane>]) {
    every_byte_comes(planes);
    memory_that_ends_ends_the_exchange(planes);
    who_disagrees_is_told(planes);
    abort_at_any_moment(planes);
}

fn every_byte_comes(planes: &[Box<dyn Plane>]) {
    ranks(planes, 6, "exchange", |mut group| {
        let (me, size) = (group.rank(), group.size());
        for (salt, at_once) in [(0, 1 << 30), (1, 4096), (2, 33), (3, 70_001)] {
            let lens = lens(size, salt);
            let mut pieces = Pieces::new(me, &lens, at_once);
            // What is submitted before runs before it, and need not have been waited for.
            let buffer = Buffer::F32(vec![1.0; 30_000]);
            let sum = group.submit(Op::AllReduce { reduce: Reduce::Sum, buffer }, PATIENCE);
            group.exchange(&mut pieces, PATIENCE).unwrap();
            assert_eq!(sum.wait().unwrap(), Buffer::F32(vec![size as f32; 30_000]));
            for (from, came) in pieces.into.iter().enumerate() {
                assert!(*came == message(from, me, lens[from][me]), "{from} to {me}, {salt}");
            }
        }
        assert_eq!(group.health(), None);
        group.retire();
    });
}

/// A rank has nothing more to lend in the middle of a message.
fn memory_that_ends_ends_the_exchange(planes: &[Box<dyn Plane>]) {
    if planes.len() < 2 {
        return;
    }
    for (number, left) in [0, 500_000, 3_000_000].into_iter().enumerate() {
        let errors = ranks(planes, 6, &format!("lent {number}"), |mut group| {
            let mut lens = vec![vec![5_000_000; group.size()]; group.size()];
            for (me, lens) in lens.iter_mut().enumerate() {
                lens[me] = 0;
            }
            let mut pieces = Pieces::new(group.rank(), &lens, 60_000);
            if group.rank() == 0 {
                pieces.left = left;
            }
            group.exchange(&mut pieces, PATIENCE).unwrap_err()
        });
        left_by_itself(errors, 0, |error| matches!(error, PlaneError::Io { .. }));
    }
}

/// Two ranks count on other lengths, or on one round more. The next operation tells one of them, and the one
/// after that the other.
fn who_disagrees_is_told(planes: &[Box<dyn Plane>]) {
    if planes.len() < 2 {
        return;
    }
    // What rank 0 sends rank 1 in each round, and what rank 1 waits for.
    let cases: [(&[usize], &[usize]); 6] = [
        (&[10], &[0]),
        (&[0], &[10]),
        (&[10], &[20]),
        (&[2_300_001], &[2_300_000]),
        (&[10, 20], &[10]),
        (&[10], &[10, 20]),
    ];
    for (number, (sent, awaited)) in cases.into_iter().enumerate() {
        let ends = ranks(planes, 6, &format!("disagree {number}"), |mut group| {
            let (me, size) = (group.rank(), group.size());
            for &len in if me == 0 { sent } else { awaited } {
                let mut lens = vec![vec![0; size]; size];
                lens[0][1] = len;
                group.exchange(&mut Pieces::new(me, &lens, 1 << 30), DISAGREE)?;
            }
            group.submit(Op::Barrier, DISAGREE).wait()?;
            group.submit(Op::Barrier, DISAGREE).wait()
        });
        assert!(ends[0].is_err() && ends[1].is_err(), "{sent:?} and {awaited:?}: {ends:?}");
    }
}

/// Whatever a rank is amid when it aborts, the exchange ends on all ranks, soon.
fn abort_at_any_moment(planes: &[Box<dyn Plane>]) {
    if planes.len() < 2 {
        return;
    }
    for round in 0..8_u64 {
        let errors = ranks(planes, 6, &format!("abort exchange {round}"), |mut group| {
            let aborter = group.aborter();
            let lens = lens(group.size(), round as usize);
            thread::scope(|scope| {
                if group.rank() == 1 {
                    scope.spawn(move || {
                        // Another moment each round.
                        thread::sleep(Duration::from_micros(150 * round * round));
                        aborter.abort(AbortReason::Sibling);
                    });
                }
                loop {
                    let mut pieces = Pieces::new(group.rank(), &lens, 10_000);
                    if let Err(error) = group.exchange(&mut pieces, PATIENCE) {
                        break error;
                    }
                }
            })
        });
        left_by_itself(errors, 1, aborted);
    }
}
