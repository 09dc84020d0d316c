//! What every worker is told to prepare: its part of a plan, of which nearly all is encoded once for many.

use crate::rpc::convert;
use reknit_engine::{JobName, Participant};
use reknit_layout::{Circle, Circles, Plan, Transfer, WorkerKey};
use reknit_proto::Bytes;
use std::sync::Arc;

/// The parts of one plan.
#[derive(Debug)]
pub(super) struct Prepares {
    plan: Arc<Plan>,
    circles: Circles,
    /// One per group of the layout.
    layouts: Vec<Bytes>,
    tensor: Vec<Bytes>,
    columns: Vec<Bytes>,
    speakers: Bytes,
    movers: Vec<Bytes>,
}

impl Prepares {
    /// `participants`: everyone in the plan, in the order of workers.
    pub(super) fn new(
        job: &JobName,
        plan: &Arc<Plan>,
        participants: &[Participant],
    ) -> Result<Self, serde_json::Error> {
        let circles = Circles::new(plan);
        let layout = &plan.layout;
        let groups = layout.groups.iter().map(|group| json(&layout.cut_to(group)).map(|json| packed(&json)));
        let peers = |circle: &Circle| {
            let found = circle.iter().filter_map(|worker| {
                let at = participants.binary_search_by(|participant| participant.worker.cmp(worker));
                participants.get(at.ok()?)
            });
            packed(&convert::peers(job, found))
        };
        Ok(Self {
            plan: plan.clone(),
            layouts: groups.collect::<Result<_, _>>()?,
            tensor: circles.tensor.iter().map(peers).collect(),
            columns: circles.columns.iter().map(peers).collect(),
            speakers: peers(&circles.speakers),
            movers: circles.movers.iter().map(peers).collect(),
            circles,
        })
    }

    pub(super) fn are_of(&self, plan: &Arc<Plan>) -> bool {
        Arc::ptr_eq(&self.plan, plan)
    }

    pub(super) fn of(&self, worker: &WorkerKey) -> Result<convert::PlanPart, serde_json::Error> {
        let Some(part) = self.circles.part(worker) else {
            return Ok(convert::PlanPart::default());
        };
        let among = |all: &[Bytes], number: Option<usize>| {
            number.and_then(|number| all.get(number)).cloned().unwrap_or_default()
        };
        let transfers: Vec<(usize, &Transfer)> = part
            .transfers
            .iter()
            .filter_map(|number| Some((*number, self.plan.transfers.get(*number)?)))
            .collect();
        Ok(convert::PlanPart {
            layout: among(&self.layouts, part.tensor),
            fresh: self.plan.fresh,
            transfers: if transfers.is_empty() { Bytes::new() } else { json(&transfers)? },
            tensor: among(&self.tensor, part.tensor),
            column: among(&self.columns, part.column),
            speakers: if part.speaks { self.speakers.clone() } else { Bytes::new() },
            movers: among(&self.movers, part.movers),
        })
    }
}

fn packed(bytes: &[u8]) -> Bytes {
    reknit_proto::pack(bytes).into()
}

fn json<T: serde::Serialize>(value: &T) -> Result<Bytes, serde_json::Error> {
    serde_json::to_vec(value).map(Bytes::from)
}
