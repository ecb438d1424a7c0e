//! Unmaps and syncs. The address tells how a mapping was made: in a slot of the pool, in the book (not copied), or in the pool's map (single-use
//! buffers).

use core::cell::Cell;

use super::book::Entry;
use super::{DmaAttributes, DmaOps};
use crate::addr::Iova;
use crate::bounce::error::{DmaUnmapError, inside};
use crate::bounce::pool::Toward;
use crate::dma::Choice;
use crate::dma::Machine;
use crate::dma::adaptive::Half;
use crate::domain::{Rule, UnmapError};
use crate::platform::LocalCpu;
use crate::sync::{Ordering, fence};

struct Timed {
    size: usize,
    way: Choice,
    start: u64,
}

impl<X: Machine> DmaOps<X> {
    /// Ends the mapping of `len` bytes at `iova`; of a list, all bytes from the first to the last, with one wait. After `Ok` the device does not
    /// reach the buffer (under a lazy policy, after the flush that covers it), which has the device's bytes, unless the attributes decline them.
    ///
    /// A copy costs O(len), and does not wait if it was in a slot. A mapping that was not copied costs one walk for each leaf table and one store for
    /// each entry; if it ends strictly, it waits for one invalidation.
    ///
    /// Context: any. Allocates nothing.
    ///
    /// # Errors
    /// [`DmaUnmapError`]. After [`NotMapped`](DmaUnmapError::NotMapped) and [`OutOfRange`](DmaUnmapError::OutOfRange) (it is no mapping of the
    /// handle, or not the whole of one) nothing is changed. After [`Unconfirmed`](DmaUnmapError::Unconfirmed) and [`Unmap`](DmaUnmapError::Unmap) the
    /// mapping has ended, but **devices may still reach the buffer**, until a [flush](crate::domain::Domain::flush) of the domain succeeds.
    ///
    /// # Safety
    /// If this is an open mapping of the handle:
    ///
    /// 1. No other unmap and no sync of the mapping runs at the same time.
    /// 2. Clauses 1 and 3 of its [map](Self::map) hold until this has returned.
    #[inline]
    pub unsafe fn unmap(&self, iova: Iova, len: u64, attributes: DmaAttributes) -> Result<(), DmaUnmapError> {
        let ended = match self.config.is_auto() {
            // SAFETY: clauses 1 and 2 are the caller's.
            true => unsafe { self.end_measured(iova, len, !attributes.skip_copy) },
            // SAFETY: clauses 1 and 2 are the caller's.
            false => unsafe { self.end(iova, len, !attributes.skip_copy) },
        };
        if ended.is_err() {
            self.count_error();
        }
        ended
    }

