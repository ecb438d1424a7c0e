//! How mappings are made: a list as a whole or not at all, and in the book before anybody knows its address.

use super::book::Entry;
use super::{DmaOps, MapAttributes, PoolOf};
use crate::addr::{Direction, DmaSegment, Iova, IovaRange, PhysAddr, PhysSegment};
use crate::bounce::error::DmaMapError;
use crate::bounce::pool::Attributes;
use crate::dma::Machine;
use crate::dma::device::bytes_of;
use crate::dma::layout::device_view;
use crate::domain::{MapListError, UnmapError};
use crate::sync::Ordering;

impl<X: Machine> DmaOps<X> {
    /// Lets the device reach `len` bytes at `phys`, or a copy of them, and returns its address for them: see the
    /// [module](super).
    ///
    /// A copy through a buffer that waits costs O(len), and O(1) for the rest. Any other mapping may allocate memory, tables and
    /// book-keeping. Any context.
    ///
    /// # Errors
    /// [`DmaMapError`], with nothing mapped and nothing lost; but after [`MapListError::Unconfirmed`] devices may reach what was
    /// entered, until a flush of the domain succeeds.
    ///
    /// # Safety
    /// Until an [`unmap`](Self::unmap) of the mapping has returned `Ok` (and, under a lazy policy, the flush that covers it is
    /// confirmed):
    ///
    /// - The bytes are memory that the CPU reaches through the domain's [`CopyMemory`](crate::platform::CopyMemory), if it has any,
    ///   or they are registers, and the attributes say so.
    /// - They are the caller's to open to the device, as for [`Domain::map`](crate::domain::Domain::map), with all of their
    ///   granules where they are mapped and not copied.
    /// - Nothing but devices, and what accesses them as atomics, touches them while this, a sync or the unmap of the mapping
    ///   runs: those copy, as a device would.
    #[inline]
    pub unsafe fn map(
        &self,
        phys: PhysAddr,
        len: u64,
        direction: Direction,
        attributes: MapAttributes,
    ) -> Result<Iova, DmaMapError> {
        let list = [PhysSegment { phys, len }];
        if let Some(pool) = self.copier(len, attributes) {
            // SAFETY: the caller's promise.
            if let Some(mapped) = unsafe { self.copy(pool, &list, len, direction, attributes) } {
                return mapped.map(|(iova, _)| iova);
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.open(&list, direction, attributes) }.map(|(iova, _)| iova)
    }

    /// As [`map`](Self::map), for a list: in one range of addresses, and by one call of the
    /// [`Mapper`](crate::mapper::Mapper). Writes to `out`, which has room for as many segments as the list, what the device is to
    /// be given: segments that touch are merged. Returns how many segments it wrote. The list ends as a whole, by one
    /// [`unmap`](Self::unmap) of all addresses from the first of these to the last.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    ///
    /// # Safety
    /// As [`map`](Self::map), for each piece.
    pub unsafe fn map_sg(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        attributes: MapAttributes,
        out: &mut [DmaSegment],
    ) -> Result<usize, DmaMapError> {
        let (needed, room) = (list.len(), out.len());
        let no_room = DmaMapError::List(MapListError::NoRoom { needed, room });
        if room < needed {
            self.count_error();
            return Err(no_room);
        }
        let len = bytes_of(list.iter().map(|piece| piece.len));
        if let Some(pool) = self.copier(len, attributes) {
            // SAFETY: the caller's promise.
            if let Some(mapped) = unsafe { self.copy(pool, list, len, direction, attributes) } {
                let (iova, len) = mapped?;
                let segment = out.first_mut().ok_or(no_room)?;
                *segment = DmaSegment { iova, len };
                return Ok(1);
            }
        }
        // SAFETY: the caller's promise.
        let (_, range) = unsafe { self.open(list, direction, attributes) }?;
        device_view(list, Some(range.start()), self.domain.granule(), out).ok_or(no_room)
    }

    /// The pool, if a mapping of `len` bytes may have to be copied, in whole or in part.
    #[inline]
    fn copier(&self, len: u64, attributes: MapAttributes) -> Option<&PoolOf<X>> {
        let threshold = self.config.threshold()?;
        let pool = self.pool.as_deref()?;
        let maybe = len <= threshold || self.profile.untrusted;
        (maybe && !attributes.is_never_copied()).then_some(pool)
    }

    /// Maps a list of `len` bytes through buffers, or with copies of its ends; returns the address and the length that end it.
    /// Returns `None` where the device is to have the memory itself.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline]
    unsafe fn copy(
        &self,
        pool: &PoolOf<X>,
        list: &[PhysSegment],
        len: u64,
        direction: Direction,
        attributes: MapAttributes,
    ) -> Option<Result<(Iova, u64), DmaMapError>> {
        // Of limits that change, a map beside that may see a pair that no device has: then it copies with what it can keep.
        let client = self.client(pool)?;
        if self.config.threshold().is_none_or(|threshold| len > threshold) && client.look_at(list).1 {
            return None;
        }
        // A device may write less than the whole, and a driver relies on the rest (so does Linux: CVE-2022-0854).
        let how = Attributes { copy_in: true, ..Attributes::default() };
        // SAFETY: the caller's promise.
        let mapped = unsafe {
            if attributes.skip_copy {
                pool.map_slow(&client, list, direction, (how, false))
            } else {
                pool.map(&client, list, direction, how)
            }
        };
        let mapped = mapped.map(|mapping| (mapping.iova(), mapping.len()));
        match &mapped {
            Ok(_) => self.count(|counts, alone| {
                counts.maps.add(alone, 1);
                counts.copies.add(alone, 1);
            }),
            Err(_) => self.count_error(),
        }
        Some(mapped)
    }

    /// Maps a list by the domain. Returns the address of its first byte, and its granules.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    unsafe fn open(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        attributes: MapAttributes,
    ) -> Result<(Iova, IovaRange), DmaMapError> {
        // SAFETY: the caller's promise.
        let opened = unsafe { self.open_noted(list, direction, attributes) };
        match &opened {
            Ok((entry, _)) => self.count(|counts, alone| {
                counts.maps.add(alone, 1);
                counts.open.add(alone, entry.used(self.domain.granule()));
                counts.exposed.add(alone, entry.neighbours);
            }),
            Err(_) => self.count_error(),
        }
        opened.map(|(entry, range)| (entry.iova, range))
    }

