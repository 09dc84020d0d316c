//! What all simulated agents and workers share: who they are, the clock of their steps, and what they have seen.

use reknit_layout::Layout;
use reknit_proto::{Bytes, v1};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc, watch};
use tonic::transport::{Channel, Uri};

#[derive(Debug)]
pub(super) struct Fleet {
    pub(super) daemon: Uri,
    /// GPUs of a node that has any.
    pub(super) gpus: u32,
    /// The job's samples per step.
    pub(super) global_batch: u64,
    /// The newest step: whoever trains commits it when it changes.
    pub(super) step: watch::Sender<u64>,
    /// Reached by workers' connections, each used by several.
    pub(super) channels: Vec<Channel>,
    /// What was last parsed: all of a group are sent the same.
    layouts: Mutex<BTreeMap<Bytes, Arc<Layout>>>,
    tally: Mutex<Tally>,
    changed: Notify,
}

/// What was seen since the bench last cleared it.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) agents: usize,
    pub(super) reports: u64,
    pub(super) worker_reports: u64,
    pub(super) stops: Vec<Instant>,
    pub(super) prepares: Vec<Instant>,
    pub(super) prepare_bytes: u64,
    pub(super) resumes: Vec<Instant>,
    /// By GPU: how to tell a worker that its plane failed.
    pub(super) planes: BTreeMap<String, mpsc::UnboundedSender<()>>,
    /// The first thing that went wrong here.
    pub(super) problem: Option<String>,
}

impl Fleet {
    pub(super) fn new(daemon: Uri, gpus: u32, global_batch: u64, channels: Vec<Channel>) -> Self {
        Self {
            gpus,
            global_batch,
            step: watch::Sender::new(0),
            channels,
            daemon,
            layouts: Mutex::default(),
            tally: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// # Errors
    /// When it is no layout.
    pub(super) fn layout(&self, packed: Bytes) -> Result<Arc<Layout>, String> {
        /// More groups than any job here has; what is left of older epochs goes.
        const KEPT: usize = 4096;
        let mut layouts = self.layouts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = layouts.get(&packed) {
            return Ok(Arc::clone(known));
        }
        let json = reknit_proto::unpack(&packed).map_err(|error| format!("its layout: {error}"))?;
        let layout: Layout = serde_json::from_slice(&json).map_err(|error| format!("its layout: {error}"))?;
        if layouts.len() >= KEPT {
            layouts.clear();
        }
        let layout = Arc::new(layout);
        layouts.insert(packed, Arc::clone(&layout));
        Ok(layout)
    }

    pub(super) fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note(&self, note: impl FnOnce(&mut Tally)) {
        note(&mut self.tally());
        self.changed.notify_one();
    }

    pub(super) fn fail(&self, problem: String) {
        self.note(|tally| tally.problem = tally.problem.take().or(Some(problem)));
    }

    /// Forgets the times that were seen.
    pub(super) fn clear(&self) {
        let mut tally = self.tally();
        let tally = &mut *tally;
        for times in [&mut tally.stops, &mut tally.prepares, &mut tally.resumes] {
            times.clear();
        }
        tally.prepare_bytes = 0;
    }

    /// Waits until it is so.
    ///
    /// # Errors
    /// What went wrong, or that it took longer than `limit`.
    pub(super) async fn until(
        &self,
        what: &str,
        limit: Duration,
        holds: impl Fn(&Tally) -> bool,
    ) -> Result<(), String> {
        let until = tokio::time::Instant::now() + limit;
        loop {
            let changed = self.changed.notified();
            {
                let tally = self.tally();
                if let Some(problem) = &tally.problem {
                    return Err(problem.clone());
                }
                if holds(&tally) {
                    return Ok(());
                }
            }
            if tokio::time::timeout_at(until, changed).await.is_err() {
                return Err(format!("waited {} s for {what}", limit.as_secs()));
            }
        }
    }
}

pub(super) fn node_name(node: u32) -> String {
    format!("bench-{node:05}")
}

/// As long as a real one's.
pub(super) fn gpu_uuid(node: u32, index: u32) -> String {
    format!("GPU-{node:08x}-0000-4000-8000-{index:012x}")
}

pub(super) fn endpoint(node: u32, index: u32) -> v1::Endpoint {
    v1::Endpoint {
        node: node_name(node),
        unix: format!("reknit-{:016x}", u64::from(node) << 8 | u64::from(index)),
        tcp: format!("10.{}.{}.{}:{}", node >> 16, node >> 8 & 255, node & 255, 40_000 + index),
    }
}
