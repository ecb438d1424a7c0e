//! The page table and the memory of its tables. A CPU finds a table only inside a section of the page table's section
//! flags, so a table is freed after a grace period.

use alloc::vec::Vec;
use core::fmt;

use super::format::{Entry, Format, Layout};
use super::place::{Near, Position};
use crate::addr::{Iova, IovaRange, PageSize, PageSizes, PhysAddr};
use crate::broken::broken;
use crate::heap::{OutOfMemory, Shared};
use crate::percpu::{CachePadded, Marks, Section, Turn, TurnLocal};
use crate::platform::{FRAME_SIZE, Frames, LocalCpu, OnePlatform, Platform, TABLE_ENTRIES};
use crate::setup::SetupError;
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, TicketLock};

/// Runs, each in one frame of a table, that a call visits or removes with one CPU.
pub(super) const RUNS_AT_ONCE: usize = 64;

/// A page table of format `X` in memory from `F`, which is freed with the page table.
///
/// All methods take `&self` and may run on any number of CPUs at the same time, as long as no two of them change the
/// same pages. If two do, the tables stay well-formed, but either mapping may win. A call holds a CPU for a bounded
/// time: for 4,096 granules or the entries of 64 frames of tables, and for one table if it splits a large page.
///
/// Mapping is unsafe, as the caller decides which memory a device may reach. The code that tells hardware to walk the
/// table from its [root](Self::root) ensures that no hardware walks it any more when the page table is dropped.
pub struct PageTable<F: Frames, X: Format> {
    pub(super) frames: F,
    format: X,
    root: PhysAddr,
    /// The tables that each CPU remembers, and the section flags.
    pub(super) near: TurnLocal<Near>,
    /// The platform whose CPUs the section flags are for.
    pub(super) platform: OnePlatform,
    /// The highest address, and the binary logarithm of the bytes that an entry of the root translates.
    last: u64,
    pub(super) root_shift: u32,
    /// Bits that the fast paths refuse in a granule's address: in an IOVA, and in a physical address.
    pub(super) stray: [u64; 2],
    /// The sum of the sizes of leaves of one entry, each a bit.
    pub(super) single: u64,
    /// Bytes of the second-smallest leaf; `u64::MAX` if there is one size.
    pub(super) second: u64,
    /// The generation under which CPUs remember tables: see [`near`](super::near).
    pub(super) stamp: AtomicU64,
    /// On other cache lines than the fields that every map and unmap reads.
    pub(super) books: CachePadded<Books>,
}

/// Shows root and levels; with `{:#?}` also the tables that the CPUs remember, which is pages of text.
impl<F: Frames, X: Format> fmt::Debug for PageTable<F, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = f.alternate();
        let mut shown = f.debug_struct("PageTable");
        shown.field("root", &self.root).field("levels", &self.levels());
        if whole {
            shown.field("near", &self.near);
        }
        shown.finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
pub(super) struct Books {
    used: AtomicUsize,
    /// Held by the one call that takes tables out of their places, or splits contiguous PTEs.
    pub taking_out: TicketLock,
    /// Empty tables that no entry leads to, but that hardware may still walk: see [`replace`](super::replace).
    pub parked: Mutex<Vec<PhysAddr>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Conflict {
    /// The page at this address is in use.
    Mapped { at: u64 },
    /// No frame for a table is free.
    OutOfMemory,
    /// The frame that was found lies where no entry can point to.
    BeyondPhysical { table: PhysAddr },
    /// Another CPU reclaims or replaces a table on the way, or has not shown it to the hardware yet: try again, outside
    /// the section. A split also returns this if hardware did not confirm that it has forgotten the page.
    Busy,
}

/// A table that no entry leads to yet. Dropping it frees the table.
pub(super) struct NewTable<'a, F: Frames, X: Format> {
    owner: &'a PageTable<F, X>,
    table: PhysAddr,
    level: u32,
}

impl<F: Frames, X: Format> NewTable<'_, F, X> {
    pub(super) fn table(&self) -> PhysAddr {
        self.table
    }

    /// Counts the table as used: an entry leads to it now.
    pub(super) fn keep(self) -> PhysAddr {
        self.owner.count_frames(self.owner.frames_of(self.level) as isize);
        let table = self.table;
        core::mem::forget(self);
        table
    }
}

impl<F: Frames, X: Format> Drop for NewTable<'_, F, X> {
    fn drop(&mut self) {
        self.owner.free_table(self.table, self.level);
    }
}

