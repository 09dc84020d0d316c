//! A rank is killed in the middle of an operation. It is a real process; the survivors are threads of this one.

#![allow(clippy::unwrap_used)]

mod suite;

use reknit_plane::{
    AbortReason, Buffer, Endpoint, Group, GroupSpec, HostPlane, Op, Plane, PlaneError, Reduce, Ticket,
    Transport,
};
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

/// A node's name that starts with `unix` has no shared memory.
fn plane(node: &str) -> HostPlane {
    let transport = if node.starts_with("unix") { Transport::Unix } else { Transport::Shared };
    HostPlane::over(transport, node, "127.0.0.1").unwrap()
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
    let resident: usize = std::env::var("VICTIM_MIB").unwrap().parse().unwrap();
    let plane = plane(&node);
    // Every page is written to, and kept.
    let ballast = vec![1_u8; resident << 20];
    println!("\nendpoint {}", show(&plane.endpoint()));
    let lines = std::io::stdin().lines().take(SIZE);
    let members = lines.map(|line| parse(&line.unwrap())).collect();
    let mut group = plane.join(spec(members, VICTIM, 1)).unwrap();
    let mut buffer = values(VICTIM);
    for step in 0.. {
        println!("step {step}");
        buffer = all_reduce(&mut *group, Reduce::Max, buffer).unwrap();
    }
    drop(ballast);
}

struct Victim {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Victim {
    fn spawn(node: &str, mib: usize) -> Victim {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "victim", "--ignored", "--nocapture"])
            .env("VICTIM_NODE", node)
            .env("VICTIM_MIB", mib.to_string())
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

/// How the survivors hear of the death.
#[derive(Clone, Copy, PartialEq)]
enum News {
    /// By themselves.
    None,
    /// As the daemon would push it, since it takes long to tear down the dead rank's memory.
    Pushed,
}

fn survive(node: impl Fn(usize) -> String, mib: usize, news: News) {
    let mut victim = Victim::spawn(&node(VICTIM), mib);
    let planes: Vec<HostPlane> = (0..VICTIM).map(|rank| plane(&node(rank))).collect();
    let survivors: Vec<Endpoint> = planes.iter().map(Plane::endpoint).collect();
    let mut members = survivors.clone();
    members.push(parse(&victim.wait_for("endpoint ")));
    let mut stdin = victim.process.stdin.take().unwrap();
    for member in &members {
        writeln!(stdin, "{}", show(member)).unwrap();
    }

    let (planes, members) = (&planes, &members);
    let (told, aborters) = std::sync::mpsc::channel();
    let (killed, ends) = thread::scope(|scope| {
        let threads: Vec<_> = (0..VICTIM)
            .map(|rank| {
                let told = told.clone();
                scope.spawn(move || {
                    let mut group = planes[rank].join(spec(members.clone(), rank, 1)).unwrap();
                    told.send(group.aborter()).unwrap();
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
        if news == News::Pushed {
            aborters.iter().take(VICTIM).for_each(|aborter| aborter.abort(AbortReason::EpochClosed));
        }
        let ends: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        (killed, ends)
    });
    if mib > 0 && news == News::None {
        // The end of its socket comes only after that of its memory.
        let died = ends.iter().any(|(_, error, _)| error.to_string().contains("its process died"));
        assert!(died, "{ends:?}");
    }
    for (finished, error, failed) in ends {
        // The victim saw its second operation end, so everybody was in it.
        assert!(finished >= 1, "the group worked before");
        let after = failed.duration_since(killed);
        println!("{mib} MiB: seen after {after:?}: {error}");
        match news {
            News::None => assert!(matches!(error, PlaneError::PeerLost { rank: VICTIM, .. }), "{error}"),
            News::Pushed => assert!(
                matches!(
                    error,
                    PlaneError::Aborted { .. } | PlaneError::PeerLeft { .. } | PlaneError::PeerLost { .. }
                ),
                "{error}"
            ),
        }
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
    survive(|_| "node".into(), 0, News::None);
}

#[test]
fn a_killed_rank_without_shared_memory_is_named_at_once_and_the_rest_go_on() {
    survive(|_| "unix".into(), 0, News::None);
}

#[test]
fn a_killed_rank_on_another_node_is_named_at_once_and_the_rest_go_on() {
    survive(|rank| format!("node-{rank}"), 0, News::None);
}

#[test]
fn the_news_of_a_death_is_enough_while_a_gigabyte_is_torn_down() {
    survive(|_| "node".into(), 1536, News::Pushed);
}

/// The end of its sockets would take longer than the memory's.
#[test]
fn a_killed_rank_with_a_gigabyte_is_named_at_once() {
    survive(|_| "node".into(), 1536, News::None);
}
