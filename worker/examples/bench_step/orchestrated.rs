//! A rank with all that the worker does around a step: orders, pace, vote, state for the daemon, reports.

use crate::lineup::{Orders, TIMEOUTS};
use reknit_layout::{Epoch, JobSpec, Place, WorkerKey};
use reknit_plane::Plane;
use reknit_worker::abort::Aborts;
use reknit_worker::messages::{Order, Phase, Report};
use reknit_worker::rank::{Rank, Setting};
use reknit_worker::reshard::CHUNK;
use reknit_worker::session::Outbox;
use reknit_worker::status::Status;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

pub(crate) struct Orchestrated {
    rank: Rank<f32>,
    status: Arc<Status>,
    outbox: Outbox,
    orders: Receiver<Order>,
    /// The session's end of the orders.
    _session: SyncSender<Order>,
}

impl Orchestrated {
    pub(crate) fn join(
        job: &Arc<JobSpec>,
        orders: &Orders,
        (_, worker, plane): &(Place, WorkerKey, Arc<dyn Plane>),
    ) -> Self {
        let status = Arc::<Status>::default();
        let setting = Setting {
            worker: worker.clone(),
            job: Arc::clone(job),
            timeouts: TIMEOUTS,
            plane: Arc::clone(plane),
            aborts: Arc::new(Aborts::new(Arc::clone(plane))),
            pace: Arc::clone(status.pace()),
            outbox: Arc::default(),
            threads: reknit_model::Team::alone(),
            chunk: CHUNK,
        };
        let mut rank = Rank::new(setting).expect("the text is there");
        let epoch = Epoch(3);
        rank.prepare(&orders.of(worker, epoch)).expect("all are there");
        assert!(rank.resume(epoch));
        status.set_state(rank.state(Phase::Training));
        let (session, orders) = sync_channel(64);
        Self { rank, status, outbox: Outbox::default(), orders, _session: session }
    }

    pub(crate) fn status(&self) -> Arc<Status> {
        Arc::clone(&self.status)
    }

    /// One turn of the training thread.
    pub(crate) fn step(&mut self) -> Duration {
        let begun = Instant::now();
        assert!(self.orders.try_recv().is_err(), "nobody gives orders here");
        let pause = self.status.pause_asked(self.rank.epoch());
        let done = self.rank.train_step(&|| pause).expect("the step succeeds");
        self.status.set_committed(done.committed.step, done.committed.vote, done.computed);
        self.outbox.push(Report::Committed(done.committed));
        begun.elapsed()
    }
}
