//! Unmaps, by the policy that holds at that moment: a strict one clears the entries, waits for the hardware, and frees the addresses; a lazy
//! one clears the entries and queues the range, and a later flush frees it.

use super::Domain;
use super::lifecycle::Unsure;
use crate::addr::IovaRange;
use crate::domain::account::CpuBook;
use crate::domain::{AtomicPolicy, UnmapError};
use crate::invalidation::{Cleared, Gather, InvalidationError, Pushed};
use crate::mapper::Mapper;
use crate::pgtable::Unmapped;
use crate::platform::{LocalCpu, Platform};

/// How a mapping ends.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rule<'a> {
    /// By this policy, or, if there is none, by the domain's. It is read again where a change could matter.
    Policy(Option<&'a AtomicPolicy>),
    Strictly,
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
        self.end(range, 0, Rule::Policy(None), |_| ())
    }

    /// Unmaps `range`, and waits until devices do not reach it, whatever the policy. Costs and context as for a strict [`unmap`](Self::unmap).
    pub fn unmap_strictly(&self, range: IovaRange) -> Result<(), UnmapError> {
        self.end(range, 0, Rule::Strictly, |_| ())
    }

    /// As [`unmap`](Self::unmap), by `rule`. `neighbours` bytes of the range were [counted](Self::count_neighbours). Calls `counted` with
    /// the CPU on which it frees or queues the addresses; not after an error, and perhaps not on a slow path.
    #[inline(always)]
    pub(crate) fn end(
        &self,
        range: IovaRange,
        neighbours: u64,
        rule: Rule<'_>,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        let range = self.whole_for(range)?;
        match rule {
            // A lazy end reads the policy again, in the exclusive section that queues the range.
            Rule::Policy(exception) if self.policy.window(exception).is_some() => {
                self.end_lazily(range, neighbours, exception, counted)
            }
            _ => self.end_strictly(range, neighbours, counted),
        }
    }

    /// Clears the range, in an exclusive section if that is possible; waits until devices do not reach it; and frees its addresses.
    #[inline(always)]
    fn end_strictly(
        &self,
        range: IovaRange,
        neighbours: u64,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        let changing = self.changing(range);
        let fast =
            |cpu: &LocalCpu<'_>| self.space.in_turn(cpu, |turn, _| self.mapper.unmap_fast(turn, range));
        let is_cleared = M::IS_QUICK && self.platform.with_cpu_fast(fast).flatten() == Some(true);
        changing.done();
        if is_cleared {
            let all = Unmapped::of(range, range.len());
            self.clear(range, neighbours, || (all, self.mapper.sync_range(range)))?;
        } else {
            self.clear(range, neighbours, || self.mapper.unmap_now(&self.platform, range))?;
        }
        self.free(range, neighbours, counted);
        Ok(())
    }

    /// Clears and queues the range in one exclusive section, on the fast path.
    #[inline(never)]
    fn end_lazily(
        &self,
        range: IovaRange,
        neighbours: u64,
        exception: Option<&AtomicPolicy>,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        let window = || self.policy.window(exception);
        // A mapper that is not quick clears outside of exclusive sections.
        if !M::IS_QUICK {
            self.clear(range, neighbours, || self.unlink_or_sync(range))?;
        }
        let (changing, untimed) = (self.changing(range), self.untimed());
        let (cleared, mut is_cleared) = (Cleared { range, neighbours }, !M::IS_QUICK);
        let fast = |cpu: &LocalCpu<'_>| {
            self.space.in_turn(cpu, |turn, own| {
                let own = own?;
                is_cleared |= M::IS_QUICK && self.mapper.unmap_fast(turn, range);
                if !is_cleared {
                    return None;
                }
                let pushed = match self.flush_queue.push(turn, cleared, window, || self.platform.now_ns()) {
                    Some((pushed, oldest)) => {
                        oldest.into_iter().for_each(|oldest| self.give_back(Some(own), oldest));
                        pushed
                    }
                    None => self.push_in(turn, own, cleared.waiting(), window)?,
                };
                if pushed.is_queued() {
                    self.books.with(cpu, |book| self.count_unmap(book, neighbours));
                    counted(cpu);
                }
                Some(pushed)
            })?
        };
        let pushed = self.platform.with_cpu_fast(fast).flatten();
        untimed.done();
        changing.done();
        match pushed {
            Some(Pushed::Queued) => Ok(()),
            pushed => self.end_lazily_slow(range, neighbours, (is_cleared, pushed), window, counted),
        }
    }

    /// Goes on with a lazy end: clears the range, unless it `is_cleared`; queues it, unless `pushed` is the result of that; and sets its
    /// timer. If the queue is full, flushes and queues it again. What must not be deferred any more is invalidated.
    #[cold]
    #[inline(never)]
    fn end_lazily_slow(
        &self,
        range: IovaRange,
        neighbours: u64,
        (is_cleared, mut pushed): (bool, Option<Pushed>),
        window: impl Fn() -> Option<u64>,
        counted: impl Fn(&LocalCpu<'_>),
    ) -> Result<(), UnmapError> {
        if !is_cleared {
            self.clear(range, neighbours, || self.unlink_or_sync(range))?;
        }
        let (changing, untimed) = (self.changing(range), self.untimed());
        let waiting = Cleared { range, neighbours }.waiting();
        let is_queued = loop {
            let count = |book: CpuBook<'_>| self.count_unmap(book, neighbours);
            match pushed.take().unwrap_or_else(|| self.push(waiting, &window, count)) {
                Pushed::Queued => break true,
                Pushed::QueuedFirst { window_ns } => {
                    self.set_timer(window_ns);
                    break true;
                }
                Pushed::Full if self.flush_closed().is_ok() => {}
                Pushed::Full | Pushed::Refused => break false,
            }
        };
        untimed.done();
        changing.done();
        if !is_queued {
            let all = Unmapped::of(range, range.len());
            // Only a range that the fast path cleared can be invalidated by itself: of any other, the gather is gone.
            let sync = || match M::IS_QUICK && is_cleared {
                true => self.mapper.sync_range(range),
                false => self.mapper.sync(Gather::EVERYTHING),
            };
            self.clear(range, neighbours, || (all, sync()))?;
            self.free(range, neighbours, counted);
        }
        Ok(())
    }

    /// Removes the translations of `range` by `remove`, which says what it has removed, and whether devices do not reach it any more. If
    /// that is less than all of the range, or not confirmed, ends the range, and returns the error.
    // Inlined, as are all callees: a strict unmap took 5 % longer otherwise.
    #[inline(always)]
    fn clear(
        &self,
        range: IovaRange,
        neighbours: u64,
        remove: impl FnOnce() -> (Unmapped, Result<(), InvalidationError>),
    ) -> Result<(), UnmapError> {
        let changing = self.changing(range);
        let (unmapped, confirmed) = remove();
        changing.done();
        if unmapped.bytes == range.len() && confirmed.is_ok() {
            return Ok(());
        }
        Err(self.end_badly(range, unmapped, neighbours, confirmed))
    }

    /// Removes the translations of a range that is to be queued, and syncs them if not all of it was mapped. Out of line, so that its gather
    /// leaves the stack before the caller goes on.
    #[inline(never)]
    fn unlink_or_sync(&self, range: IovaRange) -> (Unmapped, Result<(), InvalidationError>) {
        let mut gather = Gather::new();
        let unmapped = self.unlink(range, &mut gather);
        let is_whole = unmapped.bytes == range.len();
        (unmapped, if is_whole { Ok(()) } else { self.mapper.sync(&gather) })
    }

    /// Removes the translations of `range` and adds them to `gather`, or everything if not all of the range was mapped. Returns what was
    /// mapped, and what still is.
    // Inlined: otherwise the result goes through memory, which costs a batch 1.5 ns.
    #[inline(always)]
    pub(crate) fn unlink(&self, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let unsure = Unsure(gather);
        let unmapped = self.mapper.unmap(&self.platform, range, unsure.0);
        if unmapped.bytes == range.len() {
            unsure.done();
        }
        // Otherwise the guard adds everything: another caller has removed the rest, and may not have invalidated it. The rest may have been
        // part of a large page, whose extent is not known any more.
        unmapped
    }

    /// Frees the addresses of an unmap that is confirmed, and counts it.
    #[inline(always)]
    fn free(&self, range: IovaRange, neighbours: u64, counted: impl Fn(&LocalCpu<'_>)) {
        let mut changing = Some(self.changing(range));
        let fast = |cpu: &LocalCpu<'_>| {
            self.space.in_turn(cpu, |_, own| {
                let range = own.and_then(|_| changing.take())?.done();
                self.give_back(own, range);
                self.books.with(cpu, |book| self.count_unmap(book, neighbours));
                counted(cpu);
                Some(())
            })
        };
        self.platform.with_cpu_fast(fast);
        if let Some(changing) = changing {
            self.free_slowly(changing.done(), neighbours);
        }
    }

    #[cold]
    #[inline(never)]
    fn free_slowly(&self, range: IovaRange, neighbours: u64) {
        let changing = self.changing(range);
        self.with_turn(|cpu, own| {
            self.count_unmap(self.books.of(cpu), neighbours);
            self.give_back(own, changing.done());
        });
    }

    /// Ends a range that was not mapped as a whole, or whose invalidation is not confirmed.
    #[cold]
    #[inline(never)]
    fn end_badly(
        &self,
        range: IovaRange,
        Unmapped { bytes: unmapped, kept, .. }: Unmapped,
        neighbours: u64,
        confirmed: Result<(), InvalidationError>,
    ) -> UnmapError {
        // Reachable bytes are counted before the clock is read again, which may panic.
        if confirmed.is_err() && unmapped == range.len() {
            self.changing(range).hold();
        } else {
            self.end_rest(range, unmapped, confirmed.is_ok() && kept == 0);
            if confirmed.is_err() {
                self.hold(unmapped, None);
            }
        }
        if unmapped > 0 {
            // Otherwise another call unmapped all of it, and has subtracted the neighbours.
            self.platform.with_cpu(|cpu| self.change_in(self.books.of(cpu), neighbours.wrapping_neg()));
        }
        match confirmed {
            _ if kept > 0 => UnmapError::StillMapped { range, unmapped, kept },
            Err(error) => UnmapError::Unconfirmed { range, error },
            Ok(()) => UnmapError::NotMapped { range, unmapped },
        }
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
