//! Medians of the host plane's all-reduce, beside a memory copy of the same size. Ranks are threads of this process.
//!
//! `cargo run --release -p reknit-plane --example bench_plane [RANKS]...`

use reknit_plane::{Buffer, Group, GroupSpec, HostPlane, Op, Plane, Reduce, Ticket};
use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6
}

fn repeats(bytes: usize) -> usize {
    (256 << 20 >> bytes.ilog2()).clamp(5, 500)
}

fn copy(bytes: usize) -> f64 {
    let from = vec![1.0_f32; bytes / 4];
    let mut to = vec![0.0_f32; bytes / 4];
    let times = (0..repeats(bytes))
        .map(|_| {
            let start = Instant::now();
            to.copy_from_slice(black_box(&from));
            black_box(&mut to);
            start.elapsed()
        })
        .collect();
    median(times)
}

fn all_reduce(group: &mut dyn Group, bytes: usize, barrier: &Barrier) -> f64 {
    let mut buffer = Buffer::F32(vec![0.0; bytes / 4]);
    let mut times = Vec::new();
    barrier.wait();
    for round in 0..repeats(bytes) + 2 {
        let start = Instant::now();
        let reduce = Reduce::Sum;
        let work = group.submit(Op::AllReduce { reduce, buffer }, PATIENCE);
        buffer = match work.wait() {
            Ok(buffer) => buffer,
            Err(error) => panic!("{error}"),
        };
        // The first ones find the memory unmapped.
        if round >= 2 {
            times.push(start.elapsed());
        }
    }
    median(times)
}

fn bench(transport: &str, ranks: usize, node: impl Fn(usize) -> String) {
    let open = |rank| match HostPlane::new(&node(rank), "127.0.0.1") {
        Ok(plane) => plane,
        Err(error) => panic!("{error}"),
    };
    let planes: Vec<HostPlane> = (0..ranks).map(open).collect();
    let members: Vec<_> = planes.iter().map(Plane::endpoint).collect();
    let barrier = Barrier::new(ranks);
    let (planes, members, barrier) = (&planes, &members, &barrier);
    thread::scope(|scope| {
        for (rank, plane) in planes.iter().enumerate() {
            scope.spawn(move || {
                let spec = GroupSpec {
                    job: "bench".into(),
                    epoch: 1,
                    name: "world".into(),
                    members: members.clone(),
                    rank,
                    ticket: Ticket([7; 32]),
                    deadline: PATIENCE,
                };
                let mut group = match plane.join(spec) {
                    Ok(group) => group,
                    Err(error) => panic!("{error}"),
                };
                for bytes in SIZES {
                    let time = all_reduce(&mut *group, bytes, barrier);
                    if rank == 0 {
                        let kib = bytes >> 10;
                        let copy = copy(bytes);
                        println!("{transport:5} {ranks:5} {kib:9} {time:14.0} {copy:10.0}");
                    }
                    barrier.wait();
                }
                group.retire();
            });
        }
    });
}

fn main() {
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let ranks = if given.is_empty() { vec![2, 4] } else { given };
    println!("      ranks       KiB  all-reduce us    copy us");
    for ranks in ranks {
        bench("unix", ranks, |_| "node".into());
        bench("tcp", ranks, |rank| format!("node-{rank}"));
    }
}
