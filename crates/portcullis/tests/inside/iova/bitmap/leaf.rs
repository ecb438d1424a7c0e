use super::super::check::slow_fit;
use super::super::fit::{Fit, Need};
use super::*;
use alloc::vec::Vec;
use proptest::prelude::*;

/// Words with few runs, many, and none.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => Just(0),
        3 => Just(u64::MAX),
        2 => any::<u64>(),
        2 => (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(a, b, c)| a | b | c),
        2 => (0..64_u32).prop_map(|bits| u64::MAX >> bits),
        2 => (0..64_u32).prop_map(|bits| u64::MAX << bits),
        1 => (0..64_u32).prop_map(|bit| !(1 << bit)),
    ]
}

fn leaf() -> impl Strategy<Value = Leaf> {
    prop::array::uniform8(word()).prop_map(Leaf)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn what_fits_is_what_is_counted_page_by_page(leaf in leaf()) {
        prop_assert_eq!(Fit::from(leaf.fit()), slow_fit(&leaf));
    }

    /// For every request with natural alignment, what is known says whether it fits, and where it
    /// fits is the last block that begins with so many free pages.
    #[test]
    fn what_fits_has_a_place(leaf in leaf(), order in 0..=9_u32, pages in any::<u32>()) {
        let pages = 1 + pages % (1 << order);
        let fits = |block: &u32| (*block..block + pages).all(|page| leaf.is_free(page));
        let blocks: Vec<u32> = (0..512).step_by(1 << order).filter(fits).collect();
        let fit = Fit::from(leaf.fit());
        prop_assert_eq!(fit.has(Need::of(pages.into(), order)), !blocks.is_empty());
        prop_assert_eq!(leaf.place(pages.into(), order), blocks.last().copied());
    }

    /// Several places at once are those of single calls, in their order, and the pages of no others
    /// are taken.
    #[test]
    fn several_places_are_those_of_single_calls(
        leaf in leaf(), order in 0..=9_u32, pages in any::<u32>(), wanted in 0..600_usize
    ) {
        let pages = 1 + pages % (1 << order);
        let (mut single, mut several) = (leaf, leaf);
        let mut expected = Vec::new();
        while expected.len() < wanted
            && let Some(start) = single.place(pages.into(), order)
        {
            single.set(start, start + pages, false);
            expected.push(1024 + u64::from(start));
        }
        let mut places = Vec::new();
        let taken = several.take(pages.into(), order, 1024, wanted, |page| places.push(page));
        prop_assert_eq!(taken, places.len());
        prop_assert_eq!(places, expected);
        prop_assert_eq!(several.0, single.0);
    }

    #[test]
    fn what_is_toggled_is_a_range(leaf in leaf(), start in 0..512_u32, pages in 1..513_u32) {
        let end = (start + pages).min(512);
        let toggled = leaf.toggled(start, end);
        for page in 0..512 {
            let inside = (start..end).contains(&page);
            prop_assert_eq!(toggled.is_free(page), leaf.is_free(page) != inside);
        }
    }
}
