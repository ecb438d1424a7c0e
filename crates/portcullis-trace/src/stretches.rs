//! A set of numbers as disjoint, non-adjacent ranges.
//!
//! Cost: O(log n) for n ranges; memory for each range.

use std::collections::BTreeMap;

/// The last number of each range by its first.
#[derive(Debug, Default)]
pub(crate) struct Stretches(BTreeMap<u64, u64>);

impl Stretches {
    pub(crate) fn add(&mut self, mut first: u64, mut last: u64) {
        // Merges all adjacent ones.
        while let Some((&start, &end)) = self.0.range(..=last.saturating_add(1)).next_back() {
            if end.saturating_add(1) < first {
                break;
            }
            if start <= first && last <= end {
                return;
            }
            self.0.remove(&start);
            (first, last) = (first.min(start), last.max(end));
        }
        self.0.insert(first, last);
    }

    pub(crate) fn holds(&self, number: u64) -> bool {
        self.0.range(..=number).next_back().is_some_and(|(_, &end)| number <= end)
    }

    /// The first and the last number of each range, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().map(|(&first, &last)| (first, last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_holds_what_was_added_and_nothing_else(
            parts in prop::collection::vec((0..60_u64, 0..9_u64), 0..20),
            low in prop::sample::select(vec![0, u64::MAX - 63]),
        ) {
            let (mut stretches, mut plain) = (Stretches::default(), [false; 64]);
            for (first, more) in parts {
                let last = (first + more).min(63);
                stretches.add(low + first, low + last);
                plain[first as usize..=last as usize].fill(true);
            }
            for (at, held) in plain.iter().enumerate() {
                prop_assert_eq!(stretches.holds(low + at as u64), *held);
            }
            let gaps: Vec<_> = stretches.iter().collect();
            prop_assert!(gaps.windows(2).all(|pair| pair[0].1 + 1 < pair[1].0), "{:?}", gaps);
        }
    }
}
