//! The set of frames that the heap has allocated. All access to these is by whole words; in other memory a copy accesses only the bytes
//! named.
//!
//! A three-level bitmap, with a bit for each frame: a lookup takes three dependent loads, and no lock. A level is allocated with the first
//! frame in it, and stays: 48 KiB for each 256 GiB of addresses with allocated frames, and 4 KiB for each 128 MiB. [`bits`] has the memory
//! ordering.

mod bits;

use std::sync::OnceLock;

use bits::{Bits, WORD_BITS};

const LEAF_BITS: u32 = 15;
const MIDDLE_BITS: u32 = 11;
/// Frame number bits of 52-bit addresses above the lower levels.
const TOP_BITS: u32 = 52 - 12 - LEAF_BITS - MIDDLE_BITS;

type Leaf = Box<[Bits]>;
type Middle = Box<[OnceLock<Leaf>]>;

static TOP: [OnceLock<Middle>; 1 << TOP_BITS] = [const { OnceLock::new() }; 1 << TOP_BITS];

/// Indices of a frame in the three levels. The first is out of bounds for a frame beyond 52 address bits.
fn path(frame: u64) -> [usize; 3] {
    let index = |shift: u32, bits: u32| (frame >> shift) as usize & ((1 << bits) - 1);
    let top = usize::try_from(frame >> (LEAF_BITS + MIDDLE_BITS)).unwrap_or(usize::MAX);
    [top, index(LEAF_BITS, MIDDLE_BITS), index(0, LEAF_BITS)]
}

/// A level of `count` entries; `None` without memory.
fn level<T>(count: usize, place: impl FnMut() -> T) -> Option<Box<[T]>> {
    let mut places = Vec::new();
    places.try_reserve_exact(count).ok()?;
    places.resize_with(count, place);
    Some(places.into())
}

/// The level in `place`, made if it is missing.
fn get_or_make<T>(place: &OnceLock<T>, make: impl FnOnce() -> Option<T>) -> Option<&T> {
    if place.get().is_none() {
        // Another thread may have been first: then its level counts.
        let _ = place.set(make()?);
    }
    place.get()
}

/// Adds `count` frames from number `first` on. `None`, with nothing added, without memory.
pub(super) fn give(first: u64, count: usize) -> Option<()> {
    let all = first..first + count as u64;
    // All levels first, so that nothing must be undone.
    for frame in all.clone().step_by(1 << LEAF_BITS).chain(all.clone().next_back()) {
        let [top, middle, _] = path(frame);
        let middles = get_or_make(TOP.get(top)?, || level(1 << MIDDLE_BITS, OnceLock::new))?;
        get_or_make(middles.get(middle)?, || level((1 << LEAF_BITS) / WORD_BITS, Bits::default))?;
    }
    all.for_each(|frame| _ = with_bits(frame, Bits::set));
    Some(())
}

/// Removes them.
pub(super) fn take_back(first: u64, count: usize) {
    (first..first + count as u64).for_each(|frame| _ = with_bits(frame, Bits::clear));
}

pub(super) fn is_given(frame: u64) -> bool {
    with_bits(frame, Bits::is_set).unwrap_or(false)
}

/// Calls `f` with the bits of a frame's word, and the frame's index there.
fn with_bits<R>(frame: u64, f: impl FnOnce(&Bits, usize) -> R) -> Option<R> {
    let [top, middle, bit] = path(frame);
    let leaf = TOP.get(top)?.get()?.get(middle)?.get()?;
    Some(f(leaf.get(bit / WORD_BITS)?, bit % WORD_BITS))
}

#[cfg(test)]
mod tests {
    use portcullis::platform::{FRAME_SIZE, Frames};

    use super::*;
    use crate::heap::Heap;

    #[test]
    fn what_is_given_is_known_until_it_comes_back() {
        // Addresses that no process uses, so that other tests have no frames there: around each boundary of a level.
        let borders = [1 << 39, (1 << 39) + (1 << LEAF_BITS), (1 << 39) + (1 << (LEAF_BITS + MIDDLE_BITS))];
        for border in borders {
            for (before, count) in [(1, 2), (0, 1), (3, 3), (70, 140), (40_000, 80_000)] {
                let first = border - before;
                give(first, count).unwrap();
                let end = first + count as u64;
                assert!((first..end).all(is_given));
                assert!(!is_given(first - 1) && !is_given(end));
                // A process address may be wider than a table entry: it is a different frame.
                assert!(!is_given(first + (1 << 40)) && give(first + (1 << 40), count).is_none());
                take_back(first, count);
                assert!(!(first - 1..=end).any(is_given));
            }
        }
        assert!(!is_given(u64::MAX));
    }

    #[test]
    fn what_the_heap_allocates_is_given() {
        let first = Heap.alloc(3).unwrap();
        assert!((0..3).all(|frame| is_given(first.get() / FRAME_SIZE + frame)));
        // SAFETY: clauses 1 and 2: allocated above, and not used.
        unsafe { Heap.free(first, 3) };
    }
}
