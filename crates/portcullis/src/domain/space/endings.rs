//! Unmaps, by the policy that holds at that moment. Addresses become free only after the hardware has confirmed that devices do not reach
//! them: a strict unmap waits for that, a lazy one leaves it to a deferred flush.

use super::{Changing, Domain};
use crate::addr::IovaRange;
use crate::domain::{AtomicPolicy, UnmapError};
use crate::invalidation::{Cleared, Gather, InvalidationError, Pushed};
use crate::iova::Own;
use crate::mapper::Mapper;
use crate::percpu::Turn;
use crate::pgtable::Unmapped;
use crate::platform::{LocalCpu, Platform};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Ending<'a> {
    /// Neighbours of the buffer that were [counted](Domain::count_neighbours).
    pub neighbours: u64,
    /// The policy of the mapping or its device, which is read again where a change could matter. Without one, the domain's policy holds.
    pub exception: Option<&'a AtomicPolicy>,
}

impl<M: Mapper, P: Platform> Domain<M, P> {
    /// Unmaps `range` (as [`map`](Self::map) returned it) by the domain's policy, and frees its addresses as soon as the policy allows. A
    /// mapping may be unmapped in parts, of whole granules. Its addresses are free when all of it is gone.
    ///
    /// Costs one walk for each leaf table and one store for each entry; a part also takes a lock, and O(log n) for n partly unmapped
    /// mappings (O(n) for the first part of one, and for the last). A strict unmap then waits for one invalidation. A lazy one queues the
    /// range in O(1), unless its CPU's queue is full: then it waits for a flush.
    ///
    /// Context: allocates nothing for a whole mapping. For a part it may allocate a note (without memory, the part's addresses leak). A
    /// part of a large page splits the page first, which may allocate a table and wait (see [`Mapper::unmap`]). The caller holds no lock
    /// and no CPU.
    ///
    /// The caller guarantees that the mapping is its own. An unmap of another caller's mapping frees addresses that are in use. The other
    /// caller's unmap may then end a third mapping: its accesses fail, but devices reach nothing that was handed back.
    ///
    /// # Errors
    /// [`UnmapError`] says what was not done. After [`UnmapError::Unconfirmed`] and [`UnmapError::StillMapped`] devices may still reach the
    /// memory.
    pub fn unmap(&self, range: IovaRange) -> Result<(), UnmapError> {
        self.end(range, Ending { neighbours: 0, exception: None }, |_| ())
    }

    /// Unmaps `range`, and waits until devices do not reach it, whatever the policy. Costs and context as for a strict [`unmap`](Self::unmap).
    pub fn unmap_strictly(&self, range: IovaRange) -> Result<(), UnmapError> {
        self.end_now(range, 0, |_| ())
    }

    /// As [`unmap`](Self::unmap), with `ending`. Calls `counted` with the CPU on which it frees or queues the addresses; not after an
    /// error, and not on the slow path.
    #[inline(always)]
    pub(crate) fn end(
        &self,
        range: IovaRange,
        ending: Ending<'_>,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        let Ending { neighbours, exception } = ending;
        // A lazy ending looks at the policy again, in the exclusive section that queues it.
        match self.window_by(exception) {
            None => self.end_now(range, neighbours, counted),
            Some(_) => self.end_lazily(self.whole_for(range)?, neighbours, exception, counted),
        }
    }

    #[inline(always)]
    pub(crate) fn end_now(
        &self,
        range: IovaRange,
        neighbours: u64,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        let range = self.whole_for(range)?;
        match M::IS_QUICK {
            true => self.end_quickly(range, neighbours, counted),
            false => self.end_at_once(range, neighbours, counted),
        }
    }

    /// As [`end_now`](Self::end_now): clears the range in an exclusive section, and then waits.
    #[inline(never)]
    fn end_quickly(
        &self,
        range: IovaRange,
        neighbours: u64,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        let changing = self.changing(range);
        let fast =
            |cpu: &LocalCpu<'_>| self.space.in_turn(cpu, |turn, _| self.mapper.unmap_fast(turn, range));
        let is_cleared = self.platform.with_cpu_fast(fast).flatten() == Some(true);
        // The callees guard the addresses themselves.
        changing.done();
        if is_cleared {
            self.end_cleared(range, neighbours, || self.mapper.sync_range(range), counted)
        } else {
            self.end_slowly(range, neighbours, || None, counted)
        }
    }

