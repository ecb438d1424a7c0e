//! The program's heap: so that where its values lie is the same in each run, and as with an allocator that gives each CPU
//! memory of its own.
//!
//! Blocks are powers of two and aligned to their size. Each CPU takes chunks for its small blocks; a block that it frees
//! is the next that it gets, whoever had allocated it. What the allocator itself would touch is not seen.

use std::collections::HashMap;
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Where it is, if that is free: the same in each run.
const BASE: usize = 0x1000_0000_0000;

/// Addresses, of which only those are memory that are used.
const BYTES: usize = 1 << 40;

/// The least that a CPU takes for its blocks.
const CHUNK_BITS: u32 = 16;

/// The smallest block.
const LEAST_BITS: u32 = 4;

/// All memory of the program.
pub struct Heap {
    base: usize,
    end: usize,
    /// Below it, everything has been taken.
    next: usize,
    /// For each chunk the size of its blocks, as a power of two.
    chunks: Vec<u8>,
    /// Free blocks by owner and size, and whether they have been used.
    free: HashMap<(usize, u32), Vec<(usize, bool)>>,
}

static HEAP: OnceLock<Option<Mutex<Heap>>> = OnceLock::new();

/// Runs `f` on the heap; `None` where there is none.
pub fn with<R>(f: impl FnOnce(&mut Heap) -> R) -> Option<R> {
    let heap = HEAP.get_or_init(|| Heap::map().map(Mutex::new)).as_ref()?;
    Some(f(&mut heap.lock().unwrap_or_else(PoisonError::into_inner)))
}

/// `size` bytes at a multiple of `align` for CPU `owner`, or null; `zeroed` if asked for.
pub fn allocate(owner: usize, size: usize, align: usize, zeroed: bool) -> *mut u8 {
    let block = with(|heap| heap.take(owner, size, align)).flatten();
    let Some((block, used)) = block else { return ptr::null_mut() };
    let block = ptr::with_exposed_provenance_mut::<u8>(block);
    if zeroed && used {
        // SAFETY: the block has `size` bytes and nobody else has it.
        unsafe { block.write_bytes(0, size) };
    }
    block
}

impl Heap {
    fn map() -> Option<Self> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let kind = kind | libc::MAP_NORESERVE;
        let wanted = ptr::without_provenance_mut(BASE);
        // SAFETY: new memory where there is none: the address is a hint.
        let memory = unsafe { libc::mmap(wanted, BYTES, access, kind, -1, 0) };
        if memory == libc::MAP_FAILED {
            return None;
        }
        // Aligned, for blocks are.
        let base = memory.expose_provenance().next_multiple_of(1 << 30);
        let chunks = vec![0; BYTES >> CHUNK_BITS];
        let end = memory.addr() + BYTES;
        Some(Self { base, end, next: base, chunks, free: HashMap::new() })
    }

    fn chunk(&self, block: usize) -> usize {
        (block - self.base) >> CHUNK_BITS
    }

    /// A block, and whether it was used before.
    fn take(&mut self, owner: usize, size: usize, align: usize) -> Option<(usize, bool)> {
        let bits = size.max(align).max(1 << LEAST_BITS).checked_next_power_of_two()?.trailing_zeros();
        if let Some(block) = self.free.get_mut(&(owner, bits)).and_then(Vec::pop) {
            return Some(block);
        }
        let piece = 1 << bits.max(CHUNK_BITS);
        let first = self.next.checked_next_multiple_of(piece)?;
        self.next = first.checked_add(piece).filter(|end| *end <= self.end)?;
        let chunk = self.chunk(first);
        self.chunks[chunk] = bits as u8;
        let blocks = (first..self.next).step_by(1 << bits).rev().map(|block| (block, false));
        let free = self.free.entry((owner, bits)).or_default();
        free.extend(blocks);
        free.pop()
    }

    /// Whether the heap has given out `block`, and then how large it is.
    pub fn size_of(&self, block: usize) -> Option<usize> {
        (self.base..self.next).contains(&block).then(|| 1 << self.chunks[self.chunk(block)])
    }

    /// Takes a block back; whether it was of the heap.
    pub fn free(&mut self, owner: usize, block: usize) -> bool {
        let Some(size) = self.size_of(block) else { return false };
        self.free.entry((owner, size.trailing_zeros())).or_default().push((block, true));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_and_their_cpus_own() {
        let mut heap = Heap::map().unwrap();
        let mut take = |owner, size, align| heap.take(owner, size, align).unwrap();
        let (a, b, c) = (take(0, 24, 8), take(0, 24, 8), take(1, 24, 8));
        assert_eq!((b.0 - a.0, a.0 % 32), (32, 0));
        assert!(c.0.abs_diff(a.0) >= 1 << CHUNK_BITS);
        let (table, pool) = (take(1, 4096, 4096), take(1, (1 << 20) + 1, 8));
        assert_eq!((table.0 % 4096, pool.0 % (2 << 20)), (0, 0));
        assert_eq!((heap.size_of(b.0), heap.size_of(pool.0)), (Some(32), Some(2 << 20)));
        // The CPU that frees a block has it.
        assert!(heap.free(1, b.0) && !heap.free(1, 4096));
        assert_eq!(heap.take(1, 17, 1), Some((b.0, true)));
    }
}
