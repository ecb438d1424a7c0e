//! Copies for a queue in a machine without an IOMMU. The machine's pool knows single pieces; here are lists of them, each copied as a whole
//! or not at all.

use alloc::vec::Vec;

use super::{DmaMapError, DmaUnmapError, Machine};
use crate::addr::{Direction, DmaSegment, Iova, PhysAddr, PhysSegment};
use crate::bounce::swiotlb::{Constraints, Swiotlb};
use crate::domain::MapListError;
use crate::heap::Shared;

/// The pool, the device's constraints on addresses, and the open lists.
pub(super) struct Copies<X: Machine> {
    pub(super) pool: Shared<Swiotlb<X::Platform, X::Memory>>,
    pub(super) constraints: Constraints,
    /// The pieces of each list, by its index; an empty list is free.
    lists: Vec<Vec<DmaSegment>>,
    free: Vec<usize>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Copied {
    pub(super) first: Iova,
    pub(super) is_list: bool,
    pub(super) word: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Cpu,
    Device,
}

impl<X: Machine> Copies<X> {
    pub(super) fn new(pool: Shared<Swiotlb<X::Platform, X::Memory>>, constraints: Constraints) -> Self {
        Self { pool, constraints, lists: Vec::new(), free: Vec::new() }
    }

    /// Copies each piece of `list` into the pool. Allocates for a list of several pieces.
    ///
    /// # Safety
    /// As [`Swiotlb::map_piece`], clauses 1 and 2, for each piece, until the unmap has returned.
    #[inline]
    pub(super) unsafe fn map(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(Copied, usize), DmaMapError> {
        let (needed, room) = (list.len(), out.len());
        match (list, &mut *out) {
            ([], _) => Err(MapListError::EmptyList.into()),
            ([piece], [place, ..]) => {
                // SAFETY: clauses 1 and 2 are the caller's.
                *place = unsafe { self.map_piece(*piece, direction) }?;
                Ok((Copied { first: place.iova, is_list: false, word: place.len }, 1))
            }
            _ if room < needed => Err(MapListError::NoRoom { needed, room }.into()),
            // SAFETY: clauses 1 and 2 are the caller's.
            _ => unsafe { self.map_list(list, direction, &mut out[..needed]) },
        }
    }

    /// # Safety
    /// As [`map`](Self::map).
    #[inline]
    unsafe fn map_piece(&self, piece: PhysSegment, direction: Direction) -> Result<DmaSegment, DmaMapError> {
        // SAFETY: clauses 1 and 2 are the caller's.
        let mapped = unsafe { self.pool.map_piece(piece, direction, &self.constraints) }?;
        Ok(DmaSegment { iova: Iova::new(mapped.phys.get()), len: mapped.len })
    }

    /// # Safety
    /// As [`map`](Self::map).
    #[inline(never)]
    unsafe fn map_list(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(Copied, usize), DmaMapError> {
        let index = self.place_for(list.len())?;
        // If a call below panics, the mapped pieces leak, and the index with them.
        for (piece, place) in list.iter().zip(&mut *out) {
            // SAFETY: clauses 1 and 2 are the caller's.
            match unsafe { self.map_piece(*piece, direction) } {
                Ok(mapped) => {
                    *place = mapped;
                    self.lists[index].push(mapped);
                }
                Err(error) => {
                    // SAFETY: the pieces were mapped just now, and nobody knows of them (1); the caller's clauses still hold (2).
                    let _ = unsafe { self.unmap_list(index) };
                    return Err(error);
                }
            }
        }
        Ok((Copied { first: out[0].iova, is_list: true, word: index as u64 }, list.len()))
    }

    /// Takes a free place for a list of `len` pieces. It has room for them, and the list of free places has room for it: an unmap allocates nothing.
    fn place_for(&mut self, len: usize) -> Result<usize, DmaMapError> {
        let no_memory = |_| DmaMapError::OutOfMemory;
        if self.free.is_empty() {
            self.lists.try_reserve(1).map_err(no_memory)?;
            self.free.try_reserve(self.lists.len() + 1).map_err(no_memory)?;
            self.free.push(self.lists.len());
            self.lists.push(Vec::new());
        }
        // Without memory for the pieces, the place stays free.
        let index = self.free.last().copied().ok_or(DmaMapError::OutOfMemory)?;
        self.lists[index].try_reserve(len).map_err(no_memory)?;
        self.free.pop();
        Ok(index)
    }

    /// Ends a mapping.
    ///
    /// # Safety
    /// 1. It is an open mapping of this queue, for which no other call runs.
    /// 2. Clauses 1 and 2 of its [map](Self::map) hold until this returns.
    #[inline]
    pub(super) unsafe fn unmap(&mut self, copied: Copied) -> Result<(), DmaUnmapError> {
        match copied {
            // SAFETY: clauses 1 and 2 are the caller's.
            Copied { is_list: true, word, .. } => unsafe { self.unmap_list(word as usize) },
            Copied { first, word: len, .. } => {
                // SAFETY: clauses 1 and 2 are the caller's.
                unsafe { self.pool.unmap_piece(PhysAddr::new(first.get()), len) }
            }
        }
    }

    /// # Safety
    /// As [`unmap`](Self::unmap).
    #[inline(never)]
    unsafe fn unmap_list(&mut self, index: usize) -> Result<(), DmaUnmapError> {
        let mut result = Ok(());
        for segment in self.lists[index].drain(..) {
            // SAFETY: clauses 1 and 2 are the caller's, for each piece.
            let unmapped = unsafe { self.pool.unmap_piece(PhysAddr::new(segment.iova.get()), segment.len) };
            result = result.and(unmapped);
        }
        self.free.push(index);
        result
    }

    pub(super) fn list(&self, index: usize) -> &[DmaSegment] {
        &self.lists[index]
    }

    /// Copies `len` bytes from `offset` on of a mapping, as far as it has them.
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap), clauses 1 and 2.
    pub(super) unsafe fn sync(
        &self,
        pieces: &[DmaSegment],
        side: Side,
        (offset, len): (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        let (end, mut begins) = (offset.saturating_add(len), 0_u64);
        for segment in pieces {
            let (first, last) = (offset.max(begins), end.min(begins.saturating_add(segment.len)));
            if first < last {
                let phys = PhysAddr::new(segment.iova.get().wrapping_add(first - begins));
                // SAFETY: clauses 1 and 2 are the caller's.
                unsafe {
                    match side {
                        Side::Cpu => self.pool.piece_for_cpu(phys, last - first)?,
                        Side::Device => self.pool.piece_for_device(phys, last - first)?,
                    }
                }
            }
            begins = begins.saturating_add(segment.len);
        }
        Ok(())
    }
}
