//! Map and unmap, as the owner of a page table calls them. No call changes what an address outside its range translates
//! to; only a split may make accesses to the rest of the large page, or of its table, fault for a while (`split.rs`,
//! `replace.rs`). Each call holds a CPU for a bounded number of entries only.

use super::error::MapError;
use super::format::{Attributes, Format, Layout, LeafSize};
use super::place::Last;
use super::table::{Conflict, PageTable, RUNS_AT_ONCE};
use super::unmap::{Obstacle, UnmapRun};
use crate::addr::{Iova, IovaRange, PhysAddr};
use crate::platform::{Frames, LocalCpu, Platform};
use crate::sync::pause;

/// The result of an unmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "an unmap may have found less than it was asked to remove"]
pub struct Unmapped {
    /// Bytes removed. Less than the range if it has holes, or if a part is `kept`.
    pub bytes: u64,
    /// Bytes of the range that **are still mapped**, and that devices reach: parts of large pages that could not be
    /// split (no memory, an unconfirmed invalidation, or another platform than the table's), parts of granules, and
    /// parts of a mapping that a mapper removes only as a whole.
    pub kept: u64,
    /// The range to invalidate for `bytes` to be out of reach: the requested range, and the whole of each large page
    /// that was split, now or earlier, and of which it covers a part. If all of the range was mapped and `bytes` is
    /// less, another caller has removed the rest. The rest may have been part of a large page, whose extent the tables
    /// no longer show: then everything must be invalidated, unless that caller does it.
    pub stale: IovaRange,
}

impl Unmapped {
    /// The result of an unmap that removed `bytes` of `range`, for mappers that split no pages.
    pub const fn of(range: IovaRange, bytes: u64) -> Self {
        Self { bytes, kept: 0, stale: range }
    }
}

/// Granules that a call maps before it returns the CPU. Each costs at most a walk. The last run, of up to a frame of
/// entries, may exceed this number.
const PAGES_AT_ONCE: u64 = 4096;

enum Pause {
    Done,
    TimeSlice,
    Obstacle(Obstacle),
}

