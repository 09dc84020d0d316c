//! A job's layout at one epoch.

use crate::{Axis, Epoch, Holding, JobSpec, Place, ReplicaId, Slot, StageId, Step, Units, WorkerKey};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Who holds what, who takes how many samples, and where gradients meet, at one epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Layout {
    pub epoch: Epoch,
    /// One per (replica, stage), ordered by replica, then stage.
    pub groups: Vec<Group>,
    /// Samples of each replica per step; 0 for a replica that does not train.
    pub batch: Vec<u32>,
    /// One per stage.
    pub sync: Vec<SyncColumns>,
}

/// One (replica, stage): the slots that split its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub replica: ReplicaId,
    pub stage: StageId,
    /// One entry per nominal slot, in slot order; `None` where the slot is inactive.
    pub slots: Vec<Option<Member>>,
    /// Shared between groups that are split alike.
    pub partitions: Arc<Partitions>,
}

/// Per axis one set per nominal slot, empty where inactive. Together they cover every unit once (COVER); a group that does
/// not train has no axis.
pub type Partitions = BTreeMap<Axis, Vec<Units>>;

/// The worker that fills an active slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    pub worker: WorkerKey,
}

/// How the gradients of one stage meet over the replicas.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncColumns {
    pub stage: StageId,
    /// The smallest degree among training replicas.
    pub columns: u32,
    /// `hosts[replica][column]`: the slot that hosts the column; empty for a replica that does not train.
    /// A slot hosts at most one column.
    pub hosts: Vec<Vec<Slot>>,
    /// Per axis the units of each column. What a slot owns outside its own column goes to the column's host
    /// before the sum over replicas and comes back after it.
    pub axes: Vec<SyncAxis>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncAxis {
    pub axis: Axis,
    pub columns: Vec<Units>,
}

impl Layout {
    /// Sees that everything in it is as long as what it belongs to. Whoever has it from outside asks this once, and may then
    /// look up whatever it names.
    ///
    /// # Errors
    /// Says what is missing.
    pub fn check_shape(&self) -> Result<(), String> {
        let samples = self.batch.iter().try_fold(0_u32, |sum, share| sum.checked_add(*share));
        samples.ok_or("a step has more samples than can be counted")?;
        for group in &self.groups {
            for (axis, sets) in group.partitions.iter() {
                if sets.len() != group.slots.len() {
                    let (sets, slots) = (sets.len(), group.slots.len());
                    return Err(format!("{axis} is shared out to {sets} slots of {slots}"));
                }
            }
        }
        self.sync.iter().try_for_each(|sync| self.check_columns(sync))
    }

    fn check_columns(&self, sync: &SyncColumns) -> Result<(), String> {
        let wanted = sync.columns as usize;
        for SyncAxis { axis, columns } in &sync.axes {
            if columns.len() != wanted {
                return Err(format!("{axis} has {} columns of {wanted}", columns.len()));
            }
        }
        for (replica, hosts) in (0..).map(ReplicaId).zip(&sync.hosts).filter(|(_, hosts)| !hosts.is_empty()) {
            if hosts.len() > wanted {
                return Err(format!("replica {replica} hosts {} columns of {wanted}", hosts.len()));
            }
            let Some(group) = self.group(replica, sync.stage) else { continue };
            let mut axes = sync.axes.iter().map(|axis| axis.axis);
            if let Some(axis) = axes.find(|axis| !group.partitions.contains_key(axis)) {
                return Err(format!("replica {replica} trains and has no {axis}"));
            }
        }
        Ok(())
    }

    /// Every active place with its worker, in the order of places.
    pub fn members(&self) -> impl Iterator<Item = (Place, &Member)> {
        self.groups.iter().flat_map(Group::members)
    }

    /// What everyone holds once the layout is committed at `step`. Those that own the same share it.
    pub fn holdings(&self, step: Step) -> impl Iterator<Item = (Place, Holding)> {
        let mut shared: HashMap<(*const Partitions, Slot), Arc<_>> = HashMap::new();
        self.groups.iter().flat_map(move |group| {
            let held = group.active().into_iter().map(|slot| {
                let key = (Arc::as_ptr(&group.partitions), slot);
                let units = shared.entry(key).or_insert_with(|| Arc::new(group.owned(slot)));
                (group.place(slot), Holding { step, units: Arc::clone(units) })
            });
            held.collect::<Vec<_>>()
        })
    }

    /// What of it concerns the members of `group`: that group, its stage's columns with the hosts in its replica and in
    /// any other only the first, and the batch.
    pub fn cut_to(&self, group: &Group) -> Self {
        let sync = self.sync.iter().filter(|sync| sync.stage == group.stage);
        let hosts = |(replica, hosts): (u32, &Vec<Slot>)| match ReplicaId(replica) == group.replica {
            true => hosts.clone(),
            false => hosts.first().copied().into_iter().collect(),
        };
        let sync = sync.map(|sync| SyncColumns {
            stage: sync.stage,
            columns: sync.columns,
            hosts: (0..).zip(&sync.hosts).map(hosts).collect(),
            axes: sync.axes.clone(),
        });
        Self {
            epoch: self.epoch,
            groups: vec![group.clone()],
            batch: self.batch.clone(),
            sync: sync.collect(),
        }
    }

