//! The workers of this node: started, watched through pidfds, fenced, and found again after the agent's own
//! restart.

mod process;
mod readiness;
mod record;

use process::Process;
pub(crate) use process::{LogTo, WorkerSpec};
use record::{Record, Records};
use reknit_layout::{GpuId, WorkerKey};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::path::Path;
use tokio::sync::mpsc;
use tracing::{info, warn};

/// Ends that are remembered, to answer an order that comes late.
pub(crate) const ENDS_KEPT: usize = 256;

/// One worker process of one job.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct WorkerId {
    pub(crate) job: String,
    #[serde(flatten)]
    pub(crate) key: WorkerKey,
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.job, self.key)
    }
}

/// How a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Exit {
    Signal(i32),
    Status {
        status: i32,
        /// The last line of its log, when it did not end well: programs say there why.
        last_words: Option<String>,
    },
    /// Not this agent's child, so the kernel does not tell.
    Adopted,
    NotStarted(String),
    /// It was asked for and is not there.
    NotRunning,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(signal) => write!(f, "killed by signal {signal}"),
            Self::Status { status, last_words: None } => write!(f, "exit status {status}"),
            Self::Status { status, last_words: Some(words) } => write!(f, "exit status {status}: {words}"),
            Self::Adopted => f.write_str("exited (status unknown: adopted)"),
            Self::NotStarted(why) => write!(f, "could not be started: {why}"),
            Self::NotRunning => f.write_str("was not running"),
        }
    }
}

/// What became of an order to spawn.
#[derive(Debug)]
pub(crate) enum Spawn {
    Running(u32),
    Ended(Exit),
}

/// Every worker of the node.
#[derive(Debug)]
pub(crate) struct Workers {
    spec: WorkerSpec,
    records: Records,
    live: BTreeMap<WorkerId, Process>,
    ended: VecDeque<(WorkerId, Exit)>,
    exits: mpsc::Sender<(WorkerId, Exit)>,
}

impl Workers {
    /// Adopts the recorded workers that still run. Each worker's end is sent to `exits` once.
    pub(crate) fn adopt(
        spec: WorkerSpec,
        state_dir: &Path,
        exits: mpsc::Sender<(WorkerId, Exit)>,
    ) -> io::Result<Self> {
        let mut workers = Self {
            spec,
            records: Records::new(state_dir)?,
            live: BTreeMap::new(),
            ended: VecDeque::new(),
            exits,
        };
        for record in workers.records.load() {
            match Process::adopt(&record)? {
                Some(process) => {
                    info!(worker = %record.worker, pid = record.pid, "worker adopted");
                    workers.watch(record.worker, process)?;
                }
                None => {
                    info!(worker = %record.worker, "worker ended while the agent was away");
                    workers.remember(record.worker, Exit::Adopted);
                }
            }
        }
        workers.save();
        Ok(workers)
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = (&WorkerId, u32)> {
        self.live.iter().map(|(worker, process)| (worker, process.pid()))
    }

    /// Ends known so far, oldest first.
    pub(crate) fn ended_before(&self) -> impl Iterator<Item = &(WorkerId, Exit)> {
        self.ended.iter()
    }

    /// Starts a worker, unless it runs or has already run: a key is never used twice.
    pub(crate) fn spawn(&mut self, worker: WorkerId, index: Option<u32>) -> Spawn {
        if let Some(process) = self.live.get(&worker) {
            return Spawn::Running(process.pid());
        }
        if let Some(exit) = self.end_of(&worker) {
            return Spawn::Ended(exit.clone());
        }
        let started = match (index, self.on(&worker.key.gpu)) {
            (None, _) => Err(format!("this node has no GPU {}", worker.key.gpu)),
            (Some(_), Some(other)) => Err(format!("{other} runs on GPU {} already", worker.key.gpu)),
            (Some(index), None) => Process::spawn(&self.spec, &worker, index)
                .map_err(|e| format!("{}: {e}", self.spec.binary.display())),
        };
        let watched = started.and_then(|process| {
            let pid = process.pid();
            self.watch(worker.clone(), process).map_err(|e| format!("cannot watch it: {e}"))?;
            Ok(pid)
        });
        match watched {
            Ok(pid) => {
                self.save();
                Spawn::Running(pid)
            }
            Err(why) => {
                warn!(%worker, why, "a worker could not be started");
                let exit = Exit::NotStarted(why);
                self.remember(worker, exit.clone());
                Spawn::Ended(exit)
            }
        }
    }

    /// Kills a worker; its end comes through `exits`. `Some` when it is gone already.
    pub(crate) fn fence(&mut self, worker: &WorkerId) -> Option<Exit> {
        match self.live.get(worker) {
            Some(process) => {
                process.signal(Signal::KILL);
                None
            }
            None => Some(self.end_of(worker).cloned().unwrap_or(Exit::NotRunning)),
        }
    }

    /// Takes note of an end that came through `exits`.
    pub(crate) fn ended(&mut self, worker: &WorkerId, exit: &Exit) {
        self.live.remove(worker);
        self.remember(worker.clone(), exit.clone());
        self.save();
    }

    pub(crate) fn signal_all(&self, signal: Signal) {
        for process in self.live.values() {
            process.signal(signal);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    fn on(&self, gpu: &GpuId) -> Option<&WorkerId> {
        self.live.keys().find(|worker| worker.key.gpu == *gpu)
    }

    fn end_of(&self, worker: &WorkerId) -> Option<&Exit> {
        let found = self.ended.iter().rev().find(|(ended, _)| ended == worker);
        found.map(|(_, exit)| exit)
    }

    fn remember(&mut self, worker: WorkerId, exit: Exit) {
        if self.ended.len() == ENDS_KEPT {
            self.ended.pop_front();
        }
        self.ended.push_back((worker, exit));
    }

    fn watch(&mut self, worker: WorkerId, process: Process) -> io::Result<()> {
        let end = process.end()?;
        let exits = self.exits.clone();
        let watched = worker.clone();
        tokio::spawn(async move {
            let exit = end.await;
            // Fails only when the agent itself has ended.
            let _unheard = exits.send((watched, exit)).await;
        });
        self.live.insert(worker, process);
        Ok(())
    }

    fn save(&self) {
        let records: Vec<Record> =
            self.live.iter().map(|(worker, process)| process.record(worker.clone())).collect();
        if let Err(e) = self.records.save(records) {
            warn!(%e, "cannot record the running workers: they will be lost to the agent's next start");
        }
    }
}
