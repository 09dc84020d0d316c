//! GPU health, from the driver to the daemon.

#![allow(clippy::unwrap_used)]

mod harness;

use harness::{Daemon, Node, PATIENCE, kill, probe_of, runs};
use reknit_proto::v1::{HealthClass, Observability};
use reknit_simdriver::state::{STATE_VARIABLE, State, Target};
use std::time::{Duration, Instant};

const CALM: Duration = Duration::from_millis(700);

#[tokio::test]
async fn the_hello_names_the_gpus() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(4));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    assert_eq!(session.hello.node, "n0");
    let told = session.hello.gpus.iter();
    let mut told: Vec<_> = told.map(|g| (g.index, g.uuid.clone(), g.health())).collect();
    told.sort_by_key(|(index, ..)| *index);
    let expected = node.gpus.iter().zip(0..);
    let expected = expected.map(|(uuid, index)| (index, uuid.clone(), HealthClass::Healthy));
    assert_eq!(told, expected.collect::<Vec<_>>());
    assert_eq!(session.hello.gpus[0].memory_bytes, 80 << 30);
    session.quiet(CALM).await;
    drop(agent);
}

#[tokio::test]
async fn a_gpu_that_falls_off_the_bus_is_blamed_alone_and_comes_back() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(4));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.quiet(CALM).await;
    let lost = Instant::now();
    node.set(2, "lost=true");
    node.xid(2, 79);
    let (fatal, at) = session.health().await;
    println!("loss reported after {:?}: {}", at - lost, fatal.verdict().cause);
    assert!(at - lost < Duration::from_millis(150), "{:?}", at - lost);
    assert_eq!(fatal.gpu, node.gpus[2]);
    assert_eq!(fatal.health(), HealthClass::Fatal);
    assert!(!fatal.verdict().shards_readable);
    session.quiet(CALM).await;

    node.set(2, "lost=false");
    let (healthy, _) = session.health().await;
    assert_eq!(healthy.gpu, node.gpus[2]);
    assert_eq!(healthy.health(), HealthClass::Healthy);
    assert_eq!(healthy.verdict().cause, "reads healthy again");
    assert!(healthy.sequence > fatal.sequence);
    session.quiet(CALM).await;

    // And once more: the listener must have survived.
    let raised = Instant::now();
    node.xid(2, 79);
    let (fatal, at) = session.health().await;
    println!("XID reported after {:?}", at - raised);
    assert!(at - raised < Duration::from_millis(100), "{:?}", at - raised);
    assert_eq!(fatal.verdict().cause, "XID 79: GPU has fallen off the bus");
    assert_eq!(fatal.verdict().evidence, "XID 79");
    // No reading says so, but the driver's last word was that it is gone: it stays out until it was away.
    session.quiet(CALM).await;
    node.set(2, "lost=true");
    session.quiet(CALM).await;
    node.set(2, "lost=false");
    assert_eq!(session.health().await.0.health(), HealthClass::Healthy);
    drop(agent);
}

#[tokio::test]
async fn a_gpu_lost_without_a_word_is_found_by_reading() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(3));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    for change in ["lost", "absent", "reset_required"] {
        let begun = Instant::now();
        node.set(1, &format!("{change}=true"));
        let (fatal, at) = session.health().await;
        println!("{change} reported after {:?}: {}", at - begun, fatal.verdict().evidence);
        assert!(at - begun < Duration::from_millis(500));
        assert_eq!(fatal.gpu, node.gpus[1], "{change}");
        assert_eq!(fatal.health(), HealthClass::Fatal, "{change}");
        session.quiet(Duration::from_millis(400)).await;
        node.set(1, &format!("{change}=false"));
        let (healthy, _) = session.health().await;
        assert_eq!(healthy.gpu, node.gpus[1], "{change}");
        assert_eq!(healthy.health(), HealthClass::Healthy, "{change}");
    }
    drop(agent);
}

