//! Direct and split mappings: the domain maps all of a list, or its middle, while bounce buffers take its unaligned ends. A split mapping opens only
//! whole granules of the list, and the granules of its buffers.

use alloc::vec::Vec;

use super::BouncePool;
use super::client::Client;
use super::mapping::{PoolMapping, Way};
use super::single::{Ends, Parts, remember};
use super::slot::{Terms, Toward};
use crate::addr::{Iova, PageSize, Permissions, PhysAddr, PhysSegment, touch};
use crate::bounce::error::DmaMapError;
use crate::domain::{Changing, MapListError, Tally};
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// All of its pieces touch for the device: only the first begins, and only the last ends, inside a granule.
    pub touches: bool,
    /// It covers whole granules.
    pub whole: bool,
}

/// Bytes of a list in its first and its last granule, where it does not begin or end at a granule.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cut {
    pub head: u64,
    pub tail: u64,
}

impl Cut {
    /// The cut of a list that has more than a granule, and whose pieces touch.
    fn of(list: &[PhysSegment], granule: PageSize) -> Self {
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
            // A piece of which nothing is left may end at the end of the address space.
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
    (shape(list, granule).touches && len > cut.head + cut.tail).then_some(cut)
}

pub(super) fn shape(list: &[PhysSegment], granule: PageSize) -> Shape {
    let begins = |piece: &PhysSegment| piece.phys.is_aligned(granule);
    let ends = |piece: &PhysSegment| (piece.phys.get().wrapping_add(piece.len)) & granule.offset_mask() == 0;
    let touches = touch(list, granule);
    let whole = touches && list.first().is_some_and(begins) && list.last().is_some_and(ends);
    Shape { touches, whole }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Maps `list`, of `len` bytes, directly.
    ///
    /// # Safety
    /// As [`BounceDevice::map`](super::BounceDevice::map).
    #[inline(never)]
    pub(super) unsafe fn map_direct<'a>(
        &self,
        client: &Client,
        list: &'a [PhysSegment],
        len: u64,
        terms: Terms,
        touches: bool,
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        let granule = self.domain.granule();
        let (Some(first), Some(last)) = (list.first(), list.last()) else {
            return Err(MapListError::EmptyList.into());
        };
        let offset = first.phys.page_offset(granule);
        if touches {
            // SAFETY: clause 2 is the caller's.
            let changing = unsafe { self.map_unnoted(list, terms.direction.permissions(), client.limit()) }?;
            self.domain.count_neighbours(changing.range().len().saturating_sub(len).cast_signed());
            let iova = Iova::new(changing.done().start().get() | offset);
            return Ok(PoolMapping { iova, len, way: Way::Direct, list: None });
        }
        // The bytes behind the list in its last page.
        let unused =
            granule.offset_mask() - (last.phys.get().wrapping_add(last.len - 1) & granule.offset_mask());
        let bytes = self.domain.pages_of(list)?;
        let (span, neighbours) = (bytes - offset - unused, bytes.saturating_sub(len));
        let (terms, parts) = (Terms { offset, ..terms }, Parts::Direct { neighbours });
        // SAFETY: there are no buffers (1); `list` is the caller's to open by its clause 2 (2).
        let single = unsafe { self.enter_single(client, (list, bytes), Vec::new(), (span, terms), parts) }?;
        // If a call below panics, the addresses leak: nobody owns them yet.
        let changing = self.domain.changing(single.range);
        self.domain.settle(Tally { maps: 1, ..Tally::default() });
        self.domain.count_neighbours(neighbours.cast_signed());
        changing.done();
        Ok(PoolMapping { iova: single.iova(), len: span, way: Way::Direct, list: Some((list, granule)) })
    }

    /// Maps `list` by the domain, at addresses at which the pool's map has no mapping. Where it has one, a caller has ended that by number,
    /// and its owner may still unmap it: such addresses leak, and others are taken.
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
            self.domain.leave_open(changing.range().len());
            return Err(MapListError::Unconfirmed { error }.into());
        }
        Ok(())
    }

    /// Maps `list`, of `len` bytes in more than one granule and with no gap inside one, with its unaligned ends bounced.
    ///
    /// # Safety
    /// As [`BounceDevice::map`](super::BounceDevice::map).
    #[inline(never)]
    pub(super) unsafe fn map_split<'a>(
        &self,
        client: &Client,
        list: &'a [PhysSegment],
        len: u64,
        (terms, copied): (Terms, bool),
    ) -> Result<PoolMapping<'a>, DmaMapError> {
        let granule = self.domain.granule();
        let Some(first) = list.first() else { return Err(MapListError::EmptyList.into()) };
        let offset = first.phys.page_offset(granule);
        let bytes = offset.checked_add(len).and_then(|bytes| granule.round_up(bytes));
        let bytes = bytes.ok_or(MapListError::Wraps { index: 0, phys: first.phys, len })?;
        let cut = Cut::of(list, granule);
        let mut linked = Vec::new();
        linked.try_reserve_exact(list.len() + 2).map_err(|_| DmaMapError::OutOfMemory)?;
        let original = remember(list)?;

        let end = |bytes| self.alloc(granule.bytes()).map(|phys| Some((phys, bytes)));
        let head = if cut.head > 0 { end(cut.head) } else { Some(None) };
        let head = head.ok_or_else(|| self.no_buffer(granule.bytes()))?;
        let tail = if cut.tail > 0 { end(cut.tail) } else { Some(None) };
        let Some(tail) = tail else {
            if let Some((phys, _)) = head {
                // SAFETY: it came from the lines above, and nobody else has it.
                unsafe { self.free(phys, granule.bytes()) };
            }
            return Err(self.no_buffer(granule.bytes()));
        };
        let granule_at = |(phys, _)| PhysSegment { phys, len: granule.bytes() };
        linked.extend(head.map(granule_at));
        cut.push_middle(list, &mut linked);
        linked.extend(tail.map(granule_at));

        let terms = Terms { offset, ..terms };
        let parts = Parts::Split(Ends { head, tail });
        if copied && terms.copies_in() {
            // SAFETY: the original by the caller's clauses 1 and 3; nobody else has the ends' granules yet.
            unsafe { self.copy_parts(&parts, &original, (offset, len), (0, len), Toward::Buffer) };
        }
        // SAFETY: the ends came from `alloc` just now (1); between them are whole granules of `list`, by the caller's clause 2 (2).
        let single = unsafe { self.enter_single(client, (&linked, bytes), original, (len, terms), parts) }?;
        Ok(PoolMapping { iova: single.iova(), len, way: Way::Split, list: None })
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
