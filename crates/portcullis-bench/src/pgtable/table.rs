//! What every subject does: map, unmap, translate.

use std::hint::black_box;
use std::ops::Range;

use portcullis::addr::PhysAddr;

use super::work::Work;

/// A subject's tables, shared by all threads.
pub(crate) trait Table: Send + Sync + 'static {
    /// Maps `pages` pages of `page` bytes at `iova` to the memory at `phys`; whether that worked.
    fn map(&self, iova: u64, phys: u64, page: u64, pages: u64) -> bool;

    /// Maps the pieces, each of one page, one after the other at `iova`.
    fn map_list(&self, iova: u64, page: u64, pieces: &[(PhysAddr, u64)]) -> bool;

    /// Removes `pages` pages of `page` bytes at `iova`; whether they were there.
    fn unmap(&self, iova: u64, page: u64, pages: u64) -> bool;

    /// The memory behind `iova`.
    fn phys(&self, iova: u64) -> Option<u64>;
}

/// A thread's work on a subject's tables, in loops that are compiled for that subject: what is called for a
/// single operation is found before.
pub(crate) trait Measured: Send + Sync {
    /// Does the operations `entries` of one table; `false` as soon as one fails.
    fn map_all(&self, work: &Work, table: u64, entries: Range<u64>) -> bool;

    /// As [`map_all`](Self::map_all).
    fn unmap_all(&self, work: &Work, table: u64, entries: Range<u64>) -> bool;

    /// As [`map_all`](Self::map_all).
    fn translate_all(&self, work: &Work, table: u64, entries: Range<u64>) -> bool;

    /// The memory behind `iova`.
    fn look_up(&self, iova: u64) -> Option<u64>;
}

impl<T: Table> Measured for T {
    fn map_all(&self, work: &Work, table: u64, mut entries: Range<u64>) -> bool {
        let Work { page, pages, .. } = *work;
        let first = work.iova(table, 0);
        if work.pieces.is_empty() {
            return entries.all(|entry| {
                let iova = first + entry * work.step;
                self.map(iova, iova.wrapping_add(work.to_phys), page, pages)
            });
        }
        let pieces = work.pieces.chunks_exact(pages as usize);
        let pieces = pieces.skip(entries.start as usize);
        entries.zip(pieces).all(|(entry, pieces)| self.map_list(first + entry * work.step, page, pieces))
    }

    fn unmap_all(&self, work: &Work, table: u64, mut entries: Range<u64>) -> bool {
        let Work { page, pages, .. } = *work;
        let first = work.iova(table, 0);
        entries.all(|entry| self.unmap(first + entry * work.step, page, pages))
    }

    fn translate_all(&self, work: &Work, table: u64, mut entries: Range<u64>) -> bool {
        let first = work.iova(table, 0);
        entries.all(|entry| self.phys(first + entry * work.step).map(black_box).is_some())
    }

    fn look_up(&self, iova: u64) -> Option<u64> {
        self.phys(iova)
    }
}
