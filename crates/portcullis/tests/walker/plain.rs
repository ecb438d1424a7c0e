//! What is mapped, as a list of pieces.

use std::collections::BTreeMap;

use portcullis::pgtable::Attributes;

/// A piece of memory that is mapped in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub len: u64,
    pub phys: u64,
    pub attributes: Attributes,
}

/// Pieces by the addresses that they begin at. None overlaps another.
#[derive(Debug, Default, Clone)]
pub struct Plain(BTreeMap<u64, Piece>);

impl Plain {
    pub fn insert(&mut self, start: u64, piece: Piece) {
        self.0.insert(start, piece);
    }

    /// The pieces that overlap, the highest first.
    fn overlapping(&self, start: u64, len: u64) -> impl Iterator<Item = (u64, Piece)> {
        let below = self.0.range(..start + len).rev().map(|(at, piece)| (*at, *piece));
        below.take_while(move |(at, piece)| at + piece.len > start)
    }

    /// The lowest address in use.
    pub fn first_in(&self, start: u64, len: u64) -> Option<u64> {
        self.overlapping(start, len).last().map(|(at, _)| at.max(start))
    }

    /// Takes out what lies in the range: the pieces of it.
    pub fn remove(&mut self, start: u64, len: u64) -> Vec<(u64, Piece)> {
        let end = start + len;
        let overlapping: Vec<_> = self.overlapping(start, len).collect();
        let part = |at: u64, piece: Piece, from: u64, to: u64| {
            (from, Piece { len: to - from, phys: piece.phys + (from - at), ..piece })
        };
        let mut removed = Vec::new();
        for (at, piece) in overlapping {
            self.0.remove(&at);
            let (from, to, last) = (at.max(start), (at + piece.len).min(end), at + piece.len);
            removed.push(part(at, piece, from, to));
            self.0.extend((at < from).then(|| part(at, piece, at, from)));
            self.0.extend((to < last).then(|| part(at, piece, to, last)));
        }
        removed
    }

    /// Where `at` leads, and how.
    pub fn find(&self, at: u64) -> Option<(u64, Attributes)> {
        let (&first, piece) = self.0.range(..=at).next_back()?;
        (at - first < piece.len).then(|| (piece.phys + (at - first), piece.attributes))
    }

    pub fn bytes(&self) -> u64 {
        self.0.values().map(|piece| piece.len).sum()
    }

    pub fn pieces(&self) -> Vec<(u64, Piece)> {
        self.0.iter().map(|(at, piece)| (*at, *piece)).collect()
    }
}
