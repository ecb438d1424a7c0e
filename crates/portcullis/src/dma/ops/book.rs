//! A handle's account of mapped memory: one word for each mapping, at its first granule. So a mapping ends once, as a whole, and by its
//! owner: a caller that names anything else changes nothing.
//!
//! A word is written by the caller that has just got the addresses, and exchanged for 0 by the one that will unmap them: of several callers
//! that end a mapping, one succeeds. (The words need no order: their addresses go from one caller to the next through the domain's caches
//! and lists, which order earlier stores.)

use super::words::{Near, Words};
use crate::addr::{Iova, IovaRange, PageSize};
use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::heap::OutOfMemory;
use crate::iova::WordLeaf;
use crate::sync::{AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct Book {
    words: Words,
    granule: PageSize,
    /// The most bytes of a mapping for which a word has room.
    most: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// The address of its first byte.
    pub iova: Iova,
    /// Bytes from the first to the last.
    pub len: u64,
    /// Its granules.
    pub range: IovaRange,
    /// Neighbours: bytes of its granules that are not the buffer's.
    pub neighbours: u64,
    /// Whether it ends strictly whatever the policy.
    pub lasting: bool,
    /// Whether its addresses are reserved, and go back to nobody.
    pub fixed: bool,
}

/// Why a mapping is not noted. It fits in a register, as a map's frame has no room for more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotNoted {
    OutOfMemory,
    /// Its word has no room for its length.
    TooLong,
}

/// A mapping begins at the granule.
const LIVE: u64 = 1;
const LASTING: u64 = 1 << 1;
/// The mapping has gaps between its pieces: the next granule's word has their bytes.
const GAPS: u64 = 1 << 2;
/// The mapping has reserved addresses, which go back to nobody.
const FIXED: u64 = 1 << 3;
/// No mapping begins at the granule, but one that began some granules before may continue here: a search for the beginning looks at this
/// granule. A mapping at a multiple of its size has none of these. The word stays when the mapping ends.
const CONTINUES: u64 = 1 << 4;
/// Above the flags: the offset of the first byte in its granule, and above that the length; or a number of bytes or of granules.
const FLAG_BITS: u32 = 5;

impl Entry {
    /// Bytes of the buffer: without the gaps of a list.
    #[inline]
    pub(super) fn used(&self) -> u64 {
        self.range.len().saturating_sub(self.neighbours)
    }
}

impl Book {
    /// An empty book of a domain with addresses up to `last`, in these granules. Allocates nothing yet.
    pub(super) fn new(last: Iova, granule: PageSize, near: Near) -> Self {
        let most = u64::MAX.checked_shr(FLAG_BITS + granule.shift()).unwrap_or(0);
        Self { words: Words::new((last.get() >> granule.shift()).saturating_add(1), near), granule, most }
    }

    pub(super) fn bytes(&self) -> usize {
        self.words.bytes()
    }

    /// Notes a mapping, whose addresses are the caller's. Allocates where no mapping was ever near.
    #[inline(always)]
    pub(super) fn note(&self, entry: Entry) -> Result<(), NotNoted> {
        let beside = entry.range.len().saturating_sub(entry.len);
        self.note_with(entry, entry.neighbours.saturating_sub(beside))
    }

