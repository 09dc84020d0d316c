//! How large the record of a large job is, and that etcd takes it.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use reknit_engine::JobRecord;
use reknit_layout::{
    Epoch, GpuId, Incarnation, JobSpec, Layout, Place, PlanRequest, Slot, Step, Topology, WorkerKey,
    candidates, plan,
};
use reknitd::config::EtcdConfig;
use reknitd::store::{Connection, Embedded, Etcd, Store, StoreError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;
use support::etcd::EtcdServer;

/// What etcd takes in one request unless told otherwise: 1.5 MiB.
const ETCD_TAKES: usize = 3 << 19;
/// Stages times slots of a replica.
const REPLICA: u32 = 64;
const TENSOR: u32 = 8;
/// Replicas: what planning more of them adds is time.
const PLANNED: u32 = 8;

fn spec(workers: u32) -> JobSpec {
    let file = reknit_layout::job::EXAMPLE
        .replace("layers = 4", "layers = 80")
        .replace("heads = 12", "heads = 64")
        .replace("hidden = 192", "hidden = 8192")
        .replace("head_dim = 16", "head_dim = 128")
        .replace("ffn = 768", "ffn = 28672")
        .replace("ffn_block = 16", "ffn_block = 128")
        .replace("vocab = 256", "vocab = 128256")
        .replace("vocab_block = 16", "vocab_block = 128")
        .replace("data = 2", &format!("data = {}", workers / REPLICA))
        .replace("tensor = 4", "tensor = 8")
        .replace("pipeline = 1", "pipeline = 8")
        .replace("global = 32", &format!("global = {}", workers / 8))
        .replace("micro = 4", "micro = 1")
        .replace("spares = 0", "spares = 64");
    JobSpec::parse(&file, "job").unwrap()
}

/// Random numbers (splitmix64): real UUIDs say nothing twice, and packing must not profit from ours.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn gpu(&mut self) -> GpuId {
        let (a, b) = (self.next(), self.next());
        GpuId(format!(
            "GPU-{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            a >> 32,
            (a >> 16) & 0xffff,
            a & 0xffff,
            b >> 48,
            b & 0xffff_ffff_ffff
        ))
    }
}

/// After a year: one GPU in fifty is gone, one in a hundred has a spare in its place. Replicas are planned [`PLANNED`] at
/// a time, and those that follow are seated alike.
fn record(workers: u32) -> JobRecord {
    let (mut random, mut record) = (Random(7), JobRecord::new(spec(workers)));
    let planned = uneven(&mut random);
    let mut layout =
        Layout { epoch: Epoch(1234), groups: Vec::new(), batch: Vec::new(), sync: planned.sync.clone() };
    let tiles = workers / REPLICA / PLANNED;
    for tile in 0..tiles {
        layout.batch.extend(&planned.batch);
        for mut group in planned.groups.iter().cloned() {
            group.replica.0 += tile * PLANNED;
            for (slot, member) in (0..).map(Slot).zip(&mut group.slots) {
                let (place, gpu) = (Place { replica: group.replica, stage: group.stage, slot }, random.gpu());
                if random.next().is_multiple_of(100) {
                    record.replaced.insert(place, random.gpu());
                }
                if let Some(member) = member {
                    member.worker =
                        WorkerKey { gpu: gpu.clone(), incarnation: Incarnation(random.next() % 30_000) };
                }
                record.places.insert(place, gpu);
            }
            layout.groups.push(group);
        }
    }
    for (sync, planned) in layout.sync.iter_mut().zip(&planned.sync) {
        sync.hosts = (0..tiles).flat_map(|_| planned.hosts.iter().cloned()).collect();
    }
    assert_eq!(record.places.len(), workers as usize);
    record.layout = Some(Arc::new(layout));
    // The newest spare trains from the next layout on only.
    record.places.insert(Place::new(0, 0, 0), random.gpu());
    record.last_epoch = Epoch(1234);
    record.last_incarnation = Incarnation(30_000);
    record.ever_committed = true;
    record
}

