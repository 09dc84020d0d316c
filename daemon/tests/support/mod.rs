//! Starts the real daemon and talks to it.
#![allow(dead_code, unreachable_pub, reason = "each test file uses another part")]

pub mod etcd;
pub mod peers;

use reknit_proto::v1;
use reknit_proto::v1::admin_client::AdminClient;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tonic::transport::Channel;

pub const PATIENCE: Duration = Duration::from_secs(30);

/// A running `reknitd` with its log. Killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    lines: Receiver<String>,
    /// Every line of its stderr so far.
    pub log: Vec<String>,
    /// `host:port`, once it serves.
    pub address: String,
}

impl Daemon {
    /// Started, and perhaps waiting to lead.
    pub fn spawn(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_reknitd"))
            .args(["--log", "json"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, lines, log: Vec::new(), address: String::new() }
    }

    /// Started and serving.
    pub fn start(arguments: &[&str]) -> Self {
        let mut daemon = Self::spawn(arguments);
        daemon.wait_until_serving();
        daemon
    }

    /// With an embedded store in `dir`, on a free port.
    pub fn embedded(dir: &Path) -> Self {
        Self::start(&["--listen", "127.0.0.1:0", "--state-dir", dir.to_str().unwrap()])
    }

    pub fn wait_until_serving(&mut self) {
        self.wait_until_reached("serving gRPC");
    }

    /// In stand-by at least.
    pub fn wait_until_listening(&mut self) {
        self.wait_until_reached("listening");
    }

    /// In stand-by, while another one leads.
    pub fn wait_until_standing_by(&mut self) {
        self.wait_until_listening();
        self.wait_for_log("waiting to lead");
    }

    fn wait_until_reached(&mut self, text: &str) {
        let line = self.wait_for_log(text);
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        self.address = line["fields"]["address"].as_str().unwrap().to_owned();
    }

    pub fn wait_for_log(&mut self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.log.push(line.clone());
                    if line.contains(text) {
                        return line;
                    }
                }
                Err(RecvTimeoutError::Timeout) => panic!("no `{text}` in {:#?}", self.log),
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("reknitd ended without `{text}`: {:#?}", self.log)
                }
            }
        }
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// SIGKILL, and gone.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    }

    /// Waits for it to end by itself: its status and the last line it wrote.
    pub fn exit(mut self) -> (i32, String) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.log.push(line),
                Err(RecvTimeoutError::Timeout) => panic!("reknitd did not end: {:#?}", self.log),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let status = self.child.wait().unwrap();
        let code = status.code().unwrap_or_else(|| panic!("{status}: {:#?}", self.log));
        (code, self.log.last().cloned().unwrap_or_default())
    }

    pub async fn admin(&self) -> AdminClient<Channel> {
        AdminClient::connect(format!("http://{}", self.address)).await.unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A small job for the four GPUs of one node: two replicas of two slots.
pub fn job_file(name: &str) -> String {
    let file = reknit_layout::job::EXAMPLE
        .replace("name = \"example\"", &format!("name = \"{name}\""))
        .replace("tensor = 4", "tensor = 2")
        .replace("min_tensor = 2", "min_tensor = 1");
    assert!(file.contains("min_tensor = 1") && file.contains(name));
    file
}

pub async fn submit(admin: &mut AdminClient<Channel>, name: &str) -> v1::Job {
    let job_toml = job_file(name);
    admin.submit_job(v1::SubmitJobRequest { job_toml }).await.unwrap().into_inner()
}

pub async fn job_names(admin: &mut AdminClient<Channel>) -> Vec<String> {
    let jobs = admin.list_jobs(v1::ListJobsRequest {}).await.unwrap();
    jobs.into_inner().jobs.into_iter().map(|job| job.name).collect()
}

/// Looks at the job again after every event until `wanted` holds.
pub async fn wait_for_job(
    admin: &mut AdminClient<Channel>,
    name: &str,
    wanted: impl Fn(&v1::Job) -> bool,
) -> v1::Job {
    let watch = v1::WatchEventsRequest { job: name.to_owned() };
    let mut events = admin.watch_events(watch).await.unwrap().into_inner();
    let mut last = None;
    let wait = async {
        loop {
            let request = v1::GetJobRequest { name: name.to_owned() };
            let job = admin.get_job(request).await.unwrap().into_inner();
            if wanted(&job) {
                return job;
            }
            last = Some((job.phase, job.explanation, job.epoch, job.committed_step));
            events.message().await.unwrap().expect("the daemon stopped");
        }
    };
    match tokio::time::timeout(PATIENCE, wait).await {
        Ok(job) => job,
        Err(_) => panic!("the job stays {last:#?}"),
    }
}
