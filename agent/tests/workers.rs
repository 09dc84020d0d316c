//! Workers: started, watched, fenced, and found again.

#![allow(clippy::unwrap_used)]

mod harness;

use harness::{Daemon, Node, PATIENCE, command_line, kill, runs};
use std::time::{Duration, Instant};

#[tokio::test]
async fn a_killed_worker_is_reported_at_once() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(4));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.spawn(&node.gpus[1], 7).await;
    let spawned = session.spawned().await;
    assert_eq!(spawned.worker.unwrap(), harness::key(&node.gpus[1], 7));
    assert!(runs(spawned.pid));

    let killed = Instant::now();
    kill(spawned.pid, "KILL");
    let (exited, at) = session.exited().await;
    println!("exit reported after {:?}", at - killed);
    assert_eq!(exited.worker.unwrap(), harness::key(&node.gpus[1], 7));
    assert_eq!((exited.signal, exited.status), (9, -1));
    assert_eq!(exited.how, "killed by signal 9");
    session.quiet(Duration::from_millis(200)).await;
    drop(agent);
}

#[tokio::test]
async fn a_worker_that_fails_says_why_through_its_agent() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    std::fs::write(&node.worker, "#!/bin/sh\nprintf 'reknit-worker: no \\033[31mtext\\n\\n' >&2\nexit 66\n")
        .unwrap();
    let _agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.spawn(&node.gpus[0], 1).await;
    session.spawned().await;
    let (exited, _) = session.exited().await;
    assert_eq!((exited.signal, exited.status), (0, 66));
    assert_eq!(exited.how, "exit status 66: reknit-worker: no [31mtext");
}

#[tokio::test]
async fn a_worker_gets_its_flags_and_its_log() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let mut command = node.command(&format!("http://{}", daemon.address));
    let agent = harness::RunningAgent(command.args(["--data-ip", "127.0.0.2"]).spawn().unwrap());
    let mut session = daemon.session().await;
    session.spawn(&node.gpus[1], 3).await;
    session.spawned().await;
    let log = node.folder.path().join("state/logs/job-gpu1-3.log");
    let deadline = Instant::now() + PATIENCE;
    let mut text = String::new();
    while !text.ends_with('\n') && Instant::now() < deadline {
        text = std::fs::read_to_string(&log).unwrap_or_default();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let expected = format!(
        "--daemon http://{} --job job --gpu {} --node n0 --incarnation 3 --data-ip 127.0.0.2 --threads 1\n",
        daemon.address, node.gpus[1]
    );
    assert_eq!(text, expected);
    drop(agent);
}

#[tokio::test]
async fn fencing_is_confirmed_and_a_key_never_starts_twice() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let gpu = &node.gpus[0];
    session.spawn(gpu, 1).await;
    let pid = session.spawned().await.pid;
    session.spawn(gpu, 1).await;
    assert_eq!(session.spawned().await.pid, pid, "the same order twice");
    session.spawn(gpu, 2).await;
    let (refused, _) = session.exited().await;
    assert_eq!(refused.worker.unwrap().incarnation, 2);
    assert!(refused.how.contains("runs on GPU"), "{}", refused.how);
    assert!(runs(pid));

    // A stopped process cannot react to anything gentler than SIGKILL.
    kill(pid, "STOP");
    session.fence(gpu, 1).await;
    let (exited, _) = session.exited().await;
    assert_eq!((exited.signal, exited.worker.unwrap().incarnation), (9, 1));
    assert!(!runs(pid));

    session.fence(gpu, 1).await;
    assert_eq!(session.exited().await.0.how, "killed by signal 9", "told again");
    session.spawn(gpu, 1).await;
    assert_eq!(session.exited().await.0.how, "killed by signal 9", "not started again");
    session.fence(gpu, 99).await;
    assert_eq!(session.exited().await.0.how, "was not running");
    session.spawn("GPU-of-another-node", 4).await;
    assert!(session.exited().await.0.how.contains("no GPU"));
    session.spawn(gpu, 5).await;
    assert!(runs(session.spawned().await.pid), "the GPU is free again");
    drop(agent);
}

