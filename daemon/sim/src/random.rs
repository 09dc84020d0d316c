//! Random numbers without state: a function of the seed and counters.

/// The `counter`-th number of the `stream`-th sequence of `seed`.
///
/// Three rounds of the SplitMix64 finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
pub(crate) fn number(seed: u64, stream: u64, counter: u64) -> u64 {
    [stream, counter].into_iter().fold(mix(seed), |state, word| mix(state ^ word))
}

fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// A number in `0..below` from 64 random bits, by multiplication; its bias is below `below / 2^64`.
pub(crate) fn below(bits: u64, below: u32) -> u32 {
    ((u128::from(bits) * u128::from(below)) >> 64) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_and_repeat() {
        assert_eq!(number(1, 2, 3), number(1, 2, 3));
        let mut counts = [0; 8];
        (0..8000).for_each(|counter| counts[below(number(7, 0, counter), 8) as usize] += 1);
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