    /// As [`note`](Self::note), for a caller that knows the bytes of gaps.
    #[inline(always)]
    pub(super) fn note_with(&self, entry: Entry, gaps: u64) -> Result<(), NotNoted> {
        let Entry { iova, len, range, lasting, fixed, .. } = entry;
        let shift = self.granule.shift();
        if len > self.most {
            return Err(NotNoted::TooLong);
        }
        let (page, last) = (range.start().get() >> shift, range.last().get() >> shift);
        if last > page {
            self.note_inside(page, last, gaps)?;
        }
        let flag = |set, flag| if set { flag } else { 0 };
        let flags = LIVE | flag(lasting, LASTING) | flag(gaps > 0, GAPS) | flag(fixed, FIXED);
        let offset = iova.get() & self.granule.offset_mask();
        self.word_or_make(page)?.store((len << shift | offset) << FLAG_BITS | flags, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn error(&self, why: NotNoted, len: u64) -> DmaMapError {
        match why {
            NotNoted::OutOfMemory => DmaMapError::OutOfMemory,
            NotNoted::TooLong => DmaMapError::TooLong { len, most: self.most },
        }
    }

    /// Writes the words inside a mapping of several granules.
    #[inline(never)]
    fn note_inside(&self, page: u64, last: u64, gaps: u64) -> Result<(), NotNoted> {
        if gaps > 0 {
            self.word_or_make(page + 1)?.store(gaps << FLAG_BITS, Ordering::Relaxed);
        }
        // The places at which a search from inside the mapping looks before its beginning.
        let after =
            |page: u64| page.checked_add(page & page.wrapping_neg()).filter(|next| *next <= last && page > 0);
        let mut next = after(page);
        while let Some(inside) = next {
            self.word_or_make(inside)?.store((inside - page) << FLAG_BITS | CONTINUES, Ordering::Relaxed);
            next = after(inside);
        }
        Ok(())
    }

    /// Takes the mapping of `len` bytes at `iova` out of the book: the caller unmaps it. Cannot fail for want of memory.
    ///
    /// # Errors
    /// [`DmaUnmapError`]: nothing is changed.
    #[inline(always)]
    pub(super) fn take(&self, iova: Iova, len: u64) -> Result<Entry, DmaUnmapError> {
        let nothing = DmaUnmapError::NotMapped { iova };
        let page = iova.get() >> self.granule.shift();
        let word = self.word(page).ok_or(nothing)?;
        let found = word.load(Ordering::Relaxed);
        let entry = self.entry(page, found).filter(|entry| entry.iova == iova).ok_or(nothing)?;
        if entry.len != len {
            return Err(DmaUnmapError::OutOfRange { iova, offset: 0, len, mapped: entry.len });
        }
        let taken = word.compare_exchange(found, 0, Ordering::Relaxed, Ordering::Relaxed);
        if taken.is_ok() { Ok(entry) } else { Err(nothing) }
    }

    /// Takes every mapping out of the book, and calls `f` with it. O(granules that ever had a mapping near).
    pub(super) fn take_all(&self, mut f: impl FnMut(Entry)) {
        self.words.each_leaf(|first, leaf| {
            for page in first..first.saturating_add(WordLeaf::WORDS) {
                let word = leaf.word(page);
                let found = word.load(Ordering::Relaxed);
                if let Some(entry) = self.entry(page, found)
                    && word.compare_exchange(found, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
                {
                    f(entry);
                }
            }
        });
    }

    /// Finds the mapping that contains the address `at`. Looks at a word for each power of two.
    pub(super) fn find(&self, at: Iova) -> Option<Entry> {
        let page = at.get() >> self.granule.shift();
        // Clears one more of the lowest set bits of the granule's number each time: the mapping begins at one of these, or one of them says where.
        (0..u64::BITS - self.granule.shift()).find_map(|order| {
            let first = page >> order << order;
            // Each beginning is looked at once.
            if order > 0 && first == page >> (order - 1) << (order - 1) {
                return None;
            }
            let word = self.word(first)?.load(Ordering::Relaxed);
            let entry = if word & (LIVE | CONTINUES) == CONTINUES {
                let begins = first.checked_sub(word >> FLAG_BITS)?;
                self.entry(begins, self.word(begins)?.load(Ordering::Relaxed))?
            } else {
                self.entry(first, word)?
            };
            (at <= entry.range.last()).then_some(entry)
        })
    }

    #[inline]
    fn word(&self, page: u64) -> Option<&AtomicU64> {
        Some(self.words.leaf(page)?.word(page))
    }

    #[inline]
    fn word_or_make(&self, page: u64) -> Result<&AtomicU64, NotNoted> {
        self.word(page).map_or_else(|| self.make_word(page), Ok)
    }

    #[cold]
    #[inline(never)]
    fn make_word(&self, page: u64) -> Result<&AtomicU64, NotNoted> {
        match self.words.leaf_or_make(page) {
            Ok(Some(leaf)) => Ok(leaf.word(page)),
            Ok(None) | Err(OutOfMemory) => Err(NotNoted::OutOfMemory),
        }
    }

    #[inline(always)]
    fn entry(&self, page: u64, word: u64) -> Option<Entry> {
        if word & LIVE == 0 {
            return None;
        }
        let (shift, rest) = (self.granule.shift(), word >> FLAG_BITS);
        let iova = Iova::new(page << shift | rest & self.granule.offset_mask());
        let len = rest >> shift;
        let range = IovaRange::of_pages(iova, len, self.granule)?;
        let gaps =
            if word & GAPS == 0 { 0 } else { self.word(page + 1)?.load(Ordering::Relaxed) >> FLAG_BITS };
        let neighbours = (range.len() - len).saturating_add(gaps);
        Some(Entry { iova, len, range, neighbours, lasting: word & LASTING != 0, fixed: word & FIXED != 0 })
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Two callers end it, and one ends all, at once.
    #[test]
    fn of_several_callers_that_end_a_mapping_one_has_it() {
        loom::model(|| {
            let book = Arc::new(Book::new(Iova::new(0x7fff), PageSize::SIZE_4K, Near::new().unwrap()));
            let (iova, len) = (Iova::new(0x2010), 0x1ff0);
            let range = IovaRange::new(Iova::new(0x2000), 0x2000).unwrap();
            book.note(Entry { iova, len, range, neighbours: 0x10, lasting: false, fixed: false }).unwrap();
            let other = {
                let book = Arc::clone(&book);
                thread::spawn(move || u32::from(book.take(iova, len).is_ok()))
            };
            let all = {
                let (book, mut taken) = (Arc::clone(&book), 0);
                thread::spawn(move || {
                    book.take_all(|_| taken += 1);
                    taken
                })
            };
            let own = u32::from(book.take(iova, len).is_ok());
            assert_eq!(own + other.join().unwrap() + all.join().unwrap(), 1);
            assert_eq!(book.find(iova), None);
        });
    }

    fn page(at: u64) -> Entry {
        let iova = Iova::new(at);
        let range = IovaRange::new(iova, 0x1000).unwrap();
        Entry { iova, len: 0x1000, range, neighbours: 0, lasting: false, fixed: false }
    }

    /// Two callers at once, each with a mapping of its own, which it ends.
    fn at_once(one: fn(&Book, Entry), at: [u64; 2]) {
        loom::model(move || {
            let book = Arc::new(Book::new(Iova::new(0x7fff), PageSize::SIZE_4K, Near::new().unwrap()));
            let other = {
                let book = Arc::clone(&book);
                thread::spawn(move || one(&book, page(at[1])))
            };
            one(&book, page(at[0]));
            other.join().unwrap();
            assert_eq!(at.map(|at| book.find(Iova::new(at))), [None, None]);
        });
    }

    /// Each caller looks for another leaf, and one of them is cached.
    #[test]
    fn callers_that_remember_leaves_at_once_find_each_its_own() {
        let one = |book: &Book, entry: Entry| {
            book.note(entry).unwrap();
            assert_eq!(book.find(entry.iova), Some(entry));
            assert_eq!(book.take(entry.iova, entry.len), Ok(entry));
        };
        at_once(one, [0x4000, 0x2000]);
    }

    /// The leaf may have just been cached by the other caller.
    #[test]
    fn a_caller_uses_the_leaf_that_another_remembers() {
        let one = |book: &Book, entry: Entry| {
            book.note(entry).unwrap();
            assert_eq!(book.take(entry.iova, entry.len), Ok(entry));
        };
        at_once(one, [0x3000, 0x2000]);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn entry(iova: u64, len: u64, neighbours: u64) -> Entry {
        let iova = Iova::new(iova);
        let range = IovaRange::of_pages(iova, len, PageSize::SIZE_4K).unwrap();
        Entry { iova, len, range, neighbours, lasting: false, fixed: false }
    }

    /// Wherever it begins, and whatever stood in the words before.
    #[test]
    fn a_mapping_is_found_by_every_address_in_it_and_by_no_other() {
        let book = Book::new(Iova::new((1 << 48) - 1), PageSize::SIZE_4K, Near::new().unwrap());
        for first in 1..40_u64 {
            for pages in 1..20_u64 {
                let noted = entry(first * 4096 + 100, pages * 4096 - 200, 200);
                book.note(noted).unwrap();
                for page in 0..64 {
                    let inside = (first..first + pages).contains(&page);
                    let found = book.find(Iova::new(page * 4096 + 150));
                    assert_eq!(found, inside.then_some(noted), "{page} of {pages} from {first}");
                }
                assert_eq!(book.find(noted.range.last()), Some(noted));
                assert_eq!(book.take(noted.iova, noted.len), Ok(noted));
                assert_eq!(
                    book.take(noted.iova, noted.len),
                    Err(DmaUnmapError::NotMapped { iova: noted.iova })
                );
            }
        }
        assert_eq!((0..64).find_map(|page| book.find(Iova::new(page * 4096))), None);
    }

    /// A number of bytes in gaps, odd or even, is no mapping.
    #[test]
    fn what_is_beside_the_pieces_of_a_list_is_kept_with_it() {
        let book = Book::new(Iova::new((1 << 48) - 1), PageSize::SIZE_4K, Near::new().unwrap());
        for gaps in [1, 2, 3, 4, 5, 7, 4095, 8001] {
            let noted = entry(8 * 4096 + 8, 3 * 4096 - 16, 16 + gaps);
            book.note(noted).unwrap();
            for page in 8..11 {
                assert_eq!(book.find(Iova::new(page * 4096)), Some(noted), "{gaps}");
                let at = Iova::new(page * 4096 + 8);
                assert!(book.take(at, 77).is_err());
            }
            assert_eq!(noted.used(), 3 * 4096 - 16 - gaps);
            assert_eq!(book.take(noted.iova, noted.len), Ok(noted));
        }
    }

    /// One of the leaves is cached in that place, and the others are looked up.
    #[test]
    fn mappings_whose_leaves_share_a_place_are_told_apart() {
        let book = Book::new(Iova::new((1 << 48) - 1), PageSize::SIZE_4K, Near::new().unwrap());
        let apart = WordLeaf::WORDS * Near::LEAVES as u64 * 4096;
        let all = [1, 2, 3].map(|number| entry(number * apart + 0x5010, number * 4096, 4096));
        all.iter().for_each(|entry| book.note(*entry).unwrap());
        for entry in all.iter().chain(&all) {
            assert_eq!(book.find(entry.iova), Some(*entry));
        }
        for (left, entry) in all.iter().enumerate() {
            assert_eq!(book.take(entry.iova, entry.len), Ok(*entry));
            assert!(all[left + 1..].iter().all(|other| book.find(other.iova) == Some(*other)));
            assert_eq!(book.find(entry.iova), None);
        }
    }

    #[test]
    fn all_mappings_are_taken_once() {
        let book = Book::new(Iova::new(u64::MAX), PageSize::SIZE_4K, Near::new().unwrap());
        let all = [entry(4096, 1, 4095), entry(3 << 40, 9 * 4096, 0), entry(u64::MAX - 4095, 4096, 0)];
        let all = all.map(|entry| Entry { lasting: entry.len == 1, fixed: entry.len > 4096, ..entry });
        all.iter().for_each(|entry| book.note(*entry).unwrap());
        let mut taken = alloc::vec::Vec::new();
        book.take_all(|entry| taken.push(entry));
        assert_eq!(taken, all);
        book.take_all(|entry| panic!("{entry:?}"));
        let most = book.most;
        assert_eq!(most, u64::MAX >> 5 >> 12, "five flags and an offset in a page are beside it");
        assert_eq!(book.note(entry(0, most + 1, 0)), Err(NotNoted::TooLong));
        assert_ne!(book.note(entry(0, most, 0)), Err(NotNoted::TooLong));
        assert_eq!(book.error(NotNoted::TooLong, most + 1), DmaMapError::TooLong { len: most + 1, most });
    }
}
