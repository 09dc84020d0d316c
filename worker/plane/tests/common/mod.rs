//! What tests of single groups have in common.

use reknit_plane::{Endpoint, GroupSpec, Ticket};
use std::time::Duration;

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn spec(members: &[Endpoint], rank: usize) -> GroupSpec {
    GroupSpec {
        job: "job".into(),
        epoch: 4,
        name: "world".into(),
        members: members.to_vec(),
        rank,
        ticket: Ticket([4; 32]),
        deadline: PATIENCE,
    }
}
