//! Where a ring of a colour lies. The argument is with [`RingConfig::colour`](super::RingConfig::colour).

/// Granules from one colour to the next.
const STRIDE: u64 = 5;
/// Sets of a paging-structure cache that colours tell apart for sure.
const TABLE_SETS: u64 = 16;

/// Where a ring lies in the range that is taken for it. All in granules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// The size of the range: whole large pages, and fewer than twice 2^31 granules and 16 large pages.
    pub range: u64,
    /// Where in the range the ring begins.
    pub base: u64,
    /// The same in the smallest range that the ring fits in.
    pub skew: u64,
    /// The position in the ring of the first reservation.
    pub position: u64,
}

/// The layout of a ring of `granules`, a multiple of `unit`, where a large page has `per_large`. None is 0, and
/// all are at most 2^31.
///
/// The base stays for good, as each lap begins there. The first position does too as long as the rings move in
/// step: each of them stays that much ahead of the others.
pub(super) fn layout(colour: Option<u32>, unit: u64, granules: u64, per_large: u64) -> Layout {
    let Some(colour) = colour.map(u64::from) else {
        return Layout { range: granules.next_multiple_of(per_large), base: 0, skew: 0, position: 0 };
    };
    // Descriptors of whole large pages are mapped, and cached, as such: nothing may be moved by less.
    let (skew, fine) = if unit.is_multiple_of(per_large) {
        (colour * per_large % unit, 0)
    } else {
        (colour * STRIDE % unit, colour * STRIDE)
    };
    let large = (skew + granules).div_ceil(per_large);
    // The range is aligned to as many large pages, or to all the sets where that is more.
    let aligned = large.next_power_of_two();
    let spread = large.max(TABLE_SETS);
    let first = colour % spread;
    // The part of the range that the first large page is in; there the ring lies, and starts inside it.
    let part = first - first % aligned;
    let position = (first - part) * per_large + fine;
    Layout {
        range: spread * per_large,
        base: part * per_large + skew,
        skew,
        position: position / unit * unit % granules,
    }
}

#[cfg(test)]
mod tests {
    use super::{Layout, layout};
    use alloc::vec;
    use alloc::vec::Vec;

    /// The pages that rings of `large` large pages, numbered in a row, start with: each in a range of its own,
    /// anywhere in the space.
    fn pages(rings: u32, unit: u64, large: u64) -> Vec<u64> {
        let page = |colour: u32| {
            let granules = large * 512;
            let Layout { range, base, position, .. } = layout(Some(colour), unit, granules, 512);
            assert!(base + granules <= range && position % unit == 0 && position < granules);
            let alignment = range.next_power_of_two();
            let place = u64::from(colour.wrapping_mul(0x9e37_79b9) >> 16);
            place * alignment + base + position
        };
        (0..rings).map(page).collect()
    }

    fn most_in_a_set(numbers: impl Iterator<Item = u64>, sets: usize) -> usize {
        let mut counts = vec![0; sets];
        numbers.for_each(|number| counts[number as usize % sets] += 1);
        counts.into_iter().max().unwrap_or(0)
    }

    /// As many rings as there are sets: one for each, in the IOTLB and one level up, wherever they are.
    #[test]
    fn consecutive_colours_start_in_different_sets() {
        for sets in [2, 4, 8, 16, 32] {
            for (unit, large) in [(1, 1), (64, 1), (1, 4), (4, 16), (64, 64), (256, 256)] {
                let pages = pages(sets, unit, large);
                assert_eq!(most_in_a_set(pages.into_iter(), sets as usize), 1, "{unit} {large}");
            }
        }
        for sets in [2, 4, 8, 16] {
            for large in [1, 2, 4, 8, 16, 64, 256] {
                let tables = pages(sets, 1, large).into_iter().map(|page| page / 512);
                assert_eq!(most_in_a_set(tables, sets as usize), 1, "{large} large pages, {sets} sets");
            }
            for (unit, large) in [(512, 4), (512, 64), (1024, 64), (2048, 256)] {
                let pages = pages(sets, unit, large);
                assert!(pages.iter().all(|page| page.is_multiple_of(512)), "mapped by large pages");
                assert_eq!(most_in_a_set(pages.iter().map(|page| page / 512), sets as usize), 1, "{unit}");
            }
        }
    }

    /// At the end of a lap all of the ring is still inside, for any colour and size.
    #[test]
    fn a_ring_lies_in_its_range() {
        for colour in [None, Some(0), Some(1), Some(15), Some(16), Some(4711), Some(u32::MAX)] {
            for (unit, count) in [(1, 1), (1, 513), (3, 700), (64, 512), (512, 15), (1000, 8), (1 << 31, 1)] {
                let granules = unit * count;
                let Layout { range, base, position, .. } = layout(colour, unit, granules, 512);
                assert!(base + granules <= range && range.is_multiple_of(512), "{colour:?} {unit} {count}");
                assert!(position + unit <= granules && position.is_multiple_of(unit));
            }
        }
    }
}
