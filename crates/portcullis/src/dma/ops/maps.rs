//! Maps. A list is mapped as a whole or not at all, and recorded in the book before its address is returned.

use core::slice;

use super::book::{Entry, NotNoted};
use super::{Counts, DmaAttributes, DmaOps, PoolOf};
use crate::addr::{Direction, DmaSegment, Iova, IovaRange, PhysAddr, PhysSegment, touch};
use crate::bounce::error::DmaMapError;
use crate::bounce::pool::Attributes as PoolAttributes;
use crate::dma::Choice;
use crate::dma::Machine;
use crate::dma::adaptive::Half;
use crate::dma::device::bytes_of;
use crate::dma::layout::view_apart;
use crate::domain::{MapListError, Rule, UnmapError};
use crate::invalidation::InvalidationError;
use crate::platform::LocalCpu;
use crate::sync::Ordering;

enum Made {
    /// In whole or in part.
    Copied { iova: Iova, len: u64 },
    /// Not copied.
    Opened { iova: Iova, range: IovaRange },
}

impl<X: Machine> DmaOps<X> {
    /// Lets the device reach `len` bytes at `phys`, or a copy of them, and returns the device's address: see the [module](super). A copy through an
    /// idle buffer costs O(len) for the copy, and O(1) besides.
    ///
    /// Context: any. Any other mapping may allocate memory, tables and book entries.
    ///
    /// # Errors
    /// [`DmaMapError`], with nothing mapped and nothing leaked. After [`MapListError::Unconfirmed`] devices may reach entries of it, until a flush of
    /// the domain succeeds.
    ///
    /// # Safety
    /// Until an [`unmap`](Self::unmap) of the mapping has returned `Ok` (and, under a lazy policy, the flush that covers it is confirmed):
    ///
    /// 1. The bytes are memory that the CPU reaches through the domain's [`CopyMemory`](crate::platform::CopyMemory), if it has any; or they are
    ///    registers, and the attributes say so.
    /// 2. The caller may let the device access them, as for [`Domain::map`](crate::domain::Domain::map), clauses 1 to 3; with all of their granules
    ///    if they are not copied.
    /// 3. While this, a sync or the unmap of the mapping runs, only devices and atomic accesses touch them: these calls copy as a device would.
    /// 4. While one of these calls runs, no other handle of the device, or of a device of its [group](crate::dma::Device::in_group), is dropped
    ///    with mappings open: the copies of the whole group end with it.
    #[inline(always)]
    pub unsafe fn map(
        &self,
        phys: PhysAddr,
        len: u64,
        direction: Direction,
        attributes: DmaAttributes,
    ) -> Result<Iova, DmaMapError> {
        let list = [PhysSegment { phys, len }];
        // SAFETY: clauses 1 to 3 are the caller's.
        match unsafe { self.enter::<true>(&list, len, direction, attributes) } {
            Ok(Made::Copied { iova, .. } | Made::Opened { iova, .. }) => Ok(iova),
            Err(error) => {
                self.count_error();
                Err(error)
            }
        }
    }

    /// As [`map`](Self::map), for a list, in one range of addresses, by one call of the [`Mapper`](crate::mapper::Mapper). Writes the device's
    /// segments to `out`, which has room for as many as the list has: touching ones are merged. Returns their number. One [`unmap`](Self::unmap) of
    /// all addresses from the first segment to the last ends the list.
    ///
    /// # Safety
    /// As [`map`](Self::map), clauses 1 to 4, for each piece.
    pub unsafe fn map_sg(
        &self,
        list: &[PhysSegment],
        direction: Direction,
        attributes: DmaAttributes,
        out: &mut [DmaSegment],
    ) -> Result<usize, DmaMapError> {
        let (needed, room) = (list.len(), out.len());
        let no_room = DmaMapError::List(MapListError::NoRoom { needed, room });
        let len = bytes_of(list.iter().map(|piece| piece.len));
        let made = match room < needed {
            true => Err(no_room),
            // SAFETY: clauses 1 to 3 are the caller's.
            false => unsafe { self.enter::<false>(list, len, direction, attributes) },
        };
        match made.inspect_err(|_| self.count_error())? {
            Made::Copied { iova, len } => {
                let segment = out.first_mut().ok_or(no_room)?;
                *segment = DmaSegment { iova, len };
                Ok(1)
            }
            Made::Opened { iova, .. } if touch(list, self.domain.granule()) => {
                let segment = out.first_mut().ok_or(no_room)?;
                *segment = DmaSegment { iova, len };
                Ok(1)
            }
            Made::Opened { range, .. } => {
                view_apart(list, Some(range.start()), self.domain.granule(), out).ok_or(no_room)
            }
        }
    }

