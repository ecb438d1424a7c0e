//! A hash table of recently found entries, in front of the index. A result is only a hint, which the caller checks.

use super::index::Span;

/// The most places: four for each possible entry, up to this number.
const MOST_PLACES: usize = 1 << 17;

/// An entry's number in each place, by the hash of its range. The caller checks the entry: the number may belong to another range with the
/// same hash, or to an entry that has ended.
#[derive(Debug)]
pub(super) struct Recent {
    /// The places, a power of two of them.
    places: Box<[u32]>,
}

impl Recent {
    /// Makes a table for `entries` entries; `None` without memory.
    pub(super) fn new(entries: usize) -> Option<Self> {
        let len = entries.saturating_mul(4).min(MOST_PLACES).next_power_of_two();
        let mut places = Vec::new();
        places.try_reserve_exact(len).ok()?;
        places.resize(len, 0);
        Some(Self { places: places.into_boxed_slice() })
    }

    /// Returns the number that was stored for `span`, or any other.
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
        // Fibonacci hashing: it separates neighbours at power-of-two distances, as buffers are.
        (span.mixed().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & (self.places.len() - 1)
    }
}
