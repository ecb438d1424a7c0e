//! Blocks of up to 128 KiB, cut out of [large ones](super::large) of a huge page each: so slots of pools, rings and page tables lie on huge
//! pages, if the system has some.
//!
//! Each huge page has a bitmap of its frames. A block of up to 32 frames, aligned to its size rounded up to a power of two, lies in one
//! word of it. An allocation tests at most eight words of each huge page with room. Freeing the last block of a huge page returns the page
//! to the system, except one.

use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::FRAME;
use super::large::{self, HUGE};

/// The most frames of a block.
pub(super) const MOST: usize = 32;
/// Frames of a bitmap word.
const IN_WORD: usize = u64::BITS as usize;
const WORDS: usize = HUGE / FRAME / IN_WORD;

/// A huge page, and its used frames.
#[derive(Debug)]
struct Page {
    start: usize,
    used: [u64; WORDS],
    free: usize,
}

/// Huge pages, by address.
#[derive(Debug)]
struct Pages(Vec<Page>);

static PAGES: Mutex<Pages> = Mutex::new(Pages(Vec::new()));

fn pages() -> MutexGuard<'static, Pages> {
    // No code panics while it is held.
    PAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first free index for `count` frames, aligned to that number rounded up to a power of two.
fn place(used: u64, count: usize) -> Option<usize> {
    let (mut starts, mut len) = (!used, 1);
    // Bits that begin a run of `len` free frames.
    while len < count {
        let more = len.min(count - len);
        starts &= starts >> more;
        len += more;
    }
    let step = count.next_power_of_two();
    // A one at each multiple of the step.
    starts &= if step == IN_WORD { 1 } else { u64::MAX / ((1 << step) - 1) };
    (starts != 0).then(|| starts.trailing_zeros() as usize)
}

fn mask(first: usize, count: usize) -> u64 {
    (u64::MAX >> (IN_WORD - count)) << first
}

impl Page {
    fn take(&mut self, count: usize) -> Option<usize> {
        if self.free < count {
            return None;
        }
        let (index, first) =
            self.used.iter().enumerate().find_map(|(index, used)| Some((index, place(*used, count)?)))?;
        self.used[index] |= mask(first, count);
        self.free -= count;
        Some(self.start + (index * IN_WORD + first) * FRAME)
    }

    fn give_back(&mut self, at: usize, count: usize) {
        let first = (at - self.start) / FRAME;
        self.used[first / IN_WORD] &= !mask(first % IN_WORD, count);
        self.free += count;
    }

    fn is_empty(&self) -> bool {
        self.free == WORDS * IN_WORD
    }
}

impl Pages {
    /// A block of the existing pages; it may not be zeroed.
    fn take(&mut self, count: usize) -> Option<usize> {
        self.0.iter_mut().find_map(|page| page.take(count))
    }

    fn add(&mut self, start: usize) -> Option<()> {
        self.0.try_reserve(1).ok()?;
        let at = self.0.partition_point(|page| page.start < start);
        self.0.insert(at, Page { start, used: [0; WORDS], free: WORDS * IN_WORD });
        Some(())
    }

    /// Frees a block, if one of the pages has it. Returns a page that is no longer needed.
    fn give_back(&mut self, at: usize, count: usize) -> Result<Option<usize>, NotHere> {
        let start = at & !(HUGE - 1);
        let index = self.0.binary_search_by_key(&start, |page| page.start).map_err(|_| NotHere)?;
        self.0[index].give_back(at, count);
        let others_are_empty =
            self.0.iter().enumerate().any(|(other, page)| other != index && page.is_empty());
        let goes = self.0[index].is_empty() && others_are_empty;
        Ok(goes.then(|| self.0.remove(index).start))
    }
}

#[derive(Debug)]
pub(super) struct NotHere;

/// A zeroed block of `count` frames, 1 to [`MOST`]; `None` without a huge page.
pub(super) fn alloc(count: usize) -> Option<NonNull<u8>> {
    let found = pages().take(count);
    let at = match found {
        Some(at) => at,
        None => {
            // Without the lock, because the kernel may be slow: another thread may add one meanwhile.
            let page = large::alloc(HUGE, HUGE)?;
            let mut pages = pages();
            if pages.add(page.expose_provenance().get()).is_none() {
                drop(pages);
                // SAFETY: clause 1: allocated above, and not returned.
                unsafe { large::free(page.as_ptr(), HUGE) };
                return None;
            }
            pages.take(count)?
        }
    };
    let block = NonNull::new(with_exposed_provenance_mut::<u8>(at))?;
    // SAFETY: the block is this call's. An earlier owner may have stored something there.
    unsafe { block.write_bytes(0, count * FRAME) };
    Some(block)
}