enum Stop {
    Conflict(Conflict),
    Error(MapError),
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Maps `range` to the memory at `phys`, with the largest pages that alignment and size allow at each address.
    /// Costs one walk for each lowest table and one store for each entry.
    ///
    /// Context: allocates missing tables. Waits only for another CPU that changes a table on the way: for the first
    /// step of a [`reclaim`](Self::reclaim); with non-coherent frames, until a new table is shown to hardware; and
    /// while the table is replaced to split contiguous PTEs, which takes until hardware has forgotten it.
    ///
    /// # Errors
    /// [`MapError`]: this call maps nothing of the range. A range beside the error is what the call had entered before
    /// it failed, and has removed again. A device may have used those pages meanwhile, so they need an invalidation
    /// before the range is used again.
    ///
    /// # Safety
    /// 1. **The memory is the caller's to open to every device that this table translates for, as long as it is
    ///    mapped**: from the call on, until an unmap of it has returned and an invalidation of what that removed is
    ///    confirmed. For that time, devices may access it at any moment, as the permissions say.
    /// 2. For that time its owner does not give it to others, nor rely on its contents: there are no references to it
    ///    but to atomics (and, if devices only read, shared ones to bytes that are not written). The CPU reads and
    ///    writes it as atomics, or volatile.
    /// 3. Both hold for all of each granule: whole pages are opened.
    /// 4. After an error they hold only for the range beside the error, until the invalidation of that range is
    ///    confirmed.
    ///
    /// Memory that only a software IOMMU reaches, and that is all accessed as atomics, may be opened by any caller.
    #[inline]
    pub unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        phys: PhysAddr,
        attributes: impl Into<Attributes>,
    ) -> Result<(), (MapError, Option<IovaRange>)> {
        let attributes = attributes.into();
        // SAFETY: clauses 1 to 4 are the caller's.
        if self.in_turn(platform, |turn| unsafe { self.map_in(turn, range, phys, attributes) }) {
            return Ok(());
        }
        self.check(range).map_err(|error| (error, None))?;
        self.map_from(platform, range, 0, [(phys, range.len())], attributes)
    }

    /// As [`map`](Self::map), to the pieces of memory in `list`, each with its length, one after the other. Pieces in
    /// one lowest table share a walk.
    ///
    /// # Errors
    /// As [`map`](Self::map); [`MapError::Length`] if the pieces together are not as long as the range.
    ///
    /// # Safety
    /// As for [`map`](Self::map), for each piece.
    pub unsafe fn map_list<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: impl Into<Attributes>,
    ) -> Result<(), (MapError, Option<IovaRange>)> {
        self.check(range).map_err(|error| (error, None))?;
        self.map_from(platform, range, 0, list, attributes.into())
    }

    #[inline(never)]
    fn map_from<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        mut done: u64,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
    ) -> Result<(), (MapError, Option<IovaRange>)> {
        let mut list = list.into_iter();
        let mut piece = (0, 0);
        // Maps as much as one CPU may be held for. Returns whether that is all.
        let mut enter = |cpu: Option<&LocalCpu<'_>>| {
            let _section = self.section(cpu);
            let mut last = Last::NONE;
            let end = range.len().min(done.saturating_add(PAGES_AT_ONCE << X::GRANULE_SHIFT));
            while done < end {
                if piece.1 == 0 {
                    let next = list.next().ok_or(Stop::Error(MapError::Length { range, list: done }))?;
                    if next.1 == 0 {
                        // An empty piece ends the time slice, as any number of them may follow.
                        return Ok(false);
                    }
                    piece = self.piece(next, range, done)?;
                }
                let at = range.start().get() + done;
                if piece.1 == 1 << X::GRANULE_SHIFT && self.map_next(at, piece.0, attributes, &last) {
                    done += piece.1;
                    piece.1 = 0;
                    continue;
                }
                let run = self.map_run((at, piece.0, piece.1), attributes, &mut last);
                done += run.bytes;
                piece = (piece.0.wrapping_add(run.bytes), piece.1 - run.bytes);
                if let Some(conflict) = run.conflict {
                    return Err(Stop::Conflict(conflict));
                }
            }
            Ok(done == range.len())
        };
        let mut result = match self.platform.with_cpu_fast(platform, |cpu| enter(Some(cpu))) {
            Some(result) => result,
            None => self.platform.with_cpu(platform, &mut enter),
        };
        let stop = loop {
            match result {
                Ok(true) => match list.find(|piece| piece.1 > 0) {
                    None => return Ok(()),
                    Some((_, more)) => {
                        break Stop::Error(MapError::Length { range, list: done.saturating_add(more) });
                    }
                },
                Ok(false) => {}
                Err(Stop::Conflict(Conflict::Busy)) => pause(),
                Err(stop) => break stop,
            }
            result = self.platform.with_cpu(platform, &mut enter);
        };
        Err(self.undo(platform, range, done, stop))
    }

    #[inline]
    fn piece(&self, (phys, len): (PhysAddr, u64), range: IovaRange, done: u64) -> Result<(u64, u64), Stop> {
        let granule = self.granule();
        if !Self::are_whole(phys.get() | len) {
            return Err(Stop::Error(MapError::Misaligned { range, phys, granule: granule.bytes() }));
        }
        if len > range.len() - done {
            return Err(Stop::Error(MapError::Length { range, list: done.saturating_add(len) }));
        }
        match phys.get().checked_add(len.saturating_sub(1)) {
            Some(last) if last <= self.format().last_phys().get() => Ok((phys.get(), len)),
            _ => Err(Stop::Error(MapError::BeyondPhysical { phys, len, last: self.format().last_phys() })),
        }
    }

    /// Removes the first `done` bytes of `range` again. Returns the error for `stop`, and the removed range, unless it
    /// is empty.
    #[cold]
    fn undo<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        done: u64,
        stop: Stop,
    ) -> (MapError, Option<IovaRange>) {
        let undone = IovaRange::new(range.start(), done).ok();
        if let Some(entered) = undone {
            // The call's own pages lie inside the range, so this needs no split. If a part is kept, it belongs to
            // another caller's large page, which was mapped after another CPU had unmapped some of this call's pages
            // against the rules. The call's entries were free before, so no larger page around them is cached any more.
            let _ = self.unmap_all(platform, entered, &mut |_| false);
        }
        let error = match stop {
            Stop::Error(error) => error,
            Stop::Conflict(Conflict::Mapped { at }) => MapError::AlreadyMapped { at: Iova::new(at) },
            Stop::Conflict(Conflict::BeyondPhysical { table }) => {
                MapError::TableBeyondPhysical { table, last: self.format().last_phys() }
            }
            Stop::Conflict(_) => MapError::OutOfMemory,
        };
        (error, undone)
    }

    /// Clears every entry of `range`. Splits a large page of which the range covers only a part. If that fails, the page
    /// stays mapped and counts as [kept](Unmapped::kept); so does a granule of which the range covers only a part.
    ///
    /// The hardware may use what it has cached until the [stale](Unmapped::stale) range is invalidated. Costs one walk
    /// for each lowest table and one store for each entry; a hole costs one step for each missing table.
    ///
    /// `invalidate` makes the hardware forget a range, paging structures included, and returns whether that worked. It
    /// is called with no CPU held, and only to split contiguous PTEs, or a page of a format with break-before-make. It
    /// must not reclaim in this table, nor split pages there.
    ///
    /// Context: allocates only to split. Waits for:
    /// - another CPU that is splitting a page of the range;
    /// - the first step of a [`reclaim`](Self::reclaim) of a table that took a large page's place;
    /// - with non-coherent frames, every CPU that is changing a table on the way;
    /// - before it splits contiguous PTEs, the reclaims and the splits of contiguous PTEs that were called before.
    ///
    /// So an interrupt handler should remove only pages that were mapped as a whole.
    ///
    /// # Safety
    /// 1. **`invalidate` returns `true` only if hardware has forgotten the range**: no IOMMU that walks this table, and
    ///    no device TLB, uses a translation or a table of the range any more that it read before the call, and every
    ///    access that did is complete. A table is freed because of that. (An `invalidate` that always returns `false`
    ///    is sound.)
    #[inline]
    pub unsafe fn unmap<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        invalidate: &mut dyn FnMut(IovaRange) -> bool,
    ) -> Unmapped {
        if self.in_turn(platform, |turn| self.unmap_in(turn, range)) {
            return Unmapped::of(range, range.len());
        }
        self.unmap_all(platform, range, invalidate)
    }

    #[inline(never)]
    fn unmap_all<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        invalidate: &mut dyn FnMut(IovaRange) -> bool,
    ) -> Unmapped {
        let end = range.last().min(self.last_iova()).get();
        let mut at = range.start().get();
        let mut unmapped = Unmapped::of(range, 0);
        let mut enter = |cpu: Option<&LocalCpu<'_>>, at: &mut u64| {
            let _section = self.section(cpu);
            for _ in 0..RUNS_AT_ONCE {
                if *at > end {
                    return Pause::Done;
                }
                let UnmapRun { bytes, skip, split, obstacle } =
                    self.unmap_run(range.start().get(), *at, end - *at + 1);
                if split > 0 {
                    self.widen(&mut unmapped.stale, *at, split);
                }
                if let Some(obstacle) = obstacle {
                    return Pause::Obstacle(obstacle);
                }
                unmapped.bytes += bytes;
                // The end is below 2^63, so this cannot wrap.
                *at += bytes + skip;
            }
            Pause::TimeSlice
        };
        let mut kept = 0;
        loop {
            let paused = match self.platform.with_cpu_fast(platform, |cpu| enter(Some(cpu), &mut at)) {
                Some(paused) => paused,
                None => self.platform.with_cpu(platform, |cpu| enter(cpu, &mut at)),
            };
            let page = match paused {
                Pause::Done => return Unmapped { kept, ..unmapped },
                Pause::TimeSlice => continue,
                Pause::Obstacle(Obstacle::SticksOut(page)) => page,
                Pause::Obstacle(Obstacle::Busy) => {
                    pause();
                    continue;
                }
            };
            let forget = &mut |start, len| IovaRange::new(Iova::new(start), len).is_ok_and(&mut *invalidate);
            let is_smallest = page.size == LeafSize { level: 1, run: 0 };
            let mut split = |at| match page.size.run {
                1.. if !X::BREAK_BEFORE_MAKE => self.split_run(platform, at, forget),
                run => self.split(platform, at, run, forget),
            };
            let result = if is_smallest { None } else { split(at).ok() };
            let Some(is_done) = result else {
                let next = page.iova + self.format().page_size(page.size).bytes();
                kept += next.min(end + 1) - at;
                at = next;
                continue;
            };
            if !is_done {
                pause();
            }
        }
    }

    #[cold]
    fn widen(&self, stale: &mut IovaRange, at: u64, shift: u32) {
        let around = IovaRange::new(Iova::new(at >> shift << shift), 1 << shift);
        // Hardware caches nothing of addresses that cannot be translated.
        *stale = around.and_then(|around| stale.hull(around)).unwrap_or(self.aperture());
    }

    #[inline]
    fn check(&self, range: IovaRange) -> Result<(), MapError> {
        let granule = self.granule();
        if !Self::are_whole(range.start().get() | range.len()) {
            let phys = PhysAddr::new(0);
            return Err(MapError::Misaligned { range, phys, granule: granule.bytes() });
        }
        if range.last() > self.last_iova() {
            return Err(MapError::BeyondAperture { range, last: self.last_iova() });
        }
        Ok(())
    }
}
