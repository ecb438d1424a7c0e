//! The memory of buffers: how it is taken (always zeroed), wiped, given back, and copied in pieces.
//! Its callers answer for it that no device reaches what they give back.

use super::BouncePool;
use super::single::Parts;
use super::slot::{Slot, Toward};
use crate::addr::{PhysAddr, PhysSegment};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, FRAME_SIZE, Platform};

/// A place in a list of pieces.
struct Cursor<'a> {
    pieces: &'a [PhysSegment],
    /// Bytes of the first piece that are behind.
    at: u64,
}

impl<'a> Cursor<'a> {
    fn new(pieces: &'a [PhysSegment], skip: u64) -> Self {
        let mut cursor = Self { pieces, at: skip };
        cursor.settle();
        cursor
    }

    /// Goes on to the piece that the place is in.
    fn settle(&mut self) {
        while let Some((first, rest)) = self.pieces.split_first()
            && self.at >= first.len
        {
            self.at -= first.len;
            self.pieces = rest;
        }
    }

    /// The rest of the piece.
    fn piece(&self) -> Option<(PhysAddr, u64)> {
        let first = self.pieces.first()?;
        Some((first.phys.checked_add(self.at)?, first.len - self.at))
    }

    fn advance(&mut self, bytes: u64) {
        self.at += bytes;
        self.settle();
    }
}

/// Copies `len` bytes, or as many as there are, from `from_at` bytes into one list of pieces to `to_at` bytes into
/// another: `into` says which of them is the original. O(len + pieces).
///
/// # Safety
/// As [`CopyMemory::copy`], for the bytes of both.
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
        // SAFETY: the bytes are a part of those that the caller vouches for.
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
    /// Allocates `bytes` bytes of zeroed memory, a multiple of the granule. Evicts nothing for it.
    pub(super) fn try_alloc(&self, bytes: u64) -> Option<PhysAddr> {
        self.memory.alloc(usize::try_from(bytes / FRAME_SIZE).ok()?)
    }

    /// Gives memory back.
    ///
    /// # Safety
    /// It came from [`alloc`](Self::alloc), or [`try_alloc`](Self::try_alloc), with the same `bytes`, and no CPU
    /// and no device reaches it.
    pub(crate) unsafe fn free(&self, at: PhysAddr, bytes: u64) {
        // SAFETY: the caller's promise; `alloc` asked for as many frames.
        unsafe { self.memory.free(at, (bytes / FRAME_SIZE) as usize) };
    }

    /// Zeroes what the buffer of a free slot may hold. O(size of the slot).
    pub(super) fn wipe(&self, slot: &Slot, class: usize, kind: usize) {
        let Some(buffer) = slot.buffer() else { return };
        // Devices write anywhere in a buffer that they may write to; in others there is only what was copied in.
        let bytes = if kind == 0 { slot.dirty() } else { self.layout.slot_bytes(class) };
        if bytes > 0 {
            // SAFETY: the buffer is the pool's own, and the slot is in this caller's hands.
            unsafe { self.memory.zero(buffer, bytes) };
        }
        slot.set_dirty(0);
    }

    /// Calls `f` with each piece of memory in `parts`.
    pub(super) fn each_buffer(&self, parts: &Parts, mut f: impl FnMut(PhysSegment)) {
        let len = self.domain.granule().bytes();
        match parts {
            Parts::Whole(buffer) => buffer.iter().for_each(|piece| f(*piece)),
            Parts::Split(ends) => {
                [ends.head, ends.tail]
                    .into_iter()
                    .flatten()
                    .for_each(|(phys, _)| f(PhysSegment { phys, len }));
            }
            Parts::Direct { .. } => {}
        }
    }

    /// # Safety
    /// No device reaches the buffers of `parts`, which came from [`alloc`](Self::alloc).
    pub(super) unsafe fn free_parts(&self, parts: &Parts) {
        // SAFETY: the caller's promise.
        self.each_buffer(parts, |piece| unsafe { self.free(piece.phys, piece.len) });
    }

    /// Bytes of memory in `parts`.
    pub(super) fn bytes_of(&self, parts: &Parts) -> u64 {
        let mut bytes = 0;
        self.each_buffer(parts, |piece| bytes += piece.len);
        bytes
    }
}
