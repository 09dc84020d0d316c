//! Where gradients meet over the replicas, as one rank sees it: a pure reading of the layout's sync columns.

use reknit_layout::{Axis, Layout, Place, ReplicaId, Slot, SyncColumns, Units};
use std::collections::{BTreeMap, BTreeSet};

/// Units of several axes, in the order in which their values travel.
pub type Pieces = Vec<(Axis, Units)>;

/// One rank's part in the sum over replicas. Ranks are those of its tensor-parallel group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyncPlan {
    /// How many replicas train.
    pub replicas: usize,
    /// The first replica that trains.
    pub first_replica: ReplicaId,
    /// How many columns there are.
    pub columns: usize,
    /// What this rank owns.
    pub owned: BTreeMap<Axis, Units>,
    /// Where somebody in this group hands units over: all of it takes part in that.
    pub crossing: BTreeSet<Axis>,
    /// What this rank hands to each rank, for that rank's column.
    pub give: Vec<Pieces>,
    /// What each rank hands to this one, for this one's column.
    pub take: Vec<Pieces>,
    /// The column that this rank hosts.
    pub column: Option<Column>,
    /// The rank whose host of column 0 sums the replicated gradients and passes them on in its group.
    pub replicated_root: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    pub index: usize,
    /// Every unit of the column.
    pub pieces: Pieces,
}

impl SyncPlan {
    /// `None` when `place` does not train under `layout`.
    pub fn new(layout: &Layout, place: Place) -> Option<Self> {
        let group = layout.group(place.replica, place.stage)?;
        let sync = layout.sync.iter().find(|sync| sync.stage == place.stage)?;
        let hosts = sync.hosts.get(place.replica.0 as usize)?;
        let active = group.active();
        if !active.contains(&place.slot) {
            return None;
        }
        let column_of = |slot: Slot| hosts.iter().position(|host| *host == slot);

        let owned_in_column_of = |owner: Slot, host: Slot| -> Pieces {
            let Some(column) = column_of(host).filter(|_| owner != host) else { return Vec::new() };
            let pieces = sync.axes.iter().map(|axis| {
                let owned = &group.partitions[&axis.axis][owner.0 as usize];
                (axis.axis, owned.intersection(&axis.columns[column]))
            });
            pieces.filter(|(_, units)| !units.is_empty()).collect()
        };
        let pairs = active.iter().flat_map(|owner| active.iter().map(move |host| (*owner, *host)));
        let crossing = pairs.flat_map(|(owner, host)| owned_in_column_of(owner, host));

        let replicas = sync.hosts.iter().filter(|hosts| !hosts.is_empty()).count();
        Some(Self {
            replicas,
            first_replica: ReplicaId(sync.hosts.iter().position(|hosts| !hosts.is_empty())? as u32),
            columns: sync.columns as usize,
            owned: group.owned(place.slot),
            crossing: crossing.map(|(axis, _)| axis).filter(|_| replicas > 1).collect(),
            give: active.iter().map(|host| owned_in_column_of(place.slot, *host)).collect(),
            take: active.iter().map(|owner| owned_in_column_of(*owner, place.slot)).collect(),
            column: column_of(place.slot).map(|index| Column::new(sync, index)),
            replicated_root: active.iter().position(|slot| hosts.first() == Some(slot))?,
        })
    }

    /// The sum is over more than one replica.
    pub fn is_needed(&self) -> bool {
        self.replicas > 1
    }
}

impl Column {
    fn new(sync: &SyncColumns, index: usize) -> Self {
        Self {
            index,
            pieces: sync.axes.iter().map(|axis| (axis.axis, axis.columns[index].clone())).collect(),
        }
    }
}
