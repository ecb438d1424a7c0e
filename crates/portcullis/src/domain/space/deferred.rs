//! What waits for a flush: cleared ranges under a lazy policy, and ranges whose invalidation failed. Each is in a flush queue, and is
//! counted, until the flush that covers it is confirmed; only then are its addresses given back.

use super::{Changing, Domain};
use crate::addr::IovaRange;
use crate::domain::account::CpuBook;
use crate::domain::{AtomicPolicy, PolicyWord};
use crate::exposure::Bytes;
use crate::invalidation::{Cleared, Pushed, Waiting};
use crate::iova::Own;
use crate::mapper::Mapper;
use crate::percpu::Turn;
use crate::platform::{LocalCpu, Platform};

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Goes on with `pushed`, the result of queueing a cleared range: sets its timer, or, if the queue was full, flushes and queues it
    /// again. Returns whether the range is deferred.
    #[inline]
    pub(super) fn defer(
        &self,
        range: IovaRange,
        neighbours: u64,
        mut pushed: Pushed,
        window: impl Fn() -> Option<u64>,
    ) -> bool {
        loop {
            match pushed {
                Pushed::Queued => return true,
                Pushed::QueuedFirst { window_ns } => {
                    self.set_timer(window_ns);
                    return true;
                }
                Pushed::Full if self.flush_closed().is_ok() => {
                    pushed = self.push(range, neighbours, &window);
                }
                // It cannot be deferred, and needs an invalidation of its own.
                Pushed::Full | Pushed::Refused => return false,
            }
        }
    }

    /// Queues a cleared range for the next flush, and counts it, if it may be deferred and there is room.
    #[cold]
    #[inline(never)]
    pub(super) fn push(&self, range: IovaRange, neighbours: u64, window: impl Fn() -> Option<u64>) -> Pushed {
        let count = |cpu: Option<&LocalCpu<'_>>| self.count_unmap(self.books.of(cpu), neighbours);
        self.push_any(Cleared { range, neighbours }.waiting(), window, count)
    }

    /// Queues `waiting`, and calls `count`, if it may be deferred and there is room. It goes to the CPU's own queue in an exclusive
    /// section, or to the shared queue.
    fn push_any(
        &self,
        waiting: Waiting,
        window: impl Fn() -> Option<u64>,
        count: impl FnOnce(Option<&LocalCpu<'_>>),
    ) -> Pushed {
        let clock = || self.platform.now_ns();
        self.platform.with_cpu(|cpu| {
            let in_turn = |turn: Option<&Turn<'_>>, own: Option<Own<'_>>| {
                let (pushed, oldest) = self.flush_queue.push_own(turn?, waiting, &window, clock)?;
                oldest.into_iter().for_each(|oldest| self.give_back(cpu, own, oldest));
                Some(pushed)
            };
            let pushed = self.space.with_own(cpu, in_turn).unwrap_or_else(|| {
                let give_back = |oldest| self.space.with_own(cpu, |_, own| self.give_back(cpu, own, oldest));
                self.flush_queue.push_shared(waiting, &window, clock, give_back)
            });
            if pushed.is_queued() {
                count(cpu);
            }
            pushed
        })
    }

    /// Holds a cleared range that may still be reached until a later flush is confirmed. The domain retries that flush.
    pub(crate) fn quarantine(&self, changing: Changing<'_, M, P>) {
        self.await_flush(changing.range().len(), Some(changing));
    }

    /// As [`quarantine`](Self::quarantine), for `bytes` that were cleared and whose addresses leak.
    #[cold]
    pub(crate) fn leave_open(&self, bytes: u64) {
        self.await_flush(bytes, None);
    }

    fn await_flush(&self, used: u64, changing: Option<Changing<'_, M, P>>) {
        let untimed = self.untimed();
        let bytes = Bytes { used, neighbour: 0 };
        let waiting = Waiting { range: changing.as_ref().map(Changing::range), bytes };
        // If the queue is full, or the clock panics, the addresses leak.
        let done = |_: Option<&LocalCpu<'_>>| {
            changing.map(Changing::done);
        };
        let pushed = self.push_any(waiting, || Some(self.retry_ns()), done);
        if let Pushed::QueuedFirst { window_ns } = pushed {
            self.set_timer(window_ns);
        }
        untimed.done();
    }

    /// The nanoseconds for which a mapping that ends now may be deferred, by its own policy or the domain's; `None` if it must not be.
    #[inline]
    pub(super) fn window_by(&self, exception: Option<&AtomicPolicy>) -> Option<u64> {
        exception.map_or(PolicyWord::NONE, AtomicPolicy::word).or(self.policy.word()).window()
    }

    #[inline]
    pub(super) fn count_unmap(&self, book: CpuBook<'_>, neighbours: u64) {
        self.change_in(book, neighbours.wrapping_neg());
        book.add(|book| &book.unmaps, 1);
    }
}
