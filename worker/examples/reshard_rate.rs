//! How fast a whole shard moves from one rank to another over each transport, beside plain copies of as many bytes in the
//! same run: `cargo run --release -p reknit-worker --example reshard_rate [ROUNDS [CHUNK_KIB]]`.
#![allow(clippy::unwrap_used, reason = "an example may panic")]

use reknit_layout::{Axis, Epoch, GpuId, Incarnation, JobSpec, Step, Transfer, Units, WorkerKey};
use reknit_model::Shard;
use reknit_plane::host::{HostPlane, Transport};
use reknit_plane::{Plane, Ticket};
use reknit_worker::abort::Aborts;
use reknit_worker::groups::{Communicator, Joiner};
use reknit_worker::messages::{Participant, Prepare, Timeouts};
use reknit_worker::pace::Pace;
use reknit_worker::reshard::{CHUNK, Reshard};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>().unwrap());
    let rounds = arguments.next().unwrap_or(9);
    let chunk = arguments.next().map_or(CHUNK, |kib| kib << 10);
    let job = JobSpec::parse(reknit_layout::job::EXAMPLE, "example").unwrap();
    let mut job = JobSpec { name: "rate".to_owned(), ..job };
    (job.model.hidden, job.model.ffn, job.model.layers) = (384, 1536, 6);
    let model = &job.model;
    let owned: BTreeMap<Axis, Units> =
        model.axes().into_iter().map(|axis| (axis, Units::range(0, model.units(axis.family)))).collect();
    let mut whole = Shard::<f32>::init(model, 1, &owned);
    let transfer = |axis, units| Transfer { axis, units, from: worker(0), to: worker(1), bytes: 0 };
    let units = owned.iter().map(|(axis, units)| transfer(Some(*axis), units.clone()));
    let transfers: Vec<_> = units.chain([transfer(None, Units::new())]).enumerate().collect();

    let mut rates: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let mut bytes = 0;
    for round in 0..rounds {
        for (name, transport) in
            [("shm", Transport::Shared), ("unix", Transport::Unix), ("tcp", Transport::Tcp)]
        {
            let epoch = Epoch(round as u64 + 1);
            let reshard = Reshard { model, epoch, transfers: &transfers, chunk };
            let planes = [0, 1].map(|_| Arc::new(HostPlane::over(transport, "node", "127.0.0.1").unwrap()));
            let start = Barrier::new(2);
            let (came, took) = thread::scope(|scope| {
                scope.spawn(|| {
                    let mut comm = join(&job, epoch, 0, &planes);
                    start.wait();
                    reshard.run(&mut comm, &mut whole).unwrap();
                    comm.retire();
                });
                let mut shard = Shard::<f32>::awaiting(model, &owned).unwrap();
                let mut comm = join(&job, epoch, 1, &planes);
                start.wait();
                let begun = Instant::now();
                let came = reshard.run(&mut comm, &mut shard).unwrap();
                let took = begun.elapsed();
                shard.check_arrived().unwrap();
                comm.retire();
                (came, took)
            });
            bytes = came as usize;
            rates.entry(name).or_default().push(came as f64 / took.as_secs_f64() / 1e9);
        }
        for (name, took) in
            [("memcpy", memcpy(bytes)), ("plain unix", plain(UnixStream::pair().unwrap(), bytes))]
        {
            rates.entry(name).or_default().push(bytes as f64 / took.as_secs_f64() / 1e9);
        }
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let near = std::net::TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
        let took = plain((near, tcp.accept().unwrap().0), bytes);
        rates.entry("plain tcp").or_default().push(bytes as f64 / took.as_secs_f64() / 1e9);
    }

    let rate = |name: &str| {
        let mut rates = rates[name].clone();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    println!("{:.0} MB, {rounds} rounds, medians, chunks of {} KiB", bytes as f64 / 1e6, chunk >> 10);
    for (name, plain) in [("shm", "memcpy"), ("unix", "plain unix"), ("tcp", "plain tcp")] {
        let (ours, theirs) = (rate(name), rate(plain));
        println!("{name:5} {ours:6.2} GB/s   {plain:10} {theirs:6.2} GB/s   {:4.0} %", ours / theirs * 100.0);
    }
}

fn worker(rank: u32) -> WorkerKey {
    WorkerKey { gpu: GpuId(format!("GPU-{rank}")), incarnation: Incarnation(1) }
}

fn join(job: &JobSpec, epoch: Epoch, rank: usize, planes: &[Arc<HostPlane>; 2]) -> Communicator {
    let participant =
        |rank: usize| Participant { worker: worker(rank as u32), endpoint: planes[rank].endpoint() };
    let movers = vec![participant(0), participant(1)];
    let prepare = Prepare {
        epoch,
        layout: None,
        fresh: false,
        checkpoint: None,
        transfers: Vec::new(),
        tensor: Vec::new(),
        column: Vec::new(),
        speakers: Vec::new(),
        movers: movers.clone(),
        ticket: Ticket([7; 32]),
        resume_step: Step(0),
        vote: None,
    };
    let timeouts = Timeouts {
        operation: PATIENCE,
        join: PATIENCE,
        progress: Duration::from_secs(1),
        stall: Duration::from_secs(1),
    };
    let plane: Arc<HostPlane> = Arc::clone(&planes[rank]);
    let aborts = Aborts::new(Arc::<HostPlane>::clone(&plane));
    let joiner = Joiner {
        job,
        me: &worker(rank as u32),
        prepare: &prepare,
        timeouts,
        pace: &Arc::<Pace>::default(),
        aborts: &aborts,
    };
    joiner.join(&*plane, "reshard".to_owned(), &movers).unwrap()
}

fn memcpy(bytes: usize) -> Duration {
    let (from, mut to) = (vec![1_u8; bytes], vec![2_u8; bytes]);
    let begun = Instant::now();
    to.copy_from_slice(black_box(&from));
    black_box(&mut to);
    begun.elapsed()
}

fn plain<S: Read + Write + Send>((mut near, mut far): (S, S), bytes: usize) -> Duration {
    let (from, mut to) = (vec![1_u8; bytes], vec![2_u8; bytes]);
    thread::scope(|scope| {
        scope.spawn(move || far.write_all(&from).unwrap());
        let begun = Instant::now();
        near.read_exact(&mut to).unwrap();
        begun.elapsed()
    })
}
