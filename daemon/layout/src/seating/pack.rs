//! Packing of reduced groups into few replicas.
//!
//! The groups of one stage hold the same in every replica, so two of them may exchange their replicas without a byte that
//! moves. A replica is as slow as its slowest stage: the best that exchanges can reach is that the i-th most reduced
//! groups of all stages share a replica. Then as few replicas are reduced as the stage with most reduced groups has of
//! them, and no other packing has a less reduced i-th replica, for any i.

use super::reduce::by_group;
use crate::{JobSpec, Place, ReplicaId, Slot, StageId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// The groups of one stage change their replicas; every slot keeps its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Exchange {
    pub(super) stage: StageId,
    pub(super) replicas: [ReplicaId; 2],
}

impl Exchange {
    /// Brings places of the two groups to where their GPUs are afterwards.
    pub(super) fn carry(&self, places: &mut BTreeSet<Place>) {
        let [a, b] = self.replicas;
        let group = |replica| {
            let place = |slot| Place { replica, stage: self.stage, slot: Slot(slot) };
            places.range(place(0)..=place(u32::MAX)).copied().collect::<Vec<_>>()
        };
        let (of_a, of_b) = (group(a), group(b));
        for place in of_a.iter().chain(&of_b) {
            places.remove(place);
        }
        places.extend(of_a.into_iter().map(|place| Place { replica: b, ..place }));
        places.extend(of_b.into_iter().map(|place| Place { replica: a, ..place }));
    }
}

/// Per stage how much each reduced group is reduced: more is worse, and none is 0.
type Reduced = BTreeMap<StageId, BTreeMap<ReplicaId, u32>>;

/// How many slots of each group do not train. A group with fewer than `min_tensor` left stops its replica, however many they are.
pub(super) fn reduced(job: &JobSpec, inactive: &BTreeSet<Place>) -> Reduced {
    let mut reduced = Reduced::new();
    let stops = job.parallel.tensor - job.parallel.min_tensor + 1;
    for ((replica, stage), count) in by_group(inactive) {
        reduced.entry(stage).or_default().insert(replica, count.min(stops));
    }
    reduced
}

/// Exchanges after which the groups are packed; none when they are. When all groups are reduced alike, no fewer exchanges
/// would do.
///
/// The i-th replica may be reduced as much as the i-th most reduced group of any stage. From the most reduced on, each
/// reduction is given to the replica with most groups that need it over the next lower one, then with most groups that it
/// is enough for: these stay. Then the groups that need it elsewhere come there, in exchange for the least reduced.
pub(super) fn exchanges(reduced: &Reduced) -> Vec<Exchange> {
    let mut reduced = reduced.clone();
    let mut exchanges = Vec::new();
    let replicas: BTreeSet<ReplicaId> = reduced.values().flat_map(BTreeMap::keys).copied().collect();
    // How much each replica that was given a reduction may be reduced.
    let mut allowed: BTreeMap<ReplicaId, u32> = BTreeMap::new();
    let levels = levels(&reduced);
    for same in levels.chunk_by(|a, b| a == b) {
        let level = same[0];
        let needed = levels.iter().find(|other| **other < level).map_or(1, |next| next + 1)..=level;
        let free = replicas.iter().filter(|replica| !allowed.contains_key(*replica));
        let mut candidates: Vec<_> = free
            .map(|replica| {
                let groups = || reduced.values().filter_map(|groups| groups.get(replica));
                let need = groups().filter(|reduction| needed.contains(*reduction)).count();
                let stay = groups().filter(|reduction| **reduction <= level).count();
                (Reverse((need, stay)), *replica)
            })
            .collect();
        candidates.sort_unstable();
        allowed.extend(candidates.into_iter().take(same.len()).map(|(_, replica)| (replica, level)));
        for (stage, groups) in &mut reduced {
            while let Some(replicas) = misplaced(groups, &allowed, *needed.start()) {
                exchanges.push(Exchange { stage: *stage, replicas });
                let [from, to] = replicas;
                let (moved, other) = (groups.remove(&from), groups.remove(&to));
                groups.extend(moved.map(|reduction| (to, reduction)));
                groups.extend(other.map(|reduction| (from, reduction)));
            }
        }
    }
    exchanges
}

/// The i-th entry is how much the i-th most reduced group of any stage is reduced.
fn levels(reduced: &Reduced) -> Vec<u32> {
    let mut levels: Vec<u32> = Vec::new();
    for groups in reduced.values() {
        let mut sorted: Vec<u32> = groups.values().copied().collect();
        sorted.sort_unstable_by_key(|reduction| Reverse(*reduction));
        levels.resize(levels.len().max(sorted.len()), 0);
        for (level, reduction) in levels.iter_mut().zip(sorted) {
            *level = reduction.max(*level);
        }
    }
    levels
}

