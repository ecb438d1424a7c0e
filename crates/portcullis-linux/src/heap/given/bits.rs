//! Bits that many threads set, clear and look at, each of them one that has an owner: a set of numbers, of which `set` adds one,
//! `clear` removes one, and `is_set` looks for one.
//!
//! All is `Relaxed`. A frame's bit is set before the allocation returns its address, and cleared before the memory goes back to
//! the allocator. A thread that looks at it has the frame's address from its owner, in an order that the two have between them
//! (or from the allocator, which has taken the memory back from that owner in such an order), so it sees the bit as the owner left it.
//! Bits of neighbours change meanwhile, by read-modify-writes that leave this one alone.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// How many there are.
pub const WORD_BITS: usize = u64::BITS as usize;

/// Some bits, none of them set at first.
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
