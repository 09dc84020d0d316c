//! A rank is killed in the middle of an operation. It is a real process; the survivors are threads of this one.

#![allow(clippy::unwrap_used)]

mod suite;

use reknit_plane::{Buffer, Endpoint, Group, GroupSpec, HostPlane, Op, Plane, PlaneError, Reduce, Ticket};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const SIZE: usize = 3;
const VICTIM: usize = 2;
/// 32 MiB: many segments, so that the kill falls into the middle of one.
const LEN: usize = 8 << 20;

fn spec(members: Vec<Endpoint>, rank: usize, epoch: u64) -> GroupSpec {
    GroupSpec {
        job: "job".into(),
        epoch,
        name: "world".into(),
        members,
        rank,
        ticket: Ticket([epoch as u8; 32]),
        deadline: suite::PATIENCE,
    }
}

/// What each rank gives.
fn values(rank: usize) -> Buffer {
    Buffer::F32(vec![rank as f32 + 0.5; LEN])
}

fn all_reduce(group: &mut dyn Group, reduce: Reduce, buffer: Buffer) -> Result<Buffer, PlaneError> {
    let op = Op::AllReduce { reduce, buffer };
    group.submit(op, suite::PATIENCE).wait()
}

fn show(endpoint: &Endpoint) -> String {
    format!("{} {} {}", endpoint.node, endpoint.unix, endpoint.tcp)
}

fn parse(line: &str) -> Endpoint {
    let mut words = line.split(' ').map(str::to_owned);
    let mut next = || words.next().unwrap();
    Endpoint { node: next(), unix: next(), tcp: next() }
}

/// Not a test by itself: the victim, run by the tests below in a process of its own.
#[test]
#[ignore = "the tests below run it as a child process"]
fn victim() {
    let node = std::env::var("VICTIM_NODE").unwrap();
    let plane = HostPlane::new(&node, "127.0.0.1").unwrap();
    println!("\nendpoint {}", show(&plane.endpoint()));
    let lines = std::io::stdin().lines().take(SIZE);
    let members = lines.map(|line| parse(&line.unwrap())).collect();
    let mut group = plane.join(spec(members, VICTIM, 1)).unwrap();
    let mut buffer = values(VICTIM);
    for step in 0.. {
        println!("step {step}");
        buffer = all_reduce(&mut *group, Reduce::Max, buffer).unwrap();
    }
}

struct Victim {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Victim {
    fn spawn(node: &str) -> Victim {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "victim", "--ignored", "--nocapture"])
            .env("VICTIM_NODE", node)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Victim { process, lines }
    }

    fn wait_for(&mut self, what: &str) -> String {
        self.lines.find_map(|line| line.unwrap().strip_prefix(what).map(str::to_owned)).unwrap()
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn survive(node: impl Fn(usize) -> String) {
    let mut victim = Victim::spawn(&node(VICTIM));
    let planes: Vec<HostPlane> =
        (0..VICTIM).map(|rank| HostPlane::new(&node(rank), "127.0.0.1").unwrap()).collect();
    let survivors: Vec<Endpoint> = planes.iter().map(Plane::endpoint).collect();
    let mut members = survivors.clone();
    members.push(parse(&victim.wait_for("endpoint ")));
    let mut stdin = victim.process.stdin.take().unwrap();
    for member in &members {
        writeln!(stdin, "{}", show(member)).unwrap();
    }

    let (planes, members) = (&planes, &members);
    let (killed, ends) = thread::scope(|scope| {
        let threads: Vec<_> = (0..VICTIM)
            .map(|rank| {
                scope.spawn(move || {
                    let mut group = planes[rank].join(spec(members.clone(), rank, 1)).unwrap();
                    // The greatest stays the greatest: the buffer goes straight back, so that nearly all
                    // the time is spent inside the operation, where the kill is to fall.
                    let mut buffer = values(rank);
                    let mut finished = 0;
                    loop {
                        match all_reduce(&mut *group, Reduce::Max, buffer) {
                            Ok(result) => buffer = result,
                            Err(error) => return (finished, error, Instant::now()),
                        }
                        if finished == 0 {
                            assert!(buffer == values(VICTIM), "the first result is exact");
                        }
                        finished += 1;
                    }
                })
            })
            .collect();
        victim.wait_for("step 2");
        let killed = Instant::now();
        victim.kill();
        let ends: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        (killed, ends)
    });
    for (finished, error, failed) in ends {
        // The victim saw its second operation end, so everybody was in it.
        assert!(finished >= 1, "the group worked before");
        assert!(matches!(error, PlaneError::PeerLost { rank: VICTIM, .. }), "{error}");
        let after = failed.duration_since(killed);
        println!("seen after {after:?}: {error}");
        assert!(after < Duration::from_secs(1), "{after:?}");
    }

    for plane in planes {
        plane.abort_joins(1);
    }
    let survivors = &survivors;
    thread::scope(|scope| {
        for (rank, plane) in planes.iter().enumerate() {
            scope.spawn(move || {
                let mut group = plane.join(spec(survivors.clone(), rank, 2)).unwrap();
                let sum = all_reduce(&mut *group, Reduce::Sum, values(rank)).unwrap();
                assert!(sum == Buffer::F32(vec![2.0; LEN]), "exact without the dead");
                group.retire();
            });
        }
    });
}

#[test]
fn a_killed_rank_is_named_at_once_and_the_rest_go_on() {
    survive(|_| "node".into());
}

#[test]
fn a_killed_rank_on_another_node_is_named_at_once_and_the_rest_go_on() {
    survive(|rank| format!("node-{rank}"));
}
