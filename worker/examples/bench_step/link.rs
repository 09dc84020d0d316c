//! A data plane whose sums over replicas take as long as they would on a link of a given rate. The link takes no
//! processor, like a network card that reads and writes memory by itself.

use reknit_plane::{Aborter, Buffer, Endpoint, Group, GroupSpec, Lent, Op, Plane, PlaneError, Work};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) struct LinkPlane {
    pub(crate) inner: Arc<dyn Plane>,
    pub(crate) bytes_per_second: f64,
}

impl Plane for LinkPlane {
    fn endpoint(&self) -> Endpoint {
        self.inner.endpoint()
    }

    fn join(&self, spec: GroupSpec) -> Result<Box<dyn Group>, PlaneError> {
        let between_replicas = spec.name.starts_with("column");
        let group = self.inner.join(spec)?;
        if !between_replicas {
            return Ok(group);
        }
        Ok(Box::new(LinkGroup { group, bytes_per_second: self.bytes_per_second, free: Instant::now() }))
    }

    fn abort_joins(&self, epoch: u64) {
        self.inner.abort_joins(epoch);
    }
}

struct LinkGroup {
    group: Box<dyn Group>,
    bytes_per_second: f64,
    /// When the link has carried everything so far.
    free: Instant,
}

impl Group for LinkGroup {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn submit(&mut self, op: Op, deadline: Duration) -> Box<dyn Work> {
        let bytes = match &op {
            Op::AllReduce { buffer, .. } => buffer.as_bytes().len(),
            _ => 0,
        };
        // What a rank sends in a ring: each part once to be summed and once as a sum, but for its own.
        let ranks = self.size() as f64;
        let sent = 2.0 * (ranks - 1.0) / ranks * bytes as f64;
        self.free = self.free.max(Instant::now()) + Duration::from_secs_f64(sent / self.bytes_per_second);
        Box::new(LinkWork { work: self.group.submit(op, deadline), carried: self.free })
    }

    fn exchange(&mut self, memory: &mut dyn Lent, deadline: Duration) -> Result<(), PlaneError> {
        self.group.exchange(memory, deadline)
    }

    fn health(&self) -> Option<PlaneError> {
        self.group.health()
    }

    fn aborter(&self) -> Arc<dyn Aborter> {
        self.group.aborter()
    }

    fn retire(self: Box<Self>) {
        self.group.retire();
    }
}

struct LinkWork {
    work: Box<dyn Work>,
    carried: Instant,
}

impl Work for LinkWork {
    fn wait(self: Box<Self>) -> Result<Buffer, PlaneError> {
        let result = self.work.wait();
        std::thread::sleep(self.carried.saturating_duration_since(Instant::now()));
        result
    }

    fn is_done(&self) -> bool {
        self.work.is_done() && Instant::now() >= self.carried
    }
}
