//! Dropout in the residual stream: behind the embedding and behind each block, as in GPT-2.
//!
//! Whether a value is dropped is a function of the run's seed, its sample's number, layer, place, position and column
//! (RNG). A sample's number belongs to one step, so the step need not be named. Behind the sum over the group the
//! stream is the same on every rank, and so is what is dropped from it.

use crate::Real;
use crate::cpu::versions::versions;
use crate::pass::Extent;
use crate::random::Name;

/// Told apart from the names of the first weights.
const STREAM: u64 = u64::from_le_bytes(*b"dropout\0");

/// Where something is dropped: part of the name of each random number, so the numbers must not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Embedding = 0,
    Attention = 1,
    Ffn = 2,
}

/// The share that is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dropout {
    /// In 65536ths: a value is dropped when its 16 random bits are below.
    below: u16,
}

impl Dropout {
    /// `None` when nothing is dropped: `share` is less than half of 2^-16.
    pub(crate) fn new(share: f64) -> Option<Self> {
        let below = (share * 65536.0).round().clamp(0.0, 65535.0) as u16;
        (below > 0).then_some(Self { below })
    }

    /// Drops values of `rows`, a row a token, and makes up for it in the others; of gradients the same ones.
    pub(crate) fn apply<T: Real>(self, extent: &Extent<'_, T>, layer: usize, place: Place, rows: &mut [T]) {
        let name = Name::new(extent.seed).with(STREAM).with(layer as u64).with(place as u64);
        let kept = T::from_f64(65536.0 / (65536.0 - f64::from(self.below)));
        let rows = rows.chunks_mut(extent.shape.hidden).enumerate();
        extent.team.each(rows, |(token, row)| {
            let sample = extent.first_sample.wrapping_add((token / extent.seq_len) as u64);
            let of_token = name.with(sample).with((token % extent.seq_len) as u64);
            drop_from(row, of_token, self.below, kept);
        });
    }
}

versions! {
    fn drop_from<T>(row: &mut [T], name: Name, below: u16, kept: T) {
        for (number, four) in row.chunks_mut(4).enumerate() {
            let bits = name.with(number as u64).bits();
            for (place, value) in four.iter_mut().enumerate() {
                let dropped = ((bits >> (16 * place)) as u16) < below;
                *value = if dropped { T::ZERO } else { *value * kept };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_share_is_dropped_and_the_mean_stays() {
        for share in [0.1, 0.5, 0.9] {
            let dropout = Dropout::new(share).expect("something");
            let kept = 65536.0 / (65536.0 - f64::from(dropout.below));
            let mut row = vec![1.0_f64; 200_001];
            drop_from(&mut row, Name::new(1), dropout.below, kept);
            let dropped = row.iter().filter(|&&x| x == 0.0).count() as f64 / row.len() as f64;
            assert!((dropped - share).abs() < 0.005, "{dropped} instead of {share}");
            let mean = row.iter().sum::<f64>() / row.len() as f64;
            assert!((mean - 1.0).abs() < 0.02, "{mean}");
            assert!(row.iter().all(|&x| x == 0.0 || (x * (1.0 - share) - 1.0).abs() < 1e-3));
            // Neighbours have nothing to do with each other.
            let both = row.windows(2).filter(|pair| pair == &[0.0, 0.0]).count() as f64 / row.len() as f64;
            assert!((both - share * share).abs() < 0.01, "{both}");
        }
        assert_eq!((Dropout::new(0.0), Dropout::new(1e-6)), (None, None));
    }
}
