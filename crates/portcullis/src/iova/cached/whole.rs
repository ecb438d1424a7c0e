//! Finds the live range that contains a given part. The part alone is enough, as each range begins at a multiple of its
//! size.

use super::Cached;
use crate::iova::bitmap::MAX_ORDER;
use crate::iova::class::order_of;
use crate::iova::word::{DIVIDED, END_PAGE, owner_and_pages};
use crate::sync::Ordering;

/// Bounds the search for a range of more than 2^[`MAX_ORDER`] pages, which is aligned to 2^[`MAX_ORDER`] pages only. A
/// part in the first 4 TiB of the range (with 4 KiB pages) is found; a part beyond is not. The bound limits how long a
/// caller holds its locks and its CPU.
const MOST_STEPS: u64 = 4096;

impl Cached {
    /// Returns the first page and the number of pages of the range that contains the `pages` pages at `page`, if it is
    /// handed out and not [divided](Self::divide). Reads one word for each power of two, and then up to 4,097 more:
    /// [`Parts`](crate::domain) does that once for each mapping, under its lock and with the CPU that its caller was
    /// lent.
    #[cold]
    pub fn whole_of(&self, page: u64, pages: u64) -> Option<(u64, u64)> {
        let end = page.checked_add(pages).filter(|end| *end <= END_PAGE)?;
        let has_all = |(first, asked): &(u64, u64)| *first <= page && end <= first + asked;
        let small = (order_of(pages)..=MAX_ORDER)
            .filter_map(|order| self.asked(page >> order << order, order..=order))
            .find(has_all);
        small.or_else(|| {
            let last = page >> MAX_ORDER;
            (last.saturating_sub(MOST_STEPS)..=last)
                .rev()
                .filter_map(|place| self.asked(place << MAX_ORDER, MAX_ORDER + 1..=u64::BITS))
                .find(has_all)
        })
    }

    fn asked(&self, page: u64, orders: core::ops::RangeInclusive<u32>) -> Option<(u64, u64)> {
        let word = self.meta.word(page, *orders.start())?.load(Ordering::Relaxed);
        let (_, asked) = owner_and_pages(word)?;
        (word & DIVIDED == 0 && orders.contains(&order_of(asked))).then_some((page, asked))
    }

    /// Marks the live range of `pages` pages at `page` as divided: its owner maps and unmaps parts of it repeatedly, so
    /// unmapping all parts does not free the range. Returns `false` if it is no longer handed out for that many pages.
    ///
    /// Another CPU may free the range at any time, if the caller is not its owner. The word is then a link of that
    /// CPU's list, and the exchange, which is from a word that says *handed out*, fails. All writes of one word have
    /// one order, so no fence is needed. If the other CPU has read the word before the exchange and writes it after,
    /// its link replaces the bit, and the list is intact.
    #[cold]
    pub fn divide(&self, page: u64, pages: u64) -> bool {
        let Some(word) = self.meta.word(page, order_of(pages)) else { return false };
        let seen = word.load(Ordering::Relaxed);
        owner_and_pages(seen).is_some_and(|(_, asked)| asked == pages)
            && word.compare_exchange(seen, seen | DIVIDED, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}
