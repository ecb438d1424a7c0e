//! Where a ring of a colour starts. The argument is with [`RingConfig::colour`](super::RingConfig::colour).

/// Granules from one colour to the next.
const STRIDE: u64 = 5;

/// Where a ring begins inside its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Start {
    /// Granules at the front of the range that are never used: less than a descriptor.
    pub skew: u64,
    /// The position in the ring of the first reservation.
    pub position: u64,
}

/// The start of a ring of `granules`, a multiple of `unit`, where a large page has `per_large`. All are below
/// 2^32 and none is 0.
///
/// The skew stays for good, as each lap begins behind it. The first position does too as long as the rings
/// move in step: each of them is that much ahead of the others.
pub(super) fn start(colour: u32, unit: u64, granules: u64, per_large: u64) -> Start {
    let large = (granules / per_large).max(1);
    let offset = digit_sum(colour.into(), large) * per_large + u64::from(colour) * STRIDE;
    let skew = offset % unit;
    Start { skew, position: (offset - skew) % granules }
}

/// The digits of `number` in base `base`, added up modulo `base`.
fn digit_sum(mut number: u64, base: u64) -> u64 {
    let mut sum = 0;
    while number > 0 && base > 1 {
        sum += number % base;
        number /= base;
    }
    sum % base
}

#[cfg(test)]
mod tests {
    use super::{Start, start};
    use alloc::vec;
    use alloc::vec::Vec;

    /// The pages that rings of `large` large pages, one behind the other and numbered in a row, start with.
    fn pages(rings: u32, unit: u64, large: u64) -> Vec<u64> {
        let page = |colour: u32| {
            let Start { skew, position } = start(colour, unit, large * 512, 512);
            assert!(skew < unit && position % unit == 0 && position < large * 512);
            u64::from(colour) * large.next_power_of_two() * 512 + skew + position
        };
        (0..rings).map(page).collect()
    }

    fn most_in_a_set(numbers: impl Iterator<Item = u64>, sets: usize) -> usize {
        let mut counts = vec![0; sets];
        numbers.for_each(|number| counts[number as usize % sets] += 1);
        counts.into_iter().max().unwrap_or(0)
    }

    /// As many rings as there are sets: one for each, in the IOTLB and one level up.
    #[test]
    fn consecutive_colours_start_in_different_sets() {
        for sets in [2, 4, 8, 16, 32] {
            for (unit, large) in [(1, 1), (64, 1), (1, 4), (4, 16), (64, 64), (512, 256)] {
                let pages = pages(sets, unit, large);
                assert_eq!(most_in_a_set(pages.iter().copied(), sets as usize), 1, "{unit} {large}");
            }
        }
        for large in [1, 2, 4, 16, 64, 256] {
            let pages = pages(16, 1, large);
            assert_eq!(most_in_a_set(pages.iter().map(|page| page / 512), 16), 1, "{large}");
        }
    }

    #[test]
    fn the_first_colour_starts_at_the_front() {
        assert_eq!(start(0, 64, 32768, 512), Start { skew: 0, position: 0 });
        assert_eq!(start(1, 64, 32768, 512), Start { skew: 5, position: 512 });
        let last = start(u32::MAX, 3, 3, 512);
        assert!(last.skew < 3 && last.position == 0);
    }
}