    /// As [`end`](Self::end), for a handle that measures. Out of line, so that all of `end` is inlined.
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap).
    #[inline(never)]
    unsafe fn end_measured(&self, iova: Iova, len: u64, copied: bool) -> Result<(), DmaUnmapError> {
        let timed = self.begin_timed(iova, len);
        // SAFETY: clauses 1 and 2 are the caller's.
        let ended = unsafe { self.end_any(iova, len, copied) };
        if let Some(timed) = timed
            && ended.is_ok()
        {
            self.end_timed(timed);
        }
        ended
    }

    /// Reads the clock, if this unmap is to be timed: by its CPU's count, or because the mapping was a probe.
    fn begin_timed(&self, iova: Iova, len: u64) -> Option<Timed> {
        let ((chooser, clock), pool) = (self.chooser.as_ref()?, self.pool.as_deref()?);
        let size = chooser.size_of(len)?;
        let way = if pool.has_slot_at(iova) { Choice::Copy } else { Choice::Map };
        let is_whole = !self.profile.untrusted || len & self.domain.granule().offset_mask() == 0;
        let mut is_timed = is_whole && way != chooser.choice(size);
        if !is_timed {
            self.count(|counts, alone| {
                is_timed = alone && counts.timed_unmaps.next(counts.unmaps.get()).is_some()
            });
        }
        is_timed.then(|| Timed { size, way, start: clock() })
    }

    fn end_timed(&self, Timed { size, way, start }: Timed) {
        let Some((chooser, clock)) = &self.chooser else { return };
        let took = clock().saturating_sub(start);
        self.count(|_, _| chooser.note(size, way, Half::Unmap, took));
    }

    /// # Safety
    /// As [`unmap`](Self::unmap).
    #[inline(always)]
    unsafe fn end(&self, iova: Iova, len: u64, copied: bool) -> Result<(), DmaUnmapError> {
        // Pool and book each look an address up, and one of them has it: begin with the one that the present configuration fills.
        if self.config.threshold().is_none()
            && let Ok(entry) = self.book.take(iova, len)
        {
            return self.end_opened::<true>(entry);
        }
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.end_any(iova, len, copied) }
    }

    /// As [`end`](Self::end), for a mapping that may be copied.
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap).
    #[inline(never)]
    unsafe fn end_any(&self, iova: Iova, len: u64, copied: bool) -> Result<(), DmaUnmapError> {
        let copies = self.pool.as_deref().and_then(|pool| Some((pool, self.client(pool)?)));
        if let Some((pool, client)) = &copies {
            let mut is_counted = false;
            let counted = |cpu: &LocalCpu<'_>| {
                let (counts, alone) = self.counts_of(Some(cpu));
                counts.unmaps.add(alone, 1);
                is_counted = true;
            };
            // SAFETY: the pool's clauses 1 and 2 are the caller's 1 and 2; a later call by address finds the group's mappings only (3).
            if let Some(ended) = unsafe { pool.end_in_slot(client, (iova, len), copied, counted) } {
                if ended.is_ok() && !is_counted {
                    self.count(|counts, alone| counts.unmaps.add(alone, 1));
                }
                return ended;
            }
        }
        let error = match self.book.take(iova, len) {
            Ok(entry) => return self.end_opened::<false>(entry),
            Err(error) => error,
        };
        // SAFETY: as above.
        let ended =
            copies.and_then(|(pool, client)| unsafe { pool.end_single_use(&client, iova, len, copied) });
        let ended = ended.unwrap_or(Err(error));
        if !ended.is_err_and(|error| !error.is_of_commit()) {
            self.count(|counts, alone| counts.unmaps.add(alone, 1));
        }
        ended
    }

    /// Ends what was taken out of the book. Inlined with all that it calls; `FIRST` only makes an instance for each caller.
    #[inline(always)]
    fn end_opened<const FIRST: bool>(&self, entry: Entry) -> Result<(), DmaUnmapError> {
        let bytes = (entry.used(), entry.neighbours);
        // The domain counts if it borrows a CPU for the addresses. Otherwise this counts afterwards.
        let is_counted = Cell::new(false);
        let was_counted = &is_counted;
        let counted = move |cpu: &LocalCpu<'_>| {
            let (counts, alone) = self.counts_of(Some(cpu));
            counts.closed(alone, bytes);
            was_counted.set(true);
        };
        let ended = self.close(entry, counted);
        if !is_counted.get() {
            self.count(|counts, alone| counts.closed(alone, bytes));
        }
        // Orders the driver's reads after its load of the device's completion.
        fence(Ordering::Acquire);
        Ok(ended?)
    }

    #[inline(always)]
    pub(super) fn close(&self, entry: Entry, counted: impl Fn(&LocalCpu<'_>)) -> Result<(), UnmapError> {
        let Entry { range, neighbours, lasting, .. } = entry;
        let rule = if lasting { Rule::Strictly } else { Rule::Policy(Some(&self.policy)) };
        self.domain.end(range, neighbours, rule, counted)
    }

    /// Copies the device's writes to `len` bytes at `at`, anywhere inside a mapping, to the CPU's buffer. A mapping that is not copied costs a fence,
    /// and a search, O(log n) for n granules. A copied one costs O(len), if the device writes.
    ///
    /// Context: any. Never waits, allocates nothing.
    ///
    /// # Errors
    /// [`DmaUnmapError`], with nothing copied: some of the bytes are in no mapping of the handle, or another caller is syncing the same list
    /// ([`Busy`](DmaUnmapError::Busy)).
    ///
    /// # Safety
    /// If the bytes are in an open mapping of the handle:
    ///
    /// 1. No unmap of the mapping, and no other sync of any of these bytes, runs at the same time.
    /// 2. Clauses 1 and 3 of its [map](Self::map) hold until this has returned.
    pub unsafe fn sync_for_cpu(&self, at: Iova, len: u64) -> Result<(), DmaUnmapError> {
        fence(Ordering::Acquire);
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.sync(at, len, Toward::Original) }
    }

    /// Copies the CPU's writes to `len` bytes at `at`, anywhere inside a mapping, for the device. Cost, context and errors as for
    /// [`sync_for_cpu`](Self::sync_for_cpu); a copied mapping costs O(len), if the device reads.
    ///
    /// # Safety
    /// As [`sync_for_cpu`](Self::sync_for_cpu), clauses 1 and 2.
    pub unsafe fn sync_for_device(&self, at: Iova, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: clauses 1 and 2 are the caller's.
        let synced = unsafe { self.sync(at, len, Toward::Buffer) };
        fence(Ordering::Release);
        synced
    }

    /// # Safety
    /// As [`sync_for_cpu`](Self::sync_for_cpu).
    unsafe fn sync(&self, at: Iova, len: u64, into: Toward) -> Result<(), DmaUnmapError> {
        let copies = self.pool.as_deref().and_then(|pool| {
            let client = self.client(pool)?;
            // SAFETY: the pool's clauses 1 and 2 are the caller's.
            unsafe { pool.sync_named(&client, at, len, into) }
        });
        let synced = copies.unwrap_or_else(|| {
            let entry = self.book.find(at).ok_or(DmaUnmapError::NotMapped { iova: at })?;
            inside(entry.iova, entry.len, (at.get().wrapping_sub(entry.iova.get()), len))
        });
        synced.inspect_err(|_| self.count_error())?;
        self.count(|counts, alone| counts.syncs.add(alone, 1));
        Ok(())
    }
}
