//! The workers of this node: started, watched through pidfds, fenced, and found again after the agent's own
//! restart.

mod environment;
mod logs;
mod proc;
mod process;
mod readiness;
mod record;
mod remains;

use crate::files;
pub(crate) use logs::{JOURNAL, LogTo, connect_journal};
use process::Process;
pub(crate) use process::WorkerSpec;
use record::{Record, Records};
use reknit_layout::{GpuId, WorkerKey};
use remains::Traces;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::path::Path;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
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
    live: BTreeMap<WorkerId, Live>,
    ended: VecDeque<(WorkerId, Exit)>,
    exits: mpsc::Sender<(WorkerId, Exit)>,
    /// Each waits for a worker's end, and ends what it left running.
    watches: JoinSet<()>,
}

#[derive(Debug)]
struct Live {
    /// See [`Record`].
    spawn: String,
    /// `None` while it is being started.
    process: Option<Process>,
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
            watches: JoinSet::new(),
        };
        for record in workers.records.load() {
            workers.take_over(record)?;
        }
        workers.save();
        Ok(workers)
    }

    /// What an earlier start of the agent has left.
    fn take_over(&mut self, record: Record) -> io::Result<()> {
        let Record { worker, spawn, started } = record;
        let Some(started) = started.or_else(|| Process::of_spawn(&spawn)) else {
            info!(%worker, "the agent died before the worker was started");
            self.remember(worker, Exit::NotStarted("its agent died".to_owned()));
            return Ok(());
        };
        match Process::adopt(started)? {
            Some(process) => {
                info!(%worker, pid = started.pid, "worker adopted");
                self.watch(worker, spawn, process)?;
            }
            None => {
                info!(%worker, "worker ended while the agent was away");
                let traces = Traces { pid: started.pid, start_time: started.start_time, spawn };
                self.watches.spawn_blocking(move || traces.kill_all());
                self.remember(worker, Exit::Adopted);
            }
        }
        Ok(())
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = (&WorkerId, u32)> {
        let live = self.live.iter();
        live.filter_map(|(worker, live)| Some((worker, live.process.as_ref()?.pid())))
    }

    /// Ends known so far, oldest first.
    pub(crate) fn ended_before(&self) -> impl Iterator<Item = &(WorkerId, Exit)> {
        self.ended.iter()
    }

    /// Starts a worker, unless it runs or has already run: a key is never used twice.
    pub(crate) fn spawn(&mut self, worker: WorkerId, index: Option<u32>) -> Spawn {
        if let Some(process) = self.live.get(&worker).and_then(|live| live.process.as_ref()) {
            return Spawn::Running(process.pid());
        }
        if let Some(exit) = self.end_of(&worker) {
            return Spawn::Ended(exit.clone());
        }
        let started = match (index, self.on(&worker.key.gpu)) {
            (None, _) => Err(format!("this node has no GPU {}", worker.key.gpu)),
            (Some(_), Some(other)) => Err(format!("{other} runs on GPU {} already", worker.key.gpu)),
            (Some(index), None) => self.start(&worker, index),
        };
        match started {
            Ok(pid) => Spawn::Running(pid),
            Err(why) => {
                warn!(%worker, why, "a worker could not be started");
                let exit = Exit::NotStarted(why);
                self.remember(worker, exit.clone());
                Spawn::Ended(exit)
            }
        }
    }

    /// The intent is on disk before the process is there, so that an agent that dies in between knows of it.
    fn start(&mut self, worker: &WorkerId, index: u32) -> Result<u32, String> {
        let spawn = files::unique().map_err(|e| format!("the kernel gives no random number: {e}"))?;
        self.live.insert(worker.clone(), Live { spawn: spawn.clone(), process: None });
        self.save();
        let process = Process::spawn(&self.spec, worker, index, &spawn)
            .map_err(|e| format!("{}: {e}", self.spec.binary.display()));
        let watched = process.and_then(|process| {
            let pid = process.pid();
            self.watch(worker.clone(), spawn, process)
                .map(|()| pid)
                .map_err(|e| format!("cannot watch it: {e}"))
        });
        if watched.is_err() {
            self.live.remove(worker);
        }
        self.save();
        watched
    }

    /// Kills a worker; its end comes through `exits`. `Some` when it is gone already.
    pub(crate) fn fence(&mut self, worker: &WorkerId) -> Option<Exit> {
        match self.live.get(worker).and_then(|live| live.process.as_ref()) {
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
        while self.watches.try_join_next().is_some() {}
    }

    /// Writes down what could not be written before.
    pub(crate) fn retry_saving(&mut self) {
        if self.records.is_stale() {
            self.save();
        }
    }

    /// All that ended workers left running has ended too.
    pub(crate) async fn cleaned_up(&mut self) {
        while self.watches.join_next().await.is_some() {}
    }

    pub(crate) fn signal_all(&self, signal: Signal) {
        for process in self.live.values().filter_map(|live| live.process.as_ref()) {
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

    /// One that cannot be watched is killed.
    fn watch(&mut self, worker: WorkerId, spawn: String, process: Process) -> io::Result<()> {
        let end = process.end().inspect_err(|_| process.signal(Signal::KILL))?;
        let exits = self.exits.clone();
        let watched = worker.clone();
        let started = process.started();
        let traces = Traces { pid: started.pid, start_time: started.start_time, spawn: spawn.clone() };
        self.watches.spawn(async move {
            let exit = end.await;
            // Told first: others wait for it. Fails only when the agent itself has ended.
            let _unheard = exits.send((watched, exit)).await;
            let swept = tokio::task::spawn_blocking(move || traces.kill_all());
            if let Err(e) = swept.await {
                warn!(%e, "what a worker left running was not looked for");
            }
        });
        self.live.insert(worker, Live { spawn, process: Some(process) });
        Ok(())
    }

    fn save(&mut self) {
        let records = self.live.iter().map(|(worker, live)| Record {
            worker: worker.clone(),
            spawn: live.spawn.clone(),
            started: live.process.as_ref().map(Process::started),
        });
        self.records.save(records.collect());
    }
}
