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
#[path = "../../../tests/inside/iova/arena/run.rs"]
mod tests;
