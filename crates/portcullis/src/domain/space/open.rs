//! Maps of a list. A map updates its counters with the CPU that it holds to allocate addresses. If it fails later, it undoes the counts and
//! frees the addresses.

use core::cell::Cell;

use super::{Changing, Domain, LinkFailed};
use crate::addr::{Iova, IovaRange, PhysSegment};
use crate::domain::MapListError;
use crate::guard::Guard;
use crate::invalidation::Gather;
use crate::mapper::Mapper;
use crate::percpu::Turn;
use crate::pgtable::Attributes;
use crate::platform::{LocalCpu, Platform};

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// As [`map`](Self::map), for a list of `used` bytes in `len` bytes of pages, as [`pages_of`](Self::pages_of) counts them. The list's
    /// neighbours [count](Self::count_neighbours). Calls `count` with the CPU that took the addresses, and `true`; if the map fails then,
    /// again with `false`. With `HERE`, the gather is in the caller's frame.
    ///
    /// # Safety
    /// As for [`map`](Self::map), clauses 1 to 3.
    #[inline(always)]
    pub(crate) unsafe fn open<const HERE: bool>(
        &self,
        list: &[PhysSegment],
        (len, used): (u64, u64),
        attributes: Attributes,
        limit: Iova,
        count: impl Fn(Option<&LocalCpu<'_>>, bool) + Copy,
    ) -> Result<IovaRange, MapListError> {
        // By reference: one word instead of three in each closure below.
        let (neighbours, count) = (len.saturating_sub(used), &count);
        // One segment has `map_fast`.
        if M::IS_QUICK && list.len() > 1 {
            // SAFETY: clauses 1 and 2 are the caller's.
            let range = unsafe { self.open_fast(list, (len, neighbours), attributes, limit, count) };
            if let Some(range) = range {
                return Ok(range);
            }
        }
        let uncounted = move |cpu: Option<&LocalCpu<'_>>| {
            let book = self.books.of(cpu);
            count(cpu, false);
            book.add(|book| &book.refused, 1);
            self.change_in(book, neighbours.wrapping_neg());
        };
        // Counted while the CPU is lent for the addresses, to save a second loan.
        let is_counted = Cell::new(false);
        let counting = Guard::new(|| {
            if is_counted.get() {
                uncounted(None);
            }
        });
        let counted = &is_counted;
        let guarded = move |cpu: Option<&LocalCpu<'_>>, range| {
            let (changing, book) = (self.changing(range), self.books.of(cpu));
            count(cpu, true);
            book.add(|book| &book.maps, 1);
            counted.set(true);
            self.change_in(book, neighbours);
            changing
        };
        let changing = self.alloc(len, limit, guarded)?;
        let range = changing.range();
        let uncounted = move |cpu: Option<&LocalCpu<'_>>| {
            counted.set(false);
            uncounted(cpu);
        };
        if HERE {
            let mut gather = Gather::new();
            // SAFETY: clauses 1 to 3 are the caller's; the range was just allocated.
            if let Err(why) = unsafe { self.enter(range, list, attributes, &mut gather) } {
                return Err(self.open_failed(|| self.link_failed(why, &gather, None), changing, uncounted));
            }
        } else {
            // SAFETY: clauses 1 to 3 are the caller's; the range was just allocated.
            if let Err(failed) = unsafe { self.link(range, list, attributes, None) } {
                return Err(self.open_failed(|| failed, changing, uncounted));
            }
        }
        counting.done();
        Ok(changing.done())
    }

    /// The fast path, in one exclusive section of the CPU that has the addresses. If it is not possible, nothing is changed.
    ///
    /// # Safety
    /// As for [`map`](Self::map), clauses 1 and 2.
    #[inline(never)]
    unsafe fn open_fast(
        &self,
        list: &[PhysSegment],
        bytes: (u64, u64),
        attributes: Attributes,
        limit: Iova,
        count: impl Fn(Option<&LocalCpu<'_>>, bool),
    ) -> Option<IovaRange> {
        let enter = |turn: &Turn<'_>, range| {
            // SAFETY: the mapper asks for clauses 1 and 2, which are the caller's for all granules; and a slice's clones are equal.
            unsafe { self.mapper.map_list_fast(turn, range, self.granules(list), attributes) }
        };
        self.take_and(enter, bytes, limit, |cpu| count(Some(cpu), true))
    }

    /// Ends a map that was counted and has taken `addresses`. `failed` undoes the entries and says what is left; then the counts are
    /// undone, and the addresses end. Out of line, to keep the map's frame small.
    #[cold]
    #[inline(never)]
    fn open_failed(
        &self,
        failed: impl FnOnce() -> LinkFailed,
        addresses: Changing<'_, M, P>,
        uncounted: impl FnOnce(Option<&LocalCpu<'_>>),
    ) -> MapListError {
        let failed = failed();
        // With a CPU, as `uncounted` may take a lock that interrupt handlers take, too.
        self.platform.with_cpu(uncounted);
        failed.end(addresses)
    }
}
