//! Starting, refusing to start, and stopping.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use reknit_proto::v1;
use rustix::process::Signal;
use std::process::Command;
use std::time::{Duration, Instant};
use support::{Daemon, PATIENCE, job_names, submit};
use tokio_stream::StreamExt;
use tonic::Code;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

/// The status and stderr of a daemon that does not start.
fn refused(arguments: &[&str], environment: &[(&str, &str)]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_reknitd"))
        .args(arguments)
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(stderr.trim_end().lines().count(), 1, "not one line: {stderr}");
    assert!(stderr.starts_with("reknitd: "), "{stderr}");
    (output.status.code().unwrap(), stderr)
}

#[test]
fn bad_configuration_is_one_line_and_status_64() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("reknitd.toml");
    std::fs::write(&file, "[timeouts]\noperation_msec = 5\n").unwrap();
    let file = file.to_str().unwrap();
    type Case<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], &'a str);
    let cases: &[Case<'_>] = &[
        (&["--listen", "0.0.0.0:7400"], &[], "needs TLS"),
        (&["--listen", "here"], &[], "'here' for '--listen"),
        (&["--no-such-flag"], &[], "--no-such-flag"),
        (&["--config", "/no/such/file"], &[], "/no/such/file"),
        (&["--config", file], &[], "line 2: unknown field `operation_msec`"),
        (&["--store", "etcd"], &[], "--endpoints"),
        (&["--endpoints", "http://127.0.0.1:1"], &[], "add --store etcd"),
        (&[], &[("REKNITD_ENDPOINTS", "http://127.0.0.1:1")], "add --store etcd"),
        (&["--operation-ms", "1"], &[], "operation_ms = 1"),
        (&["--print-config", "--topology", "/no/such/topology"], &[], "/no/such/topology"),
        (&["--print-config", "--topology", file], &[], "topology: "),
        (&[], &[("REKNITD_LISTN", "x")], "REKNITD_LISTN"),
        (&[], &[("REKNITD_LISTEN", "x")], "--listen"),
    ];
    for (arguments, environment, wanted) in cases {
        let (status, stderr) = refused(arguments, environment);
        assert_eq!(status, 64, "{arguments:?}: {stderr}");
        assert!(stderr.contains(wanted), "{arguments:?}: {stderr}");
    }
}

#[test]
fn print_config_shows_what_wins() {
    let output = Command::new(env!("CARGO_BIN_EXE_reknitd"))
        .args(["--print-config", "--rejoin-hold-ms", "5"])
        .env("REKNITD_REJOIN_HOLD_MS", "4")
        .env("REKNITD_LISTEN", "127.0.0.1:9")
        .output()
        .unwrap();
    let config: reknitd::Config = toml::from_str(std::str::from_utf8(&output.stdout).unwrap()).unwrap();
    assert_eq!(config.timeouts.rejoin_hold_ms, 5);
    assert_eq!(config.listen.port(), 9);
}

#[tokio::test]
async fn a_job_file_is_told_back_short_and_harmless() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::embedded(dir.path());
    let mut admin = daemon.admin().await;
    let named = support::job_file("x");
    for (what, job_toml) in [
        ("name", named.replace("name = \"x\"", &format!("name = \"{}\"", "x".repeat(1 << 20)))),
        ("unknown key", format!("{named}\n\"\\u001b[31mred\" = 1\n")),
    ] {
        let refused = admin.submit_job(v1::SubmitJobRequest { job_toml }).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{what}: {refused}");
        let text = refused.message();
        assert!(text.contains(what) && text.len() < 3_000, "{what}: {text}");
        assert!(!text.contains(char::is_control), "{what}: {text:?}");
    }
}

#[test]
fn a_log_that_cannot_be_written_does_not_stop_it() {
    let dir = tempfile::tempdir().unwrap();
    let (state, ready) = (dir.path().join("state"), dir.path().join("ready"));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_reknitd"))
        .args(["--listen", "127.0.0.1:0", "--state-dir", state.to_str().unwrap()])
        .args(["--ready-file", ready.to_str().unwrap()])
        .stderr(full)
        .spawn()
        .unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !ready.exists() && Instant::now() < deadline && daemon.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let serves = ready.exists();
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(serves, "it does not serve");
}