#[tokio::test]
async fn events_mean_what_the_policy_says() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.quiet(CALM).await;
    node.xid(0, 45);
    node.xid(0, 13);
    session.quiet(CALM).await;

    node.xid(0, 94);
    let (died, _) = session.health().await;
    assert_eq!(died.health(), HealthClass::RankDied);
    assert_eq!(session.health().await.0.health(), HealthClass::Healthy, "not latched");

    node.set(0, "ecc_uncorrected=1");
    let (died, _) = session.health().await;
    assert_eq!(died.health(), HealthClass::RankDied);
    assert_eq!(died.verdict().evidence, "volatile uncorrected ECC count 0 -> 1");
    assert_eq!(session.health().await.0.health(), HealthClass::Healthy, "a delta, no level");

    node.set(1, "recovery_action=4");
    let (drain, _) = session.health().await;
    assert_eq!((drain.gpu.as_str(), drain.health()), (node.gpus[1].as_str(), HealthClass::Drain));
    assert!(drain.verdict().shards_readable);
    node.set(1, "recovery_action=1");
    assert_eq!(session.health().await.0.health(), HealthClass::Fatal);
    node.set(1, "recovery_action=0");
    assert_eq!(session.health().await.0.health(), HealthClass::Healthy);

    node.xid(0, 4711);
    let (predict, _) = session.health().await;
    assert_eq!(predict.health(), HealthClass::Predict);
    assert_eq!(predict.verdict().cause, "XID 4711: unknown to this version");
    session.quiet(CALM).await;
    drop(agent);
}

#[tokio::test]
async fn a_dead_probe_makes_the_node_blind_and_blames_no_gpu() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let mut agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.spawn(&node.gpus[0], 1).await;
    let worker = session.spawned().await.pid;
    node.set(1, "lost=true");
    assert_eq!(session.health().await.0.health(), HealthClass::Fatal);

    let probe = probe_of(agent.pid()).unwrap();
    kill(probe, "KILL");
    let (unknown, _) = session.health().await;
    assert_eq!(unknown.gpu, node.gpus[0], "of the lost GPU enough is known");
    assert_eq!(unknown.health(), HealthClass::Unknown);
    let (healthy, _) = session.health().await;
    assert_eq!(healthy.gpu, node.gpus[0]);
    assert_eq!(healthy.health(), HealthClass::Healthy);
    assert!(runs(worker));
    let second = probe_of(agent.pid()).unwrap();
    assert_ne!(second, probe);

    // A probe that hangs as a whole is replaced too.
    kill(second, "STOP");
    assert_eq!(session.health().await.0.health(), HealthClass::Unknown);
    assert_eq!(session.health().await.0.health(), HealthClass::Healthy);
    node.set(1, "lost=false");
    let (healthy, _) = session.health().await;
    assert_eq!((healthy.health(), healthy.gpu), (HealthClass::Healthy, node.gpus[1].clone()));

    let third = probe_of(agent.pid()).unwrap();
    agent.kill();
    kill(worker, "KILL");
    let deadline = Instant::now() + PATIENCE;
    while runs(third) {
        assert!(Instant::now() < deadline, "the probe outlives its agent");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_driver_that_goes_away_is_waited_for() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let (away, here) = (node.folder.path().join("away.json"), node.driver());
    std::fs::rename(&here, &away).unwrap();
    for _ in 0..2 {
        let (unknown, _) = session.health().await;
        assert_eq!(unknown.health(), HealthClass::Unknown);
    }
    session.quiet(Duration::from_secs(2)).await;
    std::fs::rename(&away, &here).unwrap();
    for _ in 0..2 {
        assert_eq!(session.health().await.0.health(), HealthClass::Healthy);
    }
    drop(agent);
}

#[tokio::test]
async fn a_node_without_a_driver_is_blind_until_it_comes() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let (away, here) = (node.folder.path().join("away.json"), node.driver());
    std::fs::rename(&here, &away).unwrap();
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    assert_eq!(session.hello.gpus, []);
    std::fs::rename(&away, &here).unwrap();
    session.hello_again().await;
    assert_eq!(session.hello.gpus.len(), 2, "another hello names them");
    drop(agent);
}

#[tokio::test]
async fn a_missing_library_is_said_and_waited_for() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let library = node.folder.path().join("libnvidia-ml.so.1");
    std::fs::write(&library, "no library").unwrap();
    let mut command = node.command_over(&format!("http://{}", daemon.address), &library);
    let agent = harness::RunningAgent(command.spawn().unwrap());
    let mut session = daemon.session().await;
    assert_eq!((session.hello.observability(), session.hello.gpus.len()), (Observability::Blind, 0));
    let gap = &session.hello.gaps[0];
    assert!(gap.contains(library.to_str().unwrap()) && gap.contains("--nvml-library"), "{gap}");
    std::fs::remove_file(&library).unwrap();
    std::os::unix::fs::symlink(harness::library(), &library).unwrap();
    session.hello_again().await;
    assert_eq!(session.hello.gpus.len(), 2);
    drop(agent);
}

