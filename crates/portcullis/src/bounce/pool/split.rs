//! Direct mappings, for which the domain maps all of a list; and the cut of a split mapping, by which bounce buffers take the list's unaligned ends
//! and the device gets only its whole granules.

use alloc::vec::Vec;

use super::BouncePool;
use super::client::Request;
use super::mapping::{PoolMapping, Way};
use super::single::Parts;
use crate::addr::{Iova, PageSize, Permissions, PhysAddr, PhysSegment, touch};
use crate::bounce::error::DmaMapError;
use crate::domain::{Changing, MapListError, Tally};
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

/// Bytes of a list in its first and its last granule, where it does not begin or end at a granule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cut {
    pub head: u64,
    pub tail: u64,
}

impl Cut {
    /// The cut of a list that has more than a granule, and whose pieces [touch]: only the first begins, and only the last ends, inside a granule.
    pub(super) fn of(list: &[PhysSegment], granule: PageSize) -> Self {
        let begins = list.first().map_or(0, |piece| piece.phys.page_offset(granule));
        let ends = list.last().map_or(0, |piece| piece.phys.get().wrapping_add(piece.len));
        let head = if begins > 0 { granule.bytes() - begins } else { 0 };
        Self { head, tail: ends & granule.offset_mask() }
    }

    /// Adds the whole granules of the cut list to `linked`, which has room.
    pub(crate) fn push_middle(self, list: &[PhysSegment], linked: &mut Vec<PhysSegment>) {
        let (mut skip, last) = (self.head, list.len().wrapping_sub(1));
        for (index, piece) in list.iter().enumerate() {
            let cut = skip + if index == last { self.tail } else { 0 };
            // Omits a piece of which nothing is left: after its last byte there may be no address.
            if piece.len > cut {
                let phys = PhysAddr::new(piece.phys.get() + skip);
                linked.push(PhysSegment { phys, len: piece.len - cut });
            }
            skip = 0;
        }
    }
}

/// The cut of a list of `len` bytes, whose sums are checked; `None` if it has no whole granules, or if pieces meet inside one.
pub(crate) fn cut(list: &[PhysSegment], len: u64, granule: PageSize) -> Option<Cut> {
    // A list with whole granules has more bytes than both of its ends.
    let cut = Cut::of(list, granule);
    (touch(list, granule) && len > cut.head + cut.tail).then_some(cut)
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Maps directly. `touches` says whether the pieces of the list [touch].
    ///
    /// # Safety
    /// As [`BounceDevice::map`](super::BounceDevice::map).
    #[inline(never)]
    pub(super) unsafe fn map_direct<'a>(
        &self,
        request: &mut Request<'_, 'a>,
        touches: bool,
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        let Request { list, origin: PhysSegment { phys, len }, terms, .. } = *request;
        let granule = self.domain.granule();
        let offset = phys.page_offset(granule);
        if touches {
            let limit = Iova::new(request.client.profile.mask);
            // SAFETY: clause 2 is the caller's.
            let changing = unsafe { self.map_unnoted(list, terms.direction.permissions(), limit) }?;
            self.domain.count_neighbours(changing.range().len().saturating_sub(len).cast_signed());
            let iova = Iova::new(changing.done().start().get() | offset);
            return Ok(PoolMapping { iova, len, way: Way::Direct, list: None });
        }
        // The bytes behind the list in its last page.
        let end = list.last().map_or(0, |last| last.phys.get().wrapping_add(last.len));
        let unused = end.wrapping_neg() & granule.offset_mask();
        let bytes = self.domain.pages_of(list)?;
        let (span, neighbours) = (bytes - offset - unused, bytes.saturating_sub(len));
        (request.origin.len, request.terms.offset) = (span, offset);
        let parts = Parts { middle: 0..span, neighbours, ..Parts::default() };
        // SAFETY: there are no buffers (1); `list` is the caller's to open by its clause 2 (2); the list of `parts` is empty (3).
        let single = unsafe { self.enter_single(request, (list, bytes), parts) }?;
        // If a call below panics, the addresses leak: nobody owns them yet.
        let changing = self.domain.changing(single.range);
        self.domain.count_tally(Tally { maps: 1, ..Tally::default() });
        self.domain.count_neighbours(neighbours.cast_signed());
        changing.done();
        Ok(PoolMapping { iova: single.iova(), len: span, way: Way::Direct, list: Some((list, granule)) })
    }

    /// Maps `list` by the domain, at addresses that are not in the pool's map. For addresses that are, a caller has ended the map's mapping by
    /// address, and its owner may still unmap it: they leak, and others are taken.
    ///
    /// # Safety
    /// As [`BounceDevice::map`](super::BounceDevice::map).
    unsafe fn map_unnoted(
        &self,
        list: &[PhysSegment],
        permissions: Permissions,
        limit: Iova,
    ) -> Result<Changing<'_, M, P>, DmaMapError> {
        loop {
            // SAFETY: `Domain::map`'s clauses are the caller's clause 2.
            let changing = self.domain.changing(unsafe { self.domain.map(list, permissions, limit) }?);
            if !self.is_noted(changing.range()) {
                return Ok(changing);
            }
            self.unmap_noted(changing)?;
        }
    }

    /// Unmaps addresses that the pool's map has, and leaks them.
    #[cold]
    #[inline(never)]
    fn unmap_noted(&self, changing: Changing<'_, M, P>) -> Result<(), DmaMapError> {
        let mut gather = Gather::new();
        let _ = self.unlink(changing.range(), &mut gather);
        if let Err(error) = self.confirm(&gather) {
            self.domain.hold(changing.range().len(), None);
            return Err(MapListError::Unconfirmed { error }.into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The head is the first piece's, and the tail the last one's.
    #[test]
    fn the_middle_of_a_list_is_its_whole_granules() {
        let piece = |phys, len| PhysSegment { phys: PhysAddr::new(phys), len };
        let list = [piece(0x1f00, 0x1100), piece(0x5000, 0x2000), piece(0x9000, 0x1080)];
        let cut = cut(&list, 0x4180, PageSize::SIZE_4K).unwrap();
        assert_eq!((cut.head, cut.tail), (0x100, 0x80));
        let mut linked = Vec::new();
        cut.push_middle(&list, &mut linked);
        assert_eq!(linked, [piece(0x2000, 0x1000), piece(0x5000, 0x2000), piece(0x9000, 0x1000)]);
    }
}
