//! The best way to give a few parcels to senders, by trying.

use super::Parcel;

/// With more parcels each is a small part of what its sender sends.
pub(super) const SEARCHED: usize = 24;
const TRIES: u32 = 100_000;

/// The sender of each parcel in the best choice that is found, which is `known`, with `most` bytes from the most loaded sender, or a better
/// one. `order`: the parcels in the order in which to choose for them, those of one kind together.
pub(super) fn best(
    parcels: &[Parcel],
    able: &[Vec<usize>],
    order: Vec<usize>,
    known: Vec<usize>,
    most: u64,
) -> Vec<usize> {
    let senders = able.iter().flatten().max().map_or(0, |last| last + 1);
    let (sent, chosen) = (vec![0; senders], known.clone());
    let mut search = Search { parcels, able, order, sent, chosen, most, best: known, tries: TRIES };
    search.choose(0);
    search.best
}

/// A search through all choices, those left out that cannot be better than what is known.
struct Search<'a> {
    parcels: &'a [Parcel],
    able: &'a [Vec<usize>],
    order: Vec<usize>,
    sent: Vec<u64>,
    chosen: Vec<usize>,
    /// What the most loaded sender sends in the best choice so far.
    most: u64,
    best: Vec<usize>,
    tries: u32,
}

impl Search<'_> {
    /// Tries every sender for the parcel at `depth` of the order.
    fn choose(&mut self, depth: usize) {
        let Some(&parcel) = self.order.get(depth) else {
            self.most = self.sent.iter().copied().max().unwrap_or(0);
            self.best.clone_from(&self.chosen);
            return;
        };
        let Parcel { bytes, able } = self.parcels[parcel];
        // Parcels of one kind are alike: their senders in ascending order are choice enough.
        let before = depth.checked_sub(1).map(|before| self.order[before]);
        let alike = before.filter(|&before| {
            let Parcel { bytes: other, able: who } = self.parcels[before];
            (other, who) == (bytes, able)
        });
        let least = alike.map_or(0, |before| self.chosen[before]);
        let able = &self.able[able];
        for &sender in able.iter().filter(|&&sender| sender >= least) {
            if self.tries > 0 && self.sent[sender] + bytes < self.most {
                self.tries -= 1;
                self.sent[sender] += bytes;
                self.chosen[parcel] = sender;
                self.choose(depth + 1);
                self.sent[sender] -= bytes;
            }
        }
    }
}
