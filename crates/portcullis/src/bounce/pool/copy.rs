//! Copies between buffers in pieces.

use crate::addr::PhysAddr;
use crate::domain::PhysSegment;
use crate::platform::CopyMemory;

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
/// another. O(len + pieces).
///
/// # Safety
/// As [`CopyMemory::copy`], for the bytes of both.
pub(super) unsafe fn copy_pieces<C: CopyMemory>(
    memory: &C,
    (from, from_at): (&[PhysSegment], u64),
    (to, to_at): (&[PhysSegment], u64),
    len: u64,
) {
    let (mut from, mut to) = (Cursor::new(from, from_at), Cursor::new(to, to_at));
    let mut left = len;
    while left > 0
        && let (Some((source, here)), Some((target, there))) = (from.piece(), to.piece())
    {
        let count = here.min(there).min(left);
        // SAFETY: the bytes are a part of those that the caller vouches for.
        unsafe { memory.copy(source, target, count) };
        from.advance(count);
        to.advance(count);
        left -= count;
    }
}
