//! What waits for a flush: ranges cleared under a lazy policy, ranges whose invalidation failed, and work that maps have left to the timer.
//!
//! A range is in a flush queue, and is counted, until a flush that covers it is confirmed; then its addresses are free. The timer flushes at the
//! end of the window, even if no CPU maps or unmaps any more. A flush that fails or panics is tried again.
//!
//! *Maps in atomic context.* Interrupt handlers may call the maps of some domains ([`Domain::map_at_once`]). A handler may have interrupted the very
//! caller that it would wait for. So a map of such a domain waits for hardware only, and leaves other work to [`Domain::maintain`]:
//!
//! | a map finds | in any other domain | here |
//! |---|---|---|
//! | no addresses | it flushes, and takes back other CPUs' caches and deferred ranges | an error; `maintain` does that |
//! | no memory for tables | it frees empty tables | an error; empty tables wait for [`Domain::reclaim`] |
//! | no slot of a pool's class | it takes free slots of other CPUs and directions | a single buffer; the pool's `maintain` |
//! | no memory for a pool's buffer | it evicts idle buffers | an error; the pool's `maintain` |
//!
//! Memory ordering. A map stores `work_left`, and then stores the timer's time with a release. The timer takes that time with an acquire, so
//! it sees `work_left`.

use super::Domain;
use super::lifecycle::Changing;
use crate::domain::account::CpuBook;
use crate::exposure::Bytes;
use crate::guard::Guard;
use crate::invalidation::{Flush, Gather, InvalidationError, Pushed, Waiting};
use crate::iova::Own;
use crate::mapper::Mapper;
use crate::percpu::Turn;
use crate::platform::{Platform, PlatformEvents};
use crate::sync::Ordering;