    /// Maps a list of `len` bytes, copied or not. `ONE` piece has code of its own on the path without copies.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline(always)]
    unsafe fn enter<const ONE: bool>(
        &self,
        list: &[PhysSegment],
        len: u64,
        direction: Direction,
        attributes: DmaAttributes,
    ) -> Result<Made, DmaMapError> {
        match self.copier(len, attributes) {
            // SAFETY: clauses 1 to 3 are the caller's.
            Some(pool) => unsafe { self.enter_copied(pool, (list, len), direction, attributes) },
            None => match list {
                // SAFETY: clauses 1 to 3 are the caller's.
                [piece] if ONE => unsafe { self.open_one(piece, direction, attributes) },
                // SAFETY: clauses 1 to 3 are the caller's.
                _ => unsafe { self.open_list((list, len), direction, attributes) },
            },
        }
    }

    /// As [`enter`](Self::enter), if the list may have to be copied.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline]
    unsafe fn enter_copied(
        &self,
        pool: &PoolOf<X>,
        (list, len): (&[PhysSegment], u64),
        direction: Direction,
        attributes: DmaAttributes,
    ) -> Result<Made, DmaMapError> {
        if self.config.is_auto() {
            // SAFETY: clauses 1 to 3 are the caller's.
            return unsafe { self.enter_measured(pool, (list, len), direction, attributes) };
        }
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.enter_by(Choice::Copy, pool, (list, len), direction, attributes) }
    }

    /// As [`enter_copied`](Self::enter_copied), for a handle that measures.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline(never)]
    unsafe fn enter_measured(
        &self,
        pool: &PoolOf<X>,
        (list, len): (&[PhysSegment], u64),
        direction: Direction,
        attributes: DmaAttributes,
    ) -> Result<Made, DmaMapError> {
        let measured = self.chooser.as_ref().and_then(|(chooser, clock)| {
            let size = chooser.size_of(len)?;
            let mut timed = None;
            self.count(|counts, alone| {
                let turn = if alone { counts.timed_maps.next(counts.maps.get()) } else { None };
                timed = turn.map(|stands_for| chooser.turn(size, stands_for));
            });
            Some((chooser, clock, size, timed))
        });
        let Some((chooser, clock, size, timed)) = measured else {
            // SAFETY: clauses 1 to 3 are the caller's.
            return unsafe { self.enter_by(Choice::Copy, pool, (list, len), direction, attributes) };
        };
        let start = timed.map(|_| clock());
        let choice = timed.unwrap_or(chooser.choice(size));
        // SAFETY: clauses 1 to 3 are the caller's.
        let made = unsafe { self.enter_by(choice, pool, (list, len), direction, attributes) }?;
        if let Some(start) = start {
            let took = clock().saturating_sub(start);
            let way = if matches!(made, Made::Copied { .. }) { Choice::Copy } else { Choice::Map };
            self.count(|_, _| chooser.note(size, way, Half::Map, took));
        }
        Ok(made)
    }

    /// The pool, if a mapping of `len` bytes may have to be copied, in whole or in part.
    #[inline]
    fn copier(&self, len: u64, attributes: DmaAttributes) -> Option<&PoolOf<X>> {
        let threshold = self.config.threshold()?;
        let pool = self.pool.as_deref()?;
        let maybe = len <= threshold || self.profile.untrusted;
        (maybe && !attributes.is_never_copied()).then_some(pool)
    }

    /// Maps a list of `len` bytes through buffers, or with copies of its ends. The device gets the memory itself for a list above the
    /// threshold, or one that `choice` maps, if it may have all of its granules.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline]
    unsafe fn enter_by(
        &self,
        choice: Choice,
        pool: &PoolOf<X>,
        (list, len): (&[PhysSegment], u64),
        direction: Direction,
        attributes: DmaAttributes,
    ) -> Result<Made, DmaMapError> {
        let is_mapped =
            choice == Choice::Map || self.config.threshold().is_none_or(|threshold| len > threshold);
        // If the limits change at the same time, this may see a pair of old and new ones.
        let client = self.client(pool).filter(|client| !(is_mapped && client.look_at(list).1));
        let Some(client) = client else {
            // SAFETY: clauses 1 to 3 are the caller's.
            return unsafe { self.open_list((list, len), direction, attributes) };
        };
        // A device may write only a part, and a driver relies on the rest (as on Linux: CVE-2022-0854).
        let how = PoolAttributes { copy_in: true };
        let mut is_counted = false;
        let add = |(counts, alone): (&Counts, bool)| {
            counts.maps.add(alone, 1);
            counts.copies.add(alone, 1);
            counts.copied.add(alone, len);
        };
        // SAFETY: the pool's clauses 1 to 3 are the caller's.
        let mapped = unsafe {
            if attributes.skip_copy && direction != Direction::FromDevice {
                pool.map_slow(&client, list, direction, (how, false))
            } else {
                let counted = |cpu: &LocalCpu<'_>| {
                    add(self.counts_of(Some(cpu)));
                    is_counted = true;
                };
                pool.map::<true>(&client, list, direction, how, counted)
            }
        };
        let mapping = mapped?;
        if !is_counted {
            self.count(|counts, alone| add((counts, alone)));
        }
        Ok(Made::Copied { iova: mapping.iova(), len: mapping.len() })
    }

    /// Maps one piece, not copied. Out of line, as copies take most of the stack.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline(never)]
    unsafe fn open_one(
        &self,
        piece: &PhysSegment,
        direction: Direction,
        attributes: DmaAttributes,
    ) -> Result<Made, DmaMapError> {
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.open::<true>((slice::from_ref(piece), piece.len), direction, attributes) }
    }

    /// Maps a list, not copied.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline(never)]
    unsafe fn open_list(
        &self,
        list: (&[PhysSegment], u64),
        direction: Direction,
        attributes: DmaAttributes,
    ) -> Result<Made, DmaMapError> {
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { self.open::<false>(list, direction, attributes) }
    }

    /// Inlined with all that it calls; there is one caller for each `ONE`.
    ///
    /// # Safety
    /// As [`map`](Self::map).
    #[inline(always)]
    unsafe fn open<const ONE: bool>(
        &self,
        (list, used): (&[PhysSegment], u64),
        direction: Direction,
        attributes: DmaAttributes,
    ) -> Result<Made, DmaMapError> {
        let Some(first) = list.first() else { return Err(MapListError::EmptyList.into()) };
        let (granule, limit) = (self.domain.granule(), Iova::new(self.mask.load(Ordering::Relaxed)));
        let how = attributes.of(direction);
        let pages = self.domain.pages_of(list)?;
        let neighbours = pages.saturating_sub(used);
        let count = move |cpu: Option<&LocalCpu<'_>>, is_opened| {
            let (counts, alone) = self.counts_of(cpu);
            let count = if is_opened { Counts::opened } else { Counts::refused };
            count(counts, alone, (used, neighbours));
        };
        let fast = match list {
            // SAFETY: `Domain::map`'s clauses are the caller's clause 2.
            [piece] => unsafe { self.domain.map_fast(*piece, how, limit, |cpu| count(Some(cpu), true)) },
            _ => None,
        };
        let range = match fast {
            Some(range) => range,
            // SAFETY: `Domain::map`'s clauses are the caller's clause 2.
            None => unsafe { self.domain.open::<ONE>(list, (pages, used), how, limit, count) }?,
        };
        let changing = self.domain.changing(range);
        let iova = Iova::new(range.start().get() | first.phys.page_offset(granule));
        let entry = |len| Entry { iova, len, range, neighbours, lasting: attributes.lasting };
        let noted = match list {
            [_] if ONE => self.book.note_with(entry(used), 0),
            _ => {
                // The bytes after the list in its last granule.
                let last =
                    list.last().map_or(0, |piece| piece.phys.get().wrapping_add(piece.len).wrapping_sub(1));
                let unused = granule.offset_mask() - (last & granule.offset_mask());
                self.book.note(entry(range.len() - (iova.get() - range.start().get()) - unused))
            }
        };
        changing.done();
        match noted {
            Ok(()) => Ok(Made::Opened { iova, range }),
            // No driver knows the address yet, but the device may have used it.
            Err(why) => Err(self.undo(range, (used, neighbours), why)),
        }
    }
}

