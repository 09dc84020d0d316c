//! The order of samples: a function of the seed and the sample's number alone (SAMPLES, RNG).

/// The window that sample `number` reads, out of `windows`.
///
/// Every pass over the data is a permutation of its windows, another one for each pass: a four-round Feistel network
/// over the smallest even number of bits that covers `windows`, walked until it lands inside (Black and Rogaway,
/// "Ciphers with arbitrary finite domains", 2002).
///
/// # Panics
/// When `windows` is 0.
pub fn window_of(seed: u64, number: u64, windows: u64) -> u64 {
    let (pass, mut index) = (number / windows, number % windows);
    let half_bits = (64 - (windows - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half_bits) - 1;
    loop {
        let (mut left, mut right) = (index >> half_bits, index & mask);
        for round in 0..4 {
            let key = mix(seed ^ mix(pass) ^ mix(round + 1));
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        index = (left << half_bits) | right;
        if index < windows {
            return index;
        }
    }
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood, 2014).
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_is_a_permutation_and_passes_differ() {
        for windows in [1, 2, 3, 16, 1000] {
            let pass =
                |p: u64| (0..windows).map(|i| window_of(7, p * windows + i, windows)).collect::<Vec<_>>();
            let mut seen = pass(0);
            seen.sort_unstable();
            assert_eq!(seen, (0..windows).collect::<Vec<_>>());
            if windows > 3 {
                assert_ne!(pass(0), pass(1));
            }
        }
    }
}