    /// # Safety
    /// As [`map`](Self::map).
    unsafe fn open_noted(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        attributes: MapAttributes,
    ) -> Result<(Entry, IovaRange), DmaMapError> {
        let Some(first) = list.first() else { return Err(MapListError::EmptyList.into()) };
        let (granule, limit) = (self.domain.granule(), Iova::new(self.mask.load(Ordering::Relaxed)));
        let how = attributes.of(direction);
        let fast = match list {
            // SAFETY: the caller's promise.
            [piece] => unsafe { self.domain.map_fast(*piece, how, limit) },
            _ => None,
        };
        let used = bytes_of(list.iter().map(|piece| piece.len));
        let changing = match fast {
            Some(range) => self.domain.changing(range),
            None => {
                // SAFETY: the caller's promise.
                let changing = self.domain.changing(unsafe { self.domain.map(list, how, limit) }?);
                self.domain.count_neighbours(changing.range().len().saturating_sub(used).cast_signed());
                changing
            }
        };
        let range = changing.range();
        let iova = Iova::new(range.start().get() | first.phys.page_offset(granule));
        // The bytes behind the list in its last granule, with which the range ends.
        let last = list.last().map_or(0, |piece| piece.phys.get().wrapping_add(piece.len).wrapping_sub(1));
        let unused = granule.offset_mask() - (last & granule.offset_mask());
        let len = range.len() - (iova.get() - range.start().get()) - unused;
        let neighbours = range.len().saturating_sub(used);
        let entry = Entry { iova, len, neighbours, lasting: attributes.lasting };
        let noted = self.book.note(entry);
        changing.done();
        match noted {
            Ok(()) => Ok((entry, range)),
            Err(error) => {
                // Nobody knows the address yet, but the device may have found it.
                let ended = self.domain.end_now(range, neighbours);
                Err(match ended {
                    Err(UnmapError::Unconfirmed { error, .. }) => MapListError::Unconfirmed { error }.into(),
                    _ => error,
                })
            }
        }
    }
}
