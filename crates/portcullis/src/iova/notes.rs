//! The notes of a whole space: a word for each range, found by its first page and its size.

use super::links::{Links, OutOfMemory};
use super::word::{COARSE_ORDER, Link, Note};
use crate::sync::{AtomicU64, Ordering};

/// Two sparse arrays: a word for each page, for ranges of up to 32 pages, and a word for 64 pages, for larger
/// ones: 8 bytes a page, and 8 bytes for 64 pages.
#[derive(Debug)]
pub(super) struct Notes {
    fine: Links,
    coarse: Links,
}

impl Notes {
    /// For the pages from `first` on, `len` of them.
    pub(super) fn new(first: u64, len: u64) -> Result<Self, OutOfMemory> {
        let last = first + (len - 1);
        let coarse_first = first >> COARSE_ORDER;
        let coarse = Links::new(coarse_first, (last >> COARSE_ORDER) - coarse_first + 1)?;
        Ok(Self { fine: Links::new(first, len)?, coarse })
    }

    /// The word of the range of order `order` at `page`, if there ever was one there.
    #[inline]
    pub(super) fn word(&self, page: u64, order: u32) -> Option<&AtomicU64> {
        self.word_in(page, order >= COARSE_ORDER)
    }

    /// Notes that the range is handed out; makes room for the note where there is none.
    pub(super) fn hand_out(&self, page: u64, order: u32, owner: u64, pages: u64) -> Result<(), OutOfMemory> {
        let (array, shift) = self.array(order >= COARSE_ORDER);
        if let Some(word) = array.get_or_make(page >> shift)? {
            word.store(Note::HandedOut { owner, pages }.encode(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Makes room for the notes of `count` ranges of order `order` from `page` on.
    pub(super) fn prepare(&self, page: u64, order: u32, count: u64) -> Result<(), OutOfMemory> {
        let (array, shift) = self.array(order >= COARSE_ORDER);
        let last = page + ((count << order) - 1);
        let mut index = page >> shift;
        while index <= last >> shift {
            array.get_or_make(index)?;
            index += Links::LEAF;
        }
        array.get_or_make(last >> shift)?;
        Ok(())
    }

    /// Where `link` leads: page, order, and what comes after it. `None` at a list's end.
    pub(super) fn follow(&self, link: Link) -> Option<(u64, u32, Link)> {
        let (page, coarse) = link.target()?;
        match Note::decode(self.word_in(page, coarse)?.load(Ordering::Relaxed)) {
            Note::Listed { order, next } => Some((page, order, next)),
            _ => None,
        }
    }

    /// Writes `note` for the range of order `order` at `page`, which has a word.
    pub(super) fn write(&self, page: u64, order: u32, note: Note) {
        if let Some(word) = self.word(page, order) {
            word.store(note.encode(), Ordering::Relaxed);
        }
    }

    /// Bytes of memory that the notes take.
    pub(super) fn bytes(&self) -> usize {
        self.fine.bytes() + self.coarse.bytes()
    }

    #[inline]
    fn word_in(&self, page: u64, coarse: bool) -> Option<&AtomicU64> {
        let (array, shift) = self.array(coarse);
        array.get(page >> shift)
    }

    /// The array, and what turns a page into its index.
    #[inline]
    fn array(&self, coarse: bool) -> (&Links, u32) {
        if coarse { (&self.coarse, COARSE_ORDER) } else { (&self.fine, 0) }
    }
}