    /// As [`end`](Self::end), for a range that may be deferred: clears and queues it in one exclusive section, on the fast path.
    #[inline(never)]
    fn end_lazily(
        &self,
        range: IovaRange,
        neighbours: u64,
        exception: Option<&AtomicPolicy>,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        let window = || self.window_by(exception);
        // A mapper that is not quick clears outside of exclusive sections.
        if !M::IS_QUICK {
            self.clear(range, neighbours)?;
        }
        let changing = self.changing(range);
        let untimed = self.untimed();
        let fast = |cpu: &LocalCpu<'_>| {
            self.space.in_turn(cpu, |turn, own| {
                let own = own?;
                let is_cleared = !M::IS_QUICK || self.mapper.unmap_fast(turn, range);
                is_cleared.then(|| self.push_fast(cpu, (turn, own), (range, neighbours), window, &counted))
            })?
        };
        let pushed = self.platform.with_cpu_fast(fast).flatten();
        untimed.done();
        changing.done();
        match pushed {
            Some(Some(Pushed::Queued)) => Ok(()),
            Some(pushed) => self.end_queued(range, neighbours, pushed, window, counted),
            None if !M::IS_QUICK => self.end_queued(range, neighbours, None, window, counted),
            None => self.end_slowly(range, neighbours, window, counted),
        }
    }

    #[cold]
    #[inline(never)]
    fn end_slowly(
        &self,
        range: IovaRange,
        neighbours: u64,
        window: impl Fn() -> Option<u64>,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        if window().is_none() {
            return self.end_at_once(range, neighbours, counted);
        }
        self.clear(range, neighbours)?;
        if self.wait_queued(range, neighbours, None, window) {
            return Ok(());
        }
        self.end_cleared(range, neighbours, || self.mapper.sync(Gather::EVERYTHING), counted)
    }

    #[inline(always)]
    fn end_at_once(
        &self,
        range: IovaRange,
        neighbours: u64,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        let changing = self.changing(range);
        let (unmapped, confirmed) = self.mapper.unmap_now(&self.platform, range);
        if unmapped.bytes != range.len() || confirmed.is_err() {
            return Err(self.end_badly(changing, unmapped, neighbours, confirmed));
        }
        self.ended(changing.done(), neighbours, counted);
        Ok(())
    }

    /// Removes the translations of a range that is to be queued. If not all of it was mapped, makes it unreachable before it returns the
    /// error.
    #[inline(always)]
    fn clear(&self, range: IovaRange, neighbours: u64) -> Result<(), UnmapError> {
        let changing = self.changing(range);
        let (unmapped, confirmed) = self.unlink_or_confirm(range);
        if unmapped.bytes == range.len() {
            changing.done();
            return Ok(());
        }
        Err(self.end_badly(changing, unmapped, neighbours, confirmed))
    }

    /// Removes the translations of a range, and syncs them if not all of it was mapped. Out of line, so that its gather leaves the stack
    /// before the caller goes on.
    #[inline(never)]
    fn unlink_or_confirm(&self, range: IovaRange) -> (Unmapped, Result<(), InvalidationError>) {
        let mut gather = Gather::new();
        let unmapped = self.unlink(range, &mut gather);
        let is_whole = unmapped.bytes == range.len();
        (unmapped, if is_whole { Ok(()) } else { self.mapper.sync(&gather) })
    }

    /// Ends a cleared range. `pushed` is the result of queueing it, or `None` if the CPU had no queue.
    #[cold]
    #[inline(never)]
    fn end_queued(
        &self,
        range: IovaRange,
        neighbours: u64,
        pushed: Option<Pushed>,
        window: impl Fn() -> Option<u64>,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        if self.wait_queued(range, neighbours, pushed, window) {
            return Ok(());
        }
        let sync = || match M::IS_QUICK {
            true => self.mapper.sync_range(range),
            false => self.mapper.sync(Gather::EVERYTHING),
        };
        self.end_cleared(range, neighbours, sync, counted)
    }

    /// Queues a cleared range, unless `pushed` says that it was. Returns whether it is deferred.
    #[inline]
    fn wait_queued(
        &self,
        range: IovaRange,
        neighbours: u64,
        pushed: Option<Pushed>,
        window: impl Fn() -> Option<u64>,
    ) -> bool {
        let (changing, untimed) = (self.changing(range), self.untimed());
        let pushed = pushed.unwrap_or_else(|| self.push(range, neighbours, &window));
        let is_queued = self.defer(range, neighbours, pushed, window);
        untimed.done();
        changing.done();
        is_queued
    }

    /// Ends a cleared range that must not be deferred. `sync` invalidates it, or the whole domain if its gather is gone.
    // Inlined: a strict unmap ends here, and took 5 % longer out of line.
    #[inline(always)]
    fn end_cleared(
        &self,
        range: IovaRange,
        neighbours: u64,
        sync: impl FnOnce() -> Result<(), InvalidationError>,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        let changing = self.changing(range);
        let confirmed = sync();
        if confirmed.is_err() {
            let all = Unmapped::of(range, range.len());
            return Err(self.end_badly(changing, all, neighbours, confirmed));
        }
        self.ended(changing.done(), neighbours, counted);
        Ok(())
    }

    #[inline(always)]
    fn ended(&self, range: IovaRange, neighbours: u64, counted: impl Fn(&LocalCpu<'_>)) {
        let mut changing = Some(self.changing(range));
        let put = |cpu: &LocalCpu<'_>| {
            self.space.in_turn(cpu, |_, own| {
                if own.is_some_and(|own| self.space.put(own, range)) {
                    changing.take().map(Changing::done);
                    self.books.with(cpu, |page| self.count_unmap(page, neighbours));
                    counted(cpu);
                }
            })
        };
        self.platform.with_cpu_fast(put);
        if let Some(changing) = changing {
            changing.done();
            self.ended_slowly(range, neighbours);
        }
    }

    /// The fast path of [`push`](Self::push), in an exclusive section. `None` if the CPU has no queue now.
    #[inline(always)]
    fn push_fast(
        &self,
        cpu: &LocalCpu<'_>,
        (turn, own): (&Turn<'_>, Own<'_>),
        (range, neighbours): (IovaRange, u64),
        window: impl Fn() -> Option<u64>,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Option<Pushed> {
        let (cleared, clock) = (Cleared { range, neighbours }, || self.platform.now_ns());
        let Some((pushed, oldest)) = self.flush_queue.push(turn, cleared, &window, clock) else {
            // With one shared queue nobody revokes queues, so an exclusive section may wait for its lock.
            return (!self.flush_queue.has_queue(0)).then(|| self.push_shared(cpu, own, cleared, window));
        };
        if let Some(oldest) = oldest
            && !self.space.put(own, oldest)
        {
            self.give_back_slowly(cpu, own, oldest);
        }
        if pushed.is_queued() {
            self.books.with(cpu, |page| self.count_unmap(page, neighbours));
            counted(cpu);
        }
        Some(pushed)
    }

    /// As [`push_fast`](Self::push_fast), if all CPUs share one queue. (Out of line: inlined, it cost maps and unmaps with per-CPU queues
    /// 15 instructions.)
    #[cold]
    #[inline(never)]
    fn push_shared(
        &self,
        cpu: &LocalCpu<'_>,
        own: Own<'_>,
        cleared: Cleared,
        window: impl Fn() -> Option<u64>,
    ) -> Pushed {
        let give_back = |oldest| {
            if !self.space.put(own, oldest) {
                self.give_back_slowly(cpu, own, oldest);
            }
        };
        let pushed =
            self.flush_queue.push_shared(cleared.waiting(), window, || self.platform.now_ns(), give_back);
        if pushed.is_queued() {
            self.books.with(cpu, |page| self.count_unmap(page, cleared.neighbours));
        }
        pushed
    }

    #[cold]
    #[inline(never)]
    fn give_back_slowly(&self, cpu: &LocalCpu<'_>, own: Own<'_>, range: IovaRange) {
        self.give_back(Some(cpu), Some(own), range);
    }

    #[cold]
    #[inline(never)]
    fn ended_slowly(&self, range: IovaRange, neighbours: u64) {
        let changing = self.changing(range);
        self.with_turn(|cpu, own| {
            self.count_unmap(self.books.of(cpu), neighbours);
            self.give_back(cpu, own, changing.done());
        });
    }

    /// The range to remove for `range`; of a mapper that removes mappings as a whole, the whole mapping.
    ///
    /// # Errors
    /// [`UnmapError::StillMapped`]: it is a part, and goes with the rest of its mapping.
    pub(crate) fn whole_for(&self, range: IovaRange) -> Result<IovaRange, UnmapError> {
        if !M::REMOVES_WHOLES {
            return Ok(range);
        }
        let removed = self.platform.with_cpu(|_| self.parts.unwant(&self.space, range));
        removed.ok_or(UnmapError::StillMapped { range, unmapped: 0, kept: range.len() })
    }
}