    pub fn group(&self, replica: ReplicaId, stage: StageId) -> Option<&Group> {
        self.groups.iter().find(|group| (group.replica, group.stage) == (replica, stage))
    }

    /// Where `worker` stands, if it has a place.
    pub fn place_of(&self, worker: &WorkerKey) -> Option<Place> {
        self.members().find(|(_, member)| member.worker == *worker).map(|(place, _)| place)
    }

    /// The degree of every group, in the order of groups.
    pub fn degrees(&self) -> Vec<u32> {
        self.groups.iter().map(Group::degree).collect()
    }

    /// The samples of a step that `replica` takes, as an offset range into the step's global batch.
    pub fn samples_of(&self, replica: ReplicaId) -> std::ops::Range<u32> {
        let index = replica.0 as usize;
        let start: u32 = self.batch.iter().take(index).sum();
        start..start + self.batch.get(index).copied().unwrap_or(0)
    }

    /// Bytes of gradients that are handed to the hosts of their columns in one step, over all replicas; as many come back.
    pub fn handover_bytes(&self, job: &JobSpec) -> u64 {
        self.handovers(job).flatten().map(|(handed, _)| handed).sum()
    }

    /// Bytes of gradients that the busiest GPU sends for the same in one step, and receives: it hands over some, and
    /// sends back those that it hosts for others.
    pub fn busiest_handover_bytes(&self, job: &JobSpec) -> u64 {
        self.handovers(job).flatten().map(|(handed, hosted)| handed + hosted).max().unwrap_or(0)
    }

    /// Of each group and slot: bytes of gradients that it hands to hosts, and those that it hosts for others.
    fn handovers<'a>(&'a self, job: &'a JobSpec) -> impl Iterator<Item = Vec<(u64, u64)>> + 'a {
        self.groups.iter().filter_map(|group| {
            let sync = self.sync.iter().find(|sync| sync.stage == group.stage)?;
            let hosts = sync.hosts.get(group.replica.0 as usize)?;
            let mut slots = vec![(0, 0); group.slots.len()];
            for axis in &sync.axes {
                let unit = job.unit_params(group.stage, axis.axis.family) * job.model.dtype.gradient_bytes();
                let sets = group.partitions.get(&axis.axis).into_iter().flatten();
                for ((slot, owned), (handed, hosted)) in sets.enumerate().zip(&mut slots) {
                    let column = hosts.iter().position(|host| host.0 as usize == slot);
                    let column = column.and_then(|column| axis.columns.get(column));
                    let own = column.map_or(0, |column| owned.intersection(column).len());
                    *handed += u64::from(owned.len() - own) * unit;
                    *hosted += u64::from(column.map_or(0, Units::len) - own) * unit;
                }
            }
            Some(slots)
        })
    }
}

impl Group {
    pub fn place(&self, slot: Slot) -> Place {
        Place { replica: self.replica, stage: self.stage, slot }
    }

    /// Every active place with its worker, in the order of slots.
    pub fn members(&self) -> impl Iterator<Item = (Place, &Member)> {
        let slots = (0..).map(Slot).zip(&self.slots);
        slots.filter_map(|(slot, member)| member.as_ref().map(|member| (self.place(slot), member)))
    }

    /// How many slots are active.
    pub fn degree(&self) -> u32 {
        self.slots.iter().flatten().count() as u32
    }

    /// The active slots in order: the rank order of the group's communicator.
    pub fn active(&self) -> Vec<Slot> {
        let slots = self.slots.iter().enumerate();
        slots.filter(|(_, member)| member.is_some()).map(|(slot, _)| Slot(slot as u32)).collect()
    }

    /// What `slot` owns of every axis.
    pub fn owned(&self, slot: Slot) -> BTreeMap<Axis, Units> {
        let of = |sets: &Vec<Units>| sets.get(slot.0 as usize).cloned().unwrap_or_default();
        self.partitions.iter().map(|(axis, sets)| (*axis, of(sets))).collect()
    }

    /// What `slot` owns at least once `lost` is gone and the others share evenly what it owned: a guess, for who wants to be
    /// ready before there is a plan. Which units they are is not told by it.
    pub fn owned_without(&self, lost: Slot, slot: Slot) -> BTreeMap<Axis, Units> {
        let left = self.degree().saturating_sub(1).max(1);
        let of = |sets: &[Units]| {
            let [own, theirs] =
                [slot, lost].map(|slot| sets.get(slot.0 as usize).cloned().unwrap_or_default());
            let share = sets.iter().map(Units::len).sum::<u32>() / left;
            let more = share.saturating_sub(own.len()) as usize;
            own.union(&theirs.iter().take(more).collect())
        };
        self.partitions.iter().map(|(axis, sets)| (*axis, of(sets))).collect()
    }
}