impl<X: Machine> DmaOps<X> {
    /// Ends a mapping that is not in the book. `bytes` are its used bytes and its neighbours.
    #[cold]
    #[inline(never)]
    fn undo(&self, range: IovaRange, bytes: (u64, u64), why: NotNoted) -> DmaMapError {
        self.count(|counts, alone| counts.refused(alone, bytes));
        undone(self.domain.end(range, bytes.1, Rule::Strictly, |_| ()), self.book.error(why, bytes.0))
    }
}

fn undone(ended: Result<(), UnmapError>, error: DmaMapError) -> DmaMapError {
    match ended {
        Err(UnmapError::Unconfirmed { error, .. }) => MapListError::Unconfirmed { error }.into(),
        Err(UnmapError::StillMapped { kept, .. }) => {
            MapListError::Unconfirmed { error: InvalidationError::StillMapped { bytes: kept } }.into()
        }
        _ => error,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Otherwise its caller would reuse the memory.
    #[test]
    fn a_map_that_could_not_be_taken_back_is_told_as_one_that_devices_may_reach() {
        let range = IovaRange::new(Iova::new(0x1000), 0x1000).unwrap();
        let error = InvalidationError::StillMapped { bytes: 0x1000 };
        let reachable = DmaMapError::List(MapListError::Unconfirmed { error });
        let undone = |ended| undone(ended, DmaMapError::OutOfMemory);
        assert_eq!(undone(Ok(())), DmaMapError::OutOfMemory);
        assert_eq!(undone(Err(UnmapError::Unconfirmed { range, error })), reachable);
        assert_eq!(undone(Err(UnmapError::StillMapped { range, unmapped: 0, kept: 0x1000 })), reachable);
        assert_eq!(undone(Err(UnmapError::NotMapped { range, unmapped: 0 })), DmaMapError::OutOfMemory);
    }
}
