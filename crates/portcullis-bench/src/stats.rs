//! Medians and quantiles of measured values.

/// The value that a share of `quantile` (0 to 1) of `values` does not exceed; `None` of no values. Sorts.
pub(crate) fn quantile(values: &mut [f64], quantile: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    // Nearest rank: the smallest value with at least that share at or below it.
    let rank = (values.len() as f64 * quantile).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied()
}

/// The middle value (of an even number, the lower of the two in the middle). Sorts.
pub(crate) fn median(values: &mut [f64]) -> Option<f64> {
    quantile(values, 0.5)
}

#[cfg(test)]
mod tests {
    use super::{median, quantile};

    #[test]
    fn nearest_ranks() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [3.0]), Some(3.0));
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), Some(2.0));
        let mut hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(quantile(&mut hundred, 0.99), Some(99.0));
        assert_eq!(quantile(&mut hundred, 1.0), Some(100.0));
        assert_eq!(quantile(&mut hundred, 0.0), Some(1.0));
    }
}
