//! Plain models of an address space, against which the structures are tested, and numbers to test with.
#![allow(dead_code, reason = "each test file uses a part")]

use portcullis::iova::{BitmapError, Placement};
use proptest::prelude::*;

/// A space in which everything is done the obvious way.
pub trait Model {
    /// First page and pages of each hole, from the lowest up.
    fn holes(&self) -> Vec<(u64, u64)>;
    fn release(&mut self, first: u64, end: u64);
    /// Takes what is free there; returns how many pages that was.
    fn take(&mut self, first: u64, end: u64) -> u64;
    fn place(&self, pages: u64, order: u32, max_page: u64, placement: Placement) -> Option<u64>;

    /// The lowest hole that a range overlaps.
    fn overlapped(&self, first: u64, end: u64) -> Option<(u64, u64)> {
        self.holes().into_iter().find(|&(start, pages)| start < end && first < start + pages)
    }
}

/// One flag per page of a small space.
pub struct Flags(Vec<bool>);

impl Flags {
    /// `pages` pages, none of them free.
    pub fn new(pages: u64) -> Self {
        Self(vec![false; pages as usize])
    }
}

impl Model for Flags {
    fn holes(&self) -> Vec<(u64, u64)> {
        let mut holes: Vec<(u64, u64)> = Vec::new();
        for page in (0..self.0.len()).filter(|&page| self.0[page]) {
            match holes.last_mut() {
                Some((start, pages)) if *start + *pages == page as u64 => *pages += 1,
                _ => holes.push((page as u64, 1)),
            }
        }
        holes
    }

    fn release(&mut self, first: u64, end: u64) {
        self.0[first as usize..end as usize].fill(true);
    }

    fn take(&mut self, first: u64, end: u64) -> u64 {
        let len = self.0.len();
        let flags = &mut self.0[(first as usize).min(len)..(end as usize).min(len)];
        let taken = flags.iter().filter(|free| **free).count() as u64;
        flags.fill(false);
        taken
    }

    fn place(&self, pages: u64, order: u32, max_page: u64, placement: Placement) -> Option<u64> {
        let len = self.0.len() as u64;
        let fits = |start: &u64| {
            let end = start.saturating_add(pages);
            start.is_multiple_of(1 << order)
                && end <= len
                && end - 1 <= max_page
                && self.0[*start as usize..end as usize].iter().all(|free| *free)
        };
        match placement {
            Placement::TopDown => (0..len).rev().find(fits),
            Placement::BottomUp => (0..len).find(fits),
        }
    }
}

/// A list of free ranges, for a space of any size.
#[derive(Default)]
pub struct List(Vec<(u64, u64)>);

impl Model for List {
    fn holes(&self) -> Vec<(u64, u64)> {
        self.0.iter().map(|&(start, end)| (start, end - start)).collect()
    }

    fn release(&mut self, first: u64, end: u64) {
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

    fn take(&mut self, first: u64, end: u64) -> u64 {
        let free = |list: &Self| list.0.iter().map(|hole| hole.1 - hole.0).sum::<u64>();
        let before = free(self);
        let parts =
            self.0.iter().flat_map(|&(start, stop)| [(start, stop.min(first)), (start.max(end), stop)]);
        self.0 = parts.filter(|part| part.0 < part.1).collect();
        before - free(self)
    }

    fn place(&self, pages: u64, order: u32, max_page: u64, placement: Placement) -> Option<u64> {
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
