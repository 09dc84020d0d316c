//! Between the wire and the engine. Nothing else knows both.

mod limits;
mod operators;
mod orders;
mod reports;

pub use operators::*;
pub use orders::*;
use reknit_engine::JobName;
use reknit_layout::WorkerKey;
use reknit_proto::v1;
pub use reports::*;

fn key(job: &JobName, worker: &WorkerKey) -> v1::WorkerKey {
    v1::WorkerKey { job: job.0.clone(), gpu: worker.gpu.0.clone(), incarnation: worker.incarnation.0 }
}