#[tokio::test]
async fn a_gpu_that_never_answered_is_reported_by_its_place_and_named_when_it_does() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(3));
    node.set(1, "lost=true");
    let mut command = node.command(&format!("http://{}", daemon.address));
    let agent = harness::RunningAgent(command.args(["--probe-interval-ms", "50"]).spawn().unwrap());
    let mut session = daemon.session().await;
    let mut named: Vec<_> = session.hello.gpus.iter().map(|gpu| (gpu.index, gpu.uuid.clone())).collect();
    named.sort();
    let unidentified = "unidentified-1".to_owned();
    assert_eq!(named, [(0, node.gpus[0].clone()), (1, unidentified.clone()), (2, node.gpus[2].clone())]);
    let (fatal, _) = session.health().await;
    assert_eq!((fatal.health(), fatal.gpu), (HealthClass::Fatal, unidentified));
    session.quiet(CALM).await;
    node.set(1, "lost=false");
    session.hello_again().await;
    let mut named: Vec<_> = session.hello.gpus.iter().collect();
    named.sort_by_key(|gpu| gpu.index);
    assert_eq!(named.iter().map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>(), node.gpus);
    assert!(named.iter().all(|gpu| gpu.health() == HealthClass::Healthy), "{named:?}");
    session.quiet(CALM).await;
    drop(agent);
}

#[tokio::test]
async fn a_hung_gpu_does_not_hide_the_others_from_a_new_probe() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    node.set(1, "hang=true");
    kill(probe_of(agent.pid()).unwrap(), "KILL");
    for _ in 0..2 {
        assert_eq!(session.health().await.0.health(), HealthClass::Unknown);
    }
    let (healthy, _) = session.health().await;
    assert_eq!((healthy.health(), healthy.gpu), (HealthClass::Healthy, node.gpus[0].clone()));
    session.quiet(CALM).await;
    node.set(1, "hang=false");
    let (healthy, _) = session.health().await;
    assert_eq!((healthy.health(), healthy.gpu), (HealthClass::Healthy, node.gpus[1].clone()));
    drop(agent);
}

#[tokio::test]
async fn a_driver_that_hangs_as_a_whole_blinds_the_node_and_blames_no_gpu() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let probe = probe_of(agent.pid()).unwrap();
    node.set(0, "hang=true");
    node.set(1, "hang=true");
    for _ in 0..2 {
        assert_eq!(session.health().await.0.health(), HealthClass::Unknown);
    }
    node.set(0, "hang=false");
    node.set(1, "hang=false");
    for _ in 0..2 {
        assert_eq!(session.health().await.0.health(), HealthClass::Healthy);
    }
    assert!(!runs(probe), "the probe was replaced");
    session.quiet(CALM).await;
    drop(agent);
}

#[tokio::test]
async fn a_lost_gpu_is_known_to_the_agents_next_start() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(3));
    let mut agent = node.start(&daemon);
    let _session = daemon.session().await;
    node.set(0, "absent=true");
    agent.kill();
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    assert_eq!(session.hello.gpus.len(), 3);
    let mut indices: Vec<_> = session.hello.gpus.iter().collect();
    indices.sort_by_key(|gpu| gpu.index);
    let uuids: Vec<_> = indices.iter().map(|gpu| gpu.uuid.clone()).collect();
    assert_eq!(uuids, node.gpus, "each GPU keeps its number");
    let told = &indices[0];
    if told.health() != HealthClass::Fatal {
        let (fatal, _) = session.health().await;
        assert_eq!((fatal.gpu.as_str(), fatal.health()), (node.gpus[0].as_str(), HealthClass::Fatal));
    }
    drop(agent);
}

#[tokio::test]
async fn a_daemon_that_was_away_for_long_hears_of_everything() {
    let node = Node::new(8);
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = node.command(&format!("http://{address}"));
    let log = node.folder.path().join("log");
    // So many errors would have the GPUs drained.
    let policy = node.folder.path().join("patient.toml");
    std::fs::write(&policy, "risk = { predict_at = 1e9, drain_at = 1e9 }\n").unwrap();
    command.args(["--probe-interval-ms", "10"]).arg("--policy").arg(policy);
    command.stderr(std::fs::File::create(&log).unwrap());
    let agent = harness::RunningAgent(command.spawn().unwrap());
    // More transitions than the agent would let wait for a session that is too slow.
    let wanted = 1200;
    let mut errors = 0;
    let told = || std::fs::read_to_string(&log).unwrap().matches("GPU health").count();
    let deadline = Instant::now() + 6 * PATIENCE;
    while told() < wanted {
        assert!(Instant::now() < deadline, "only {} transitions", told());
        errors += 1;
        State::update(&node.driver(), |state| state.set(Target::All, &[format!("ecc_uncorrected={errors}")]))
            .unwrap();
        // Two readings lift each.
        tokio::time::sleep(Duration::from_millis(80)).await;
    }
    let mut daemon = Daemon::start_at(address).await;
    let mut session = daemon.session().await;
    for _ in 0..wanted {
        session.health().await;
    }
    drop(agent);
}