#[tokio::test]
async fn workers_outlive_the_agent_and_are_adopted() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(3));
    let mut agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let mut pids = Vec::new();
    for gpu in &node.gpus {
        session.spawn(gpu, 1).await;
        pids.push(session.spawned().await.pid);
    }
    agent.kill();
    assert!(pids.iter().all(|pid| runs(*pid)));
    kill(pids[2], "KILL");

    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let mut adopted: Vec<_> = session.hello.workers.iter().map(|w| w.pid).collect();
    adopted.sort_unstable();
    let mut expected = pids[..2].to_vec();
    expected.sort_unstable();
    assert_eq!(adopted, expected);
    let (exited, _) = session.exited().await;
    assert_eq!(exited.worker.unwrap().gpu, node.gpus[2], "it died meanwhile");

    let killed = Instant::now();
    kill(pids[0], "KILL");
    let (exited, at) = session.exited().await;
    assert!(at - killed < Duration::from_millis(100), "{:?}", at - killed);
    assert_eq!(exited.how, "exited (status unknown: adopted)");
    assert_eq!((exited.signal, exited.status), (0, -1));
    session.fence(&node.gpus[1], 1).await;
    let (exited, _) = session.exited().await;
    assert_eq!(exited.worker.unwrap().gpu, node.gpus[1]);
    assert!(!runs(pids[1]));
    drop(agent);
}

#[tokio::test]
async fn a_recorded_number_that_is_another_process_now_is_left_alone() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    let mut stranger = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    // Start times are told apart from one clock tick, 10 ms, to the next.
    tokio::time::sleep(Duration::from_millis(30)).await;
    let mut agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.spawn(&node.gpus[0], 1).await;
    let pid = session.spawned().await.pid;
    agent.kill();
    kill(pid, "KILL");
    let path = node.folder.path().join("state/workers.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let recorded = format!("\"pid\": {pid}");
    assert!(text.contains(&recorded), "{text}");
    let forged = text.replace(&recorded, &format!("\"pid\": {}", stranger.id()));
    std::fs::write(&path, &forged).unwrap();

    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    assert_eq!(session.hello.workers, [], "{forged}");
    let (exited, _) = session.exited().await;
    assert_eq!(exited.how, "exited (status unknown: adopted)");
    session.fence(&node.gpus[0], 1).await;
    session.exited().await;
    drop(agent);
    assert!(runs(stranger.id()));
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

#[tokio::test]
async fn losing_the_daemon_touches_no_worker() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.spawn(&node.gpus[0], 1).await;
    session.spawn(&node.gpus[1], 1).await;
    let pids = [session.spawned().await.pid, session.spawned().await.pid];
    session.heartbeat().await;
    session.close();
    kill(pids[1], "KILL");
    let mut session = daemon.session().await;
    assert!(runs(pids[0]));
    let (exited, _) = session.exited().await;
    assert_eq!(exited.worker.unwrap().gpu, node.gpus[1]);
    assert_eq!(exited.signal, 9);
    drop(agent);
}

#[tokio::test]
async fn sigterm_stops_the_workers_unless_told_to_keep_them() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    let address = format!("http://{}", daemon.address);
    let keeping = node.command(&address).arg("--keep-workers").spawn().unwrap();
    let mut agent = harness::RunningAgent(keeping);
    let mut session = daemon.session().await;
    session.spawn(&node.gpus[0], 1).await;
    let pid = session.spawned().await.pid;
    agent.terminate();
    assert_eq!(agent.exit_code(PATIENCE), Some(0));
    assert!(runs(pid));

    let mut agent = node.start(&daemon);
    let session = daemon.session().await;
    assert_eq!(session.hello.workers[0].pid, pid);
    assert!(command_line(pid).contains("sleep"));
    agent.terminate();
    assert_eq!(agent.exit_code(PATIENCE), Some(0));
    assert!(!runs(pid));
}

