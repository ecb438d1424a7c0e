//! Copy or map, for [`OpsConfig::Auto`](super::OpsConfig::Auto): whichever was measured to be cheaper on this machine, for each size.
//! Protection does not depend on it, as a device that is not trusted is never given a granule that holds other data.
//!
//! The measuring is that of queues (`dma/adaptive/book.rs`), shared by all CPUs so that none waits and no line is written by all: each
//! CPU counts its own mappings and times one in 61, and only that one takes the lock of its size's account. Which way is
//! chosen is a bit for each size, in a word that all read and a change of mind alone writes. Maps and unmaps are timed
//! apart, as another CPU may end what one has made: an account holds means of both halves, of all directions together.
//! A mapping that went the way which is not chosen is a probe, and its unmap is timed, too.

use alloc::boxed::Box;

use crate::dma::Choice;
use crate::dma::adaptive::{Cell, Half, class_of, classes, pause_after};
use crate::heap::slice;
use crate::percpu::{CachePadded, LocalU64};
use crate::setup::SetupError;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// What is measured, and chosen.
#[derive(Debug)]
pub(super) struct Chooser {
    /// A bit for each size whose mappings are mapped, and not copied.
    maps: CachePadded<AtomicU64>,
    cells: Box<[Mutex<Cell>]>,
}

/// When one CPU times its next mapping, or its next unmap, by its own count of these.
#[derive(Debug)]
pub(super) struct Turns(LocalU64);

impl Default for Turns {
    fn default() -> Self {
        // The first mappings warm up tables and buffers.
        Self(LocalU64::new(8))
    }
}

impl Turns {
    /// Whether the next call is to be timed, when its CPU has made `made` of them. Returns for how many it stands.
    #[inline]
    pub(super) fn next(&self, made: u64) -> Option<u64> {
        if made < self.0.get() {
            return None;
        }
        let pause = pause_after(made);
        self.0.set(made.wrapping_add(pause));
        Some(pause)
    }
}

impl Chooser {
    /// Makes one for mappings of up to `most` bytes.
    ///
    /// # Errors
    /// [`SetupError::OutOfMemory`].
    pub(super) fn new(most: u64) -> Result<Self, SetupError> {
        let cells = slice(classes(most), |_| Ok(Mutex::new(Cell::default())))?;
        Ok(Self { maps: CachePadded(AtomicU64::new(0)), cells })
    }

    /// The size of mappings of `len` bytes, if any is measured.
    #[inline]
    pub(super) fn size_of(&self, len: u64) -> Option<usize> {
        class_of(len, self.cells.len())
    }

    /// What is chosen for a size.
    #[inline]
    pub(super) fn choice(&self, size: usize) -> Choice {
        // Relaxed: either way protects.
        if self.maps.load(Ordering::Relaxed) >> size & 1 == 0 { Choice::Copy } else { Choice::Map }
    }

    /// Which way a mapping goes that is timed, and that stands for so many. The caller has a CPU lent.
    pub(super) fn turn(&self, size: usize, mappings: u64) -> Choice {
        self.cells.get(size).map_or(Choice::Copy, |cell| cell.lock().turn(mappings))
    }

    /// Notes what half of a mapping took. The caller has a CPU lent.
    pub(super) fn note(&self, size: usize, way: Choice, half: Half, ns: u64) {
        let Some(cell) = self.cells.get(size) else { return };
        let mut cell = cell.lock();
        let (before, bit) = (self.choice(size), 1 << size);
        match cell.note(way, half, ns) {
            after if after == before => {}
            Choice::Map => _ = self.maps.fetch_or(bit, Ordering::Relaxed),
            Choice::Copy => _ = self.maps.fetch_and(!bit, Ordering::Relaxed),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Each of two sizes goes the way that is cheaper for it, and changes when that does.
    #[test]
    fn the_way_that_is_cheaper_is_chosen_for_each_size() {
        let chooser = Chooser::new(64 << 10).unwrap();
        let (small, large) = (chooser.size_of(256).unwrap(), chooser.size_of(64 << 10).unwrap());
        assert_ne!(small, large);
        assert_eq!((chooser.size_of(0), chooser.size_of((64 << 10) + 1)), (None, None));
        let mut probes = [0; 2];
        let mut run = |large_copies_at: u64| {
            for _ in 0..4_000 {
                for (number, size, copy_ns) in [(0, small, 20), (1, large, large_copies_at)] {
                    let way = chooser.turn(size, 61);
                    probes[number] += u32::from(way != chooser.choice(size));
                    let ns = if way == Choice::Copy { copy_ns } else { 500 };
                    chooser.note(size, way, Half::Map, ns);
                    chooser.note(size, way, Half::Unmap, ns);
                }
            }
        };
        run(3_000);
        assert_eq!([small, large].map(|size| chooser.choice(size)), [Choice::Copy, Choice::Map]);
        run(100);
        assert_eq!([small, large].map(|size| chooser.choice(size)), [Choice::Copy, Choice::Copy]);
        assert!(probes.iter().all(|probes| (1..400).contains(probes)), "{probes:?} of 8,000");
    }

    #[test]
    fn a_cpu_times_its_first_mappings_often_and_later_ones_seldom() {
        let turns = Turns::default();
        let timed: alloc::vec::Vec<u64> = (0..10_000).filter(|made| turns.next(*made).is_some()).collect();
        assert_eq!(timed[..4], [8, 10, 12, 15]);
        assert!(timed.len() < 250 && timed.windows(2).rev().take(50).all(|pair| pair[1] - pair[0] == 61));
    }
}
