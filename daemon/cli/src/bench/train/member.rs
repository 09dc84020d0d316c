//! A rank of the tensor-parallel group that trains here.

use reknit_model::TensorParallel;
use reknit_plane::host::HostPlane;
use reknit_plane::{
    Buffer, Element, Endpoint, Group, GroupSpec, Op, Plane, PlaneError, Reduce, Ticket, Work,
};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(60);
/// Every group here lives in one process, which knows it already.
const TICKET: Ticket = Ticket([7; 32]);

pub(super) struct Member {
    group: Box<dyn Group>,
    /// Moves the group's data for as long as it is used.
    _plane: HostPlane,
    begun: Option<Box<dyn Work>>,
}

impl Member {
    pub(super) fn join(plane: HostPlane, members: Vec<Endpoint>, rank: usize) -> Result<Self, PlaneError> {
        let group = plane.join(GroupSpec {
            job: "bench".to_owned(),
            epoch: 1,
            name: "tensor".to_owned(),
            members,
            rank,
            ticket: TICKET,
            deadline: DEADLINE,
        })?;
        Ok(Self { group, _plane: plane, begun: None })
    }

    pub(super) fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The group's sum, or its greatest, of one number.
    pub(super) fn reduce(&mut self, reduce: Reduce, value: f64) -> Result<f64, PlaneError> {
        let mut values = vec![value];
        self.all_reduce(reduce, &mut values)?;
        Ok(values[0])
    }

    fn all_reduce<T: Element>(&mut self, reduce: Reduce, values: &mut Vec<T>) -> Result<(), PlaneError> {
        if self.group.size() > 1 {
            let buffer = T::wrap(std::mem::take(values));
            let work = self.group.submit(Op::AllReduce { reduce, buffer }, DEADLINE);
            *values = numbers(work.wait()?)?;
        }
        Ok(())
    }
}

fn numbers<T: Element>(buffer: Buffer) -> Result<Vec<T>, PlaneError> {
    let detail = || "the sum came back as another type".to_owned();
    T::unwrap(buffer).ok_or_else(|| PlaneError::Io { group: "tensor".to_owned(), detail: detail() })
}

impl TensorParallel<f32> for Member {
    type Error = PlaneError;

    fn all_reduce_sum(&mut self, values: &mut Vec<f32>) -> Result<(), PlaneError> {
        self.all_reduce(Reduce::Sum, values)
    }

    fn all_reduce_max(&mut self, values: &mut Vec<f32>) -> Result<(), PlaneError> {
        self.all_reduce(Reduce::Max, values)
    }

    fn begin_sum(&mut self, values: &mut Vec<f32>) -> Result<(), PlaneError> {
        if self.group.size() > 1 {
            let buffer = Buffer::F32(std::mem::take(values));
            let op = Op::AllReduce { reduce: Reduce::Sum, buffer };
            self.begun = Some(self.group.submit(op, DEADLINE));
        }
        Ok(())
    }

    fn finish_sum(&mut self, values: &mut Vec<f32>) -> Result<(), PlaneError> {
        if let Some(work) = self.begun.take() {
            *values = numbers(work.wait()?)?;
        }
        Ok(())
    }
}
