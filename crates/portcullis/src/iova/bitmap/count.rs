//! What fits into a leaf, computed from its bits for all orders and words at once and without branches: these
//! would depend on the bits and be guessed wrong half of the time.
//!
//! For each order `k`, a word is seen as lanes of `2^k` bits, one for each block of the order. A lane counts
//! the free pages that its block begins with. That of two blocks together is that of the first, and if that
//! one is full, that of the second on top.

use super::fit::Fit;
use super::leaf::Leaf;

/// The first bits of lanes.
const PAIRS: u64 = u64::MAX / 0x3;
const NIBBLES: u64 = u64::MAX / 0xf;
const BYTES: u64 = u64::MAX / 0xff;
const SHORTS: u64 = u64::MAX / 0xffff;
const HALVES: u64 = u64::MAX / 0xffff_ffff;

/// Joins lanes of `width` bits in pairs, each of which counts up to `1 << order`; `first` has the first bit of
/// each pair.
#[inline(always)]
fn join(lanes: u64, width: u32, order: u32, first: u64) -> u64 {
    let mask = first * ((1 << width) - 1);
    let (low, high) = (lanes & mask, lanes >> width & mask);
    // This bit is set only if the count is full.
    let full = low & first << order;
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
    pub(super) fn fit(&self) -> Fit {
        let bits = self.0;
        let (mut any, mut pair) = (0, 0);
        let (mut two, mut three, mut more) = (0, 0, 0);
        let mut six = 0;
        for (word, bits) in bits.into_iter().enumerate() {
            any |= bits;
            let lanes = (bits & PAIRS) + (bits & bits >> 1 & PAIRS);
            pair |= lanes;
            let lanes = join(lanes, 2, 1, NIBBLES);
            two = max(two, max(lanes & BYTES * 0xf, lanes >> 4 & BYTES * 0xf));
            let lanes = join(lanes, 4, 2, BYTES);
            three = max(three, lanes);
            let four = join(lanes, 8, 3, SHORTS);
            let five = join(four, 16, 4, HALVES);
            let all = join(five, 32, 5, 1);
            // None of them fills its lanes, so that there is room for all.
            more = max(more, four | five << 8 | all << 24);
            six |= all << (8 * word);
        }
        let one = u64::from(any != 0) + u64::from(pair != 0) + u64::from(pair & PAIRS << 1 != 0);
        // Two and three, four bytes each, then two, then one.
        const LOW: u64 = u32::MAX as u64;
        let lanes = max(two & LOW | three << 32, two >> 32 | three & !LOW);
        let lanes = max(lanes, lanes >> 16);
        let lanes = max(lanes, lanes >> 8);
        let (two, three) = (lanes & 0xff, lanes >> 32 & 0xff);
        // Byte 0 and 2 for four, 1 for five and 3 for six.
        let more = max(more & LOW, more >> 32);
        let four = max(more & 0xff, more >> 16 & 0xff);
        let low =
            one | two << 8 | three << 16 | four << 24 | (more & 0xff00) << 24 | (more & 0xff00_0000) << 16;
        // The words together.
        let lanes = join(six, 8, 6, SHORTS);
        let seven = (lanes & 0xff).max(lanes >> 16 & 0xff).max((lanes >> 32 & 0xff).max(lanes >> 48));
        let lanes = join(lanes, 16, 7, HALVES);
        let eight = (lanes & 0xffff).max(lanes >> 32);
        let nine = join(lanes, 32, 8, 1);
        Fit::new(low, seven as u32, eight as u32, nine as u32)
    }
}
