//! Random numbers that are functions of a name: no order, split or thread changes them (RNG).

/// A counter-based random generator: the SplitMix64 finaliser (Steele et al. 2014, the constants of Stafford's mix 13) over a chain of names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Name(u64);

impl Name {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    #[inline(always)]
    pub(crate) fn with(self, part: u64) -> Self {
        Self(mix(self.0 ^ mix(part)))
    }

    #[inline(always)]
    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    /// Normal with mean 0 and deviation 1, as the sum of twelve uniform numbers of 16 bits (variance 2^32 / 12 each).
    /// Only integers and one exact division: the same on every machine, whatever its mathematics library. Never beyond 6.
    pub(crate) fn normal(self) -> f64 {
        let sum: u64 = (0..3)
            .map(|i| self.with(i).0)
            .flat_map(|bits| [bits, bits >> 16, bits >> 32, bits >> 48])
            .map(|bits| bits & 0xffff)
            .sum();
        (sum as f64 - 12.0 * 32767.5) / 65536.0
    }
}

#[inline(always)]
fn mix(bits: u64) -> u64 {
    let bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
