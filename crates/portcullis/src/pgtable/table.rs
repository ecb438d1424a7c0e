//! The page table as its owner sees it: map, unmap, translate. No call changes a translation
//! outside its range, and none keeps a CPU for more than a bounded number of entries.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::error::MapError;
use super::format::{Attributes, Format, Layout, LeafSize};
use super::map::Last;
use super::near::Near;
use super::unmap::{Obstacle, UnmapRun};
use super::walk::{Conflict, NewTable};
use crate::addr::{Iova, IovaRange, PageSize, PageSizes, PhysAddr};
use crate::broken::broken;
use crate::percpu::{CachePadded, Marks, Section, Turn, TurnLocal};
use crate::platform::{FRAME_SIZE, Frames, Home, LocalCpu, Platform};
use crate::setup::SetupError;
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Mutex, Ordering, pause};

/// The result of an unmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "an unmap may have found less than it was asked to remove"]
pub struct Unmapped {
    /// Bytes removed. Less than the range if it has holes, or if a part is `kept`.
    pub bytes: u64,
    /// Bytes of the range that **are still mapped**, and reached by devices: parts of larger pages
    /// that could not be split, for want of memory or because an invalidation was not confirmed;
    /// and parts of granules.
    pub kept: u64,
    /// The range that an invalidation must cover for `bytes` to be out of reach: the range that was
    /// asked for, and the whole of each large page that was split, now or earlier, and of which it
    /// covers a part. If less than the range was found, another caller has removed the rest. That
    /// may have been a part of a large page of which no trace is left, and everything must be
    /// invalidated to have it out of reach, unless the caller that removed it ensures that.
    pub stale: IovaRange,
}

impl Unmapped {
    /// Makes the result of an unmap that removed `bytes` of `range`. For mappers that split no
    /// pages.
    pub const fn of(range: IovaRange, bytes: u64) -> Self {
        Self { bytes, kept: 0, stale: range }
    }
}

/// The number of runs of entries, each in one frame of a table, that a call visits or removes with
/// one CPU.
pub(super) const RUNS_AT_ONCE: usize = 64;

/// The number of granules that a call maps with one CPU, at a cost of a walk each at the most, or
/// of one run of larger pages.
const PAGES_AT_ONCE: u64 = 4096;

/// A page table of format `X` in memory from `F`, freed with it.
///
/// All methods take `&self` and may run on any number of CPUs at the same time, as long as no two
/// of them change the same pages; if they do, entries stay valid but any of their mappings may win.
///
/// A call never keeps a CPU in proportion to a range: it keeps it for 4,096 granules or the
/// entries of 64 frames of tables at a time, and for one table if a large page is split.
///
/// The caller decides which memory a device may reach: the table maps what it is told, so that is
/// unsafe. The code that tells hardware to walk the table from its [root](Self::root) ensures that
/// no hardware walks it any more when it is dropped.
#[derive(Debug)]
pub struct PageTable<F: Frames, X: Format> {
    frames: F,
    format: X,
    root: PhysAddr,
    /// The tables that each CPU remembers, and the marks of its turns.
    pub(super) near: TurnLocal<Near>,
    /// The platform whose CPUs these are for.
    home: Home,
    /// The highest address, and the binary logarithm of the bytes that an entry of the root
    /// translates.
    last: u64,
    root_shift: u32,
    /// The bits that no granule's address has, in the device's addresses and in memory.
    stray: [u64; 2],
    /// The sum of the sizes of leaves of one entry.
    single: u64,
    /// Bytes of the smallest leaf but one; of the only leaf, if there is one size.
    pub(super) second: u64,
    /// The stamp under which CPUs remember the tables that they were in: see [`near`](super::near).
    pub(super) stamp: AtomicU64,
    /// Apart from the fields that every map and unmap reads.
    books: CachePadded<Books>,
}