#[test]
fn a_port_in_use_is_named_and_status_69() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let state = dir.path().to_str().unwrap();
    let arguments = ["--listen", &address, "--state-dir", state];
    let (status, stderr) = refused(&arguments, &[]);
    assert_eq!(status, 69);
    assert!(stderr.contains(&address) && stderr.contains("--listen"), "{stderr}");
}

#[test]
fn a_second_daemon_on_the_same_state_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let _first = Daemon::embedded(dir.path());
    let state = dir.path().to_str().unwrap();
    let arguments = ["--listen", "127.0.0.1:0", "--state-dir", state, "--log", "json"];
    let (status, last) = Daemon::spawn(&arguments[..4]).exit();
    assert_eq!(status, 69);
    assert!(last.contains("in use by another process") && last.contains(state), "{last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_it_in_order_even_while_somebody_watches() {
    let dir = tempfile::tempdir().unwrap();
    let ready = dir.path().join("ready");
    let arguments = ["--listen", "127.0.0.1:0", "--ready-file", ready.to_str().unwrap()];
    let state = ["--state-dir", dir.path().to_str().unwrap()];
    let mut daemon = Daemon::start(&[&arguments[..], &state[..]].concat());
    let mut admin = daemon.admin().await;
    let watch = v1::WatchEventsRequest::default();
    let mut events = admin.watch_events(watch).await.unwrap().into_inner();
    daemon.signal(Signal::TERM);
    assert!(matches!(events.message().await, Ok(None)));
    daemon.wait_for_log("stopping");
    assert_eq!(std::fs::read_to_string(&ready).unwrap(), daemon.address);
    drop((admin, events));
    let (status, last) = daemon.exit();
    assert_eq!(status, 0, "{last}");
    assert!(last.contains("stopping"), "something went wrong after it: {last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reflection_and_health_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::embedded(dir.path());
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", daemon.address))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let list = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut reflection = ServerReflectionClient::new(channel.clone());
    let mut answers = reflection.server_reflection_info(tokio_stream::once(list)).await.unwrap().into_inner();
    let answer = answers.next().await.unwrap().unwrap().message_response.unwrap();
    let MessageResponse::ListServicesResponse(services) = answer else {
        panic!("{answer:?}");
    };
    let names: Vec<_> = services.service.into_iter().map(|service| service.name).collect();
    for service in ["reknit.v1.Admin", "reknit.v1.Agent", "reknit.v1.Worker", "grpc.health.v1.Health"] {
        assert!(names.iter().any(|name| name == service), "{service} is not in {names:?}");
    }

    let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
    let service = "reknit.v1.Admin".to_owned();
    let check = tonic_health::pb::HealthCheckRequest { service };
    let status = health.check(check).await.unwrap().into_inner().status();
    assert_eq!(status, tonic_health::pb::health_check_response::ServingStatus::Serving);
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_are_told_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::embedded(dir.path());
    let mut admin = daemon.admin().await;
    submit(&mut admin, "one").await;

    let job_toml = support::job_file("one");
    let twice = admin.submit_job(v1::SubmitJobRequest { job_toml }).await.unwrap_err();
    assert_eq!(twice.code(), Code::AlreadyExists);
    assert!(twice.message().contains("one"), "{twice}");

    let job_toml = support::job_file("two").replace("[run]", "[run]\nspeed = 3");
    let unknown = admin.submit_job(v1::SubmitJobRequest { job_toml }).await.unwrap_err();
    assert_eq!(unknown.code(), Code::InvalidArgument);
    assert!(unknown.message().starts_with("job: line "), "{unknown}");
    assert!(unknown.message().contains("speed") && !unknown.message().contains('\n'), "{unknown}");

    let name = "nobody".to_owned();
    let missing = admin.get_job(v1::GetJobRequest { name }).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
    let name = "nobody".to_owned();
    let missing = admin.stop_job(v1::StopJobRequest { name }).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
    let gpu = "GPU-none".to_owned();
    let missing = admin.drain_gpu(v1::DrainGpuRequest { gpu }).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
    assert!(missing.message().contains("GPU-none"), "{missing}");
    assert_eq!(job_names(&mut admin).await, ["one"]);
}