/// The layout of a few replicas after losses, one after the other: what slots own then is as uneven as it gets.
fn uneven(random: &mut Random) -> Layout {
    let workers = PLANNED * REPLICA;
    let (spec, topology) = (spec(workers), Topology::default());
    let places =
        (0..workers).map(|number| Place::new(number / REPLICA, number % REPLICA / TENSOR, number % TENSOR));
    let mut members: BTreeMap<Place, WorkerKey> =
        places.map(|place| (place, WorkerKey { gpu: random.gpu(), incarnation: Incarnation(1) })).collect();
    let mut layout: Option<Layout> = None;
    for epoch in 1..=4 {
        let held: Vec<_> = layout.iter().flat_map(|layout| layout.holdings(Step(epoch))).collect();
        if layout.is_some() {
            members.retain(|_, _| !random.next().is_multiple_of(100));
        }
        let held =
            held.into_iter().filter_map(|(place, holding)| Some((members.get(&place)?.clone(), holding)));
        let workers = candidates(members.clone(), held);
        let fresh = layout.is_none();
        let request =
            PlanRequest { job: &spec, topology: &topology, epoch: Epoch(epoch), workers: &workers, fresh };
        layout = Some(plan(&request).unwrap().layout);
    }
    layout.unwrap()
}

async fn etcd() -> (EtcdServer, Etcd) {
    let server = EtcdServer::start().await;
    let config =
        EtcdConfig { endpoints: vec![server.endpoint.clone()], lease_seconds: 10, ..EtcdConfig::default() };
    let store = Etcd::open(&Connection::new(&config).unwrap(), "http://me:1").await.unwrap();
    store.load().await.unwrap();
    (server, store)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_record_of_a_job_of_16384_ranks_fits_into_a_request_of_etcd() {
    let dir = tempfile::tempdir().unwrap();
    let embedded = Embedded::open(dir.path()).await.unwrap();
    let (server, etcd) = etcd().await;
    for workers in [8_192, 16_384] {
        let record = record(workers);
        let layout = record.layout.as_ref().unwrap();
        let degrees: BTreeSet<_> = layout.degrees().into_iter().collect();
        assert!(
            degrees.len() > 2 && record.replaced.len() > 50,
            "{degrees:?}: not as uneven as it should be"
        );
        let plain = serde_json::to_vec(&record).unwrap().len();
        let start = Instant::now();
        embedded.put_job(&record).await.unwrap();
        let in_file = start.elapsed();
        let start = Instant::now();
        etcd.put_job(&record).await.unwrap();
        let in_etcd = start.elapsed();
        let mut client = server.client().await.unwrap();
        let stored = client.get("/reknit/jobs/example", None).await.unwrap().kvs()[0].value().len();
        println!(
            "{workers} workers: {plain} bytes as JSON, {stored} stored; {in_file:?} to a file, {in_etcd:?} to etcd"
        );
        assert!(stored < ETCD_TAKES / 3 * 2, "{stored} bytes");
        assert_eq!(embedded.load().await.unwrap().jobs, std::slice::from_ref(&record));
        assert_eq!(etcd.load().await.unwrap().jobs, [record]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_large_for_etcd_all_the_same_is_no_passing_trouble() {
    let (_server, etcd) = etcd().await;
    let mut record = JobRecord::new(JobSpec::parse(&support::job_file("huge"), "job").unwrap());
    let mut random = Random(1);
    // Above what etcd takes, and above what its gRPC server does.
    for numbers in [80_000, 200_000] {
        record.explanation = (0..numbers).map(|_| random.gpu().0).collect();
        let start = Instant::now();
        let error = etcd.put_job(&record).await.unwrap_err();
        let text = error.to_string();
        println!("{text}");
        let StoreError::TooLarge { bytes, .. } = error else { panic!("{text}") };
        assert!(bytes > ETCD_TAKES && !error.passes());
        assert!(text.contains("/reknit/jobs/huge") && text.contains("--max-request-bytes"), "{text}");
        assert!(start.elapsed().as_secs() < 5, "it was tried again and again");
    }
    record.explanation.clear();
    etcd.put_job(&record).await.unwrap();
}

/// Another daemon would meet the same: nobody takes over again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_cannot_store_what_is_too_large_ends_and_says_why() {
    let server = EtcdServer::start_plain(&["--max-request-bytes", "500"]).await;
    let mut daemon = server.daemon();
    daemon.wait_until_serving();
    let mut admin = daemon.admin().await;
    let job_toml = support::job_file("one");
    admin.submit_job(reknit_proto::v1::SubmitJobRequest { job_toml }).await.unwrap_err();
    drop(admin);
    let (status, last) = daemon.exit();
    assert_eq!(status, 65, "{last}");
    assert!(last.contains("/reknit/jobs/one") && last.contains("--max-request-bytes"), "{last}");
}