/// Fields that are written when tables come and go.
#[derive(Debug, Default)]
struct Books {
    /// The number of frames in tables.
    used: AtomicUsize,
    is_reclaiming: AtomicBool,
    /// Empty tables that no entry leads to, but that hardware may know: see
    /// [`replace`](super::replace).
    parked: Mutex<Vec<PhysAddr>>,
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Makes an empty table of `format`, which a [`Domain`](crate::domain::Domain) that is made of it serves to the CPUs of its
    /// platform. By itself it is for no CPU: all of them take turns by a lock. A table without a domain is made
    /// [`for_cpus`](Self::for_cpus).
    ///
    /// # Errors
    /// [`SetupError`], with nothing allocated.
    pub fn new(frames: F, format: X) -> Result<Self, SetupError> {
        Self::for_cpus(frames, format, 0)
    }

    /// Makes an empty table of `format` for `cpus` CPUs, which should be as many as the platform's
    /// [`cpus`](crate::platform::Platform::cpus): CPUs with higher numbers take turns by a lock, and have no lists of addresses
    /// in a [`Domain`](crate::domain::Domain) of the table.
    ///
    /// # Errors
    /// [`SetupError`], with nothing allocated.
    pub fn for_cpus(frames: F, format: X, cpus: usize) -> Result<Self, SetupError> {
        let mut table = Self {
            frames,
            format,
            root: PhysAddr::new(0),
            near: Self::near_of(cpus),
            home: Home::default(),
            last: format.last_iova().get(),
            root_shift: format.shift(format.levels()),
            stray: [format.last_iova().get(), format.last_phys().get()].map(Self::stray_bits),
            single: format
                .leaf_sizes()
                .iter()
                .filter(|size| size.run == 0)
                .map(|size| format.page_size(*size).bytes())
                .sum(),
            second: format.leaf_sizes().get(1).map_or(u64::MAX, |size| format.page_size(*size).bytes()),
            stamp: AtomicU64::new(1),
            books: CachePadded::default(),
        };
        match table.new_table(format.levels()).map(NewTable::keep) {
            Ok(root) => table.root = root,
            Err(conflict) => {
                let error = match conflict {
                    Conflict::BeyondPhysical { table: root } => {
                        SetupError::TableBeyondPhysical { table: root, last: format.last_phys() }
                    }
                    _ => SetupError::OutOfMemory,
                };
                return Err(error);
            }
        }
        Ok(table)
    }

    /// Makes the table for `cpus` CPUs, if it is for none yet.
    pub(crate) fn set_cpus(&mut self, cpus: usize) {
        if self.marks().cpus() == 0 {
            self.near = Self::near_of(cpus);
        }
    }

    fn near_of(cpus: usize) -> TurnLocal<Near> {
        TurnLocal::new(Arc::new(Marks::new(cpus)), cpus, |_| Near::default())
    }

    /// Returns the address at which the hardware finds the top table.
    #[inline]
    pub fn root(&self) -> PhysAddr {
        self.root
    }

    /// Returns the layout of the entries.
    #[inline]
    pub fn format(&self) -> &X {
        &self.format
    }

    /// Returns how many levels a walk has.
    pub fn levels(&self) -> u32 {
        self.format.levels()
    }

    /// Returns the page sizes that leaves may have.
    pub fn page_sizes(&self) -> PageSizes {
        self.format.page_sizes()
    }

    /// Returns the highest address that the tables can translate.
    #[inline]
    pub fn last_iova(&self) -> Iova {
        Iova::new(self.last)
    }

    /// Returns the addresses that the tables can translate.
    pub fn aperture(&self) -> IovaRange {
        IovaRange::from_bounds(Iova::new(0), self.last_iova()).expect("63 bits at most never wrap")
    }

    /// Returns the bytes of memory in tables, the root included.
    pub fn table_bytes(&self) -> usize {
        self.books.used.load(Ordering::Relaxed) * FRAME_SIZE as usize
    }

