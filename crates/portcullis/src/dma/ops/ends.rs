//! How mappings end, and are synced meanwhile. Which way a mapping went is found out from its address: the pool knows its slots,
//! the book what is mapped, and the pool's map the rest.

use core::cell::Cell;

use super::book::Entry;
use super::{DmaOps, UnmapAttributes};
use crate::addr::{Iova, IovaRange};
use crate::bounce::error::{DmaUnmapError, inside};
use crate::bounce::pool::Toward;
use crate::dma::Choice;
use crate::dma::Machine;
use crate::dma::adaptive::Half;
use crate::domain::{Ending, Tally, UnmapError};
use crate::guard::Guard;
use crate::invalidation::Gather;
use crate::platform::LocalCpu;
use crate::sync::{Ordering, fence};

/// An unmap that is timed.
struct Timed {
    size: usize,
    way: Choice,
    start: u64,
}

impl<X: Machine> DmaOps<X> {
    /// Ends the mapping of `len` bytes at `iova`: of a list, all bytes from the first to the last, with one wait. After
    /// `Ok` the device does not reach the buffer (under a lazy policy only until the flush that covers it), and the buffer has
    /// what the device wrote, unless the attributes say that nobody wants that.
    ///
    /// A copy costs O(len), and waits for nothing where it went through a slot. What is mapped costs one walk for each leaf
    /// table and one store for each entry; if it ends strictly, it waits for one invalidation. Allocates nothing. Any context.
    ///
    /// # Errors
    /// [`DmaUnmapError`]. After [`NotMapped`](DmaUnmapError::NotMapped) and [`OutOfRange`](DmaUnmapError::OutOfRange), which say that
    /// this is no mapping of the handle's, or not the whole of it, nothing is changed. After
    /// [`Unconfirmed`](DmaUnmapError::Unconfirmed) and [`Unmap`](DmaUnmapError::Unmap) the mapping is over, but **devices
    /// may still reach the buffer**, until a [flush](crate::domain::Domain::flush) of the domain succeeds.
    ///
    /// # Safety
    /// Where this is a mapping of the handle's that has not ended:
    ///
    /// - No other unmap and no sync of the mapping runs at the same time.
    /// - What was promised when it was [mapped](Self::map) holds until this has returned.
    #[inline]
    pub unsafe fn unmap(
        &self,
        iova: Iova,
        len: u64,
        attributes: UnmapAttributes,
    ) -> Result<(), DmaUnmapError> {
        let ended = match self.config.is_auto() {
            // SAFETY: the caller's promise.
            true => unsafe { self.end_measured(iova, len, !attributes.skip_copy) },
            // SAFETY: the caller's promise.
            false => unsafe { self.end(iova, len, !attributes.skip_copy) },
        };
        if ended.is_err() {
            self.count_error();
        }
        ended
    }

    /// As [`end`](Self::end), for a handle that measures. By itself, so that there is one way through the other, all of it in line.
    ///
    /// # Safety
    /// As [`unmap`](Self::unmap).
    #[inline(never)]
    unsafe fn end_measured(&self, iova: Iova, len: u64, copied: bool) -> Result<(), DmaUnmapError> {
        let timed = self.begin_timed(iova, len);
        // SAFETY: the caller's promise.
        let ended = unsafe { self.end_any(iova, len, copied) };
        if let Some(timed) = timed
            && ended.is_ok()
        {
            self.end_timed(timed);
        }
        ended
    }

    /// Reads the clock, if this unmap is to be timed: its CPU's turn has come, or the mapping went the way that is not chosen.
    fn begin_timed(&self, iova: Iova, len: u64) -> Option<Timed> {
        let ((chooser, clock), pool) = (self.chooser.as_ref()?, self.pool.as_deref()?);
        let size = chooser.size_of(len)?;
        let way = if pool.has_slot_at(iova) { Choice::Copy } else { Choice::Map };
        // Of a device that is not trusted, others were no choice.
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
        // The pool and the book each know an address by looking it up, and one of them has it: first the one that has what is mapped today.
        if self.config.threshold().is_none()
            && let Ok(entry) = self.book.take(iova, len)
        {
            return self.end_opened::<true>(entry);
        }
        // SAFETY: the caller's promise.
        unsafe { self.end_any(iova, len, copied) }
    }

