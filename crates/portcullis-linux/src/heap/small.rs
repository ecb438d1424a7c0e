//! Blocks of up to 128 KiB, cut out of [large ones](super::large) of a huge page each: so that the slots of pools, rings and page tables lie on huge pages, where
//! the system has some.
//!
//! Each huge page has a bit for each of its frames. A block of up to 32 frames that begins at a multiple of its size, rounded up to a power of two, lies in one word of
//! them. A block takes a look at eight words of each huge page that has room, at the most. A huge page whose last block comes back is the system's again, but for one.

use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::FRAME;
use super::large::{self, HUGE};

/// The most frames of a block.
pub(super) const MOST: usize = 32;
/// Frames whose bits are in a word.
const IN_WORD: usize = u64::BITS as usize;
const WORDS: usize = HUGE / FRAME / IN_WORD;

/// A huge page, and which of its frames are in use.
#[derive(Debug)]
struct Page {
    start: usize,
    used: [u64; WORDS],
    free: usize,
}

/// Huge pages, by their addresses.
#[derive(Debug)]
struct Pages(Vec<Page>);

static PAGES: Mutex<Pages> = Mutex::new(Pages(Vec::new()));

fn pages() -> MutexGuard<'static, Pages> {
    // Nothing panics while it is held.
    PAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first place for `count` frames, a multiple of that number rounded up to a power of two, among those not in `used`.
fn place(used: u64, count: usize) -> Option<usize> {
    let (mut starts, mut len) = (!used, 1);
    // Those that begin a run of `len` free frames.
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
    /// A block out of the pages that there are; whether nobody has had it before is not known.
    fn take(&mut self, count: usize) -> Option<usize> {
        self.0.iter_mut().find_map(|page| page.take(count))
    }

    fn add(&mut self, start: usize) -> Option<()> {
        self.0.try_reserve(1).ok()?;
        let at = self.0.partition_point(|page| page.start < start);
        self.0.insert(at, Page { start, used: [0; WORDS], free: WORDS * IN_WORD });
        Some(())
    }

    /// Takes a block back, if it is of one of the pages. Returns the page that is not needed any more.
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

/// A block is of none of the pages.
#[derive(Debug)]
pub(super) struct NotHere;

/// A zeroed block of `count` frames, 1 to [`MOST`]; `None` where no huge page can be had.
pub(super) fn alloc(count: usize) -> Option<NonNull<u8>> {
    let found = pages().take(count);
    let at = match found {
        Some(at) => at,
        None => {
            // Without the lock, as the kernel may take its time: others may add one meanwhile.
            let page = large::alloc(HUGE, HUGE)?;
            let mut pages = pages();
            if pages.add(page.expose_provenance().get()).is_none() {
                drop(pages);
                // SAFETY: the page from above, which nobody has seen.
                unsafe { large::free(page.as_ptr(), HUGE) };
                return None;
            }
            pages.take(count)?
        }
    };
    let block = NonNull::new(with_exposed_provenance_mut::<u8>(at))?;
    // SAFETY: it is this caller's alone. An earlier owner may have left something there.
    unsafe { block.write_bytes(0, count * FRAME) };
    Some(block)
}

/// # Safety
/// It is of one [`alloc`] of as many frames, or of none, and nothing uses it.
pub(super) unsafe fn free(block: *mut u8, count: usize) -> Result<(), NotHere> {
    let page = pages().give_back(block.addr(), count)?;
    if let Some(page) = page {
        // SAFETY: it has no block any more, and is in the list no more.
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

    /// Blocks of all sizes, in and out: they lie beside each other, and pages go with their last block, but for one.
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

    /// What was freed is not seen by the next owner.
    #[test]
    fn blocks_are_zero_and_lie_on_huge_pages() {
        for _ in 0..3 {
            let blocks: Vec<_> = [1, 32, 3, 7].map(|count| (alloc(count).unwrap(), count)).into();
            for (block, count) in &blocks {
                // SAFETY: it is the test's.
                let bytes = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), count * FRAME) };
                assert!(bytes.iter().all(|byte| *byte == 0));
                bytes.fill(7);
                let flags = large::tests::smaps(block.addr().get(), "VmFlags").unwrap();
                assert!(flags.contains("ht") || flags.contains("hg"), "{flags}");
            }
            // SAFETY: of the calls above.
            blocks.into_iter().for_each(|(block, count)| unsafe { free(block.as_ptr(), count) }.unwrap());
        }
        // SAFETY: it is of no call.
        assert!(unsafe { free(std::ptr::without_provenance_mut(FRAME), 1) }.is_err());
    }
}
