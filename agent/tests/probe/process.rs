//! A probe, started and spoken to as its supervisor does.

use crate::harness::{Node, PATIENCE, library};
use reknit_simdriver::state::STATE_VARIABLE;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// A running probe and what it says.
pub(crate) struct Probe {
    pub(crate) child: Child,
    pub(crate) socket: UnixStream,
    lines: Receiver<Value>,
}

impl Probe {
    /// Ready, with nothing else read of it.
    pub(crate) fn start(node: &Node, interval_ms: u64) -> Self {
        let probe = Self::spawn(node, interval_ms);
        let ready = probe.wait_for("ready", |line| line.get("ready").cloned());
        assert_eq!(ready["gpus"].as_array().unwrap().len(), node.gpus.len());
        probe
    }

    pub(crate) fn spawn(node: &Node, interval_ms: u64) -> Self {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_reknit-agent"))
            .args(["probe", "--log", "human", "--interval-ms", &interval_ms.to_string(), "--nvml-library"])
            .arg(library())
            .env(STATE_VARIABLE, node.driver())
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let socket = UnixStream::from(ours);
        let input = BufReader::new(socket.try_clone().unwrap());
        let (lines_in, lines) = channel();
        std::thread::spawn(move || {
            for line in input.lines().map_while(Result::ok) {
                if lines_in.send(serde_json::from_str(&line).unwrap()).is_err() {
                    return;
                }
            }
        });
        let mut probe = Self { child, socket, lines };
        probe.order(json!({"expect": {"gpus": []}}));
        probe
    }

    pub(crate) fn order(&mut self, order: Value) {
        self.socket.write_all(format!("{order}\n").as_bytes()).unwrap();
    }

    pub(crate) fn set_power_limit(&mut self, gpu: &str, limit: Option<u32>) {
        self.order(json!({"set_power_limit": {"gpu": gpu, "limit": limit}}));
    }

    /// The first line of which `pick` makes something.
    pub(crate) fn wait_for<T>(&self, what: &str, pick: impl Fn(&Value) -> Option<T>) -> T {
        self.within(PATIENCE, pick).unwrap_or_else(|| panic!("no {what} within {PATIENCE:?}"))
    }

    pub(crate) fn within<T>(&self, limit: Duration, pick: impl Fn(&Value) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Some(picked) = pick(&line) {
                        return Some(picked);
                    }
                }
                Err(RecvTimeoutError::Timeout) => return None,
                Err(RecvTimeoutError::Disconnected) => panic!("the probe is gone"),
            }
        }
    }

    /// The next reading of `gpu`.
    pub(crate) fn reading(&self, gpu: &str) -> Value {
        self.wait_for("reading", |line| reading_of(line, gpu))
    }

    pub(crate) fn power_limit(&self) -> Value {
        self.wait_for("power limit", |line| line.get("power_limit").cloned())
    }

    /// Everything that is said from now on for `time`.
    pub(crate) fn all(&self, time: Duration) -> Vec<Value> {
        let all = std::cell::RefCell::new(Vec::new());
        let _over = self.within(time, |line| {
            all.borrow_mut().push(line.clone());
            None::<()>
        });
        all.into_inner()
    }

    /// Clock ticks, of which there are 100 a second.
    pub(crate) fn cpu_ticks(&self) -> u64 {
        crate::harness::cpu_ticks(self.child.id())
    }

    /// Waits for the probe's end.
    pub(crate) fn ended(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if self.child.try_wait().unwrap().is_some() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _gone_already = self.child.kill();
        let _exit = self.child.wait();
    }
}

pub(crate) fn reading_of(line: &Value, gpu: &str) -> Option<Value> {
    let reading = line.get("reading").filter(|reading| reading["gpu"] == gpu)?;
    Some(reading["reading"].clone())
}

/// A reading that was begun after the change.
pub(crate) fn fresh(probe: &mut Probe, gpu: &str) -> Value {
    probe.all(Duration::from_millis(60));
    probe.order(json!("read_now"));
    probe.wait_for("reading of both sets", |line| {
        reading_of(line, gpu).filter(|reading| !reading["answers"]["slow"].is_null())
    })["answers"]
        .clone()
}
