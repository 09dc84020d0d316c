//! How a group of any data plane comes to its end: by a mistake, a deadline, an abort, or in order.

use super::{PATIENCE, all_reduce, ranks, run, spec};
use reknit_plane::{AbortReason, Buffer, Op, Plane, PlaneError, Reduce};
use std::thread;
use std::time::Duration;

pub(super) fn endings(planes: &[Box<dyn Plane>]) {
    refused_operations(planes);
    mismatches(planes);
    deadline(planes);
    abort_unblocks_wait(planes);
    abort_at_any_moment(planes);
    abort_unblocks_join(planes);
    retired_peers(planes);
}

fn refused_operations(planes: &[Box<dyn Plane>]) {
    let size = planes.len();
    let wrong: [fn(usize) -> Op; 7] = [
        |_| Op::AllReduce { reduce: Reduce::Sum, buffer: Buffer::Bytes(vec![1]) },
        |size| Op::ReduceScatterV { buffer: Buffer::F32(vec![1.0; size + 1]), counts: vec![1; size] },
        |size| Op::AllGatherV { buffer: Buffer::F32(vec![1.0]), counts: vec![1; size + 1] },
        |size| Op::Broadcast { root: size, buffer: Buffer::F32(vec![1.0]) },
        |size| Op::AllGatherV { buffer: Buffer::F32(vec![]), counts: vec![usize::MAX; size] },
        |size| Op::AllToAllV {
            buffer: Buffer::F32(vec![1.0; 2 * size]),
            send: vec![0..2; size],
            receive: vec![1..3; size],
        },
        |size| Op::AllToAllV {
            buffer: Buffer::F32(vec![1.0; size]),
            send: vec![0..0; size],
            receive: vec![size..size + 1; size],
        },
    ];
    for (number, op) in wrong.iter().enumerate() {
        let errors = ranks(planes, 2, &format!("refused {number}"), |mut group| {
            let error = group.submit(op(size), PATIENCE).wait().unwrap_err();
            assert!(group.health().is_some());
            let later = group.submit(Op::Barrier, PATIENCE).wait().unwrap_err();
            (error, later)
        });
        for (error, later) in errors {
            assert!(matches!(error, PlaneError::Io { .. } | PlaneError::PeerLeft { .. }), "{error}");
            assert_eq!(error, later, "the first error stays");
        }
    }
}

fn mismatches(planes: &[Box<dyn Plane>]) {
    if planes.len() < 2 {
        return;
    }
    let odd: [fn() -> Op; 4] = [
        || Op::Barrier,
        || Op::AllReduce { reduce: Reduce::Max, buffer: Buffer::F32(vec![1.0; 8]) },
        || Op::AllReduce { reduce: Reduce::Sum, buffer: Buffer::F32(vec![1.0; 9]) },
        || Op::AllReduce { reduce: Reduce::Sum, buffer: Buffer::F64(vec![1.0; 4]) },
    ];
    for (number, op) in odd.iter().enumerate() {
        let errors = ranks(planes, 3, &format!("mismatch {number}"), |mut group| {
            let op = match group.rank() {
                0 => op(),
                _ => Op::AllReduce { reduce: Reduce::Sum, buffer: Buffer::F32(vec![1.0; 8]) },
            };
            group.submit(op, PATIENCE).wait().unwrap_err()
        });
        assert!(errors.iter().any(|error| matches!(error, PlaneError::Mismatch { .. })), "{errors:?}");
        for error in errors {
            assert!(matches!(error, PlaneError::Mismatch { .. } | PlaneError::PeerLeft { .. }), "{error}");
        }
    }
}

/// The last rank stays silent until the others have given up.
fn deadline(planes: &[Box<dyn Plane>]) {
    if planes.len() < 2 {
        return;
    }
    let last = planes.len() - 1;
    let mut groups = ranks(planes, 3, "deadline", |group| group);
    let silent = groups.remove(last);
    let limit = Duration::from_millis(200);
    let before = std::time::Instant::now();
    let works: Vec<_> = groups.iter_mut().map(|group| group.submit(Op::Barrier, limit)).collect();
    let errors: Vec<_> = works.into_iter().map(|work| work.wait().unwrap_err()).collect();
    assert!(before.elapsed() >= limit);
    let named = errors
        .iter()
        .any(|error| matches!(error, PlaneError::Deadline { waiting_for, .. } if *waiting_for == [last]));
    assert!(named, "{errors:?}");
    drop(silent);
}

fn abort_unblocks_wait(planes: &[Box<dyn Plane>]) {
    if planes.len() < 2 {
        return;
    }
    let mut groups = ranks(planes, 3, "abort", |group| group);
    let aborter = groups[0].aborter();
    let op = Op::Recv { from: 1, buffer: Buffer::F32(vec![0.0; 4]) };
    let work = groups[0].submit(op, PATIENCE);
    let waiting = thread::spawn(move || work.wait());
    aborter.abort(AbortReason::Sibling);
    aborter.abort(AbortReason::Leaving);
    let error = waiting.join().unwrap().unwrap_err();
    assert!(aborted(&error), "the first reason stays: {error}");
    let error = groups[1].submit(Op::Barrier, PATIENCE).wait().unwrap_err();
    // Another rank may have heard of it sooner and left in its turn.
    assert!(matches!(&error, PlaneError::PeerLeft { rank, .. } if *rank != 1), "{error}");
}

