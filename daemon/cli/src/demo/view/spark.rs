//! Small pictures of numbers.

const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The course of `values` in at most `width` characters, each the mean of its share, scaled from least to most.
pub(super) fn sparkline(values: &[f64], width: usize) -> String {
    let count = width.min(values.len());
    let means: Vec<f64> = (0..count)
        .map(|i| {
            let share = &values[i * values.len() / count..(i + 1) * values.len() / count];
            share.iter().sum::<f64>() / share.len() as f64
        })
        .collect();
    let least = means.iter().copied().fold(f64::INFINITY, f64::min);
    let most = means.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let level = |value: f64| {
        let share = if most > least { (value - least) / (most - least) } else { 0.0 };
        LEVELS[((share * 7.0).round() as usize).min(7)]
    };
    means.into_iter().map(level).collect()
}

/// Splits `width` cells in proportion to `lengths`; they add up to `width` unless all lengths are zero.
pub(super) fn cells(lengths: &[f64], width: usize) -> Vec<usize> {
    let total: f64 = lengths.iter().sum();
    let mut sum = 0.0;
    let mut before = 0;
    lengths
        .iter()
        .map(|length| {
            sum += length;
            let until = if total > 0.0 { (sum / total * width as f64).round() as usize } else { 0 };
            let cells = until - before;
            before = until;
            cells
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_falling_loss_falls() {
        assert_eq!(sparkline(&[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 8), "█▇▆▅▄▃▂▁");
        assert_eq!(sparkline(&[8.0, 8.0, 1.0, 1.0], 2), "█▁");
        assert_eq!(sparkline(&[5.0], 8), "▁");
        assert_eq!(sparkline(&[], 8), "");
        assert_eq!(sparkline(&[f64::NAN, 1.0, 2.0], 3).chars().count(), 3);
    }

    #[test]
    fn cells_add_up() {
        assert_eq!(cells(&[1.0, 1.0, 1.0], 10), [3, 4, 3]);
        assert_eq!(cells(&[0.0, 90.0, 10.0], 10), [0, 9, 1]);
        assert_eq!(cells(&[0.0, 0.0], 10), [0, 0]);
    }
}
