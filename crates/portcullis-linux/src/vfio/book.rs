//! Which mappings a kernel has: a kernel removes a mapping as a whole only, so one must know where each begins and ends.

use std::collections::BTreeMap;

use portcullis::addr::{Iova, IovaRange};

use super::ranges::common;

/// The mappings of an address space, which lie apart.
#[derive(Debug, Default)]
pub struct Book {
    /// By their first address.
    mappings: BTreeMap<Iova, IovaRange>,
    bytes: u64,
}

impl Book {
    /// How many there are.
    pub fn len(&self) -> u64 {
        self.mappings.len() as u64
    }

    /// How many bytes they have together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The mappings that overlap `range`, in order. O(log n) for each.
    fn touching(&self, range: IovaRange) -> impl Iterator<Item = IovaRange> + '_ {
        let before = self.mappings.range(..range.start()).next_back();
        let inside = self.mappings.range(range.start()..=range.last());
        before
            .into_iter()
            .chain(inside)
            .map(|(_, mapping)| *mapping)
            .filter(move |mapping| common(*mapping, range).is_some())
    }

    /// Adds a mapping.
    ///
    /// # Errors
    /// The lowest of its addresses that is in use: nothing is added.
    pub fn add(&mut self, mapping: IovaRange) -> Result<(), Iova> {
        if let Some(other) = self.touching(mapping).next() {
            return Err(other.start().max(mapping.start()));
        }
        self.mappings.insert(mapping.start(), mapping);
        self.bytes = self.bytes.saturating_add(mapping.len());
        Ok(())
    }

    /// Takes those out that lie in `range` as a whole, and returns them, and how many bytes of others lie there.
    pub fn take(&mut self, range: IovaRange) -> (Vec<IovaRange>, u64) {
        let (mut whole, mut kept) = (Vec::new(), 0);
        for mapping in self.touching(range) {
            if range.contains_range(mapping) {
                whole.push(mapping);
            } else {
                kept += common(mapping, range).map_or(0, IovaRange::len);
            }
        }
        for mapping in &whole {
            self.mappings.remove(&mapping.start());
            self.bytes -= mapping.len();
        }
        (whole, kept)
    }
}

/// Joins ranges that lie beside each other, which come in order.
pub fn joined(ranges: &[IovaRange]) -> impl Iterator<Item = &[IovaRange]> {
    ranges.chunk_by(|one, next| one.last().checked_add(1) == Some(next.start()))
}
