//! Copies for a queue without an IOMMU. The machine's pool maps single pieces; this maps lists, each as a whole or not at all.

use alloc::vec::Vec;

use super::lane::{Common, Lane, Unmapped};
use super::{DmaMapError, DmaUnmapError, Machine};
use crate::addr::{Direction, DmaSegment, Iova, PhysAddr, PhysSegment};
use crate::bounce::pool::Toward;
use crate::bounce::swiotlb::{Constraints, Swiotlb};
use crate::dma::mapping::Kind;
use crate::dma::slab::Slab;
use crate::dma::{Ended, NotUnmapped, RawMapping};
use crate::domain::MapListError;
use crate::heap::Shared;

pub(super) struct Copies<X: Machine> {
    pub(super) pool: Shared<Swiotlb<X::Platform, X::Memory>>,
    pub(super) constraints: Constraints,
    /// The pieces of each list; none if it is free.
    lists: Slab<Vec<DmaSegment>>,
}

impl<X: Machine> Copies<X> {
    pub(super) fn new(pool: Shared<Swiotlb<X::Platform, X::Memory>>, constraints: Constraints) -> Self {
        Self { pool, constraints, lists: Slab::default() }
    }

    /// # Safety
    /// As [`Swiotlb::map_piece`], clauses 1 and 2, until the unmap has returned.
    #[inline]
    unsafe fn map_piece(&self, piece: PhysSegment, direction: Direction) -> Result<DmaSegment, DmaMapError> {
        // SAFETY: clauses 1 and 2 are the caller's.
        let mapped = unsafe { self.pool.map_piece(piece, direction, &self.constraints) }?;
        Ok(DmaSegment { iova: Iova::new(mapped.phys.get()), len: mapped.len })
    }

    /// Copies each piece of `list`, and returns the list's index. Allocates.
    ///
    /// # Safety
    /// As [`map_piece`](Self::map_piece), for each piece.
    #[inline(never)]
    unsafe fn map_list(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<usize, DmaMapError> {
        let index = self.lists.vacant().ok_or(DmaMapError::OutOfMemory)?;
        self.lists.records[index].try_reserve(list.len()).map_err(|_| DmaMapError::OutOfMemory)?;
        self.lists.take();
        // If this panics, the mapped pieces and the index leak.
        for (piece, place) in list.iter().zip(&mut *out) {
            // SAFETY: clauses 1 and 2 are the caller's.
            match unsafe { self.map_piece(*piece, direction) } {
                Ok(mapped) => {
                    *place = mapped;
                    self.lists.records[index].push(mapped);
                }
                Err(error) => {
                    // SAFETY: the pieces were mapped just now, and no other call knows them (1); the caller's clauses still hold (2).
                    let _ = unsafe { self.unmap_list(index) };
                    return Err(error);
                }
            }
        }
        Ok(index)
    }

    /// # Safety
    /// 1. It is an open list of this queue, for which no other call runs.
    /// 2. Clauses 1 and 2 of [`map_piece`](Self::map_piece) hold until this returns.
    #[inline(never)]
    unsafe fn unmap_list(&mut self, index: usize) -> Result<(), DmaUnmapError> {
        let mut result = Ok(());
        for segment in self.lists.records[index].drain(..) {
            // SAFETY: clauses 1 and 2 are the caller's, for each piece.
            let unmapped = unsafe { self.pool.unmap_piece(PhysAddr::new(segment.iova.get()), segment.len) };
            result = result.and(unmapped);
        }
        self.lists.free(index);
        result
    }

    fn list(&self, mapping: &RawMapping) -> Option<usize> {
        (mapping.kind() == Kind::Swiotlb { is_list: true }).then_some(mapping.word as usize)
    }

    fn pieces(&self, mapping: &RawMapping) -> Option<&[DmaSegment]> {
        self.list(mapping).map(|index| &self.lists.records[index][..])
    }
}

impl<X: Machine> Lane<X> for Copies<X> {
    #[inline]
    unsafe fn map_for(
        &mut self,
        queue: &Common<X>,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(usize, RawMapping), DmaMapError> {
        let (needed, room) = (list.len(), out.len());
        let (iova, word, is_list) = match (list, &mut *out) {
            ([], _) => return Err(MapListError::EmptyList.into()),
            ([piece], [place, ..]) => {
                // SAFETY: the pool's clauses are the caller's clause 2.
                *place = unsafe { self.map_piece(*piece, direction) }?;
                (place.iova, place.len, false)
            }
            _ if room < needed => return Err(MapListError::NoRoom { needed, room }.into()),
            _ => {
                // SAFETY: the pool's clauses are the caller's clause 2.
                let index = unsafe { self.map_list(list, direction, &mut out[..needed]) }?;
                (out[0].iova, index as u64, true)
            }
        };
        Ok((needed, RawMapping { iova, word, tag: queue.number | Kind::Swiotlb { is_list }.bits() }))
    }

    unsafe fn unmap_for(&mut self, _: &mut Common<X>, mapping: RawMapping) -> Unmapped {
        // SAFETY: the pool's clauses: by clause 1 this has the only token of an open mapping, which syncs borrow, so no other unmap or sync runs now or later (1).
        // `map_raw`'s clause 2 holds until this returns (2).
        let ended = unsafe {
            match self.list(&mapping) {
                Some(index) => self.unmap_list(index),
                None => self.pool.unmap_piece(PhysAddr::new(mapping.iova.get()), mapping.word),
            }
        };
        let lost = |error| NotUnmapped { mapping: None, waits: false, error };
        ended.map(|()| Ended::Done(())).map_err(lost)
    }

    fn segments_for(&self, _: &Common<X>, mapping: &RawMapping) -> Option<&[DmaSegment]> {
        self.pieces(mapping)
    }

    unsafe fn sync_for(
        &self,
        _: &Common<X>,
        mapping: &RawMapping,
        into: Toward,
        (offset, len): (u64, u64),
    ) -> Result<(), DmaUnmapError> {
        let one = [DmaSegment { iova: mapping.iova, len: mapping.word }];
        let (end, mut begins) = (offset.saturating_add(len), 0_u64);
        for segment in self.pieces(mapping).unwrap_or(&one) {
            let (first, last) = (offset.max(begins), end.min(begins.saturating_add(segment.len)));
            if first < last {
                let phys = PhysAddr::new(segment.iova.get().wrapping_add(first - begins));
                // SAFETY: the pool's clause 1: the mapping is borrowed, so it does not end meanwhile, and a queue is not `Sync`, so no two of its
                // syncs run together. Clause 2 is `map_raw`'s clause 2, of the mapping's caller.
                unsafe { self.pool.sync_piece(phys, last - first, into) }?;
            }
            begins = begins.saturating_add(segment.len);
        }
        Ok(())
    }
}
