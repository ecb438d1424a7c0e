//! The record of the kernel's mappings: a kernel removes only whole mappings, so the mapper must know their bounds. It also has their
//! memory and permissions: a container without a device gets its mappings again later.

use std::collections::BTreeMap;

use portcullis::addr::{Iova, IovaRange};

use super::ranges::common;
use crate::pieces::Piece;

/// The mappings of an address space, without overlaps.
#[derive(Debug, Default)]
pub struct Book {
    /// By their first address.
    mappings: BTreeMap<Iova, Piece>,
    bytes: u64,
}

impl Book {
    /// How many there are.
    pub fn len(&self) -> u64 {
        self.mappings.len() as u64
    }

    /// Their total bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All of them, in order.
    pub fn all(&self) -> impl Iterator<Item = Piece> + '_ {
        self.mappings.values().copied()
    }

    /// The mappings that overlap `range`, in order. O(log n) for each.
    fn touching(&self, range: IovaRange) -> impl Iterator<Item = Piece> + '_ {
        let before = self.mappings.range(..range.start()).next_back();
        let inside = self.mappings.range(range.start()..=range.last());
        before
            .into_iter()
            .chain(inside)
            .map(|(_, mapping)| *mapping)
            .filter(move |mapping| common(mapping.range, range).is_some())
    }

    /// Adds a mapping.
    ///
    /// # Errors
    /// The lowest of its addresses that is in use: nothing is added.
    pub fn add(&mut self, mapping: Piece) -> Result<(), Iova> {
        let start = mapping.range.start();
        if let Some(other) = self.touching(mapping.range).next() {
            return Err(other.range.start().max(start));
        }
        self.mappings.insert(start, mapping);
        self.bytes = self.bytes.saturating_add(mapping.range.len());
        Ok(())
    }

    /// Removes and returns mappings that lie in `range` as a whole, and how many bytes of others lie there.
    pub fn take(&mut self, range: IovaRange) -> (Vec<Piece>, u64) {
        let (mut whole, mut kept) = (Vec::new(), 0);
        for mapping in self.touching(range) {
            if range.contains_range(mapping.range) {
                whole.push(mapping);
            } else {
                kept += common(mapping.range, range).map_or(0, IovaRange::len);
            }
        }
        for mapping in &whole {
            self.mappings.remove(&mapping.range.start());
            self.bytes -= mapping.range.len();
        }
        (whole, kept)
    }
}

/// Groups sorted mappings that are adjacent.
pub fn joined(mappings: &[Piece]) -> impl Iterator<Item = &[Piece]> {
    mappings.chunk_by(|one, next| one.range.last().checked_add(1) == Some(next.range.start()))
}