/// The most reduced group, reduced by `least` or more, whose replica may not be reduced so much, and the replica with the
/// least reduced group among those that may, the least allowed of them.
fn misplaced(
    groups: &BTreeMap<ReplicaId, u32>,
    allowed: &BTreeMap<ReplicaId, u32>,
    least: u32,
) -> Option<[ReplicaId; 2]> {
    let may = |replica: &ReplicaId| allowed.get(replica).copied().unwrap_or(0);
    let over =
        groups.iter().filter(|(replica, reduction)| **reduction >= least && **reduction > may(replica));
    let (from, reduction) = over.max_by_key(|(replica, reduction)| (**reduction, Reverse(**replica)))?;
    let there = |replica: &ReplicaId| groups.get(replica).copied().unwrap_or(0);
    let fitting = allowed.iter().filter(|(replica, most)| *most >= reduction && there(replica) < *reduction);
    let (to, _) = fitting.min_by_key(|(replica, most)| (there(replica), **most, **replica))?;
    Some([*from, *to])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `stages[stage][replica]`: how much the group is reduced.
    type Stages = Vec<Vec<u32>>;

    fn packed(mut stages: Stages) -> (Stages, usize) {
        let map = |groups: &Vec<u32>| {
            let reduced = (0..).map(ReplicaId).zip(groups.iter().copied());
            reduced.filter(|(_, reduction)| *reduction > 0).collect::<BTreeMap<_, _>>()
        };
        let reduced = (0..).map(StageId).zip(stages.iter().map(map)).collect();
        let exchanges = exchanges(&reduced);
        for Exchange { stage, replicas: [a, b] } in &exchanges {
            stages[stage.0 as usize].swap(a.0 as usize, b.0 as usize);
        }
        (stages, exchanges.len())
    }

    /// How much each replica's slowest stage is reduced, the most reduced first.
    fn pace(stages: &Stages) -> Vec<u32> {
        let worst = |replica| stages.iter().map(|groups| groups[replica]).max().unwrap_or(0);
        let mut pace: Vec<u32> = (0..stages[0].len()).map(worst).collect();
        pace.sort_unstable_by_key(|worst| Reverse(*worst));
        pace
    }

    /// By trying all: every state that so many exchanges or fewer reach, level by level.
    fn reachable(stages: &Stages, exchanges: usize) -> BTreeSet<Stages> {
        let mut seen = BTreeSet::from([stages.clone()]);
        let mut last = seen.clone();
        for _ in 0..exchanges {
            let mut next = BTreeSet::new();
            for state in &last {
                for stage in 0..state.len() {
                    for b in 0..state[stage].len() {
                        for a in 0..b {
                            let mut other = state.clone();
                            other[stage].swap(a, b);
                            if !seen.contains(&other) {
                                next.insert(other);
                            }
                        }
                    }
                }
            }
            seen.extend(next.iter().cloned());
            last = next;
        }
        seen
    }

    fn stages(worst: u32) -> impl Strategy<Value = Stages> {
        (1..=3_usize, 1..=4_usize).prop_flat_map(move |(stages, replicas)| {
            prop::collection::vec(prop::collection::vec(0..=worst, replicas), stages)
        })
    }

    proptest! {
        #[test]
        fn no_packing_is_better(before in stages(3)) {
            let (after, exchanges) = packed(before.clone());
            let best = reachable(&before, 12).iter().map(pace).min().unwrap();
            prop_assert_eq!(pace(&after), &best[..]);
            let whole = |pace: &[u32]| pace.iter().filter(|worst| **worst == 0).count();
            let of_stage = before.iter().map(|groups| whole(groups)).min().unwrap();
            prop_assert_eq!(whole(&best), of_stage);
            let groups = before.iter().flatten().filter(|reduction| **reduction > 0).count();
            prop_assert!(exchanges <= groups);
            prop_assert_eq!(packed(after).1, 0);
        }

        #[test]
        fn groups_reduced_alike_are_packed_with_the_fewest_exchanges(before in stages(1)) {
            let (after, exchanges) = packed(before.clone());
            if let Some(fewer) = exchanges.checked_sub(1) {
                let reached = reachable(&before, fewer);
                prop_assert!(reached.iter().all(|stages| pace(stages) > pace(&after)));
            }
        }
    }

    #[test]
    fn what_is_packed_stays() {
        for stages in [
            vec![vec![0, 2, 0], vec![0, 1, 0]],
            vec![vec![3, 1, 0], vec![2, 1, 0], vec![3, 0, 0]],
            vec![vec![0, 0, 0], vec![0, 1, 1]],
        ] {
            assert_eq!(packed(stages.clone()), (stages, 0));
        }
    }

    #[test]
    fn the_most_reduced_groups_share_a_replica() {
        assert_eq!(packed(vec![vec![1, 4], vec![4, 1]]), (vec![vec![4, 1], vec![4, 1]], 1));
        // Not with the first, which would have to go on from there.
        assert_eq!(packed(vec![vec![2, 2, 0], vec![1, 0, 2]]), (vec![vec![2, 2, 0], vec![1, 2, 0]], 1));
    }
}
