//! Checkpoints while training goes on: the training thread only copies, a thread of its own writes.

use crate::messages::Report;
use crate::session::Outbox;
use reknit_checkpoint::{CheckpointError, Snapshot, Store, job_sha256};
use reknit_layout::{JobSpec, Step, WorkerKey};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// How often a long write tells how far it is.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// Writes this rank's part of the job's checkpoints. Dropped, it ends what it has in hand first.
#[derive(Debug)]
pub struct Saver {
    every: u64,
    last: Step,
    /// The memory of the last copy, when nothing is being written.
    spare: Option<Vec<u8>>,
    returned: Receiver<Vec<u8>>,
    /// How many have been handed over and are not written.
    in_hand: usize,
    /// See [`Saver::is_owed`].
    owed: bool,
    /// `None` only while it is dropped.
    snapshots: Option<SyncSender<Snapshot>>,
    thread: Option<JoinHandle<()>>,
    outbox: Arc<Outbox>,
}

/// What the writing thread works with.
struct Writer {
    store: Store,
    keep: usize,
    last: Step,
    name: String,
    job_sha256: String,
    outbox: Arc<Outbox>,
    returned: Sender<Vec<u8>>,
}

impl Saver {
    /// `None`: the job has no folder for checkpoints. Tells which are there.
    pub fn start(job: &JobSpec, worker: &WorkerKey, outbox: &Arc<Outbox>) -> Option<Self> {
        let store = Store::new(job.checkpoint.folder(&job.name)?);
        let job_sha256 = job_sha256(job);
        tell_known(&store, &job_sha256, outbox);
        let (snapshots, orders) = sync_channel(1);
        let (give_back, returned) = channel();
        let writer = Writer {
            store,
            keep: job.checkpoint.keep as usize,
            last: Step(job.run.steps),
            name: writer_name(worker),
            job_sha256,
            outbox: Arc::clone(outbox),
            returned: give_back,
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_owned());
        let thread = thread.spawn(move || orders.iter().for_each(|snapshot| writer.write(snapshot)));
        let thread = thread.inspect_err(|error| warn!(%error, "no thread to write checkpoints with"));
        Some(Self {
            every: job.checkpoint.every_steps,
            last: Step(job.run.steps),
            spare: Some(Vec::new()),
            returned,
            in_hand: 0,
            owed: false,
            snapshots: Some(snapshots),
            thread: thread.ok(),
            outbox: Arc::clone(outbox),
        })
    }

    /// Whether there shall be a checkpoint of `step`: every so many steps, and of the last one.
    pub fn is_due(&self, step: Step) -> bool {
        self.every > 0 && (step.0.is_multiple_of(self.every) || step == self.last)
    }

    /// Whether the one that was due last may never be complete, so that the next step shall have one.
    pub fn is_owed(&self) -> bool {
        self.owed
    }

    /// This rank did not save `step`, and others may have.
    pub fn missed(&mut self, step: Step) {
        self.owed |= self.is_due(step);
    }

    /// The epoch was broken off: whoever is gone may have been writing as long as this rank is.
    pub fn broken_off(&mut self) {
        self.owed |= !self.is_done_within(Duration::ZERO);
    }

    /// The job goes on from a checkpoint.
    pub fn gone_back(&mut self) {
        self.owed = false;
    }

