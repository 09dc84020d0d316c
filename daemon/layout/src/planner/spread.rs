//! Which of the able senders sends each parcel, so that the most loaded one sends as little as possible.
//!
//! Parcels differ in size and in who can send them: scheduling on unrelated machines, which is NP-hard. The largest parcels go first, each to
//! the able sender with least; then, as long as it helps, the most loaded sender passes a parcel on along a chain of senders
//! that each pass on another, found breadth first. For parcels of one size that ends at the best. For a few of many sizes, where
//! it may not, the best is searched for, up to a fixed number of tries.

mod search;

use std::cmp::Reverse;
use std::collections::{HashSet, VecDeque};

/// Something to send.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parcel {
    pub(super) bytes: u64,
    /// Index of the list of those who can send it.
    pub(super) able: usize,
}

/// The sender of each parcel. `able` lists senders, numbers below `senders`; no list is empty.
pub(super) fn spread(parcels: &[Parcel], able: &[Vec<usize>], senders: usize) -> Vec<usize> {
    let mut loads = Loads { parcels, able, sent: vec![0; senders], of: vec![Vec::new(); senders] };
    let mut order: Vec<usize> = (0..parcels.len()).collect();
    order.sort_by_key(|&parcel| {
        let Parcel { bytes, able: who } = parcels[parcel];
        // What only one can send is no choice, and the others go around it.
        (able[who].len() > 1, Reverse(bytes), able[who].len(), who)
    });
    for &parcel in &order {
        if let Some(&sender) = able[parcels[parcel].able].iter().min_by_key(|&&sender| loads.sent[sender]) {
            loads.give(parcel, sender);
        }
    }
    let bound = loads.bound();
    loads.level(bound);
    let mut sender_of = vec![0; parcels.len()];
    for (sender, parcels) in loads.of.iter().enumerate() {
        parcels.iter().for_each(|&parcel| sender_of[parcel] = sender);
    }
    let most = loads.sent.iter().copied().max().unwrap_or(0);
    if most > bound && order.len() <= search::SEARCHED {
        sender_of = search::best(parcels, able, order, sender_of, most);
    }
    sender_of
}

/// A chain is given up when it takes more moves than these to find.
const LOOKED_AT: usize = 10_000;

struct Loads<'a> {
    parcels: &'a [Parcel],
    able: &'a [Vec<usize>],
    /// Bytes by sender.
    sent: Vec<u64>,
    /// Parcels by sender.
    of: Vec<Vec<usize>>,
}

/// A parcel that goes to another sender.
#[derive(Clone, Copy)]
struct Move {
    parcel: usize,
    to: usize,
    /// The move before it in the chain: `to` of that one passes `parcel` on.
    after: Option<usize>,
}

