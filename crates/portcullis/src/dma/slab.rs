//! Records of mappings, by the index in a mapping's token. A map finds a place in O(1), and allocates only if there are more records than ever before;
//! an unmap allocates nothing.

use alloc::vec::Vec;

#[derive(Debug, Default)]
pub(super) struct Slab<T> {
    /// By index. One that is free may hold an earlier record, whose memory is used again.
    pub(super) records: Vec<T>,
    /// Has room for all indices.
    free: Vec<usize>,
}

impl<T: Default> Slab<T> {
    /// The index that the next [`take`](Self::take) takes. `None` without memory.
    pub(super) fn vacant(&mut self) -> Option<usize> {
        if self.free.is_empty() {
            let index = self.records.len();
            self.records.try_reserve(1).ok()?;
            self.free.try_reserve(index + 1).ok()?;
            self.records.push(T::default());
            self.free.push(index);
        }
        self.free.last().copied()
    }

    pub(super) fn take(&mut self) -> Option<usize> {
        self.free.pop()
    }

    pub(super) fn free(&mut self, index: usize) {
        self.free.push(index);
    }
}