/// Two children of the worker's, one of which leaves its process group.
const FAMILY: &str = "#!/bin/sh\n\
    sleep 1000 &\n\
    setsid sleep 1000 &\n\
    exec sleep 1000\n";

/// The worker's two children, once they are there.
async fn children(worker: u32) -> Vec<u32> {
    let mut found = Vec::new();
    harness::until("it has children", || {
        found = family(worker);
        found.len() == 2
    })
    .await;
    found
}

/// Who descends from the worker, by their marks. In the middle of an exec it has no environment, and no family is known.
fn family(worker: u32) -> Vec<u32> {
    let environment = |pid: u32| std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let mark = environment(worker);
    let mut entries = mark.split(|byte| *byte == 0);
    let Some(mark) = entries.find(|entry| entry.starts_with(b"REKNIT_SPAWN=")) else { return Vec::new() };
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let all = pids.filter(|pid| environment(*pid).split(|byte| *byte == 0).any(|entry| entry == mark));
    all.filter(|pid| *pid != worker && command_line(*pid).starts_with("sleep")).collect()
}

#[tokio::test]
async fn a_worker_gets_the_environment_it_needs_and_nothing_of_the_agents() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    let out = node.folder.path().join("environment");
    node.write_worker(&format!(
        "#!/bin/sh\n/usr/bin/env > {0}.new; mv {0}.new {0}\nexec sleep 1000\n",
        out.display()
    ));
    let mut command = node.command(&format!("http://{}", daemon.address));
    command.env("NCCL_DEBUG", "INFO").env("CUDA_VISIBLE_DEVICES", "7").env("CLOUD_SECRET", "x");
    let agent = harness::RunningAgent(command.spawn().unwrap());
    let mut session = daemon.session().await;
    session.spawn(&node.gpus[1], 3).await;
    session.spawned().await;
    harness::until("the environment is written", || out.exists()).await;
    let text = std::fs::read_to_string(&out).unwrap();
    let variables: std::collections::BTreeMap<_, _> =
        text.lines().filter_map(|line| line.split_once('=')).collect();
    for (name, value) in [
        ("CUDA_VISIBLE_DEVICES", node.gpus[1].as_str()),
        ("NCCL_DEBUG", "INFO"),
        ("REKNIT_NODE", "n0"),
        ("REKNIT_JOB", "job"),
        ("REKNIT_GPU_INDEX", "1"),
        ("REKNIT_WORKER", &format!("job/{}/3", node.gpus[1])),
    ] {
        assert_eq!(variables.get(name), Some(&value), "{name}");
    }
    for name in ["CLOUD_SECRET", "REKNIT_SIMDRIVER_STATE", "REKNIT_DAEMON", "REKNIT_PROBE_INTERVAL_MS"] {
        assert!(!variables.contains_key(name), "{name}");
    }
    drop(agent);
}

#[tokio::test]
async fn what_a_worker_leaves_running_ends_with_it() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    node.write_worker(FAMILY);
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.spawn(&node.gpus[0], 1).await;
    let worker = session.spawned().await.pid;
    let children = children(worker).await;
    session.fence(&node.gpus[0], 1).await;
    session.exited().await;
    harness::until("they end", || !children.iter().any(|child| runs(*child))).await;
    drop(agent);
}

#[tokio::test]
async fn what_an_adopted_worker_leaves_running_ends_with_it_too() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    node.write_worker(FAMILY);
    let mut agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let mut families = Vec::new();
    for gpu in &node.gpus {
        session.spawn(gpu, 1).await;
        let worker = session.spawned().await.pid;
        families.push((worker, children(worker).await));
    }
    agent.kill();
    // One leader dies while nobody looks, the other under the next agent.
    kill(families[0].0, "KILL");
    assert!(families[0].1.iter().all(|child| runs(*child)), "they ended by themselves");
    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    assert_eq!(session.hello.workers.len(), 1);
    session.exited().await;
    harness::until("they end", || !families[0].1.iter().any(|child| runs(*child))).await;
    assert!(runs(families[1].0) && families[1].1.iter().all(|child| runs(*child)));
    let killed = Instant::now();
    kill(families[1].0, "KILL");
    let (_, at) = session.exited().await;
    assert!(at - killed < Duration::from_millis(100), "{:?}", at - killed);
    harness::until("they end", || !families[1].1.iter().any(|child| runs(*child))).await;
    drop(agent);
}

