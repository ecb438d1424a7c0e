use super::*;
use crate::dice::Dice;

const GRANULE: PageSize = PageSize::SIZE_4K;

fn pages(first: u64, last: u64) -> IovaRange {
    IovaRange::from_bounds(Iova::new(first << 12), Iova::new(last << 12 | 0xfff)).unwrap()
}

fn by_blocks(first: u64, last: u64, max_order: u32) -> Option<alloc::vec::Vec<(u64, u64)>> {
    let blocks = blocks(pages(first, last), GRANULE, Granularity::Block { max_order })?;
    let bounds = |block: Block| (block.address.get() >> 12, (block.address.get() >> 12) + (1 << block.order));
    Some(blocks.map(bounds).collect())
}

/// Whether each possible page of `first..=last` lies in one of `blocks`, whose ends are exclusive.
fn holds_each_page(blocks: &[(u64, u64)], first: u64, last: u64) -> bool {
    (0..7).all(|order| {
        let pages = first.div_ceil(1 << order)..(last + 1) >> order;
        pages
            .map(|page| (page << order, (page + 1) << order))
            .all(|(start, end)| blocks.iter().any(|block| block.0 <= start && end <= block.1))
    })
}

/// Against all pairs of blocks.
#[test]
fn one_or_two_blocks_hold_each_page_wherever_two_can() {
    let around = |first: u64, last: u64| {
        let order = (0..7).find(|order| first >> order == last >> order).unwrap();
        (first >> order << order, ((first >> order) + 1) << order)
    };
    for (first, last) in (0..64).flat_map(|first| (first..64).map(move |last| (first, last))) {
        for max_order in 0..7 {
            let fits = |block: &(u64, u64)| block.1 - block.0 <= 1 << max_order;
            let one = [around(first, last)];
            let can_one = one.iter().all(fits);
            let can_two = (first + 1..=last)
                .map(|at| [around(first, at - 1), around(at, last)])
                .any(|two| two.iter().all(fits) && holds_each_page(&two, first, last));
            let taken = by_blocks(first, last, max_order);
            assert_eq!(taken.is_some(), can_one || can_two, "{first}..={last} of {max_order}");
            let Some(taken) = taken else { continue };
            assert!(matches!(taken.len(), 1..=2) && taken.iter().all(fits), "{taken:?}");
            assert!(taken.iter().all(|(start, end)| start.is_multiple_of(end - start)), "{taken:?}");
            assert!(holds_each_page(&taken, first, last), "{first}..={last}: {taken:?}");
            let held: u64 = taken.iter().map(|(start, end)| end - start).sum();
            assert!(held < 4 * (last - first + 1), "{first}..={last}: {taken:?}");
        }
    }
}

#[test]
fn a_run_across_a_large_border_takes_two_blocks_and_a_pair_of_pages_one() {
    // 64 pages across 2 MiB, of a ring of colour 1.
    assert_eq!(by_blocks(453, 516, 9), Some(alloc::vec![(448, 512), (512, 520)]));
    assert_eq!(by_blocks(511, 512, 9), Some(alloc::vec![(511, 512), (512, 513)]));
    assert_eq!(by_blocks(5, 6, 9), Some(alloc::vec![(4, 8)]));
    assert_eq!(by_blocks(5, 68, 9), Some(alloc::vec![(0, 128)]));
    // 2 MiB at a multiple of it may be a page.
    assert_eq!(by_blocks(512, 1023, 8), None);
    assert_eq!(by_blocks(512, 1022, 8), Some(alloc::vec![(512, 768), (768, 1024)]));
}

#[test]
fn each_granularity_holds_what_was_asked_for_and_little_else() {
    let mut dice = Dice(7);
    let any =
        [Granularity::Page, Granularity::Run, Granularity::ANY_BLOCK, Granularity::Block { max_order: 9 }];
    for round in 0..if cfg!(debug_assertions) { 20_000 } else { 200_000 } {
        let granule = PageSize::from_shift([12, 14, 16][round % 3]).unwrap();
        let (bits, shift) = (dice.below(40), dice.below(31));
        let len = 1 + dice.below(1 << bits);
        let start = dice.below(1 << 32) << shift | dice.below(1 << 12);
        let asked = IovaRange::new(Iova::new(start), len).unwrap();
        let touched = (asked.last().get() >> granule.shift()) - (start >> granule.shift()) + 1;
        for granularity in any {
            let Some(taken) = blocks(asked, granule, granularity) else {
                assert!(match granularity {
                    Granularity::Page => touched > MOST_BLOCKS as u64,
                    Granularity::Run => false,
                    // Half of it is the least that one of two blocks has to hold.
                    Granularity::Block { max_order } => touched >= 1 << max_order,
                });
                continue;
            };
            let count = taken.len();
            let taken = taken.collect::<alloc::vec::Vec<_>>();
            assert_eq!(taken.len(), count);
            let (mut at, mut held) = (start >> granule.shift() << granule.shift(), 0_u128);
            for block in taken {
                assert!(block.address.is_aligned(granule) && block.address.get() <= at, "{asked:?}");
                let size = u128::from(block.count) << (block.order + granule.shift());
                held += size >> granule.shift();
                at = u64::try_from(u128::from(block.address.get()) + size).unwrap_or(u64::MAX);
                if granularity == Granularity::Run {
                    assert!((1..=32).contains(&block.count) && block.order <= 31);
                    assert!(touched == 1 || (block.count, block.order) != (1, 0));
                } else {
                    assert_eq!(block.count, 1);
                    assert!(u128::from(block.address.get()).is_multiple_of(size));
                }
            }
            assert!(at > asked.last().get(), "{asked:?} {granularity:?}");
            let (most_blocks, most_pages) = match granularity {
                Granularity::Page => (MOST_BLOCKS, touched),
                Granularity::Run => (1, touched + touched / 16),
                Granularity::Block { .. } => (2, 4 * touched - 1),
            };
            assert!(count <= most_blocks && held <= most_pages.into(), "{asked:?} {granularity:?}");
        }
    }
}

#[test]
fn the_whole_address_space_is_one_block_and_no_run() {
    let all = IovaRange::from_bounds(Iova::new(1), Iova::new(u64::MAX)).unwrap();
    let taken = |granularity| blocks(all, GRANULE, granularity).map(Iterator::collect::<alloc::vec::Vec<_>>);
    let whole = Block { address: Iova::new(0), order: 52, count: 1 };
    assert_eq!(taken(Granularity::ANY_BLOCK), Some(alloc::vec![whole]));
    assert_eq!(whole.range(GRANULE), None);
    assert_eq!(taken(Granularity::Block { max_order: u32::MAX }), Some(alloc::vec![whole]));
    assert_eq!(taken(Granularity::Block { max_order: 51 }), None);
    assert!(taken(Granularity::Page).is_none() && taken(Granularity::Run).is_none());
    let last = pages((1 << 52) - 1, (1 << 52) - 1);
    let block = blocks(last, GRANULE, Granularity::Page).unwrap().next().unwrap();
    assert_eq!(block.range(GRANULE), Some(last));
}
