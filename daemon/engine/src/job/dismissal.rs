//! A worker is told to leave, or killed.

use super::Job;
use super::worker::Fate;
use crate::Command;
use crate::state::Ctx;
use reknit_layout::WorkerKey;

impl Job {
    /// Kills the worker through its agent; `WorkerExited` or the fence deadline ends it.
    pub(crate) fn fence(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey) {
        let deadline = ctx.now.after(ctx.timeouts.fence());
        let Some(mut worker) = self.workers.get_mut(key) else {
            return;
        };
        match worker.fate {
            Fate::Fencing { .. } => return,
            Fate::Alive | Fate::Stopping { .. } => worker.fate = Fate::Fencing { deadline },
        }
        ctx.out.push(Command::Fence {
            node: worker.node.clone(),
            job: self.record.name.clone(),
            worker: key.clone(),
            epoch: self.record.last_epoch,
        });
    }

    /// Asks the worker to leave; one that cannot hear it is killed.
    pub(crate) fn stop_worker(&mut self, ctx: &mut Ctx<'_>, key: &WorkerKey, reason: &str) {
        let deadline = ctx.now.after(ctx.timeouts.stop());
        let Some(mut worker) = self.workers.get_mut(key) else {
            return;
        };
        match worker.fate {
            Fate::Fencing { .. } | Fate::Stopping { .. } => {}
            Fate::Alive if worker.session => {
                worker.fate = Fate::Stopping { deadline };
                ctx.out.push(Command::Stop {
                    job: self.record.name.clone(),
                    worker: key.clone(),
                    epoch: self.record.last_epoch,
                    reason: reason.to_owned(),
                });
            }
            Fate::Alive => {
                drop(worker);
                self.fence(ctx, key);
            }
        }
    }
}
