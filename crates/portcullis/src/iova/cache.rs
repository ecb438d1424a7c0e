//! The ranges that one CPU has freed and may soon want again.

/// Size classes that are cached: 1, 2, 4, .. 512 granules (4 KiB to 2 MiB with the usual granule).
pub const CACHED_ORDERS: u32 = 10;

/// Entries that one magazine holds at the most.
const MAGAZINE: usize = 64;

/// Bytes that a magazine of one size class holds at the most with granules of 4 KiB: 64 ranges of one or two
/// granules, 512 KiB of the classes up to 256 KiB, and two ranges of those above.
pub const MAGAZINE_BYTES: u64 = 512 << 10;

/// How many ranges of `order` one CPU keeps.
const fn capacity(order: u32) -> usize {
    let fitting = (MAGAZINE_BYTES >> 12 >> order) as usize;
    if fitting > MAGAZINE {
        MAGAZINE
    } else if fitting < 2 {
        2
    } else {
        fitting
    }
}

/// One CPU's cache: for each size class a stack of first pages, last in first out.
#[derive(Debug)]
pub(super) struct Cache {
    magazines: [Magazine; CACHED_ORDERS as usize],
}

#[derive(Debug)]
struct Magazine {
    len: usize,
    pages: [u64; MAGAZINE],
}

impl Cache {
    pub(super) const fn new() -> Self {
        Self { magazines: [const { Magazine { len: 0, pages: [0; MAGAZINE] } }; CACHED_ORDERS as usize] }
    }

    /// The range of `order` freed last, if it lies below `max_page`. O(1): it looks at one entry only.
    pub(super) fn pop(&mut self, order: u32, max_page: u64) -> Option<u64> {
        let magazine = &mut self.magazines[order as usize];
        let top = magazine.len.checked_sub(1)?;
        let page = magazine.pages[top];
        let last = page.checked_add((1 << order) - 1)?;
        if last > max_page {
            return None;
        }
        magazine.len = top;
        Some(page)
    }

    /// Keeps the range of `order` at `page`. A full magazine first gives its older half to `spill`.
    pub(super) fn push(&mut self, order: u32, page: u64, mut spill: impl FnMut(u64)) {
        let magazine = &mut self.magazines[order as usize];
        if magazine.len == capacity(order) {
            let half = magazine.len.div_ceil(2);
            magazine.pages[..half].iter().for_each(|page| spill(*page));
            magazine.pages.copy_within(half..magazine.len, 0);
            magazine.len -= half;
        }
        magazine.pages[magazine.len] = page;
        magazine.len += 1;
    }

    /// Empties the cache, giving each (order, first page) to `spill`.
    pub(super) fn drain(&mut self, mut spill: impl FnMut(u32, u64)) {
        for (order, magazine) in self.magazines.iter_mut().enumerate() {
            magazine.pages[..magazine.len].iter().for_each(|page| spill(order as u32, *page));
            magazine.len = 0;
        }
    }

    /// Pages in the cache.
    pub(super) fn pages(&self) -> u64 {
        self.magazines.iter().enumerate().map(|(order, magazine)| (magazine.len as u64) << order).sum()
    }
}
