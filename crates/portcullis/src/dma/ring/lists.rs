//! Maps of lists: in one exclusive section of the CPU on the fast path, else in several.

use super::unmaps::hold;
use super::{StrictRing, no_addresses};
use crate::addr::{Direction, DmaSegment, Iova, IovaRange, PhysSegment};
use crate::bounce::error::DmaMapError;
use crate::broken::broken;
use crate::dma::RawMapping;
use crate::dma::device::bytes_of;
use crate::dma::layout::device_view;
use crate::domain::{MapListError, last_byte};
use crate::guard::Guard;
use crate::mapper::Mapper;
use crate::platform::Platform;

impl<M: Mapper, P: Platform> StrictRing<M, P> {
    /// # Safety
    /// As for [`map_sg`](Self::map_sg), clauses 1 and 2.
    #[inline(never)]
    pub(in crate::dma) unsafe fn map_list_sg(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
        out: &mut [DmaSegment],
    ) -> Result<(RawMapping, usize), DmaMapError> {
        let (needed, room) = (list.len(), out.len());
        let no_room = MapListError::NoRoom { needed, room };
        if room < needed {
            return Err(no_room.into());
        }
        // SAFETY: clauses 1 and 2 are the caller's.
        let mapping = unsafe { self.map_list(list, direction) }?;
        let granule = self.device.domain().granule();
        let pages = mapping.pages(granule);
        let used = pages.map_or(0, IovaRange::len).saturating_sub(mapping.beside());
        let count = device_view(list, used, pages.map(IovaRange::start), granule, out);
        // Every mapped list has a view.
        Ok((mapping, count.unwrap_or(needed)))
    }

    /// # Safety
    /// As for [`map_sg`](Self::map_sg), clauses 1 and 2.
    #[inline(never)]
    pub(super) unsafe fn map_list(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
    ) -> Result<RawMapping, DmaMapError> {
        let Some(first) = list.first() else {
            return Err(MapListError::EmptyList.into());
        };
        let Some(arena) = &mut self.arena else {
            let (last, mask) = (last_byte(list)?, self.device.mask());
            if last.get() > mask {
                return Err(MapListError::BeyondMask { last, mask }.into());
            }
            let first = Iova::new(first.phys.get());
            return Ok(RawMapping::untranslated(first, self.number));
        };
        let domain = self.device.domain();
        let (len, used) = (domain.pages_of(list)?, bytes_of(list.iter().map(|segment| segment.len)));
        if let Err(error) = RawMapping::fits(len, used) {
            let most = arena.range().len();
            return Err(if len > most { DmaMapError::TooLong { len, most } } else { error.into() });
        }
        let waiting = &mut self.waiting;
        let link = |range| {
            let torn = Guard::new(|| hold(waiting, range));
            // SAFETY: `link`'s clauses are the caller's clause 1; the arena owns the range.
            let linked = unsafe { domain.link_fast::<false>(range, list, direction.permissions().into()) };
            torn.done();
            linked
        };
        // For one segment, `map_fast` has already failed.
        let range = if list.len() > 1 { arena.reserve_if(len, link) } else { None };
        let range = match range {
            Some(range) => range,
            // SAFETY: clauses 1 and 2 are the caller's.
            None => unsafe { self.link_slowly(list, len, direction) }?,
        };
        let first = self.device.first_of(*first, range);
        let mapping = RawMapping::in_pages(first, range, used, self.number);
        self.count(range, mapping.beside());
        Ok(mapping)
    }

    /// The slow path: reserves `len` bytes, and maps the granules of a list there.
    ///
    /// # Safety
    /// As for [`map_sg`](Self::map_sg), clauses 1 and 2.
    #[cold]
    #[inline(never)]
    unsafe fn link_slowly(
        &mut self,
        list: &[PhysSegment],
        len: u64,
        direction: Direction,
    ) -> Result<IovaRange, DmaMapError> {
        // `refused` pushes the range here if the hardware does not confirm.
        self.unconfirmed.try_reserve(1).map_err(|_| DmaMapError::OutOfMemory)?;
        let Some(arena) = &mut self.arena else { broken("a ring of a domain that translates has addresses") };
        let range = arena.reserve(len).map_err(no_addresses)?;
        let torn = Guard::new(|| hold(&mut self.waiting, range));
        // SAFETY: `link`'s clauses are the caller's clauses 1 and 2; the arena owns the range.
        let linked = unsafe {
            let permissions = direction.permissions().into();
            self.device.domain().link_here(range, list, permissions, Some(&mut self.unlinked))
        };
        torn.done();
        linked.map(|()| range).map_err(|failed| self.refused(range, failed))
    }
}
