//! The contents of buffers: bytes that drivers and devices write, and verify.
//!
//! Every transfer has a tag of its own, which determines each of its bytes; so bytes of an earlier transfer, or of another place, are
//! detected. The usual replay writes and verifies only the first and the last eight bytes of each page of a buffer, so that it costs
//! little; the full one all of them.
//!
//! A byte also identifies its owner: its upper half is the device's [`colour`], 1 to 7. [`Paint`](super::painted) has the top bit set, and
//! memory begins as zeros.

use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::platform::FRAME_SIZE;

use super::memory::TraceMemory;

/// Bytes at each end of a page's part that are written and verified.
const SAMPLE: u64 = 8;

/// A mask of the lower halves of a word's bytes.
const LOW_HALVES: u64 = 0x0f0f_0f0f_0f0f_0f0f;
const ONES: u64 = 0x0101_0101_0101_0101;

/// The colour of a device's bytes: 1 to 7.
pub(super) fn colour(device: usize) -> u8 {
    (device % 7) as u8 + 1
}

/// Hashes a number to 64 bits.
pub(super) fn mix(number: u64) -> u64 {
    let mut x = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// The bytes of one transfer, by their offset in the mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Pattern {
    pub tag: u64,
    pub colour: u8,
}

impl Pattern {
    fn fill(self, offset: u64, bytes: &mut [u8]) {
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let whose = u64::from(self.colour) * 16 * ONES;
            let word = (mix((self.tag << 32) ^ (at / 8)) & LOW_HALVES) | whose;
            let skip = (at % 8) as usize;
            let (piece, after) = rest.split_at_mut((8 - skip).min(rest.len()));
            piece.copy_from_slice(&word.to_le_bytes()[skip..skip + piece.len()]);
            at += piece.len() as u64;
            rest = after;
        }
    }
}

/// The bytes of a mapping that are written and verified.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places<'a> {
    /// The buffer, whose pages determine the places.
    pub buffer: &'a [PhysSegment],
    /// From this offset in it,
    pub first: u64,
    /// to this one.
    pub end: u64,
    /// Only inside these offsets.
    pub within: (u64, u64),
    /// All bytes, or only those at the ends of each page's part.
    pub in_full: bool,
}

impl Places<'_> {
    /// Calls `each` with the offset and the length of each run of bytes, of up to a page.
    fn each(&self, mut each: impl FnMut(u64, u64)) {
        let mut each = |offset: u64, len: u64| {
            let (from, to) = (offset.max(self.within.0), (offset + len).min(self.within.1));
            if from < to {
                each(from, to - from);
            }
        };
        let mut begins = 0;
        for part in self.buffer {
            let (mut at, end) = (self.first.max(begins), self.end.min(begins + part.len));
            while at < end {
                let phys = part.phys.get().wrapping_add(at - begins);
                let len = (FRAME_SIZE - phys % FRAME_SIZE).min(end - at);
                if self.in_full || len <= 2 * SAMPLE {
                    each(at, len);
                } else {
                    each(at, SAMPLE);
                    each(at + len - SAMPLE, SAMPLE);
                }
                at += len;
            }
            begins += part.len;
        }
    }
}

/// Memory with a mapping's bytes from an offset on: the buffer, or the device's view.
pub(super) struct Bytes<'a> {
    memory: &'a TraceMemory,
    list: &'a [PhysSegment],
    /// The last piece used, and the offset of its first byte.
    piece: usize,
    begins: u64,
}

impl<'a> Bytes<'a> {
    /// `list` has the bytes from `offset` on.
    pub(super) fn new(memory: &'a TraceMemory, list: &'a [PhysSegment], offset: u64) -> Self {
        Self { memory, list, piece: 0, begins: offset }
    }

    pub(super) fn put(mut self, places: Places<'_>, pattern: Pattern) {
        let mut page = [0; FRAME_SIZE as usize];
        places.each(|offset, len| {
            let bytes = &mut page[..len as usize];
            pattern.fill(offset, bytes);
            let mut done = 0;
            self.pieces(offset, len, |memory, phys, len| {
                memory.write(phys, &bytes[done..done + len]);
                done += len;
            });
        });
    }

    /// Runs of `places` that differ from `pattern`, among the runs that `counts` accepts.
    pub(super) fn wrong(
        mut self,
        places: Places<'_>,
        pattern: Pattern,
        counts: impl Fn(PhysAddr) -> bool,
    ) -> u64 {
        let (mut expected, mut found) = ([0; FRAME_SIZE as usize], [0; FRAME_SIZE as usize]);
        let mut wrong = 0;
        places.each(|offset, len| {
            let expected = &mut expected[..len as usize];
            pattern.fill(offset, expected);
            let mut done = 0;
            self.pieces(offset, len, |memory, phys, len| {
                if counts(phys) {
                    memory.read(phys, &mut found[..len]);
                    wrong += u64::from(found[..len] != expected[done..done + len]);
                }
                done += len;
            });
        });
        wrong
    }

    /// Calls `each` with the addresses of the `len` bytes from `offset` on, in order.
    fn pieces(&mut self, offset: u64, len: u64, mut each: impl FnMut(&TraceMemory, PhysAddr, usize)) {
        let mut at = offset;
        while at < offset + len {
            let Some(part) = self.list.get(self.piece) else { return };
            let skip = at - self.begins;
            if skip >= part.len {
                self.begins += part.len;
                self.piece += 1;
                continue;
            }
            let count = (part.len - skip).min(offset + len - at);
            each(self.memory, PhysAddr::new(part.phys.get().wrapping_add(skip)), count as usize);
            at += count;
        }
    }
}
