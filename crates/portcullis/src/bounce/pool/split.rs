//! Large mappings: directly by the domain, or their ends through bounce buffers.

use alloc::vec::Vec;

use super::BouncePool;
use super::error::BounceMapError;
use super::mapping::{PoolMapping, Way};
use super::single::{Ends, Parts, Phase, Single, remember};
use super::slot::{Terms, Toward};
use crate::addr::{Iova, PageSize, PhysAddr};
use crate::domain::{MapListError, PhysSegment};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// How a list lies in granules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// All of its pieces touch for the device: only the first begins, and only the last ends, inside a granule.
    pub touches: bool,
    /// It covers whole granules.
    pub whole: bool,
}

/// The shape of a list whose sums are checked.
pub(super) fn shape(list: &[PhysSegment], granule: PageSize) -> Shape {
    let begins = |piece: &PhysSegment| piece.phys.is_aligned(granule);
    let ends = |piece: &PhysSegment| (piece.phys.get().wrapping_add(piece.len)) & granule.offset_mask() == 0;
    let touches = list.windows(2).all(|pair| ends(&pair[0]) && begins(&pair[1]));
    let whole = touches && list.first().is_some_and(begins) && list.last().is_some_and(ends);
    Shape { touches, whole }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Maps `list`, of `len` bytes, by the domain.
    ///
    /// # Safety
    /// As [`BounceDevice::map`](super::BounceDevice::map).
    pub(super) unsafe fn map_direct<'a>(
        &self,
        list: &'a [PhysSegment],
        len: u64,
        terms: Terms,
        (limit, touches): (Iova, bool),
    ) -> Result<PoolMapping<'a>, BounceMapError> {
        let granule = self.domain.granule();
        let (Some(first), Some(last)) = (list.first(), list.last()) else {
            return Err(MapListError::EmptyList.into());
        };
        let original = if touches { None } else { Some(remember(&[])?) };
        // SAFETY: the caller's promise.
        let range = unsafe { self.domain.map(list, terms.direction.permissions(), limit) }?;
        let neighbours = range.len().saturating_sub(len);
        // Until its owner, or the map, has it.
        let changing = self.domain.changing(range);
        self.domain.count_neighbours(neighbours);
        let offset = first.phys.page_offset(granule);
        let iova = Iova::new(range.start().get() | offset);
        let Some(list_kept) = original else {
            changing.done();
            return Ok(PoolMapping { iova, len, way: Way::Direct, list: None });
        };
        // To the last byte; the pages of the last piece end the range.
        let unused =
            granule.offset_mask() - (last.phys.get().wrapping_add(last.len - 1) & granule.offset_mask());
        let span = range.len() - offset - unused;
        let parts = Parts::Direct { neighbours };
        let single = Single { range, iova, len: span, terms, list: list_kept, parts };
        self.keep(single, Phase::Live, false);
        changing.done();
        Ok(PoolMapping { iova, len: span, way: Way::Direct, list: Some((list, granule)) })
    }

    /// Maps `list`, of `len` bytes in more than one granule and with no gap inside one, with its unaligned ends bounced.
    ///
    /// # Safety
    /// As [`BounceDevice::map`](super::BounceDevice::map).
    pub(super) unsafe fn map_split<'a>(
        &self,
        list: &'a [PhysSegment],
        len: u64,
        terms: Terms,
        limit: Iova,
    ) -> Result<PoolMapping<'a>, BounceMapError> {
        let granule = self.domain.granule();
        let (Some(first), Some(last)) = (list.first(), list.last()) else {
            return Err(MapListError::EmptyList.into());
        };
        let offset = first.phys.page_offset(granule);
        let bytes = offset.checked_add(len).and_then(|bytes| granule.round_up(bytes));
        let bytes = bytes.ok_or(MapListError::Wraps { index: 0, phys: first.phys, len })?;
        let after = last.phys.get().wrapping_add(last.len) & granule.offset_mask();
        let head_bytes = if offset > 0 { granule.bytes() - offset } else { 0 };
        // The middle: the list without the bytes at its ends.
        let mut middle = remember(list)?;
        if let Some(piece) = middle.first_mut() {
            // Where nothing remains, it may end with all addresses.
            piece.phys = PhysAddr::new(piece.phys.get().wrapping_add(head_bytes));
            piece.len -= head_bytes;
        }
        if let Some(piece) = middle.last_mut() {
            piece.len -= after;
        }
        middle.retain(|piece| piece.len > 0);
        let pieces = middle.len() + 2;
        let mut linked = Vec::new();
        linked.try_reserve_exact(pieces).map_err(|_| BounceMapError::NoMemory { pieces })?;
        let original = remember(list)?;

        let end = |bytes| self.alloc(granule.bytes()).map(|phys| Some((phys, bytes)));
        let head = if head_bytes > 0 { end(head_bytes) } else { Some(None) };
        let head = head.ok_or_else(|| self.no_buffer(granule.bytes()))?;
        let tail = if after > 0 { end(after) } else { Some(None) };
        let Some(tail) = tail else {
            if let Some((phys, _)) = head {
                // SAFETY: it came from the lines above.
                unsafe { self.free(phys, granule.bytes()) };
            }
            return Err(self.no_buffer(granule.bytes()));
        };
        let granule_at = |(phys, _)| PhysSegment { phys, len: granule.bytes() };
        linked.extend(head.map(granule_at));
        linked.extend_from_slice(&middle);
        linked.extend(tail.map(granule_at));

        let terms = Terms { offset, ..terms };
        let parts = Parts::Split(Ends { head, tail });
        if terms.copies_in() {
            // SAFETY: the original is the caller's promise; the ends' granules are nobody's yet.
            unsafe { self.copy_parts(&parts, &original, (offset, len), (0, len), Toward::Buffer) };
        }
        // SAFETY: the ends came from `alloc`; what is between them is the caller's to open, in whole granules.
        let iova = unsafe { self.enter_single(&linked, bytes, limit, original, (len, terms), parts) }?;
        Ok(PoolMapping { iova, len, way: Way::Split, list: None })
    }
}