/// # Safety
/// 1. The block is of one [`alloc`] of this many frames, and nothing uses it; or it is of no `alloc`.
pub(super) unsafe fn free(block: *mut u8, count: usize) -> Result<(), NotHere> {
    let page = pages().give_back(block.addr(), count)?;
    if let Some(page) = page {
        // SAFETY: clause 1: the page has no block, and is no longer in the list.
        unsafe { large::free(with_exposed_provenance_mut(page), HUGE) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_the_first_free_one_that_is_aligned() {
        let slow = |used: u64, count: usize| {
            (0..=IN_WORD - count)
                .step_by(count.next_power_of_two())
                .find(|first| used & mask(*first, count) == 0)
        };
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        for _ in 0..2000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            for used in [
                0,
                random,
                random & random.rotate_left(9),
                random & random.rotate_left(21) & random.rotate_left(5),
                u64::MAX,
            ] {
                for count in 1..=MOST {
                    assert_eq!(place(used, count), slow(used, count), "{used:#x}, {count}");
                }
            }
        }
    }

    /// Blocks of all sizes, in and out: they are adjacent, and all pages but one are freed with their last block.
    #[test]
    fn blocks_share_pages_and_pages_go() {
        let mut pages = Pages(Vec::new());
        let (mut held, mut next, mut random) = (Vec::<(usize, usize)>::new(), HUGE, 88172645463325252_u64);
        for step in 0..20_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let grows = step % 4000 < 2000;
            if held.is_empty() || random % 100 < if grows { 70 } else { 30 } {
                let count = 1 + (random >> 8) as usize % MOST;
                let at = pages.take(count).unwrap_or_else(|| {
                    pages.add(next).unwrap();
                    next += 2 * HUGE;
                    pages.take(count).unwrap()
                });
                assert_eq!(at % (count.next_power_of_two() * FRAME), 0);
                let end = at + count * FRAME;
                assert!(held.iter().all(|(other, frames)| end <= *other || other + frames * FRAME <= at));
                held.push((at, count));
            } else {
                let (at, count) = held.swap_remove((random >> 8) as usize % held.len());
                if let Some(gone) = pages.give_back(at, count).unwrap() {
                    assert!(held.iter().all(|(other, _)| other & !(HUGE - 1) != gone));
                }
            }
            let frames: usize = held.iter().map(|(_, count)| count).sum();
            assert_eq!(pages.0.iter().map(|page| WORDS * IN_WORD - page.free).sum::<usize>(), frames);
            let marked = |page: &Page| page.used.iter().map(|used| used.count_ones() as usize).sum::<usize>();
            assert!(pages.0.iter().all(|page| marked(page) + page.free == WORDS * IN_WORD));
            assert!(pages.0.is_sorted_by_key(|page| page.start));
            assert!(pages.0.iter().filter(|page| page.is_empty()).count() <= 1);
        }
        assert!(next > 4 * HUGE);
        held.into_iter().for_each(|(at, count)| _ = pages.give_back(at, count).unwrap());
        assert_eq!(pages.0.len(), 1);
        assert!(pages.give_back(7 * HUGE - FRAME + 100 * HUGE, 1).is_err());
    }

    #[test]
    fn blocks_are_zero_and_lie_on_huge_pages() {
        for _ in 0..3 {
            let blocks: Vec<_> = [1, 32, 3, 7].map(|count| (alloc(count).unwrap(), count)).into();
            for (block, count) in &blocks {
                // SAFETY: allocated above.
                let bytes = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), count * FRAME) };
                assert!(bytes.iter().all(|byte| *byte == 0));
                bytes.fill(7);
                let flags = large::tests::smaps(block.addr().get(), "VmFlags").unwrap();
                assert!(flags.contains("ht") || flags.contains("hg"), "{flags}");
            }
            // SAFETY: clause 1: allocated above.
            blocks.into_iter().for_each(|(block, count)| unsafe { free(block.as_ptr(), count) }.unwrap());
        }
        // SAFETY: clause 1: of no `alloc`.
        assert!(unsafe { free(std::ptr::without_provenance_mut(FRAME), 1) }.is_err());
    }
}
