//! Which frames the heap has given out. In those all access is by whole words, beside which there is nothing of anybody else's;
//! in other memory a copy keeps to the bytes that it was told.
//!
//! A bit for each frame, in a directory of three levels: a look takes three dependent loads, and no lock. Levels come into being
//! with the first frame in them, and stay: 32 KiB for each 256 GiB of addresses in which frames were given out, and 4 KiB for
//! each 128 MiB.
//!
//! All is `Relaxed`. A frame's bit is set before `alloc` returns its address, and cleared after `free` has got it. Whoever
//! copies there has the address from the owner, in an order that the two have between them; so it sees the bit as it was set. Bits
//! of neighbours change meanwhile, by read-modify-writes that leave this one alone.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const LEAF_BITS: u32 = 15;
const MIDDLE_BITS: u32 = 11;
/// What a frame's number has of 52 bits of address.
const TOP_BITS: u32 = 52 - 12 - LEAF_BITS - MIDDLE_BITS;

type Leaf = Box<[AtomicU64]>;
type Middle = Box<[OnceLock<Leaf>]>;

static TOP: [OnceLock<Middle>; 1 << TOP_BITS] = [const { OnceLock::new() }; 1 << TOP_BITS];

/// The indexes of a frame in the three levels.
fn path(frame: u64) -> [usize; 3] {
    let index = |shift: u32, bits: u32| (frame >> shift) as usize & ((1 << bits) - 1);
    [index(LEAF_BITS + MIDDLE_BITS, TOP_BITS), index(LEAF_BITS, MIDDLE_BITS), index(0, LEAF_BITS)]
}

/// A level of `count` places; `None` where there is no memory.
fn level<T>(count: usize, place: impl FnMut() -> T) -> Option<Box<[T]>> {
    let mut places = Vec::new();
    places.try_reserve_exact(count).ok()?;
    places.resize_with(count, place);
    Some(places.into())
}

/// The level in `place`, which is made if there is none.
fn get_or_make<T>(place: &OnceLock<T>, make: impl FnOnce() -> Option<T>) -> Option<&T> {
    if place.get().is_none() {
        // Another thread may have been first: then its level counts.
        let _ = place.set(make()?);
    }
    place.get()
}

/// Notes that `count` frames from number `first` on are given out. `None`, with nothing noted, where there is no memory for that.
pub(super) fn give(first: u64, count: usize) -> Option<()> {
    let all = first..first + count as u64;
    // All levels first, so that nothing is to be undone.
    for frame in all.clone().step_by(1 << LEAF_BITS).chain(all.clone().next_back()) {
        let [top, middle, _] = path(frame);
        let middles = get_or_make(&TOP[top], || level(1 << MIDDLE_BITS, OnceLock::new))?;
        get_or_make(&middles[middle], || level((1 << LEAF_BITS) / 64, || AtomicU64::new(0)))?;
    }
    all.for_each(|frame| {
        with_word(frame, |word, bit| _ = word.fetch_or(bit, Ordering::Relaxed));
    });
    Some(())
}

/// Notes that they have come back.
pub(super) fn take_back(first: u64, count: usize) {
    (first..first + count as u64).for_each(|frame| {
        with_word(frame, |word, bit| _ = word.fetch_and(!bit, Ordering::Relaxed));
    });
}

/// Whether the frame is given out.
pub(super) fn is_given(frame: u64) -> bool {
    with_word(frame, |word, bit| word.load(Ordering::Relaxed) & bit != 0).unwrap_or(false)
}

fn with_word<R>(frame: u64, f: impl FnOnce(&AtomicU64, u64) -> R) -> Option<R> {
    let [top, middle, bit] = path(frame);
    let leaf = TOP.get(top)?.get()?.get(middle)?.get()?;
    Some(f(leaf.get(bit / 64)?, 1 << (bit % 64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_is_known_until_it_comes_back() {
        // Where no process has memory, so that other tests have none there: beside each border of a level.
        let borders = [1 << 39, (1 << 39) + (1 << LEAF_BITS), (1 << 39) + (1 << (LEAF_BITS + MIDDLE_BITS))];
        for border in borders {
            for (before, count) in [(1, 2), (0, 1), (3, 3), (70, 140), (40_000, 80_000)] {
                let first = border - before;
                give(first, count).unwrap();
                let end = first + count as u64;
                assert!((first..end).all(is_given));
                assert!(!is_given(first - 1) && !is_given(end));
                take_back(first, count);
                assert!(!(first - 1..=end).any(is_given));
            }
        }
        assert!(!is_given(u64::MAX));
    }
}
