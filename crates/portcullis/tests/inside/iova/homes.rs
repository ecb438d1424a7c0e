use super::*;
use alloc::collections::BTreeSet;

/// All homes lie in one aligned block of at most a 64th of the zone; below each is room for
/// what a CPU keeps, or for its share of the block.
#[test]
fn homes_lie_apart_in_a_64th_of_the_zone() {
    for bits in [20, 24, 27, 35, 36] {
        for cpus in [1, 2, 26, 64, 4094] {
            for budget in [0, 100, 4096, 16_384] {
                let (first, end) = (1 << 20, 1 << bits);
                let homes = Homes::new((first, end), cpus, budget);
                let block = (end - first) / SHARE;
                let block = if block == 0 { 1 } else { 1 << block.ilog2() };
                let home = |cpu| homes.below(cpu, u64::MAX).unwrap_or(end);
                let all: BTreeSet<u64> = (0..cpus as u64).map(home).collect();
                let (case, each) = ((bits, cpus, budget), block / cpus as u64);
                assert_eq!(home(0), end);
                // CPUs share homes only where the block has no room for all.
                assert!(all.len() == cpus || each < COLOUR_PAGES, "{case:?}");
                if all.len() > 1 {
                    let apart = end - home(1);
                    assert!(apart >= budget.min(each.saturating_sub(LARGE)), "{case:?}: {apart}");
                    assert!(all.iter().all(|home| *home - apart >= end - block), "{case:?}");
                }
                // A limit below the block has no home.
                assert!((0..cpus as u64).all(|cpu| homes.below(cpu, end - block).is_none()));
            }
        }
    }
}

/// The first pages that many CPUs take lie in as many sets of an IOTLB, and of a cache of tables.
#[test]
fn homes_have_different_remainders() {
    let (first, end) = (1 << 20, 1 << 36);
    let homes = Homes::new((first, end), 64, 16_384);
    let sets = |pages: u64| {
        let page = |cpu| homes.below(cpu, end).unwrap_or(end) - 1;
        (0..64).map(|cpu| page(cpu) / pages % 64).collect::<BTreeSet<_>>().len()
    };
    assert_eq!((sets(1), sets(LARGE)), (64, 64));
}

/// No zone is too small, and none too large.
#[test]
fn odd_zones_are_survived() {
    for (first, end) in
        [(0, 0), (7, 7), (0, 1), (5, 6), (0, 1 << 52), ((1 << 52) - 1, 1 << 52), (1, 12_345_678)]
    {
        for cpus in [0, 1, 4094] {
            for budget in [0, 1, u64::MAX] {
                let homes = Homes::new((first, end), cpus, budget);
                assert!(
                    (0..4094).all(|cpu| homes.below(cpu, end).is_none_or(|home| first < home && home < end))
                );
            }
        }
    }
}