/// Rank `leaver` knows its own reason, and all others that somebody left by itself.
pub(super) fn left_by_itself(errors: Vec<PlaneError>, leaver: usize, knows: impl Fn(&PlaneError) -> bool) {
    for (rank, error) in errors.into_iter().enumerate() {
        let left = matches!(error, PlaneError::PeerLeft { .. });
        assert!(if rank == leaver { knows(&error) } else { left }, "rank {rank}: {error}");
    }
}

pub(super) fn aborted(error: &PlaneError) -> bool {
    matches!(error, PlaneError::Aborted { reason: AbortReason::Sibling, .. })
}

/// Whatever a rank is amid when it aborts, all operations of all ranks end, soon, and the next group works.
fn abort_at_any_moment(planes: &[Box<dyn Plane>]) {
    if planes.len() < 2 {
        return;
    }
    const LEN: usize = 400_000;
    for round in 0..8_u64 {
        let name = format!("abort {round}");
        let errors = ranks(planes, 3, &name, |mut group| {
            let aborter = group.aborter();
            let (done, finished) = std::sync::mpsc::channel::<()>();
            thread::scope(|scope| {
                if group.rank() == 1 {
                    // Another moment each round; one that has waited too long has missed the end of the test.
                    let moment = Duration::from_micros(150 * round * round);
                    scope.spawn(move || {
                        let _the_end = finished.recv_timeout(moment);
                        aborter.abort(AbortReason::Sibling);
                    });
                }
                let buffer = || Buffer::F32(vec![1.0; LEN]);
                let error = loop {
                    let works = [
                        group.submit(Op::AllReduce { reduce: Reduce::Sum, buffer: buffer() }, PATIENCE),
                        group.submit(Op::Broadcast { root: 0, buffer: buffer() }, PATIENCE),
                    ];
                    let ends = works.map(|work| work.wait());
                    if let Some(error) = ends.into_iter().find_map(Result::err) {
                        break error;
                    }
                };
                drop(done);
                assert_eq!(group.health().as_ref(), Some(&error), "the first error stays");
                error
            })
        });
        left_by_itself(errors, 1, aborted);
    }
}

fn abort_unblocks_join(planes: &[Box<dyn Plane>]) {
    if planes.len() < 2 {
        return;
    }
    let closed =
        |error: &PlaneError| matches!(error, PlaneError::Aborted { reason: AbortReason::EpochClosed, .. });
    thread::scope(|scope| {
        // Rank 1 never comes.
        let blocked = scope.spawn(|| planes[0].join(spec(planes, 0, 3, "never")).unwrap_err());
        planes[0].abort_joins(3);
        let error = blocked.join().unwrap();
        assert!(closed(&error), "{error}");
    });
    let error = planes[0].join(spec(planes, 0, 2, "older")).unwrap_err();
    assert!(closed(&error), "{error}");
    // Who still tries the old epoch is told, at once.
    let error = planes[1].join(spec(&planes[..2], 1, 3, "late")).unwrap_err();
    assert!(matches!(error, PlaneError::Handshake { .. }), "{error}");
    // And the next epoch works.
    ranks(planes, 4, "next", |mut group| {
        all_reduce::<f32>(&mut *group, 100);
        group.retire();
    });
}

/// Leaving in order is no death, but who needs the leaver hears that it is gone.
fn retired_peers(planes: &[Box<dyn Plane>]) {
    if planes.len() < 2 {
        return;
    }
    let mut groups = ranks(planes, 5, "retire", |mut group| {
        run(&mut *group, Op::Barrier);
        group
    });
    let last = groups.len() - 1;
    let sent = groups[last].submit(Op::Send { to: 0, buffer: Buffer::F64(vec![7.0; 3]) }, PATIENCE);
    sent.wait().unwrap();
    groups.remove(last).retire();
    // What it sent before it left still arrives.
    let op = Op::Recv { from: last, buffer: Buffer::F64(vec![0.0; 3]) };
    assert_eq!(run(&mut *groups[0], op), Buffer::F64(vec![7.0; 3]));
    if last > 1 {
        let buffer = || Buffer::Bytes(vec![3; 5]);
        let works = [
            groups[0].submit(Op::Send { to: 1, buffer: buffer() }, PATIENCE),
            groups[1].submit(Op::Recv { from: 0, buffer: buffer() }, PATIENCE),
        ];
        for work in works {
            work.wait().unwrap();
        }
    }
    assert_eq!(groups[0].health(), None);
    let error = groups[0].submit(Op::Barrier, PATIENCE).wait().unwrap_err();
    assert!(matches!(error, PlaneError::PeerLost { rank, .. } if rank == last), "{error}");
}