#[tokio::test]
async fn transitions_are_sent_again_until_acknowledged() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.fall_silent();
    node.set(1, "lost=true");
    let (first, _) = session.health().await;
    session.close();
    let mut session = daemon.session().await;
    let (again, _) = session.health().await;
    assert_eq!(again, first);
    session.heartbeat().await;
    session.close();
    let mut session = daemon.session().await;
    session.quiet(CALM).await;
    drop(agent);
}

#[tokio::test]
async fn without_the_kernel_log_the_node_is_degraded_until_it_comes() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let kmsg = node.folder.path().join("later");
    let mut command = node.command(&format!("http://{}", daemon.address));
    let agent = harness::RunningAgent(command.arg("--kmsg").arg(&kmsg).spawn().unwrap());
    let mut session = daemon.session().await;
    let mut beat = session.heartbeat().await;
    while beat.observability() == Observability::Full {
        beat = session.heartbeat().await;
    }
    assert_eq!(beat.observability(), Observability::Degraded);
    assert!(beat.gaps[0].contains("later") && beat.gaps[0].contains("--kmsg"), "{:?}", beat.gaps);
    State::load(&node.driver()).unwrap().log_xid(1, 79, None, &kmsg).unwrap();
    let (fatal, _) = session.health().await;
    assert_eq!((fatal.health(), fatal.gpu), (HealthClass::Fatal, node.gpus[1].clone()));
    while session.heartbeat().await.observability() != Observability::Full {}
    drop(agent);
}

#[tokio::test]
async fn an_xid_that_the_log_told_while_the_agent_was_dead_is_heard_once() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let log = |xid| {
        State::load(&node.driver()).unwrap().log_xid(1, xid, None, &node.folder.path().join("kmsg")).unwrap()
    };
    log(62);
    let mut agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.quiet(CALM).await;
    for xid in [94, 79] {
        agent.kill();
        log(xid);
        agent = node.start(&daemon);
        session = daemon.session().await;
        let (told, _) = session.health().await;
        assert_eq!(told.gpu, node.gpus[1]);
        assert!(told.verdict().cause.starts_with(&format!("XID {xid}: ")), "{told:?}");
        if xid == 94 {
            assert_eq!(session.health().await.0.health(), HealthClass::Healthy);
        }
        session.quiet(CALM).await;
    }
    drop(agent);
}

/// Run by root, the look is taken as somebody else.
#[test]
fn without_root_the_look_is_degraded_and_says_what_to_do() {
    let node = Node::new(2);
    let folder = node.folder.path();
    // What the test's own folders keep from others is copied to where all may read.
    let (agent, library) = (folder.join("reknit-agent"), folder.join("libnvidia-ml.so.1"));
    std::fs::copy(env!("CARGO_BIN_EXE_reknit-agent"), &agent).unwrap();
    std::fs::copy(harness::library(), &library).unwrap();
    let withheld = "errors={\"nvmlDeviceGetSramEccErrorStatus\":4}";
    State::update(&node.driver(), |state| state.set(Target::All, &[withheld.to_owned()])).unwrap();
    for open in [folder, &node.driver()] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(open, mode).unwrap();
    }
    let mut look = std::process::Command::new(&agent);
    look.args(["check", "--for", "1s", "--format", "json", "--nvml-library"]).arg(&library);
    look.env(STATE_VARIABLE, node.driver());
    if rustix::process::geteuid().is_root() {
        std::os::unix::process::CommandExt::uid(&mut look, 65534);
    }
    let out = look.output().unwrap();
    let seen: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((out.status.code(), seen["observability"].as_str()), (Some(0), Some("degraded")), "{seen}");
    let gaps = seen["gaps"].to_string();
    assert!(gaps.contains("nvmlDeviceGetSramEccErrorStatus") && gaps.contains("as root"), "{gaps}");
    assert!(gaps.contains("/dev/kmsg") && gaps.contains("CAP_SYSLOG"), "{gaps}");
    assert!(seen["gpus"].as_array().unwrap().iter().all(|gpu| gpu["class"] == "healthy"), "{seen}");
}
