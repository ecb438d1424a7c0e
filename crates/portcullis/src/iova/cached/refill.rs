//! Refills an empty list from the bitmap, within the CPU's budget. A refill takes a block of ranges, so that one CPU
//! owns whole cache lines of metadata and of page-table entries.

use super::{Cached, Own};
use crate::iova::bitmap::{Bitmap, BitmapError};
use crate::iova::class::{CACHED_ORDERS, Class};
use crate::iova::cpu::{BATCH, Cpu};
use crate::iova::meta::Place;
use crate::iova::word::NO_WORD;
use crate::percpu::LocalU64;
use crate::sync::Mutex;

/// Metadata words, or page-table entries, of a cache line of 64 bytes.
const LINE_WORDS: u64 = 8;

impl Cached {
    /// Refills an empty list, unless the budget has no room. Returns `false` if there was room, but the zone has no
    /// free range below `end_page`.
    #[inline(never)]
    pub(super) fn refill(
        &self,
        own: Own<'_>,
        zone: usize,
        order: u32,
        end_page: u64,
        bitmap: &Mutex<Bitmap>,
    ) -> Result<bool, BitmapError> {
        let cpu = own.cpu;
        let wanted = cpu.next_batch(zone, order).min(self.most_at_once(zone, order));
        let room = self.make_room(cpu, zone, order, wanted, bitmap);
        let pages = &cpu.fetched[..wanted.min(room) as usize];
        let fetched = self.fetch(own, zone, order, end_page, bitmap, pages)?;
        let mut no_memory = 0;
        // The highest range, which was found first, is allocated first.
        for page in pages[..fetched].iter().map(LocalU64::get).rev() {
            let pushed = cpu.push_new(zone, Class::of(order), page);
            no_memory += usize::from(pushed.is_err());
            if pushed != Ok(true) {
                bitmap.lock().free_all([page], 1 << order);
            }
        }
        if no_memory > 0 && no_memory == fetched {
            return Err(BitmapError::OutOfMemory);
        }
        Ok(fetched > 0 || pages.is_empty())
    }

    /// Takes ranges of `order` from the bitmap, for `pages`: below the CPU's home if there are any, else anywhere in
    /// the zone below `end_page`. Returns their number.
    fn fetch(
        &self,
        Own { index, .. }: Own<'_>,
        zone: usize,
        order: u32,
        end_page: u64,
        bitmap: &Mutex<Bitmap>,
        pages: &[LocalU64],
    ) -> Result<usize, BitmapError> {
        let (first, end, home) = match zone {
            0 => (0, end_page.min(self.low_end), None),
            _ => (self.low_end, end_page, self.homes.below(index, end_page)),
        };
        // Round the home down to a line of metadata: a home inside a line would split it between this CPU, below the
        // home, and a CPU whose own area is used up, which gets the ranges above it. Not for ranges of up to 4 pages:
        // their line has 8 pages, and rounding to it would undo the homes' colour of 5 pages.
        let line = if Place::shift(Class::of(order)) == 0 { 1 } else { Self::line(order) };
        let home = home.map(|home| home - home % line);
        let mut bitmap = bitmap.lock();
        // On failure below the home (no fit, or no memory for the bitmap's nodes) search the whole zone: another place
        // may need no new nodes.
        let mut fetch = |bounds| {
            let mut places = pages.iter();
            let put = |page| places.next().into_iter().for_each(|place| place.set(page));
            bitmap.alloc_run(order, bounds, pages.len(), put)
        };
        let below_home = home.map(|home| fetch((first, home)));
        let fetched = match below_home {
            Some(Ok(fetched @ 1..)) => fetched,
            _ => fetch((first, end))?,
        };
        Ok(Self::keep_whole_lines(order, &pages[..fetched], &mut bitmap))
    }

    const fn line(order: u32) -> u64 {
        LINE_WORDS << Place::shift(Class::of(order))
    }

    /// Trims the fetch to whole cache lines of metadata, to avoid false sharing with the CPU that fetches next. Returns
    /// the number of ranges kept: all of them if none starts a line, or if the tail is not contiguous, as in a
    /// fragmented space. Runs under the lock of the fetch, so that the next CPU begins below the line.
    fn keep_whole_lines(order: u32, fetched: &[LocalU64], bitmap: &mut Bitmap) -> usize {
        let line = Self::line(order);
        let fills = |page: &LocalU64| page.get().is_multiple_of(line);
        let (size, last) = (1 << order, fetched.len().saturating_sub(1));
        let Some(end) = fetched.iter().rposition(fills).filter(|end| *end < last) else {
            return fetched.len();
        };
        if fetched[end..].windows(2).any(|pair| pair[0].get().wrapping_sub(pair[1].get()) != size) {
            return fetched.len();
        }
        bitmap.free_all(fetched[end + 1..].iter().map(LocalU64::get), size);
        end + 1
    }

    /// The most ranges of `order` that a refill, a grant or a spill moves at once: a sixteenth of the budget, at least
    /// 1 and at most 64.
    pub(super) fn most_at_once(&self, zone: usize, order: u32) -> u64 {
        ((self.budget[zone] / 16) >> order).clamp(1, BATCH as u64)
    }

    /// Grants the list of `order` room for up to `wanted` more ranges, and returns its room. If the budget is used up,
    /// it first spills up to 64 ranges, largest first, to the bitmap: the bound limits how long it holds the CPU. If
    /// they freed too few pages, the list has no room yet, and a later call spills more.
    #[inline(never)]
    pub(super) fn make_room(
        &self,
        cpu: &Cpu,
        zone: usize,
        order: u32,
        wanted: u64,
        bitmap: &Mutex<Bitmap>,
    ) -> u64 {
        let budget = self.budget[zone];
        let mut room = cpu.grant(zone, order, wanted, budget);
        let mut most = BATCH;
        for other in (0..CACHED_ORDERS).rev() {
            while room == 0 && most > 0 {
                // Few at a time: the stack is deepest here.
                let mut pages = [0; BATCH / 4];
                let few = most.min(pages.len()).min(self.most_at_once(zone, other) as usize);
                let pages = &mut pages[..few];
                let spilled = cpu.spill(zone, other, pages);
                most -= spilled;
                if spilled == 0 {
                    break;
                }
                // Clear the words first: after the free another CPU may allocate the ranges and write its own words.
                let spilled = &pages[..spilled];
                spilled.iter().for_each(|page| self.meta.write(*page, other, NO_WORD));
                bitmap.lock().free_all(spilled.iter().copied(), 1 << other);
                room = cpu.grant(zone, order, wanted, budget);
            }
        }
        room
    }
}
