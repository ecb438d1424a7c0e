//! Freeing several reservations at once: a batch of descriptors that were handed out one after the other.

use super::RingArena;
use super::bits::Span;
use crate::addr::IovaRange;

impl RingArena {
    /// Frees all reservations that lie in `range`, as [`free`](Self::free) does. What lies there only in part
    /// stays, as does anything that was freed before.
    ///
    /// Where they lie side by side, one word for each 64 granules and what `free` says of the oldest; else as
    /// many times `free`.
    #[inline]
    pub(crate) fn free_run(&mut self, range: IovaRange) {
        let Some(span) = self.span_of(range) else { return };
        match self.edges.remove_run(span) {
            Some(count) => self.removed(span, count),
            None => self.free_each(span),
        }
    }

    #[cold]
    fn free_each(&mut self, all: Span) {
        let mut from = all.first;
        while let Some(span) = self.edges.next_span(from).filter(|span| span.last <= all.last) {
            self.edges.remove(span);
            self.removed(span, 1);
            from = span.last + 1;
        }
    }
}

#[cfg(all(test, not(loom), feature = "std"))]
mod tests {
    use super::super::{ArenaError, RingArena, RingConfig};
    use crate::addr::{Iova, IovaRange, PageSize};
    use crate::iova::{IovaSpace, SpaceConfig};
    use crate::std_platform::StdPlatform;

    const PAGE: u64 = 4096;

    /// The newest reservations may lie just before the oldest: freed together, the oldest of the rest is what is behind.
    #[test]
    fn a_run_of_the_newest_and_the_oldest_moves_the_tail() {
        let platform = StdPlatform::with_cpus(1);
        let aperture = IovaRange::new(Iova::new(1 << 21), 1 << 30).unwrap();
        let space = IovaSpace::new(&SpaceConfig::new(aperture, PageSize::SIZE_4K, 1)).unwrap();
        let config = RingConfig::new(16, PAGE, PageSize::SIZE_4K);
        let mut arena = RingArena::new(&space, &platform, &config).unwrap();
        let base = arena.reserve(PAGE).unwrap().start().get();
        let pages = |first: u64, count| IovaRange::new(Iova::new(base + first * PAGE), count * PAGE).unwrap();
        (1..16).for_each(|n| assert_eq!(arena.reserve(PAGE), Ok(pages(n, 1))));
        arena.free_run(pages(0, 4));
        (0..4).for_each(|n| assert_eq!(arena.reserve(PAGE), Ok(pages(n, 1))));
        // Two that were reserved last, and the two oldest.
        arena.free_run(pages(2, 4));
        assert_eq!(arena.reservations(), 12);
        assert!(
            matches!(arena.reserve(3 * PAGE), Err(ArenaError::Full { oldest, .. }) if oldest == pages(6, 1).start())
        );
        assert_eq!(arena.reserve(2 * PAGE), Ok(pages(4, 2)));
        assert!(arena.reserve(PAGE).is_err());
        // What is freed before is in the way of one that goes; what lies in the range only in part stays.
        arena.free_run(pages(8, 1));
        arena.free_run(pages(7, 3));
        arena.free_run(pages(3, 2));
        assert_eq!((arena.reservations(), arena.in_use()), (10, 11 * PAGE));
        assert_eq!(arena.free(pages(4, 2)), Ok(()), "the one of two pages");
        arena.free_run(pages(0, 16));
        assert_eq!((arena.reservations(), arena.in_use()), (0, 0));
        arena.release(&space, &platform).unwrap();
    }
}
