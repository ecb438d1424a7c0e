//! The calls of a queue whose mappings own their buffers.

use alloc::vec::Drain;
use core::mem::ManuallyDrop;

use super::lane::Lane;
use super::lanes::{AnyLane, by_lane};
use super::{DmaMapError, DmaUnmapError, Machine, Queue};
use crate::addr::{Direction, DmaSegment, Iova, PhysSegment};
use crate::bounce::error::inside;
use crate::bounce::pool::{Toward, Way};
use crate::dma::mapping::Kind;
use crate::dma::{DmaBuffer, Ended, Mapping, NotMapped, NotUnmapped, RawMapping};
use crate::domain::DeviceView;

#[allow(clippy::result_large_err, reason = "a mapping that is refused comes back in place")]
impl<X: Machine, B: DmaBuffer> Queue<X, B> {
    /// Lets the device reach `buffer`, or a copy of it, until its unmap. Cost and context as for [`map_raw`](Self::map_raw); for more than one piece
    /// it may allocate.
    ///
    /// # Errors
    /// [`NotMapped`] gives the buffer back, unless the device may reach it.
    #[inline(always)]
    pub fn map(&mut self, buffer: B, direction: Direction) -> Result<Mapping<B>, NotMapped<B>> {
        // If a call below panics, the buffer is leaked, as the device may reach it.
        let buffer = ManuallyDrop::new(buffer);
        // `map_raw`'s clauses 1, 2 and 4, by `DmaBuffer`'s: the memory is the buffer's (1 and 2 there), and safe code stays sound while devices and
        // copies access it (3 and 4 there); the buffer is given back or dropped only after its mapping has ended, or leaked. Clause 3: no other
        // caller has the mapping.
        let mapped = match buffer.segments() {
            // This arm returns by itself, so that the words stay in registers. The slow path gets a copy of the segment, as a pointer to it would
            // force the buffer into memory.
            // SAFETY: clauses 1 to 4, as above.
            [segment] => match unsafe { self.map_fast(*segment, direction) } {
                Some(raw) => return Ok(Mapping { raw, buffer }),
                // SAFETY: clauses 1 to 4, as above.
                None => unsafe { self.map_segment(*segment, direction) },
            },
            // SAFETY: clauses 1 to 4, as above.
            list => unsafe { self.map_pieces(list, direction) },
        };
        match mapped {
            Ok(raw) => Ok(Mapping { raw, buffer }),
            Err(error) if error.may_be_reached() => Err(NotMapped { buffer: None, error }),
            Err(error) => Err(NotMapped { buffer: Some(ManuallyDrop::into_inner(buffer)), error }),
        }
    }

    /// The slow path.
    ///
    /// # Safety
    /// As [`map_raw`](Self::map_raw).
    #[inline(never)]
    unsafe fn map_segment(
        &mut self,
        segment: PhysSegment,
        direction: Direction,
    ) -> Result<RawMapping, DmaMapError> {
        // SAFETY: clauses 1 to 4 are the caller's.
        unsafe { self.map_otherwise(&[segment], direction, &mut [DmaSegment::default()]) }
            .map(|(_, mapping)| mapping)
    }

    /// # Safety
    /// As [`map_raw`](Self::map_raw).
    #[inline(never)]
    unsafe fn map_pieces(
        &mut self,
        list: &[PhysSegment],
        direction: Direction,
    ) -> Result<RawMapping, DmaMapError> {
        let mut out = core::mem::take(&mut self.scratch);
        out.clear();
        let mapped = if out.try_reserve(list.len()).is_err() {
            Err(DmaMapError::OutOfMemory)
        } else {
            out.resize(list.len(), DmaSegment::default());
            // SAFETY: clauses 1 to 4 are the caller's.
            unsafe { self.map_raw(list, direction, &mut out) }
        };
        self.scratch = out;
        mapped.map(|(mapping, _)| mapping)
    }