/// Changes what the agent has recorded of its workers, as if it had died at another moment.
fn edit_records(node: &Node, edit: impl FnOnce(&mut Vec<serde_json::Value>)) {
    let path = node.state_dir().join("workers.json");
    let mut content: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(content["workers"].as_array_mut().unwrap());
    std::fs::write(&path, content.to_string()).unwrap();
}

#[tokio::test]
async fn a_worker_whose_agent_died_before_it_noted_the_process_is_found() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(2));
    node.write_worker(FAMILY);
    let mut agent = node.start(&daemon);
    let mut session = daemon.session().await;
    session.spawn(&node.gpus[0], 4).await;
    let worker = session.spawned().await.pid;
    children(worker).await;
    agent.kill();
    edit_records(&node, |workers| {
        let mut record = workers[0].as_object().unwrap().clone();
        assert!(record.remove("pid").is_some() && record.remove("start_time").is_some());
        let mut never_started = record.clone();
        never_started["gpu"] = node.gpus[1].clone().into();
        never_started["spawn"] = "of-nobody".into();
        *workers = vec![record.into(), never_started.into()];
    });

    let agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let adopted: Vec<_> = session.hello.workers.iter().map(|worker| worker.pid).collect();
    assert_eq!(adopted, [worker], "the leader, and none of its children");
    let (never, _) = session.exited().await;
    assert_eq!(never.worker.unwrap().gpu, node.gpus[1]);
    assert!(never.how.contains("could not be started"), "{}", never.how);
    session.fence(&node.gpus[0], 4).await;
    session.exited().await;
    assert!(!runs(worker));
    drop(agent);
}

#[tokio::test]
async fn without_a_journal_the_agent_says_so() {
    let (daemon, node) = (Daemon::start().await, Node::new(1));
    if std::path::Path::new("/run/systemd/journal/stdout").exists() {
        return;
    }
    let mut command = node.command(&format!("http://{}", daemon.address));
    let output = command.args(["--worker-logs", "journal"]).output().unwrap();
    assert_eq!(output.status.code(), Some(64));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("no journal") && error.contains("--worker-logs files"), "{error}");
}

/// Processes that run the node's worker program.
fn workers_of(node: &Node) -> Vec<u32> {
    let program = node.worker.to_str().unwrap();
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| command_line(*pid).starts_with(&format!("/bin/sh {program}")) && runs(*pid)).collect()
}

#[tokio::test]
async fn an_agent_killed_at_any_moment_of_a_start_knows_its_worker() {
    let (mut daemon, node) = (Daemon::start().await, Node::new(1));
    node.write_worker("#!/bin/sh\nwhile :; do sleep 1000; done\n");
    let mut agent = node.start(&daemon);
    let mut session = daemon.session().await;
    let (mut adopted, mut not_started) = (0, 0);
    for moment in 1..=40 {
        session.spawn(&node.gpus[0], moment).await;
        // Finer than a timer.
        let ordered = Instant::now();
        while ordered.elapsed() < Duration::from_micros(moment * 150) {
            tokio::task::yield_now().await;
        }
        agent.kill();
        agent = node.start(&daemon);
        session = daemon.session().await;
        let listed: Vec<_> = session.hello.workers.iter().map(|worker| worker.pid).collect();
        assert_eq!(listed, workers_of(&node), "moment {moment}");
        if listed.is_empty() {
            not_started += 1;
            continue;
        }
        adopted += 1;
        session.fence(&node.gpus[0], moment).await;
        session.exited().await;
    }
    println!("{adopted} adopted, {not_started} not started");
    assert!(
        adopted > 0 && not_started > 0,
        "{adopted} adopted, {not_started} not started: no moment in between"
    );
    drop(agent);
}