/// Nanoseconds until a failed invalidation is retried: the domain's window, within these limits.
const RETRY_NS: core::ops::RangeInclusive<u64> = 1_000_000..=10_000_000;

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Queues `waiting`, and calls `count`, if it may be deferred and there is room.
    #[cold]
    #[inline(never)]
    pub(super) fn push(
        &self,
        waiting: Waiting,
        window: impl Fn() -> Option<u64>,
        count: impl FnOnce(CpuBook<'_>),
    ) -> Pushed {
        self.platform.with_cpu(|cpu| {
            let in_turn =
                |turn: Option<&Turn<'_>>, own: Option<Own<'_>>| self.push_in(turn?, own?, waiting, &window);
            let pushed = self.space.with_own(cpu, in_turn).unwrap_or_else(|| {
                let give_back = |oldest| self.give_back(None, oldest);
                self.flush_queue.push_shared(waiting, &window, || self.platform.now_ns(), give_back)
            });
            if pushed.is_queued() {
                count(self.books.of(cpu));
            }
            pushed
        })
    }

    /// As [`push`](Self::push), in an exclusive section, without the count. `None` if the CPU has a queue, but not now: the caller leaves its
    /// section, and uses the shared queue.
    // Out of line: inlined, it cost maps and unmaps with per-CPU queues 15 instructions.
    #[cold]
    #[inline(never)]
    pub(super) fn push_in(
        &self,
        turn: &Turn<'_>,
        own: Own<'_>,
        waiting: Waiting,
        window: impl Fn() -> Option<u64>,
    ) -> Option<Pushed> {
        let (clock, give_back) = (|| self.platform.now_ns(), |oldest| self.give_back(Some(own), oldest));
        if let Some((pushed, oldest)) = self.flush_queue.push_own(turn, waiting, &window, clock) {
            oldest.into_iter().for_each(give_back);
            return Some(pushed);
        }
        // If all CPUs share one queue, no CPU has one that a flush could revoke, so this exclusive section may wait for the shared queue's lock.
        let is_shared = !self.flush_queue.has_queue(0);
        is_shared.then(|| self.flush_queue.push_shared(waiting, window, clock, give_back))
    }

    /// Counts `bytes` that were cleared and may still be reached until a later flush is confirmed, and holds their `addresses`, if any. The
    /// domain retries that flush.
    #[cold]
    pub(crate) fn hold(&self, bytes: u64, addresses: Option<Changing<'_, M, P>>) {
        let untimed = self.untimed();
        let range = addresses.as_ref().filter(|addresses| !addresses.is_lost).map(Changing::range);
        let waiting = Waiting { range, bytes: Bytes { used: bytes, neighbour: 0 } };
        // If the queue is full, or the clock panics, the addresses leak.
        let done = |_: CpuBook<'_>| {
            addresses.map(Changing::done);
        };
        let pushed = self.push(waiting, || Some(self.retry_ns()), done);
        if let Pushed::QueuedFirst { window_ns } = pushed {
            self.set_timer(window_ns);
        }
        untimed.done();
    }

    /// Waits until devices reach nothing that was unmapped before the call. [`exposure`](Self::exposure) says how long deferred ranges
    /// count. CPUs free their deferred addresses during their next unmaps.
    ///
    /// Costs one barrier of all CPUs ([`Platform::fence_all`]), a wait for the exclusive sections of CPUs that have ever deferred (O(1)
    /// each), and one domain-wide invalidation. Context: waits for hardware. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`InvalidationError`]: devices may still reach what they could before.
    pub fn flush(&self) -> Result<(), InvalidationError> {
        self.finish(self.flush_queue.begin_flush_of_all(&self.platform))
    }

    /// As [`flush`](Self::flush), but covers only the closed segments of flush queues, and waits for no CPU: for a full queue, and for a
    /// CPU that is gone.
    pub(super) fn flush_closed(&self) -> Result<(), InvalidationError> {
        self.finish(self.flush_queue.begin_flush())
    }

    // Out of line: its gather takes most of the stack.
    #[inline(never)]
    fn finish(&self, flush: Flush) -> Result<(), InvalidationError> {
        self.mapper.sync(Gather::EVERYTHING)?;
        self.flush_queue.confirm_flush(flush, self.platform.now_ns());
        self.count_one(|book| &book.flushes);
        Ok(())
    }

    /// Flushes if anything is deferred.
    pub(super) fn flush_pending(&self) -> Result<bool, InvalidationError> {
        let is_pending = self.flush_queue.is_pending(&self.platform);
        if is_pending {
            self.flush()?;
        }
        Ok(is_pending)
    }

    /// Takes back every range whose flush is confirmed, from all queues or from that of CPU `only`. Each range goes to its owner CPU.
    pub(super) fn reclaim_deferred(&self, only: Option<usize>) {
        self.flush_queue.reclaim(&self.platform, only, |cpu, safe| {
            self.space.with_own(cpu, |_, own| self.give_back(own, safe));
        });
    }

    fn retry_ns(&self) -> u64 {
        let (least, most) = RETRY_NS.into_inner();
        self.policy.window(None).unwrap_or(most).clamp(least, most)
    }

    /// Guards a range that is queued and has no timer yet. Dropped, it makes the next queued range ask for one.
    #[inline]
    pub(super) fn untimed(&self) -> Guard<impl FnMut()> {
        Guard::new(|| self.flush_queue.end_timers())
    }

    /// Has the platform call [`timer`](PlatformEvents::timer) when a window that begins now ends. If the platform panics, the next range
    /// that is queued asks again.
    pub(super) fn set_timer(&self, window_ns: u64) {
        let untimed = self.untimed();
        let due_ns = self.platform.now_ns().saturating_add(window_ns).min(u64::MAX - 1);
        // Release: the timer that takes this time sees what was queued before.
        self.due_ns.fetch_min(due_ns, Ordering::Release);
        self.platform.wake_at(due_ns);
        untimed.done();
    }

    /// Whether a window of this domain has ended. The platform calls every domain when the earliest window of any ends; a domain that is
    /// early asks again.
    fn is_due(&self) -> bool {
        let due_ns = self.due_ns.load(Ordering::Relaxed);
        if due_ns == u64::MAX {
            return false;
        }
        let untimed = self.untimed();
        let is_early = self.platform.now_ns() < due_ns;
        if is_early {
            self.platform.wake_at(due_ns);
        }
        untimed.done();
        if !is_early {
            // Acquire. The swap may drop a later time, but its caller has queued its range by now, and the timer's check of the queues sees
            // that.
            self.due_ns.swap(u64::MAX, Ordering::Acquire);
        }
        !is_early
    }

    /// From now on interrupt handlers may call maps.
    pub(crate) fn map_at_once(&self) {
        self.is_at_once.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_at_once(&self) -> bool {
        self.is_at_once.load(Ordering::Relaxed)
    }

    /// Has the platform call the domain's timer soon, which calls [`maintain`](Self::maintain).
    #[cold]
    pub(super) fn want_maintenance(&self) {
        self.work_left.store(true, Ordering::Relaxed);
        self.set_timer(0);
    }

    /// Does the work that maps have left, if any: takes back other CPUs' caches and deferred ranges. Context: waits for hardware and for
    /// other CPUs' exclusive sections. The caller holds no lock and no CPU, and is no interrupt handler.
    ///
    /// # Errors
    /// [`InvalidationError`]: ranges are still deferred. A later call tries again.
    pub(crate) fn maintain(&self) -> Result<(), InvalidationError> {
        if self.work_left.swap(false, Ordering::Relaxed) {
            let again = Guard::new(|| self.work_left.store(true, Ordering::Relaxed));
            self.flush_pending()?;
            again.done();
            self.reclaim_deferred(None);
            self.space.drain_all(&self.platform);
        }
        Ok(())
    }
}

impl<M: Mapper, P: Platform> PlatformEvents for Domain<M, P> {
    fn timer(&self) {
        if !self.is_due() {
            return;
        }
        let _ = self.maintain();
        // If the flush fails or panics, devices may still reach deferred ranges. A timer has no caller to return the error to, so it sets itself again.
        let again = Guard::new(|| self.set_timer(self.retry_ns()));
        self.flush_queue.end_timers();
        // The check comes after `end_timers`: what is queued later asks for a timer of its own.
        if let Ok(flushed) = self.flush_pending() {
            again.done();
            if flushed {
                // CPUs that have stopped deferring stop counting exposure now.
                self.flush_queue.tell(&self.platform);
            }
        }
    }

    fn cpu_released(&self, index: usize) {
        // If the flush fails, deferred ranges stay out of use until another flush succeeds. A queue that all CPUs share needs nothing: the
        // other CPUs take its ranges back.
        if self.flush_queue.has_queue(index) {
            let due = self.flush_queue.close_of(&self.platform, index);
            if !due || self.flush_closed().is_ok() {
                self.reclaim_deferred(Some(index));
            }
        }
        self.space.drain_cpu(&self.platform, index);
    }
}
