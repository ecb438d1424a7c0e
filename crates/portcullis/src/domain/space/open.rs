//! The map of a list. It counts while a CPU is lent for its addresses; where it fails, it takes the counts and the addresses back.

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
    /// As [`map`](Self::map), for a list of `used` bytes in `len` bytes of pages, as [`pages_of`](Self::pages_of) counts them. The bytes
    /// beside the segments [count](Self::count_neighbours). Calls `count` with the CPU that the addresses are taken on, and `true`; where
    /// the map then fails, again, with `false`. With `HERE`, what it gathers is in the caller's frame.
    ///
    /// # Safety
    /// As for [`map`](Self::map).
    #[inline(always)]
    pub(crate) unsafe fn open<const HERE: bool>(
        &self,
        list: &[PhysSegment],
        (len, used): (u64, u64),
        attributes: Attributes,
        limit: Iova,
        count: impl Fn(Option<&LocalCpu<'_>>, bool) + Copy,
    ) -> Result<IovaRange, MapListError> {
        // By reference: in place of three words in each of what follows.
        let (neighbours, count) = (len.saturating_sub(used), &count);
        // For one segment there is `map_fast`.
        if M::IS_QUICK && list.len() > 1 {
            // SAFETY: the caller's promise.
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
        // Counted while the CPU is lent for the addresses: to count afterwards would take it again.
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
            // SAFETY: the caller's promise.
            if let Err(why) = unsafe { self.enter(range, list, attributes, &mut gather) } {
                return Err(self.open_failed(|| self.link_failed(why, &gather, None), changing, uncounted));
            }
        } else {
            // SAFETY: the caller's promise.
            if let Err(failed) = unsafe { self.link(range, list, attributes, None) } {
                return Err(self.open_failed(|| failed, changing, uncounted));
            }
        }
        counting.done();
        Ok(changing.done())
    }

    /// The same, if that is quickly done: in one turn of the CPU that has the addresses. Otherwise nothing is changed.
    ///
    /// # Safety
    /// As for [`map`](Self::map).
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
            // SAFETY: the caller's promise, for all of the granules that the memory touches; and a slice does not change.
            unsafe { self.mapper.map_list_fast(turn, range, self.granules(list), attributes) }
        };
        self.take_and(enter, bytes, limit, |cpu| count(Some(cpu), true))
    }

    /// Ends a map that has counted, and taken `addresses`: `failed` has hardware forget it, and says what is left; then the counts take it
    /// back, and the addresses go back. By itself, so that the map's frame needs no room for it.
    #[cold]
    #[inline(never)]
    fn open_failed(
        &self,
        failed: impl FnOnce() -> LinkFailed,
        addresses: Changing<'_, M, P>,
        uncounted: impl FnOnce(Option<&LocalCpu<'_>>),
    ) -> MapListError {
        let failed = failed();
        // With a CPU, as what is counted may take a lock that an interrupt handler takes, too.
        self.platform.with_cpu(uncounted);
        failed.end(addresses)
    }
}