    /// Maps `range` to the memory at `phys`, with the largest pages that alignment and size allow at each
    /// address.
    ///
    /// Costs one walk for each leaf table touched and one store for each entry. Allocates missing tables. Waits
    /// only for a [`reclaim`](Self::reclaim) that is just looking at a table on the way.
    ///
    /// # Errors
    /// [`MapError`]: nothing of the range is mapped by this call. The range beside it, where there is one, is what the call had
    /// entered before it failed, and has removed again; a device may have used those pages meanwhile, so they need an invalidation
    /// before the range is used again.
    ///
    /// # Safety
    /// **The memory is the caller's to open to every device that is translated by this table, for as long as it is mapped**:
    /// from the call on, until an unmap of it has returned and an invalidation of what that removed is confirmed.
    ///
    /// - Devices may access it at any time, as the permissions say. Until then the owner does not
    ///   give it to others, nor use it in a way that relies on its contents: there are no
    ///   references to it but to atomics (and, if devices only read, shared ones to bytes that are
    ///   not written); the CPU reads and writes it as atomics, or volatile.
    /// - This also holds for all of each granule: whole pages are opened.
    /// - After an error it holds only for the range beside it, until the invalidation of that is
    ///   confirmed.
    ///
    /// Any caller may open memory that only a software IOMMU reaches, all of it in atomics.
    #[inline]
    pub unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        phys: PhysAddr,
        attributes: impl Into<Attributes>,
    ) -> Result<(), (MapError, Option<IovaRange>)> {
        let attributes = attributes.into();
        let fast = |cpu: &LocalCpu<'_>| {
            // SAFETY: the caller's promise; the platform has just lent the CPU.
            unsafe { self.map_fast(platform, cpu, range, phys, attributes) }
        };
        if platform.with_cpu_fast(fast) == Some(true) {
            return Ok(());
        }
        self.check(range).map_err(|error| (error, None))?;
        self.map_from(platform, range, 0, [(phys, range.len())], attributes)
    }

    /// Maps `range` to the pieces of memory in `list`, each with its length, one after the other.
    ///
    /// As [`map`](Self::map); pieces that lie in one leaf table share a walk.
    ///
    /// # Errors
    /// As [`map`](Self::map); [`MapError::Length`] if the pieces together are not as long as the
    /// range.
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

    /// Maps the rest of `range`, of which `done` bytes are mapped.
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
        // Maps as much as one CPU may be kept for. Returns whether that is all.
        let mut enter = |cpu: Option<&LocalCpu<'_>>| {
            let _section = self.section(cpu);
            let mut last = Last::NONE;
            let end = range.len().min(done.saturating_add(PAGES_AT_ONCE << X::GRANULE_SHIFT));
            while done < end {
                if piece.1 == 0 {
                    let next = list.next().ok_or(Stop::Error(MapError::Length { range, list: done }))?;
                    if next.1 == 0 {
                        // An empty piece, wherever it is: the list may go on with any number of
                        // them.
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
        let mut result = match self.with_cpu_fast(platform, |cpu| enter(Some(cpu))) {
            Some(result) => result,
            None => self.with_cpu(platform, &mut enter),
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
            result = self.with_cpu(platform, &mut enter);
        };
        Err(self.undo(platform, range, done, stop))
    }

    /// Checks a piece of memory for `range`, of which `done` bytes are mapped.
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
            Some(last) if last <= self.format.last_phys().get() => Ok((phys.get(), len)),
            _ => Err(Stop::Error(MapError::BeyondPhysical { phys, len, last: self.format.last_phys() })),
        }
    }

    /// Removes the first `done` bytes of `range` again. Returns why they could not stay.
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
            // All that is left of the call's own pages goes: whole pages inside the range, which
            // need no split. A part that is kept belongs to another caller's larger page, which
            // came after another CPU removed some of them against the rules. The call's entries
            // were free before, so no larger page around them is cached any more.
            let _ = self.unmap_all(platform, entered, &mut |_| false);
        }
        let error = match stop {
            Stop::Error(error) => error,
            Stop::Conflict(Conflict::Mapped { at }) => MapError::AlreadyMapped { at: Iova::new(at) },
            Stop::Conflict(Conflict::BeyondPhysical { table }) => {
                MapError::TableBeyondPhysical { table, last: self.format.last_phys() }
            }
            Stop::Conflict(_) => MapError::OutOfMemory,
        };
        (error, undone)
    }

    /// Clears every entry of `range`. A large page of which it covers only a part is split; if
    /// there is no memory for that, the page stays, and is counted as [kept](Unmapped::kept). So is
    /// a granule of which it covers only a part.
    ///
    /// The hardware may go on using what it has cached until it is told to forget the
    /// [stale](Unmapped::stale) range. Costs one walk for each leaf table, one store for each
    /// entry; a hole costs one step for each missing table. Allocates only to split; cannot fail.
    /// `invalidate` is called, with no CPU held, only to split a page of several entries, or of a
    /// format that requires a page to be broken before it is split: it makes the hardware forget
    /// the range, paging structures included, and returns whether that worked. The call waits for
    /// such splits by another CPU, with frames that are not coherent for any split by another CPU,
    /// and for a page of several entries also for a [`reclaim`](Self::reclaim). So an interrupt
    /// handler should only remove pages that were mapped as a whole.
    ///
    /// # Safety
    /// - **`invalidate` returns `true` only if hardware has forgotten the range**: no IOMMU that
    ///   walks this table, and no device that caches translations itself, uses a translation or a
    ///   table of the range any more that it read before the call, and every access that did is
    ///   complete. A table is freed on that word.
    /// - If that was not confirmed it returns `false`. An `invalidate` that always does is sound.
    #[inline]
    pub unsafe fn unmap<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        invalidate: &mut dyn FnMut(IovaRange) -> bool,
    ) -> Unmapped {
        // SAFETY: the platform has just lent the CPU.
        let fast = |cpu: &LocalCpu<'_>| unsafe { self.unmap_fast(platform, cpu, range) };
        if platform.with_cpu_fast(fast) == Some(true) {
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
            let paused = match self.with_cpu_fast(platform, |cpu| enter(Some(cpu), &mut at)) {
                Some(paused) => paused,
                None => self.with_cpu(platform, |cpu| enter(cpu, &mut at)),
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
            // A part of a granule cannot be removed.
            let is_smallest = page.size == LeafSize { level: 1, run: 0 };
            let mut split = |at| match page.size.run {
                1.. if !X::BREAK_BEFORE_MAKE => self.split_run(platform, at, forget),
                run => self.split(platform, at, run, forget),
            };
            let result = if is_smallest { None } else { split(at).ok() };
            let Some(is_done) = result else {
                let next = page.iova + self.format.page_size(page.size).bytes();
                kept += next.min(end + 1) - at;
                at = next;
                continue;
            };
            if !is_done {
                pause();
            }
        }
    }

    /// Extends `stale` to the 2^`shift` bytes around `at`.
    #[cold]
    fn widen(&self, stale: &mut IovaRange, at: u64, shift: u32) {
        let around = IovaRange::new(Iova::new(at >> shift << shift), 1 << shift);
        // Hardware caches nothing of addresses that cannot be translated.
        *stale = around.and_then(|around| stale.hull(around)).unwrap_or(self.aperture());
    }

    /// Returns the smallest page.
    #[inline]
    pub fn granule(&self) -> PageSize {
        // The compiler knows that it is.
        PageSize::from_shift(X::GRANULE_SHIFT).unwrap_or_else(|| broken("a granule is a page size"))
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

    /// As [`Platform::with_cpu_fast`], for a turn: returns `None` also if the turns are for
    /// another platform's CPUs.
    #[inline]
    pub(super) fn with_cpu_fast<P: Platform, R>(
        &self,
        platform: &P,
        f: impl FnOnce(&LocalCpu<'_>) -> R,
    ) -> Option<R> {
        self.home.with_cpu_fast(platform, f)
    }

    /// As [`Platform::with_cpu`], for a turn: calls without a CPU also if the turns are for
    /// another platform's CPUs.
    #[inline]
    pub(super) fn with_cpu<P: Platform, R>(
        &self,
        platform: &P,
        f: impl FnOnce(Option<&LocalCpu<'_>>) -> R,
    ) -> R {
        self.home.with_cpu(platform, f)
    }

    /// Returns whether the turns are for the CPUs of `platform`.
    #[inline]
    pub(super) fn is_home<P: Platform>(&self, platform: &P) -> bool {
        self.home.is(platform)
    }

    /// Returns whether a barrier of `platform` reaches all CPUs that have turns of their own, now and
    /// from now on.
    pub(super) fn is_reached<P: Platform>(&self, platform: &P) -> bool {
        self.home.is_reached(platform)
    }

    #[inline]
    pub(super) fn frames(&self) -> &F {
        &self.frames
    }

    /// Returns the marks of the table's turns.
    pub(super) fn marks(&self) -> &Marks {
        self.near.marks()
    }

    /// Returns the marks of the turns in which the table is changed [at hand](Self::map_in), if
    /// they are for the CPUs of `platform`; if no platform is home yet, `platform` becomes it.
    pub fn marks_for<P: Platform>(&self, platform: &P) -> Option<&Arc<Marks>> {
        self.is_home(platform).then(|| self.near.marks())
    }

    /// Begins a turn: only with the CPUs of [`with_cpu_fast`](Self::with_cpu_fast), and those that the
    /// platform which [is home](Self::is_home) has lent.
    #[inline]
    pub(super) fn turn<'a>(&'a self, cpu: &'a LocalCpu<'_>) -> Option<Turn<'a>> {
        self.near.turn(cpu)
    }

    /// Begins a section: only with the CPUs of [`with_cpu`](Self::with_cpu) and
    /// [`with_cpu_fast`](Self::with_cpu_fast).
    #[inline]
    pub(super) fn section<'a>(&'a self, cpu: Option<&'a LocalCpu<'_>>) -> Section<'a> {
        // SAFETY: they are of one platform.
        unsafe { self.near.marks().begin_section(cpu) }
    }

    #[inline]
    pub(super) fn root_shift(&self) -> u32 {
        self.root_shift
    }

    /// Returns the stray bits of addresses up to `last`. If that is not one less than a power of
    /// two, returns those of addresses up to the highest such number below.
    const fn stray_bits(last: u64) -> u64 {
        !((1 << (last + 1).ilog2()) - (1 << X::GRANULE_SHIFT))
    }

    #[inline]
    pub(super) fn stray(&self) -> [u64; 2] {
        self.stray
    }

    #[inline]
    pub(super) fn single(&self) -> u64 {
        self.single
    }

    pub(super) fn is_reclaiming(&self) -> &AtomicBool {
        &self.books.is_reclaiming
    }

    pub(super) fn parked(&self) -> &Mutex<Vec<PhysAddr>> {
        &self.books.parked
    }

    pub(super) fn count_frames(&self, frames: isize) {
        // Relaxed: a figure for reports, it orders nothing.
        self.books.used.fetch_add(frames as usize, Ordering::Relaxed);
    }
}

/// The reason why an unmap has left its section.
enum Pause {
    /// All of the range is removed.
    Done,
    /// The call has kept the CPU for long enough.
    TimeSlice,
    Obstacle(Obstacle),
}

/// The reason why a list was not mapped.
enum Stop {
    Conflict(Conflict),
    Error(MapError),
}

impl<F: Frames, X: Format> Drop for PageTable<F, X> {
    fn drop(&mut self) {
        for table in core::mem::take(&mut *self.books.parked.lock()) {
            // Only the root has another size.
            self.free_table(table, 1);
        }
        // Without a root there is nothing to free.
        if self.books.used.load(Ordering::Relaxed) == 0 {
            return;
        }
        // SAFETY: `&mut self` proves that no walk of ours is under way, and the code that made this
        // table for hardware has detached it before dropping it.
        unsafe { self.free_below(self.root, self.format.levels()) }
    }
}
