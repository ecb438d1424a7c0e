//! What one thread of a benchmark drives: mappings with numbers, each made or not.

/// A thread's mappings, each of which is made or not.
pub trait Lane: Send {
    /// Maps buffer `index`; whether that worked.
    fn map(&mut self, index: usize) -> bool;

    /// Unmaps it; whether that worked.
    fn unmap(&mut self, index: usize) -> bool;

    /// What the device was given for buffer `index` when it was mapped last.
    fn address(&self, index: usize) -> u64;

    /// Maps and unmaps buffer 0, `count` times; in a loop that is compiled for the subject, as those below.
    fn pairs(&mut self, count: u64) -> bool {
        (0..count).all(|_| self.map(0) && self.unmap(0))
    }

    /// Maps the buffers from `first` up to `end`.
    fn maps(&mut self, first: usize, end: usize) -> bool {
        (first..end).all(|index| self.map(index))
    }

    /// Unmaps each of them and maps it again.
    fn renews(&mut self, first: usize, end: usize) -> bool {
        (first..end).all(|index| self.unmap(index) && self.map(index))
    }

    /// Unmaps them.
    fn unmaps(&mut self, first: usize, end: usize) -> bool {
        (first..end).all(|index| self.unmap(index))
    }

    /// Commits what waits for the rest of a batch; whether that worked.
    fn finish(&mut self) -> bool {
        true
    }
}

/// Remembers what was mapped as buffer `index`.
#[inline]
pub(crate) fn put<T>(places: &mut [T], index: usize, value: Option<T>) -> bool {
    match (places.get_mut(index), value) {
        (Some(place), Some(value)) => {
            *place = value;
            true
        }
        _ => false,
    }
}
