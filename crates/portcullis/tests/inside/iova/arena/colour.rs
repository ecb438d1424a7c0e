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
