//! One rank: it does what all others do, and rank 0 holds the clock.

use super::report::{Exchange, Point};
use super::{Way, best_and_median};
use crate::failure::Failure;
use crate::output::print_lines;
use reknit_plane::{Buffer, Endpoint, Group, GroupSpec, HostPlane, Op, Plane, PlaneError, Reduce, Ticket};
use serde::{Deserialize, Serialize};
use std::io::BufRead;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
/// Rounds before the clock starts: the first ones find memory that was never touched.
const WARM_UP: u64 = 3;
const LEAST_ROUNDS: u64 = 5;
const MOST_ROUNDS: u64 = 5000;

/// What a rank is to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) way: Way,
    pub(super) ranks: usize,
    pub(super) sizes: Vec<usize>,
    /// For each point.
    pub(super) time: Duration,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Address {
    node: String,
    unix: String,
    tcp: String,
}

pub(super) fn run(rank: usize) -> Result<(), Failure> {
    let order: Order = hear()?;
    let plane = HostPlane::over(order.way.transport(), "bench", "127.0.0.1");
    let plane = plane.map_err(Failure::failed("the data plane"))?;
    let Endpoint { node, unix, tcp } = plane.endpoint();
    tell(&Address { node, unix, tcp })?;
    let members: Vec<Address> = hear()?;
    let group = plane.join(GroupSpec {
        job: "bench".to_owned(),
        epoch: 1,
        name: "world".to_owned(),
        members: members
            .into_iter()
            .map(|Address { node, unix, tcp }| Endpoint { node, unix, tcp })
            .collect(),
        rank,
        // Nothing is secret here.
        ticket: Ticket([1; 32]),
        deadline: PATIENCE,
    });
    let group = group.map_err(Failure::failed("the ranks do not join"))?;
    let mut points = Vec::new();
    let mut bench = Bench { group, order: &order };
    for exchange in Exchange::ALL {
        for &bytes in &order.sizes {
            let point = bench.measure(exchange, bytes).map_err(Failure::failed(exchange.name()))?;
            points.extend((rank == 0).then_some(point));
        }
    }
    bench.group.retire();
    tell(&points)
}

fn hear<T: for<'a> Deserialize<'a>>() -> Result<T, Failure> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).map_err(Failure::failed("stdin"))?;
    serde_json::from_str(&line).map_err(Failure::failed("an order on stdin"))
}

fn tell(what: &impl Serialize) -> Result<(), Failure> {
    print_lines(&[serde_json::to_string(what).map_err(Failure::failed("an answer as JSON"))?])
}

struct Bench<'a> {
    group: Box<dyn Group>,
    order: &'a Order,
}

impl Bench<'_> {
    fn measure(&mut self, exchange: Exchange, bytes: usize) -> Result<Point, PlaneError> {
        let memory = match exchange {
            Exchange::AllReduce | Exchange::Receive => bytes,
            Exchange::AllToAll => 2 * bytes,
        };
        let mut buffer = Buffer::F32(vec![1.0; memory / 4]);
        let start = Instant::now();
        for _ in 0..WARM_UP {
            (buffer, _) = self.round(exchange, buffer)?;
        }
        let one = start.elapsed().as_secs_f64() / WARM_UP as f64;
        let fit = (self.order.time.as_secs_f64() / one) as u64;
        let rounds = self.agree(fit.clamp(LEAST_ROUNDS, MOST_ROUNDS))?;
        let mut times = Vec::new();
        for _ in 0..rounds {
            let time;
            (buffer, time) = self.round(exchange, buffer)?;
            times.push(time.as_secs_f64() * 1e6);
        }
        let (best_us, median_us) = best_and_median(times);
        let (transport, ranks) = (self.order.way, self.order.ranks);
        Ok(Point { transport, ranks, exchange, bytes, rounds, best_us, median_us })
    }

    /// Everybody does as rank 0.
    fn agree(&mut self, rounds: u64) -> Result<u64, PlaneError> {
        let buffer = Buffer::Bytes(rounds.to_le_bytes().to_vec());
        let buffer = self.run(Op::Broadcast { root: 0, buffer })?;
        let mut bytes = [0; 8];
        bytes.copy_from_slice(buffer.as_bytes());
        Ok(u64::from_le_bytes(bytes))
    }

    fn run(&mut self, op: Op) -> Result<Buffer, PlaneError> {
        self.group.submit(op, PATIENCE).wait()
    }

    /// One exchange, timed from a barrier on.
    fn round(&mut self, exchange: Exchange, mut buffer: Buffer) -> Result<(Buffer, Duration), PlaneError> {
        let (rank, size) = (self.group.rank(), self.group.size());
        if let Buffer::F32(values) = &mut buffer {
            // The sums of many rounds would grow without bound.
            values.fill(1.0);
        }
        let op = match (exchange, rank) {
            (Exchange::AllReduce, _) => Op::AllReduce { reduce: Reduce::Sum, buffer },
            (Exchange::Receive, 0) => Op::Recv { from: 1, buffer },
            (Exchange::Receive, 1) => Op::Send { to: 0, buffer },
            (Exchange::Receive, _) => {
                self.run(Op::Barrier)?;
                return Ok((buffer, Duration::ZERO));
            }
            (Exchange::AllToAll, _) => {
                let part = buffer.len() / (2 * size);
                let places = |from: usize| (from..from + size).map(|at| at * part..(at + 1) * part).collect();
                Op::AllToAllV { buffer, send: places(0), receive: places(size) }
            }
        };
        self.run(Op::Barrier)?;
        let start = Instant::now();
        let buffer = self.run(op)?;
        Ok((buffer, start.elapsed()))
    }
}