    /// The same, whichever way the mapping went.
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
            // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        let ended =
            copies.and_then(|(pool, client)| unsafe { pool.end_single_use(&client, iova, len, copied) });
        let ended = ended.unwrap_or(Err(error));
        if !ended.is_err_and(|error| !error.is_of_commit()) {
            self.count(|counts, alone| counts.unmaps.add(alone, 1));
        }
        ended
    }

    /// Ends what was mapped by the domain, and is out of the book: in line, for one caller for each `FIRST`. So what it is made of is in line, too.
    #[inline(always)]
    fn end_opened<const FIRST: bool>(&self, entry: Entry) -> Result<(), DmaUnmapError> {
        let bytes = (entry.used(), entry.neighbours);
        // The domain counts while it has a CPU lent for the addresses. What it did not count is counted afterwards.
        let is_counted = Cell::new(false);
        let was_counted = &is_counted;
        let counted = move |cpu: &LocalCpu<'_>| {
            let (counts, alone) = self.counts_of(Some(cpu));
            counts.closed(alone, bytes);
            was_counted.set(true);
        };
        // Without a CPU: the platform, which may have panicked, is asked for none.
        let uncounted = Guard::new(|| {
            if !is_counted.get() {
                let (counts, alone) = self.counts_of(None);
                counts.closed(alone, bytes);
            }
        });
        let ended = self.close(entry, counted);
        if !is_counted.get() {
            self.count(|counts, alone| {
                counts.closed(alone, bytes);
                is_counted.set(true);
            });
        }
        uncounted.done();
        // The driver's reads come after its load of the device's completion.
        fence(Ordering::Acquire);
        Ok(ended?)
    }

    /// Ends what was mapped by the domain, which calls `counted` if it has a CPU lent for that.
    #[inline(always)]
    pub(super) fn close(&self, entry: Entry, counted: impl Fn(&LocalCpu<'_>)) -> Result<(), UnmapError> {
        match entry {
            Entry { fixed: true, range, neighbours, .. } => self.close_fixed(range, neighbours),
            Entry { range, neighbours, lasting, .. } => {
                let exception = Some(if lasting { &self.strictly } else { &self.policy });
                self.domain.end(range, Ending { neighbours, exception }, counted)
            }
        }
    }

    /// The same for addresses that go back to nobody.
    #[cold]
    #[inline(never)]
    fn close_fixed(&self, range: IovaRange, neighbours: u64) -> Result<(), UnmapError> {
        let (domain, mut gather) = (&self.domain, Gather::new());
        let unmapped = domain.unlink(range, &mut gather);
        let confirmed = domain.confirm(&gather);
        domain.settle(Tally { unmaps: 1, ..Tally::default() });
        domain.count_neighbours(neighbours.wrapping_neg().cast_signed());
        if confirmed.is_err() {
            domain.leave_open(unmapped.bytes);
        }
        match confirmed {
            _ if unmapped.kept > 0 => {
                Err(UnmapError::StillMapped { range, unmapped: unmapped.bytes, kept: unmapped.kept })
            }
            Err(error) => Err(UnmapError::Unconfirmed { range, error }),
            Ok(()) if unmapped.bytes < range.len() => {
                Err(UnmapError::NotMapped { range, unmapped: unmapped.bytes })
            }
            Ok(()) => Ok(()),
        }
    }

    /// Gives the CPU what the device has written to `len` bytes at the address `at`, anywhere inside of a mapping, which goes on.
    /// What is mapped and not copied costs a fence, and the search for its mapping, O(log n) for n granules. A copy costs
    /// O(len), for a device that writes. Never waits, allocates nothing, any context.
    ///
    /// # Errors
    /// [`DmaUnmapError`]: some of the bytes are in no mapping of the handle's, or another caller is syncing the same list
    /// ([`Busy`](DmaUnmapError::Busy)). Nothing is copied.
    ///
    /// # Safety
    /// Where the bytes are those of a mapping of the handle's that has not ended:
    ///
    /// - No unmap of the mapping, and no other sync of any of these bytes, runs at the same time.
    /// - What was promised when it was [mapped](Self::map) holds until this has returned.
    pub unsafe fn sync_for_cpu(&self, at: Iova, len: u64) -> Result<(), DmaUnmapError> {
        fence(Ordering::Acquire);
        // SAFETY: the caller's promise.
        unsafe { self.sync(at, len, Toward::Original) }
    }

    /// Lets the device see what the CPU has written to `len` bytes at the address `at`, anywhere inside of a mapping. Cost and
    /// context as for [`sync_for_cpu`](Self::sync_for_cpu); a copy costs O(len), for a device that reads.
    ///
    /// # Errors
    /// As [`sync_for_cpu`](Self::sync_for_cpu).
    ///
    /// # Safety
    /// As [`sync_for_cpu`](Self::sync_for_cpu).
    pub unsafe fn sync_for_device(&self, at: Iova, len: u64) -> Result<(), DmaUnmapError> {
        // SAFETY: the caller's promise.
        let synced = unsafe { self.sync(at, len, Toward::Buffer) };
        fence(Ordering::Release);
        synced
    }

    /// # Safety
    /// As [`sync_for_cpu`](Self::sync_for_cpu).
    unsafe fn sync(&self, at: Iova, len: u64, into: Toward) -> Result<(), DmaUnmapError> {
        let copies = self.pool.as_deref().and_then(|pool| {
            let client = self.client(pool)?;
            // SAFETY: the caller's promise.
            unsafe { pool.sync_named(&client, at, len, into) }
        });
        let synced = copies.unwrap_or_else(|| {
            let entry = self.book.find(at).ok_or(DmaUnmapError::NotMapped { iova: at })?;
            inside(entry.iova, entry.len, (at.get().wrapping_sub(entry.iova.get()), len))
        });
        match &synced {
            Ok(()) => self.count(|counts, alone| counts.syncs.add(alone, 1)),
            Err(_) => self.count_error(),
        }
        synced
    }
}