    /// Whether everything that was handed over is written, or never will be. Waits for it, but no longer than this.
    pub fn is_done_within(&mut self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while self.in_hand > 0 {
            match self.returned.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(memory) => {
                    self.in_hand -= 1;
                    self.spare = Some(memory);
                }
                Err(RecvTimeoutError::Timeout) => return false,
                // The thread has ended: each one that it is handed is told of.
                Err(RecvTimeoutError::Disconnected) => self.in_hand = 0,
            }
        }
        true
    }

    /// Whether nothing is being written. A rank that is not ready keeps all from making this checkpoint: without its part
    /// it would never be complete. The last step's waits for its turn.
    pub fn is_ready(&mut self, step: Step) -> bool {
        self.is_done_within(Duration::ZERO) || step == self.last
    }

    /// Memory to copy into, the same as before once it has been written.
    pub fn memory(&mut self) -> Vec<u8> {
        let mut memory = self.spare.take().unwrap_or_default();
        memory.clear();
        memory
    }

    pub fn write(&mut self, snapshot: Snapshot) {
        let Some(snapshots) = &self.snapshots else { return };
        self.owed = false;
        let (reason, snapshot) = match snapshots.try_send(snapshot) {
            Ok(()) => {
                self.in_hand += 1;
                return;
            }
            Err(TrySendError::Full(snapshot)) => ("the ones before are still being written", snapshot),
            Err(TrySendError::Disconnected(snapshot)) => {
                ("the thread that writes checkpoints has ended: see this worker's log for why", snapshot)
            }
        };
        let step = snapshot.heading.step;
        warn!(%step, reason, "no checkpoint; training goes on");
        self.outbox.push(Report::NoCheckpoint { step, reason: reason.to_owned() });
        self.spare = Some(snapshot.state);
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        self.snapshots = None;
        if let Some(thread) = self.thread.take() {
            let _its_panic_was_told = thread.join();
        }
    }
}

impl Writer {
    fn write(&self, mut snapshot: Snapshot) {
        let (id, begun) = (snapshot.heading.id(), Instant::now());
        // All ranks were ready for this one: nobody writes an earlier one. Only the last step's is begun without that.
        if id.step != self.last {
            self.clear(id.step);
        }
        let mut told = begun;
        let result = self.store.write(&snapshot, &self.name, |done, total| {
            if told.elapsed() >= TELL_EVERY && done < total {
                told = Instant::now();
                info!(step = %id.step, done, total, "writing a checkpoint");
            }
        });
        let took_ms = begun.elapsed().as_millis() as u64;
        match result {
            Ok(written) => {
                let (bytes, linked) = (written.bytes, written.linked);
                info!(step = %id.step, bytes, linked, took_ms, complete = written.complete, "checkpoint written");
                if written.complete {
                    self.completed(id.step);
                }
            }
            Err(error) => {
                warn!(step = %id.step, %error, "no checkpoint; training goes on");
                self.outbox.push(Report::NoCheckpoint { step: id.step, reason: error.to_string() });
            }
        }
        // Nobody takes it any more when the rank ends.
        let _ = self.returned.send(std::mem::take(&mut snapshot.state));
    }

    /// Whoever has written a part of `step` has ended all earlier ones, and all have written theirs.
    fn completed(&self, step: Step) {
        self.clear(step);
        match self.store.prune(&self.job_sha256, self.keep) {
            Ok(0) => {}
            Ok(removed) => info!(removed, "older checkpoints removed"),
            Err(error) => warn!(%error, "older checkpoints cannot be removed"),
        }
        tell_known(&self.store, &self.job_sha256, &self.outbox);
    }

    fn clear(&self, step: Step) {
        match self.store.clear(&self.job_sha256, step) {
            Ok(0) => {}
            Ok(removed) => info!(removed, "checkpoints removed that were never complete"),
            Err(error) => {
                warn!(%error, "what is left of checkpoints that were never complete cannot be removed")
            }
        }
    }
}

/// Only those of this very job: another one of the same name may have left some.
fn tell_known(store: &Store, job_sha256: &str, outbox: &Outbox) {
    let found = match store.list() {
        Ok(found) => found,
        Err(error) => return warn!(%error, "the checkpoints that are there are not known"),
    };
    let own: Vec<_> =
        found.into_iter().filter(|found| found.complete && found.job_sha256 == job_sha256).collect();
    if let Some(written_us) = own.first().map(|newest| newest.written_us) {
        outbox.push(Report::Checkpoints { ids: own.into_iter().map(|found| found.id).collect(), written_us });
    }
}

/// Nobody else is called so, and a folder may.
fn writer_name(worker: &WorkerKey) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let gpu: String = worker.gpu.0.chars().map(plain).collect();
    format!("{gpu}-{}", worker.incarnation)
}

/// Why this rank could not take its part out of a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("checkpoint: {folder} is of step {found}, and step {wanted} is to be resumed from")]
    OtherStep { folder: String, found: Step, wanted: Step },
}
