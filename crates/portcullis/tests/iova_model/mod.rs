//! A plain model of an address space, and numbers to test with.
#![allow(dead_code, reason = "each test file uses a part")]

use portcullis::iova::{BitmapError, Placement};
use proptest::prelude::*;

/// A list of free ranges, on which everything is done the obvious way.
#[derive(Default)]
pub struct List(Vec<(u64, u64)>);

impl List {
    /// First page and pages of each hole, from the lowest up.
    pub fn holes(&self) -> Vec<(u64, u64)> {
        self.0.iter().map(|&(start, end)| (start, end - start)).collect()
    }

    pub fn release(&mut self, first: u64, end: u64) {
        self.0.push((first, end));
        self.0.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for &(start, end) in &self.0 {
            match joined.last_mut() {
                Some(last) if last.1 == start => last.1 = end,
                _ => joined.push((start, end)),
            }
        }
        self.0 = joined;
    }

    /// Takes what is free there; returns how many pages that was.
    pub fn take(&mut self, first: u64, end: u64) -> u64 {
        let free = |list: &Self| list.0.iter().map(|hole| hole.1 - hole.0).sum::<u64>();
        let before = free(self);
        let parts =
            self.0.iter().flat_map(|&(start, stop)| [(start, stop.min(first)), (start.max(end), stop)]);
        self.0 = parts.filter(|part| part.0 < part.1).collect();
        before - free(self)
    }

    pub fn place(&self, pages: u64, order: u32, max_page: u64, placement: Placement) -> Option<u64> {
        let mut places = self.0.iter().filter_map(|&(start, end)| {
            let end = end.min(max_page.saturating_add(1));
            let first = match placement {
                Placement::TopDown => (end.checked_sub(pages)? >> order) << order,
                Placement::BottomUp => start.checked_next_multiple_of(1 << order)?,
            };
            (first >= start && first.checked_add(pages)? <= end).then_some(first)
        });
        match placement {
            Placement::TopDown => places.max(),
            Placement::BottomUp => places.next(),
        }
    }
    /// The lowest hole that a range overlaps.
    pub fn overlapped(&self, first: u64, end: u64) -> Option<(u64, u64)> {
        self.holes().into_iter().find(|&(start, pages)| start < end && first < start + pages)
    }
}

/// What a range is refused for in any space, or the page behind it, which is `most` at the most.
pub fn end_of(first: u64, pages: u64, most: u64) -> Result<u64, BitmapError> {
    if pages == 0 {
        return Err(BitmapError::Empty);
    }
    first.checked_add(pages).filter(|end| *end <= most).ok_or(BitmapError::Wraps { first, pages })
}

/// Sizes on either side of every power of two.
pub fn sizes(bits: u32) -> impl Strategy<Value = u64> {
    (0..bits, 0..3_u64, any::<u64>()).prop_map(|(bits, kind, random)| match kind {
        0 => 1 << bits,
        1 => (1 << bits) + random % 3 - 1,
        _ => 1 + random % (1 << bits),
    })
}

/// A generator of numbers for the tests that are too large for a shrinking one.
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % bound
    }

    /// Puts `items` into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}