impl<F: Frames, X: Format> PageTable<F, X> {
    /// Makes an empty table of `format` for a [`Domain`](crate::domain::Domain), which sets it up for the CPUs of its
    /// platform. Until then it has no per-CPU state, and every caller takes a lock. For a table without a domain see
    /// [`for_cpus`](Self::for_cpus). Context: allocates the frames of the root; for set-up.
    ///
    /// # Errors
    /// [`SetupError`], with nothing allocated.
    pub fn new(frames: F, format: X) -> Result<Self, SetupError> {
        Self::for_cpus(frames, format, 0)
    }

    /// Makes an empty table of `format` for `cpus` CPUs, which should be the platform's
    /// [`cpus`](crate::platform::Platform::cpus). Callers on CPUs with higher numbers take a lock, and have no lists of
    /// addresses in a [`Domain`](crate::domain::Domain) of the table. Context: allocates the frames of the root, and
    /// some words for each CPU; for set-up.
    ///
    /// # Errors
    /// [`SetupError`], with nothing allocated.
    pub fn for_cpus(frames: F, format: X, cpus: usize) -> Result<Self, SetupError> {
        let mut table = Self {
            frames,
            format,
            root: PhysAddr::new(0),
            near: Self::near_of(cpus)?,
            platform: OnePlatform::default(),
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

    /// Sets the table up for `cpus` CPUs, if it is for none yet.
    pub(crate) fn set_cpus(&mut self, cpus: usize) -> Result<(), OutOfMemory> {
        if self.near.marks().cpus() == 0 {
            self.near = Self::near_of(cpus)?;
        }
        Ok(())
    }

    fn near_of(cpus: usize) -> Result<TurnLocal<Near>, OutOfMemory> {
        TurnLocal::new(Shared::new(Marks::new(cpus)?)?, cpus, |_| Ok(Near::default()))
    }

    /// The address at which the hardware finds the top table.
    #[inline]
    pub fn root(&self) -> PhysAddr {
        self.root
    }

    /// The layout of the entries.
    #[inline]
    pub fn format(&self) -> &X {
        &self.format
    }

    /// The number of levels of a walk.
    pub fn levels(&self) -> u32 {
        self.format.levels()
    }

    /// The page sizes that leaves may have.
    pub fn page_sizes(&self) -> PageSizes {
        self.format.page_sizes()
    }

    /// The highest address that the tables can translate.
    #[inline]
    pub fn last_iova(&self) -> Iova {
        Iova::new(self.last)
    }

    /// The addresses that the tables can translate.
    pub fn aperture(&self) -> IovaRange {
        IovaRange::from_bounds(Iova::new(0), self.last_iova()).expect("63 bits at most never wrap")
    }

    /// The bytes of memory in tables, the root included.
    pub fn table_bytes(&self) -> usize {
        self.books.used.load(Ordering::Relaxed) * FRAME_SIZE as usize
    }

    /// The smallest page.
    #[inline]
    pub fn granule(&self) -> PageSize {
        PageSize::from_shift(X::GRANULE_SHIFT).unwrap_or_else(|| broken("a granule is a page size"))
    }

    /// The section flags for [`map_in`](Self::map_in) and [`unmap_in`](Self::unmap_in), if they are for the CPUs of
    /// `platform`. If they are for no platform yet, they are for `platform` from now on.
    pub fn marks_for<P: Platform>(&self, platform: &P) -> Option<&Shared<Marks>> {
        self.platform.is(platform).then(|| self.near.marks())
    }

    /// Begins an exclusive section. `cpu` is lent by the table's [one platform](OnePlatform::is).
    #[inline]
    pub(super) fn turn<'a>(&'a self, cpu: &'a LocalCpu<'_>) -> Option<Turn<'a>> {
        self.near.turn(cpu)
    }

