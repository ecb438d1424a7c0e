//! A plain model of an address space, and numbers to test with.
#![allow(dead_code, reason = "each test file uses a part")]

use portcullis::iova::{Bitmap, BitmapError, MAX_ORDER, Survey};
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
        let before = self.free_pages();
        let parts =
            self.0.iter().flat_map(|&(start, stop)| [(start, stop.min(first)), (start.max(end), stop)]);
        self.0 = parts.filter(|part| part.0 < part.1).collect();
        before - self.free_pages()
    }

    pub fn place(&self, pages: u64, order: u32, max_page: u64) -> Option<u64> {
        let places = self.0.iter().filter_map(|&(start, end)| {
            let end = end.min(max_page.saturating_add(1));
            let first = (end.checked_sub(pages)? >> order) << order;
            (first >= start).then_some(first)
        });
        places.max()
    }

    /// The lowest hole that a range overlaps.
    pub fn overlapped(&self, first: u64, end: u64) -> Option<(u64, u64)> {
        self.holes().into_iter().find(|&(start, pages)| start < end && first < start + pages)
    }

    /// What giving back or adding a range says in a space of `most` pages, or the page behind the range.
    pub fn freed(&self, first: u64, pages: u64, most: u64) -> Result<u64, BitmapError> {
        let end = end_of(first, pages, most)?;
        self.overlapped(first, end).map_or(Ok(end), |_| Err(BitmapError::Invalid))
    }

    /// What an allocation gives.
    pub fn allocated(&self, pages: u64, align_order: u32, max_page: u64) -> Result<u64, BitmapError> {
        if pages == 0 || align_order > MAX_ORDER {
            return Err(BitmapError::Invalid);
        }
        self.place(pages, align_order, max_page).ok_or(BitmapError::NoFit)
    }

    pub fn free_pages(&self) -> u64 {
        self.holes().iter().map(|hole| hole.1).sum()
    }

    pub fn largest_hole(&self) -> u64 {
        self.holes().iter().map(|hole| hole.1).max().unwrap_or(0)
    }
}

/// The pages of the largest hole, by a survey.
pub fn largest_hole(bitmap: &Bitmap) -> u64 {
    let mut survey = Survey::new(u64::MAX);
    while !bitmap.survey(&mut survey) {}
    survey.largest
}

/// What a range is refused for in any space, or the page behind it, which is `most` at the most.
pub fn end_of(first: u64, pages: u64, most: u64) -> Result<u64, BitmapError> {
    let end = first.checked_add(pages).filter(|end| pages > 0 && *end <= most);
    end.ok_or(BitmapError::Invalid)
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
