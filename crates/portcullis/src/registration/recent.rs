//! Where ranges were found last: a table in front of the ordered index.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::index::Span;

/// Four places for each entry that there may be, up to so many.
const MOST_PLACES: usize = 1 << 17;

/// A number of an entry in each place, one place for each range, by its hash. Whoever looks checks what it finds: a
/// number may be of another range that has the same place, or of an entry that is gone.
#[derive(Debug)]
pub(super) struct Recent {
    /// A power of two.
    places: Box<[u32]>,
}

impl Recent {
    /// For `entries` entries; `None` without memory.
    pub(super) fn new(entries: usize) -> Option<Self> {
        let len = entries.saturating_mul(4).min(MOST_PLACES).next_power_of_two();
        let mut places = Vec::new();
        places.try_reserve_exact(len).ok()?;
        places.resize(len, 0);
        Some(Self { places: places.into_boxed_slice() })
    }

    /// The number that was put there for `span`, or any other.
    #[inline]
    pub(super) fn get(&self, span: &Span) -> u32 {
        self.places[self.place(span)]
    }

    pub(super) fn put(&mut self, span: &Span, slot: u32) {
        let place = self.place(span);
        self.places[place] = slot;
    }

    #[inline]
    fn place(&self, span: &Span) -> usize {
        // Fibonacci hashing: neighbours by a power of two, which buffers are, end far apart.
        (span.mixed().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & (self.places.len() - 1)
    }
}