    /// Calls `f` in an exclusive section of the caller's CPU; returns `false` without one.
    #[inline]
    pub(super) fn in_turn<P: Platform>(&self, platform: &P, f: impl FnOnce(&Turn<'_>) -> bool) -> bool {
        let fast = |cpu: &LocalCpu<'_>| self.turn(cpu).is_some_and(|turn| f(&turn));
        self.platform.is(platform) && platform.with_cpu_fast(fast) == Some(true)
    }

    /// Begins a section, with a CPU of [`OnePlatform::with_cpu`] or [`OnePlatform::with_cpu_fast`], or none.
    #[inline]
    pub(super) fn section<'a>(&'a self, cpu: Option<&'a LocalCpu<'_>>) -> Section<'a> {
        // SAFETY: `Marks::turn`, 1: `OnePlatform` lends CPUs of one platform only.
        unsafe { self.near.marks().section(cpu) }
    }

    /// The bits that no granule's address up to `last` has. If `last` + 1 is not a power of two, `last` is rounded down
    /// so that it is.
    const fn stray_bits(last: u64) -> u64 {
        !((1 << (last + 1).ilog2()) - (1 << X::GRANULE_SHIFT))
    }

    pub(super) fn count_frames(&self, frames: isize) {
        // Relaxed: a figure for reports, which orders nothing.
        self.books.used.fetch_add(frames as usize, Ordering::Relaxed);
    }

    /// The words from `at` on, up to the end of its frame.
    #[inline]
    pub(super) fn words(&self, at: Position) -> &[AtomicU64] {
        let frame = at.table.get() + (at.index / TABLE_ENTRIES) as u64 * FRAME_SIZE;
        // SAFETY: `Frames::table`, 1: the root and every table that an entry leads to came from `frames` (`new_table`),
        // with as many frames as their index has room for. They are freed in `drop`, which no `&PageTable` outlives, or
        // by `reclaim` and `split_run` after a grace period for all sections that could have found them. A CPU uses
        // tables that it remembers of an earlier section only under the same generation (see `near`).
        let words = unsafe { self.frames.table(PhysAddr::new(frame)) };
        &words[at.index % TABLE_ENTRIES..]
    }

    #[inline]
    pub(super) fn word(&self, at: Position) -> &AtomicU64 {
        let frame = at.table.get() + (at.index / TABLE_ENTRIES) as u64 * FRAME_SIZE;
        // SAFETY: as in `words`.
        let words = unsafe { self.frames.table(PhysAddr::new(frame)) };
        &words[at.index % TABLE_ENTRIES]
    }

    /// Makes a non-coherent walker see the stores to `words`.
    #[inline]
    pub(super) fn clean(&self, words: &[AtomicU64]) {
        if !F::COHERENT {
            self.frames.clean(words);
        }
    }

    pub(super) fn entries_of(&self, level: u32) -> usize {
        1 << if level == self.format().levels() { self.format().root_bits() } else { X::INDEX_BITS }
    }

    pub(super) fn frames_of(&self, level: u32) -> usize {
        if level == self.format().levels() {
            self.format().root_frames()
        } else {
            self.format().table_frames()
        }
    }

    pub(super) fn new_table(&self, level: u32) -> Result<NewTable<'_, F, X>, Conflict> {
        let count = self.frames_of(level);
        let table = self.frames.alloc(count).ok_or(Conflict::OutOfMemory)?;
        let last = table.checked_add(count as u64 * FRAME_SIZE - 1);
        if last.is_none_or(|last| last > self.format().last_phys()) {
            // SAFETY: `Frames::free`, 1 and 2: the frames are of the `alloc` above, and no entry ever led to them.
            unsafe { self.frames.free(table, count) };
            return Err(Conflict::BeyondPhysical { table });
        }
        let new = NewTable { owner: self, table, level };
        if !F::COHERENT {
            let size = TABLE_ENTRIES * count;
            (0..size)
                .step_by(TABLE_ENTRIES)
                .for_each(|index| self.clean(self.words(Position { table, level, index })));
        }
        Ok(new)
    }

    /// Frees a table that no entry leads to and that no CPU or hardware uses.
    pub(super) fn free_table(&self, table: PhysAddr, level: u32) {
        // SAFETY: `Frames::free`, 1: it came from `new_table` for the same level. 2: the callers ensure that nothing
        // uses it.
        unsafe { self.frames.free(table, self.frames_of(level)) };
    }

    /// Frees the table at `table`, of `level`, and all tables below it. Recurses `level` deep.
    ///
    /// # Safety
    /// 1. Nothing, hardware included, uses them any more.
    pub(super) unsafe fn free_below(&self, table: PhysAddr, level: u32) {
        if level > 1 {
            let entries = self.entries_of(level);
            let frames = (0..entries).step_by(TABLE_ENTRIES);
            let words = frames.flat_map(|index| self.words(Position { table, level, index }));
            for entry in words.take(entries) {
                let entry = entry.load(Ordering::Acquire);
                if let Entry::Table { table, level } = self.format().decode(entry, level) {
                    // SAFETY: clause 1 covers the tables below, too.
                    unsafe { self.free_below(table, level) };
                }
            }
        }
        self.free_table(table, level);
    }
}

impl<F: Frames, X: Format> Drop for PageTable<F, X> {
    fn drop(&mut self) {
        for table in core::mem::take(&mut *self.books.parked.lock()) {
            // Only the root has another size, and it is never parked.
            self.free_table(table, 1);
        }
        if self.books.used.load(Ordering::Relaxed) == 0 {
            return;
        }
        // SAFETY: `free_below`, 1: `&mut self` shows that no CPU walks the table, and the code that made hardware walk
        // it has detached it before this drop (see [`PageTable`]).
        unsafe { self.free_below(self.root, self.format.levels()) }
    }
}