impl Loads<'_> {
    fn give(&mut self, parcel: usize, sender: usize) {
        self.sent[sender] += self.parcels[parcel].bytes;
        self.of[sender].push(parcel);
    }

    /// What the most loaded sender sends at least, whatever is chosen: an equal share, and, as of any `k * senders + 1`
    /// parcels some sender has `k + 1`, the smallest `k + 1` of the largest so many.
    fn bound(&self) -> u64 {
        let lists: HashSet<usize> = self.parcels.iter().map(|parcel| parcel.able).collect();
        let senders: HashSet<usize> = lists.iter().flat_map(|&list| &self.able[list]).copied().collect();
        let senders = senders.len().max(1);
        let share = self.sent.iter().sum::<u64>().div_ceil(senders as u64);
        let mut bytes: Vec<u64> = self.parcels.iter().map(|parcel| parcel.bytes).collect();
        bytes.sort_unstable_by_key(|bytes| Reverse(*bytes));
        // `sums[n]`: the bytes of the `n` largest.
        let sums: Vec<u64> = std::iter::once(0)
            .chain(bytes.iter().scan(0, |sum, bytes| {
                *sum += bytes;
                Some(*sum)
            }))
            .collect();
        let crowded =
            (0..bytes.len().div_ceil(senders)).map(|k| sums[k * senders + 1] - sums[k * senders - k]);
        crowded.max().unwrap_or(0).max(share)
    }

    /// Relieves the most loaded sender until it is at the bound, or nothing helps.
    fn level(&mut self, bound: u64) {
        while let Some((worst, &most)) = self.sent.iter().enumerate().max_by_key(|(_, sent)| **sent)
            && most > bound
            && self.relieve(worst)
        {}
    }

    /// Finds a chain of moves that leaves every sender on it below what `worst` sends now, and makes them.
    fn relieve(&mut self, worst: usize) -> bool {
        let most = self.sent[worst];
        let mut seen = HashSet::new();
        let mut moves: Vec<Move> = Vec::new();
        let mut queue = VecDeque::new();
        self.pass_on(worst, 1, None, &mut seen, &mut moves, &mut queue);
        while moves.len() < LOOKED_AT
            && let Some(last) = queue.pop_front()
        {
            let Move { parcel, to, .. } = moves[last];
            let bytes = self.parcels[parcel].bytes;
            // Nobody stands on a chain twice: what is told of its senders holds for one pass.
            if self.chain(&moves, last).skip(1).any(|earlier| earlier.to == to) {
                continue;
            }
            if to != worst && self.sent[to] + bytes < most {
                self.make(&moves, last, worst);
                return true;
            }
            if to == worst {
                let first =
                    self.chain(&moves, last).last().map_or(0, |first| self.parcels[first.parcel].bytes);
                if bytes < first {
                    self.make(&moves, last, worst);
                    return true;
                }
            } else {
                // One that sends as much as the most loaded may go on doing so.
                let least = self.sent[to] + bytes - most + u64::from(self.sent[to] < most);
                self.pass_on(to, least, Some(last), &mut seen, &mut moves, &mut queue);
            }
        }
        false
    }

    /// Queues every move of a parcel of `from` that is no smaller than `least`, one of each kind.
    fn pass_on(
        &self,
        from: usize,
        least: u64,
        after: Option<usize>,
        seen: &mut HashSet<(usize, usize)>,
        moves: &mut Vec<Move>,
        queue: &mut VecDeque<usize>,
    ) {
        let mut kinds = HashSet::new();
        for &parcel in &self.of[from] {
            let Parcel { bytes, able } = self.parcels[parcel];
            if bytes < least || !kinds.insert((bytes, able)) {
                continue;
            }
            for &to in &self.able[able] {
                if to != from && seen.insert((to, parcel)) {
                    moves.push(Move { parcel, to, after });
                    queue.push_back(moves.len() - 1);
                }
            }
        }
    }

    /// The moves of a chain from the last to the first.
    fn chain<'m>(&self, moves: &'m [Move], last: usize) -> impl Iterator<Item = &'m Move> + use<'m> {
        std::iter::successors(Some(&moves[last]), |step| step.after.map(|at| &moves[at]))
    }

    fn make(&mut self, moves: &[Move], last: usize, first_from: usize) {
        let chain: Vec<Move> = self.chain(moves, last).copied().collect();
        for (at, step) in chain.iter().enumerate() {
            let from = chain.get(at + 1).map_or(first_from, |before| before.to);
            self.of[from].retain(|parcel| *parcel != step.parcel);
            self.sent[from] -= self.parcels[step.parcel].bytes;
        }
        for step in chain {
            self.give(step.parcel, step.to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn most(parcels: &[Parcel], sender_of: &[usize], senders: usize) -> u64 {
        let mut sent = vec![0; senders];
        parcels.iter().zip(sender_of).for_each(|(parcel, sender)| sent[*sender] += parcel.bytes);
        sent.into_iter().max().unwrap_or(0)
    }

    /// The least that the most loaded sender can send, over every choice.
    fn best(parcels: &[Parcel], able: &[Vec<usize>], sent: &mut [u64]) -> u64 {
        let Some((parcel, rest)) = parcels.split_first() else {
            return sent.iter().copied().max().unwrap_or(0);
        };
        let with = |&sender: &usize| {
            sent[sender] += parcel.bytes;
            let best = best(rest, able, sent);
            sent[sender] -= parcel.bytes;
            best
        };
        able[parcel.able].iter().map(with).min().unwrap()
    }

    /// Of one size the best is found however many there are: whoever is able to must share evenly.
    #[test]
    fn alike_parcels_are_shared_evenly() {
        let able = vec![vec![0, 2], vec![0, 1]];
        for (count, split) in [(29, 9), (39, 4), (200, 77)] {
            let parcel = |number| Parcel { bytes: 7, able: usize::from(number >= split) };
            let parcels: Vec<Parcel> = (0..count).map(parcel).collect();
            let (first, second) = (split as u64, (count - split) as u64);
            let best = (first + second).div_ceil(3).max(first.div_ceil(2)).max(second.div_ceil(2));
            assert_eq!(most(&parcels, &spread(&parcels, &able, 3), 3), 7 * best);
        }
    }

    /// Once a chain that met a sender twice was taken for progress, for ever.
    #[test]
    fn a_chain_meets_nobody_twice() {
        let able = vec![vec![1], vec![0, 1, 2], vec![0, 2]];
        let parcels = [
            (7, 0),
            (7, 2),
            (32, 1),
            (11, 2),
            (32, 2),
            (7, 0),
            (32, 2),
            (32, 1),
            (32, 2),
            (11, 2),
            (32, 1),
            (32, 2),
            (7, 0),
            (11, 1),
            (11, 2),
            (11, 0),
            (7, 0),
            (11, 0),
            (7, 0),
            (32, 1),
            (7, 2),
            (32, 1),
            (7, 2),
            (32, 0),
            (7, 0),
            (11, 0),
            (7, 2),
            (7, 2),
            (32, 1),
            (32, 1),
            (7, 2),
            (32, 1),
            (11, 2),
            (32, 0),
            (11, 1),
        ];
        let parcels = parcels.map(|(bytes, able)| Parcel { bytes, able });
        let total: u64 = parcels.iter().map(|parcel| parcel.bytes).sum();
        let most = most(&parcels, &spread(&parcels, &able, 3), 3);
        assert!(most * 10 <= total.div_ceil(3) * 11, "{most} of {total}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(3000))]
        #[test]
        fn within_a_tenth_of_the_best(
            (able, parcels) in prop::collection::vec(prop::collection::btree_set(0..4_usize, 1..=4), 1..4)
                .prop_flat_map(|able| {
                    let bytes = prop::sample::select(vec![3_u64, 8, 10, 21]);
                    let parcel = (bytes, 0..able.len()).prop_map(|(bytes, able)| Parcel { bytes, able });
                    (Just(able), prop::collection::vec(parcel, 1..9))
                })
        ) {
            let able: Vec<Vec<usize>> = able.into_iter().map(|set| set.into_iter().collect()).collect();
            let senders = spread(&parcels, &able, 4);
            for (parcel, sender) in parcels.iter().zip(&senders) {
                prop_assert!(able[parcel.able].contains(sender));
            }
            let (found, best) = (most(&parcels, &senders, 4), best(&parcels, &able, &mut [0; 4]));
            prop_assert!(found * 10 <= best * 11, "{found} of {best}");
        }
    }
}
