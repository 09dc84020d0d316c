//! How much of a cluster is left when a domain with a failed GPU is dropped as a whole.

/// How many of `gpus` have failed at a fraction, rounded to whole GPUs. A fraction outside 0 to 1, or none, is brought there.
pub fn failed_gpus(gpus: u32, failed_fraction: f64) -> u32 {
    let fraction = if failed_fraction > 0.0 { failed_fraction.min(1.0) } else { 0.0 };
    (f64::from(gpus) * fraction).round() as u32
}

/// The expected share of GPUs in domains without a failure, when `failed_fraction` of the GPUs failed, each set
/// of GPUs being equally likely.
///
/// Hypergeometric: of `n` GPUs `k` have failed, and a domain of `d` has none of them with the probability
/// `C(n - d, k) / C(n, k) = product over i in 0..d of (n - k - i) / (n - i)`.
pub fn availability(gpus: u32, domain: u32, failed_fraction: f64) -> f64 {
    let failed = failed_gpus(gpus, failed_fraction);
    let factor = |i: u32| {
        let healthy = f64::from(gpus.saturating_sub(failed).saturating_sub(i));
        healthy / f64::from(gpus - i)
    };
    (0..domain.min(gpus)).map(factor).product()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn percent(value: f64) -> f64 {
        (value * 1000.0).round() / 10.0
    }

    /// 32,768 GPUs of which 0.1% failed: the figures the published 94% at TP64 stands on.
    #[test]
    fn published_availability() {
        let of = |domain| percent(availability(32_768, domain, 0.001));
        assert_eq!([64, 32, 16, 8].map(of), [93.7, 96.8, 98.4, 99.2]);
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(availability(1024, 8, 0.0), 1.0);
        assert_eq!(availability(1024, 8, 1.0), 0.0);
        assert_eq!(availability(1024, 8, f64::NAN), 1.0);
        assert_eq!(availability(4, 8, 0.25), 0.0);
        // One failure of 16 GPUs in two domains takes one of them.
        assert!((availability(16, 8, 1.0 / 16.0) - 0.5).abs() < 1e-12);
    }
}
