//! What fits into a leaf, computed from its bits for all orders and words at once and without branches: these
//! would depend on the bits and be guessed wrong half of the time.
//!
//! For each order `k`, a word is seen as lanes of `2^k` bits, one for each block of the order. A lane counts
//! the free pages that its block begins with. That of two blocks together is that of the first, and if that
//! one is full, that of the second on top.

use super::fit::FitBits;
use super::leaf::Leaf;

const NIBBLES: u64 = u64::MAX / 0xf;
const BYTES: u64 = u64::MAX / 0xff;
const SHORTS: u64 = u64::MAX / 0xffff;
const HALVES: u64 = u64::MAX / 0xffff_ffff;

/// The bits of even pages.
const EVEN: u64 = u64::MAX / 0x3;

/// Joins each lane in `low` with the one in the same place in `high`. They count up to `1 << order`; `full` has
/// this bit of each of them.
#[inline(always)]
fn join(low: u64, high: u64, order: u32, full: u64) -> u64 {
    // All bits of a count where the low one is full.
    let full = low & full;
    low + (high & ((full << 1) - (full >> order)))
}

/// The larger one of each byte; all are less than 128.
#[inline(always)]
fn max(a: u64, b: u64) -> u64 {
    const GUARDS: u64 = BYTES << 7;
    let difference = (a | GUARDS) - b;
    let larger = difference & GUARDS;
    b + (difference & (larger - (larger >> 7)))
}

impl Leaf {
    /// What the leaf has room for. Constant time.
    // Where it is not on its own, the compiler leaves vectors too early.
    #[inline(never)]
    pub(super) fn fit(&self) -> FitBits {
        // Order 1, then 2, then 3.
        let pairs = self.0.map(|bits| (bits & EVEN) + (bits & (bits >> 1) & EVEN));
        let fours = pairs.map(|lanes| {
            let (low, high) = (lanes & (NIBBLES * 3), (lanes >> 2) & (NIBBLES * 3));
            join(low, high, 1, NIBBLES << 1)
        });
        let eights = fours.map(|lanes| {
            let (low, high) = (lanes & (BYTES * 7), (lanes >> 4) & (BYTES * 7));
            join(low, high, 2, BYTES << 2)
        });
        // Lanes of a byte hold all larger counts up to order 6. So those of several words share one: order 4
        // of two words, order 5 of four, order 6 of all.
        let lanes =
            eights.map(|lanes| join(lanes & (SHORTS * 0xf), (lanes >> 8) & (SHORTS * 0xf), 3, SHORTS << 3));
        let four: [u64; 4] = core::array::from_fn(|at| lanes[2 * at] | lanes[2 * at + 1] << 8);
        let low = HALVES * 0xffff;
        let lanes = four.map(|lanes| join(lanes & low, (lanes >> 16) & low, 4, BYTES << 4));
        let five: [u64; 2] = core::array::from_fn(|at| lanes[2 * at] | lanes[2 * at + 1] << 16);
        let low = u64::from(u32::MAX);
        let lanes = five.map(|lanes| join(lanes & low, lanes >> 32, 5, BYTES << 5));
        let six = lanes[0] | lanes[1] << 32;
        // From here on lanes grow again.
        let low = SHORTS * 0xff;
        let seven = join(six & low, (six >> 8) & low, 6, SHORTS << 6);
        let low = HALVES * 0xffff;
        let eight = join(seven & low, (seven >> 16) & low, 7, HALVES << 7);
        let nine = join(eight & u64::from(u32::MAX), eight >> 32, 8, 1 << 8);

        // Of the smallest lanes it is enough to know which counts there are.
        let any = |words: [u64; 8]| words.into_iter().fold(0, |any, word| any | word);
        let (pair, two) = (any(pairs), any(fours));
        let threes = any(fours.map(|lanes| lanes & (lanes >> 1) & NIBBLES)) | (two & (NIBBLES << 2));
        let count = |lanes: u64| u64::from(lanes != 0);
        let one = count(any(self.0)) + count(pair) + count(pair & (EVEN << 1));
        let two = count(two) + count(two & (NIBBLES * 6)) + count(threes) + count(two & (NIBBLES << 2));

        let eights: [u64; 4] = core::array::from_fn(|at| max(eights[at], eights[at + 4]));
        let four: [u64; 2] = core::array::from_fn(|at| max(four[at], four[at + 2]));
        let eights: [u64; 2] = core::array::from_fn(|at| max(eights[at], eights[at + 2]));
        // Four bytes of each order, and then one.
        let half = |bytes: u64| max(bytes, bytes >> 32) & u64::from(u32::MAX);
        let low = half(max(eights[0], eights[1])) | half(max(four[0], four[1])) << 32;
        let high = half(max(five[0], five[1])) | half(six) << 32;
        let fold = |bytes: u64| {
            let bytes = max(bytes, bytes >> 16);
            max(bytes, bytes >> 8) & (HALVES * 0xff)
        };
        let low = fold(low) | fold(high) << 8;
        // Orders 3 and 5 in the lower half, 4 and 6 in the upper one.
        let low = one
            | two << 8
            | (low & 0xff) << 16
            | (low >> 32 & 0xff) << 24
            | (low & 0xff00) << 24
            | (low >> 40) << 40;
        let seven = (seven & 0xffff).max(seven >> 16 & 0xffff).max((seven >> 32 & 0xffff).max(seven >> 48));
        let eight = (eight & 0xffff).max(eight >> 32);
        FitBits::new(low, seven as u32, eight as u32, nine as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::slow_fit;
    use super::super::fit::{Fit, Need};
    use super::*;
    use crate::iova::placement::Placement;
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

    fn is_free(leaf: &Leaf, page: u32) -> bool {
        leaf.0[(page / 64) as usize] >> (page % 64) & 1 == 1
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn what_fits_is_what_is_counted_page_by_page(leaf in leaf()) {
            prop_assert_eq!(Fit::from(leaf.fit()), slow_fit(&leaf));
        }

        /// For every request with natural alignment, what is known says whether it fits, and where it fits is
        /// the first or the last block that begins with so many free pages.
        #[test]
        fn what_fits_has_a_place(leaf in leaf(), order in 0..=9_u32, pages in any::<u32>()) {
            let pages = 1 + pages % (1 << order);
            let fits = |block: &u32| (*block..block + pages).all(|page| is_free(&leaf, page));
            let blocks: Vec<u32> = (0..512).step_by(1 << order).filter(fits).collect();
            let fit = Fit::from(leaf.fit());
            prop_assert_eq!(fit.has(Need::of(pages.into(), order)), !blocks.is_empty());
            let place = |placement| leaf.place(pages.into(), order, placement);
            prop_assert_eq!(place(Placement::TopDown), blocks.last().copied());
            prop_assert_eq!(place(Placement::BottomUp), blocks.first().copied());
        }

        #[test]
        fn what_is_toggled_is_a_range(leaf in leaf(), start in 0..512_u32, pages in 1..513_u32) {
            let end = (start + pages).min(512);
            let toggled = leaf.toggled(start, end);
            for page in 0..512 {
                let inside = (start..end).contains(&page);
                prop_assert_eq!(is_free(&toggled, page), is_free(&leaf, page) != inside);
            }
        }
    }
}
