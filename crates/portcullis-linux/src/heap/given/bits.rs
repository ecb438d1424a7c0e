//! Bits that many threads set, clear and test, each with one owner at a time.
//!
//! All accesses are `Relaxed`. A frame's bit is set before its allocation returns, and cleared before its memory is freed. A thread that
//! tests it has the frame's address from its owner, with a happens-before edge between them (or from the allocator, which got the memory
//! back from that owner with such an edge), so it sees the bit as the owner left it. Other bits of the word change meanwhile by
//! read-modify-writes, which do not affect this one.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

pub const WORD_BITS: usize = u64::BITS as usize;

#[derive(Debug, Default)]
pub struct Bits(AtomicU64);

impl Bits {
    pub fn set(&self, bit: usize) {
        self.0.fetch_or(1 << bit, Ordering::Relaxed);
    }

    pub fn clear(&self, bit: usize) {
        self.0.fetch_and(!(1 << bit), Ordering::Relaxed);
    }

    pub fn is_set(&self, bit: usize) -> bool {
        self.0.load(Ordering::Relaxed) & 1 << bit != 0
    }
}
