//! Allocates (zeroed), wipes, copies, unmaps and frees the memory of buffers. Callers ensure that no device reaches freed memory.

use super::BouncePool;
use super::slot::{Slot, Toward};
use crate::addr::{IovaRange, PhysAddr, PhysSegment};
use crate::invalidation::{Gather, InvalidationError};
use crate::mapper::Mapper;
use crate::pgtable::Unmapped;
use crate::platform::{CopyMemory, FRAME_SIZE, Platform};
use crate::sync::Ordering;

struct Cursor<'a> {
    pieces: &'a [PhysSegment],
    at: u64,
}

impl<'a> Cursor<'a> {
    fn new(pieces: &'a [PhysSegment], skip: u64) -> Self {
        let mut cursor = Self { pieces, at: skip };
        cursor.skip_finished();
        cursor
    }

    fn skip_finished(&mut self) {
        while let Some((first, rest)) = self.pieces.split_first()
            && self.at >= first.len
        {
            self.at -= first.len;
            self.pieces = rest;
        }
    }

    fn piece(&self) -> Option<(PhysAddr, u64)> {
        let first = self.pieces.first()?;
        Some((first.phys.checked_add(self.at)?, first.len - self.at))
    }

    fn advance(&mut self, bytes: u64) {
        self.at += bytes;
        self.skip_finished();
    }
}

/// Copies `len` bytes, or as many as there are, from byte `from_at` of one list of pieces to byte `to_at` of another. `into` says which of them is
/// the original. O(len + pieces).
///
/// # Safety
/// As [`CopyMemory::copy`], for the bytes of both lists.
pub(super) unsafe fn copy_pieces<C: CopyMemory>(
    memory: &C,
    (from, from_at): (&[PhysSegment], u64),
    (to, to_at): (&[PhysSegment], u64),
    len: u64,
    into: Toward,
) {
    let (mut from, mut to) = (Cursor::new(from, from_at), Cursor::new(to, to_at));
    let mut left = len;
    while left > 0
        && let (Some((source, here)), Some((target, there))) = (from.piece(), to.piece())
    {
        let count = here.min(there).min(left);
        // SAFETY: a part of the bytes for which the caller has `copy`'s clauses.
        unsafe {
            match into {
                Toward::Buffer => memory.copy_in(source, target, count),
                Toward::Original => memory.copy_out(source, target, count),
            }
        }
        from.advance(count);
        to.advance(count);
        left -= count;
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// As [`alloc`](Self::alloc), but evicts nothing.
    pub(super) fn try_alloc(&self, bytes: u64) -> Option<PhysAddr> {
        self.memory.alloc(usize::try_from(bytes / FRAME_SIZE).ok()?)
    }

    /// Frees memory.
    ///
    /// # Safety
    /// 1. It came from [`alloc`](Self::alloc), or [`try_alloc`](Self::try_alloc), with the same `bytes`.
    /// 2. No CPU and no device reaches it.
    pub(crate) unsafe fn free(&self, at: PhysAddr, bytes: u64) {
        // SAFETY: `Frames::free` asks for clauses 1 and 2, which are the caller's; `alloc` asked for this number of frames.
        unsafe { self.memory.free(at, (bytes / FRAME_SIZE) as usize) };
    }

    /// Zeroes all bytes that the buffer of a free slot may hold. O(size of the slot).
    pub(super) fn wipe(&self, slot: &Slot, class: usize, kind: usize) {
        let Some(buffer) = slot.buffer() else { return };
        // Devices write anywhere in a buffer for writing; other buffers hold only bytes that were copied in.
        let bytes = if kind == 0 { slot.dirty.get() } else { self.layout.slot_bytes(class) };
        if bytes > 0 {
            // SAFETY: the buffer is the pool's own memory, and this caller owns the slot.
            unsafe { self.memory.zero(buffer, bytes) };
        }
        slot.dirty.set(0);
    }

    /// Removes the translations of `range`, which the pool has made, and adds all of it to `gather`. Returns whether all were there. If not, another
    /// caller has removed some by address, perhaps without an invalidation: the gather becomes everything, and the addresses must leak.
    #[must_use]
    pub(super) fn unlink(&self, range: IovaRange, gather: &mut Gather) -> bool {
        let Unmapped { bytes, kept, .. } = self.domain.unlink(range, gather);
        if kept > 0 {
            self.still_mapped.fetch_add(kept, Ordering::Relaxed);
        }
        bytes == range.len()
    }

    /// Waits until no device reaches what is in `gather`. Once the mapper has failed to remove a mapping of the pool's, always returns an error. What
    /// was mapped as a whole can be unmapped as a whole, so that mapper has broken its contract: the pool cannot know which memory is safe, and frees
    /// none any more.
    pub(super) fn confirm(&self, gather: &Gather) -> Result<(), InvalidationError> {
        self.domain.confirm(gather)?;
        // Relaxed: either this caller counted them, or a caller whose slots it took over under the depot's lock did.
        match self.still_mapped.load(Ordering::Relaxed) {
            0 => Ok(()),
            bytes => Err(InvalidationError::StillMapped { bytes }),
        }
    }
}
