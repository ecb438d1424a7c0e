//! An array of entries with fixed numbers. Taking an entry that was ensured never allocates.

use super::BitmapError;
use alloc::vec::Vec;

const END: u32 = u32::MAX;

/// An entry of a slab. An unused one holds the number of the next.
pub(super) trait Entry: Copy {
    fn unused(next: u32) -> Self;
    fn next(&self) -> u32;
}

pub(super) struct Slab<T> {
    entries: Vec<T>,
    unused: u32,
    used: usize,
}

impl<T: Entry> Slab<T> {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), unused: END, used: 0 }
    }

    #[inline]
    pub(super) fn has(&self, more: usize) -> bool {
        self.entries.capacity().saturating_sub(self.used) >= more
    }

    /// Ensures that `more` entries can be taken without allocating; copies all entries if it has to.
    pub(super) fn ensure(&mut self, more: usize) -> Result<(), BitmapError> {
        if self.has(more) {
            return Ok(());
        }
        let needed = self.used.saturating_add(more);
        // The highest numbers mark the end of the list of unused entries, and uniform blocks in nodes.
        if needed > (u32::MAX - 16) as usize {
            return Err(BitmapError::OutOfMemory);
        }
        // Growing by a constant factor keeps the cost per entry constant; a factor of only 1.5 keeps small spaces
        // small. If there is no memory for that, just enough will do.
        let len = self.entries.len();
        let ample = needed.max(self.entries.capacity() / 2 * 3);
        self.entries
            .try_reserve_exact(ample.saturating_sub(len))
            .or_else(|_| self.entries.try_reserve_exact(needed.saturating_sub(len)))
            .map_err(|_| BitmapError::OutOfMemory)
    }

    /// Takes an entry for `value` and returns its number. Does not allocate after [`Slab::ensure`].
    pub(super) fn take(&mut self, value: &T) -> u32 {
        self.used += 1;
        let number = self.unused;
        if let Some(entry) = self.entries.get_mut(number as usize) {
            self.unused = entry.next();
            *entry = *value;
            return number;
        }
        self.entries.push(*value);
        // `ensure` lets no number become larger.
        (self.entries.len() - 1) as u32
    }

    /// Not inlined: an entry has up to 256 bytes, which would be in the stack frames of its callers.
    #[inline(never)]
    pub(super) fn release(&mut self, number: u32) {
        self.entries[number as usize] = T::unused(self.unused);
        self.unused = number;
        self.used -= 1;
    }

    #[inline]
    pub(super) fn get(&self, number: u32) -> &T {
        &self.entries[number as usize]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, number: u32) -> &mut T {
        &mut self.entries[number as usize]
    }

    pub(super) const fn used(&self) -> usize {
        self.used
    }

    pub(super) const fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<T>()
    }
}
