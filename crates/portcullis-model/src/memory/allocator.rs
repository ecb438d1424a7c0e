//! The free frames: a buddy allocator behind a stack of single frames.
//!
//! Page tables are single frames, allocated and freed all the time: those come off a stack in O(1). Runs of frames come from buddy lists in
//! O(log n), lowest address first, so that a small program touches little memory. A run without a block merges the stack back first: only
//! frames in use fragment the memory.
//!
//! Frames are named by number (address / 4096), so that alignment is that of the physical address.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

/// Blocks of up to 2^40 frames: all of a 52-bit physical address space.
const ORDERS: usize = 41;
/// The order of the block that refills an empty stack: the frames of one chunk.
const REFILL_ORDER: usize = 6;

/// The free frames, and the allocated runs.
#[derive(Debug)]
pub(super) struct Allocator {
    singles: Vec<u64>,
    free: Vec<BTreeSet<u64>>,
    runs: FxHashMap<u64, u64>,
    in_use: u64,
    peak: u64,
    /// Allocations until one fails; 0 for never.
    fail_in: u64,
    bad_frees: u64,
}

impl Allocator {
    /// An allocator of `count` free frames from number `first` on.
    pub(super) fn new(first: u64, count: u64) -> Self {
        let mut allocator = Self {
            singles: Vec::new(),
            free: vec![BTreeSet::new(); ORDERS],
            runs: FxHashMap::default(),
            in_use: 0,
            peak: 0,
            fail_in: 0,
            bad_frees: 0,
        };
        allocator.give(first, count);
        allocator
    }

    /// Allocates `count` contiguous frames, aligned to `count` rounded up to a power of two, and returns the first.
    pub(super) fn alloc(&mut self, count: u64) -> Option<u64> {
        if self.fail_in > 0 {
            self.fail_in -= 1;
            if self.fail_in == 0 {
                return None;
            }
        }
        let first = match count {
            0 => return None,
            1 => self.take_single()?,
            _ => self.take_run(count)?,
        };
        self.runs.insert(first, count);
        self.in_use += count;
        self.peak = self.peak.max(self.in_use);
        Some(first)
    }

    /// Frees one [`alloc`](Self::alloc). Anything else is counted and changes nothing.
    pub(super) fn free(&mut self, first: u64, count: u64) -> bool {
        if self.runs.get(&first) != Some(&count) {
            self.bad_frees += 1;
            return false;
        }
        self.runs.remove(&first);
        self.in_use -= count;
        if count == 1 {
            self.singles.push(first);
        } else {
            self.give(first, count);
        }
        true
    }

    /// Makes the `n`-th allocation from now on fail; 0 for none.
    pub(super) fn fail_after(&mut self, n: u64) {
        self.fail_in = n;
    }

    pub(super) fn in_use(&self) -> u64 {
        self.in_use
    }

    pub(super) fn peak(&self) -> u64 {
        self.peak
    }

    pub(super) fn bad_frees(&self) -> u64 {
        self.bad_frees
    }

    fn take_single(&mut self) -> Option<u64> {
        if self.singles.is_empty() {
            match self.take_block(REFILL_ORDER) {
                // Downwards, so that they come off the stack in ascending order.
                Some(block) => self.singles.extend((block..block + (1 << REFILL_ORDER)).rev()),
                None => return self.take_block(0),
            }
        }
        self.singles.pop()
    }

    fn take_run(&mut self, count: u64) -> Option<u64> {
        let block_size = count.checked_next_power_of_two()?;
        let order = block_size.trailing_zeros() as usize;
        let first = match self.take_block(order) {
            Some(first) => first,
            None => {
                for single in std::mem::take(&mut self.singles) {
                    self.give(single, 1);
                }
                self.take_block(order)?
            }
        };
        self.give(first + count, block_size - count);
        Some(first)
    }

    /// A free block of 2^`order` frames, split off a larger one if needed.
    fn take_block(&mut self, order: usize) -> Option<u64> {
        let found = (order..ORDERS).find(|&larger| !self.free[larger].is_empty())?;
        let first = self.free[found].pop_first()?;
        for half in order..found {
            self.free[half].insert(first + (1 << half));
        }
        Some(first)
    }

    /// Frees `count` frames from `first` on to the lists, as the largest aligned blocks.
    fn give(&mut self, mut first: u64, mut count: u64) {
        while count > 0 {
            let aligned = if first == 0 { ORDERS - 1 } else { first.trailing_zeros() as usize };
            let order = aligned.min(count.ilog2() as usize).min(ORDERS - 1);
            self.give_block(first, order);
            first += 1 << order;
            count -= 1 << order;
        }
    }

    /// Frees one block, merged with free buddies.
    fn give_block(&mut self, mut first: u64, mut order: usize) {
        while order + 1 < ORDERS && self.free[order].remove(&(first ^ (1 << order))) {
            first &= !(1 << order);
            order += 1;
        }
        self.free[order].insert(first);
    }
}