    /// The device's segments of a mapping, in order. Nothing for a mapping of another queue.
    pub fn segments<'a>(
        &'a self,
        mapping: &'a Mapping<B>,
    ) -> impl Iterator<Item = DmaSegment> + use<'a, X, B> {
        let whole = |iova| Some(DmaSegment { iova, len: mapping.len() });
        let (list, first) = (mapping.buffer().segments(), mapping.iova());
        let translated = self.common.device.is_translated();
        let granule = self.common.device.domain().granule();
        let (is_own, kind) = (mapping.raw.queue() == self.common.number, mapping.raw.kind());
        let kept = if is_own {
            by_lane!(&self.lane, lane => lane.segments_for(&self.common, &mapping.raw))
        } else {
            None
        };
        let (one, listed, copies): (_, &[PhysSegment], &[DmaSegment]) = match (kept, kind) {
            _ if !is_own => (None, &[], &[]),
            (Some(kept), _) => (None, &[], kept),
            (_, Kind::Swiotlb { .. }) => (whole(first), &[], &[]),
            _ => match mapping.raw.way_of_pool() {
                Some(Way::Slot | Way::SingleUse | Way::Split) => (whole(first), &[], &[]),
                _ => (None, list, &[]),
            },
        };
        let base = translated.then(|| Iova::new(first.get() & !granule.offset_mask()));
        let view = DeviceView::new(listed, base, granule).flatten();
        one.into_iter().chain(view).chain(copies.iter().copied())
    }

    /// Ends a mapping. The strategy decides whether its buffer comes back now or with others: see [`Queue`]. Cost and context as for
    /// [`unmap_raw`](Self::unmap_raw).
    ///
    /// # Errors
    /// [`NotUnmapped`]: the buffer does not come back yet. A mapping of another queue comes back unchanged.
    #[inline(always)]
    pub fn unmap(&mut self, mapping: Mapping<B>) -> Result<Ended<B, Drain<'_, B>>, NotUnmapped<Mapping<B>>> {
        // If a call below panics, the buffer is leaked: whether it waits is unknown.
        let Mapping { raw, buffer } = mapping;
        match self.unmap_raw(raw) {
            Ok(Ended::Done(())) => Ok(Ended::Done(ManuallyDrop::into_inner(buffer))),
            Ok(Ended::Pending) => {
                self.keep(buffer);
                Ok(Ended::Pending)
            }
            Ok(Ended::Flushed(())) => {
                self.keep(buffer);
                Ok(Ended::Flushed(self.buffers.drain(..)))
            }
            // Inlined: a call would force the buffer into memory.
            Err(NotUnmapped { mapping, mut waits, error }) => {
                let mapping = match mapping {
                    Some(raw) => Some(Mapping { raw, buffer }),
                    None => {
                        waits = waits && self.keep(buffer);
                        None
                    }
                };
                Err(NotUnmapped { mapping, waits, error })
            }
        }
    }

    /// Keeps a buffer until a commit. Without memory for that it is leaked, and this returns `false`.
    #[inline]
    fn keep(&mut self, buffer: ManuallyDrop<B>) -> bool {
        // `new` made room for a batch. More wait only if hardware does not confirm.
        let has_room = self.buffers.len() < self.buffers.capacity() || self.buffers.try_reserve(1).is_ok();
        if has_room {
            self.buffers.push(ManuallyDrop::into_inner(buffer));
        }
        has_room
    }

    /// As [`commit_raw`](Self::commit_raw), but gives back the buffers, in the order of their unmaps.
    ///
    /// # Errors
    /// [`DmaUnmapError`]: everything still waits, and can be committed again.
    pub fn commit(&mut self) -> Result<Drain<'_, B>, DmaUnmapError> {
        self.commit_raw()?;
        Ok(self.buffers.drain(..))
    }

    /// Ends all of `mappings` by the policy in force, and commits: for a device that is gone or was reset, and for a driver that stops. Calls `back`
    /// with each buffer that the driver may use again, including those of earlier unmaps, in the order in which they come back; and with the error of
    /// each mapping that comes back as it was (dropped, it stays open), or whose buffer is leaked.
    ///
    /// After `Ok` all of them have come back, and nothing [waits](Self::waiting). The final commit retries unconfirmed unmaps, so a failed unmap need
    /// not fail this call.
    ///
    /// Context: that of [`unmap`](Self::unmap). Waits as often as the unmaps themselves and two commits; if the hardware does not answer any more,
    /// each may take its whole time-out. Allocates only for buffers that wait. If `back` panics, the remaining mappings stay open, and their buffers
    /// are leaked.
    ///
    /// # Errors
    /// [`DmaUnmapError`]: a mapping has not ended, as `back` was told, or buffers [wait](Self::waiting) for a commit.
    pub fn unmap_all(
        &mut self,
        mappings: impl IntoIterator<Item = Mapping<B>>,
        mut back: impl FnMut(Result<B, NotUnmapped<Mapping<B>>>),
    ) -> Result<(), DmaUnmapError> {
        let (mut confirms, mut last) = (true, None);
        for mapping in mappings {
            let mut ended = self.unmap_to(mapping, &mut back);
            // The batch is full because its commit failed; another commit may make room. If that fails, too, do not retry until the end.
            if confirms
                && matches!(&ended, Err(failed) if failed.mapping.is_some() && failed.error.is_of_commit())
            {
                confirms = self.commit_to(&mut back).is_ok();
                if confirms && let Err(NotUnmapped { mapping: Some(mapping), .. }) = ended {
                    ended = self.unmap_to(mapping, &mut back);
                }
            }
            match ended {
                Ok(()) | Err(NotUnmapped { mapping: None, waits: true, .. }) => {}
                Err(failed) => {
                    last = Some(failed.error);
                    back(Err(failed));
                }
            }
        }
        self.commit_to(&mut back).err().or(last).map_or(Ok(()), Err)
    }

    fn commit_to(
        &mut self,
        back: &mut impl FnMut(Result<B, NotUnmapped<Mapping<B>>>),
    ) -> Result<(), DmaUnmapError> {
        self.commit().map(|buffers| buffers.map(Ok).for_each(back))
    }

    fn unmap_to(
        &mut self,
        mapping: Mapping<B>,
        back: &mut impl FnMut(Result<B, NotUnmapped<Mapping<B>>>),
    ) -> Result<(), NotUnmapped<Mapping<B>>> {
        self.unmap(mapping).map(|ended| ended.for_each(|buffer| back(Ok(buffer))))
    }

    /// Makes the device's writes to `len` bytes of an open mapping's buffer, from `offset` on, visible to the CPU, and orders the CPU's later reads
    /// after them. O(len) if there is a copy or the device is non-coherent; otherwise a fence.
    ///
    /// # Errors
    /// [`DmaUnmapError`]: nothing is copied. [`OutOfRange`](DmaUnmapError::OutOfRange) by every strategy, even without copies.
    pub fn sync_for_cpu(&self, mapping: &Mapping<B>, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        self.sync_part(mapping, Toward::Original, (offset, len))
    }

    /// As [`sync_for_cpu`](Self::sync_for_cpu), but makes the CPU's writes visible to the device, and orders the CPU's later writes after them.
    pub fn sync_for_device(&self, mapping: &Mapping<B>, offset: u64, len: u64) -> Result<(), DmaUnmapError> {
        self.sync_part(mapping, Toward::Buffer, (offset, len))
    }

    /// Checks the part, which lanes without copies do not.
    fn sync_part(&self, mapping: &Mapping<B>, into: Toward, part: (u64, u64)) -> Result<(), DmaUnmapError> {
        if mapping.raw.queue() == self.common.number {
            inside(mapping.iova(), mapping.len(), part)?;
        }
        self.sync(&mapping.raw, into, part)
    }
}
