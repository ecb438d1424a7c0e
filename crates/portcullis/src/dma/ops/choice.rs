//! Copy or map, for [`OpsConfig::Auto`](super::OpsConfig::Auto): for each size, the one that measured cheaper. Protection does not depend on it, as
//! an untrusted device never gets a granule that holds other data.
//!
//! It measures as adaptive queues do (`dma/adaptive/book.rs`), on all CPUs, without contention: each CPU counts its own mappings and times one in 61,
//! which takes the lock of its size's cell. The choice is a bit for each size in one word, which only a change writes. Maps and unmaps are timed
//! separately, as another CPU may end a mapping: a cell has means of both halves, over all directions. A mapping by the way that is not chosen is a
//! probe, and its unmap is timed, too.

use alloc::boxed::Box;

use crate::dma::Choice;
use crate::dma::adaptive::{Cell, Half, class_of, classes, pause_after};
use crate::heap::slice;
use crate::percpu::{CachePadded, LocalU64};
use crate::setup::SetupError;
use crate::sync::{AtomicU64, Mutex, Ordering};

#[derive(Debug)]
pub(super) struct Chooser {
    /// A bit for each size that is mapped, not copied.
    maps: CachePadded<AtomicU64>,
    cells: Box<[Mutex<Cell>]>,
}

/// The count of maps, or of unmaps, at which a CPU times the next.
#[derive(Debug)]
pub(super) struct Turns(LocalU64);

impl Default for Turns {
    fn default() -> Self {
        // The first mappings warm up tables and buffers.
        Self(LocalU64::new(8))
    }
}

impl Turns {
    /// `None` if the next call, after `made` calls, is not timed; otherwise the number of calls from it to the next timed one.
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
    /// For mappings of up to `most` bytes.
    pub(super) fn new(most: u64) -> Result<Self, SetupError> {
        let cells = slice(classes(most), |_| Ok(Mutex::new(Cell::default())))?;
        Ok(Self { maps: CachePadded(AtomicU64::new(0)), cells })
    }

    #[inline]
    pub(super) fn size_of(&self, len: u64) -> Option<usize> {
        class_of(len, self.cells.len())
    }

    #[inline]
    pub(super) fn choice(&self, size: usize) -> Choice {
        // Relaxed: both ways protect.
        if self.maps.load(Ordering::Relaxed) >> size & 1 == 0 { Choice::Copy } else { Choice::Map }
    }

    /// The way of a timed mapping: see [`Cell::turn`]. The caller has borrowed a CPU.
    pub(super) fn turn(&self, size: usize, mappings: u64) -> Choice {
        self.cells.get(size).map_or(Choice::Copy, |cell| cell.lock().turn(mappings))
    }

    /// Records the time of half of a mapping. The caller has borrowed a CPU.
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
#[path = "../../../tests/inside/dma/ops/choice.rs"]
mod tests;
