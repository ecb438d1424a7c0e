//! The page table as its owner sees it: map, unmap, translate.

use super::vtd;
use super::walk::{self, Conflict};
use crate::addr::{Iova, IovaRange, PageSize, PageSizes, Permissions, PhysAddr};
use crate::platform::Frames;
use crate::sync::{AtomicUsize, Ordering};

/// A page table that cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The format has no table of so many levels.
    #[error("{levels} levels of page table: the format has {min} to {max}")]
    Levels {
        /// What was asked for.
        levels: u32,
        /// The fewest there are.
        min: u32,
        /// The most there are.
        max: u32,
    },
    /// A page size that the format has no leaf for, or no 4 KiB pages.
    #[error("page sizes {sizes:?}: 4 KiB is needed, 2 MiB and 1 GiB are possible")]
    PageSizes {
        /// What was asked for.
        sizes: PageSizes,
    },
    /// No memory for the root table.
    #[error("no memory for the root of a page table")]
    OutOfMemory,
}

/// A mapping that was not made: nothing of it is in the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// An address or the length is not a multiple of the granule.
    #[error("mapping {range} to {phys}: both must be multiples of the granule, {granule:#x}")]
    Misaligned {
        /// The I/O virtual range.
        range: IovaRange,
        /// The physical address.
        phys: PhysAddr,
        /// The smallest page, in bytes.
        granule: u64,
    },
    /// The range runs past what the tables can translate.
    #[error("mapping {range}: the tables translate addresses up to {last}")]
    BeyondAperture {
        /// The I/O virtual range.
        range: IovaRange,
        /// The highest address that can be translated.
        last: Iova,
    },
    /// The memory lies where no entry can point to.
    #[error("mapping {len:#x} bytes of physical memory at {phys}: an entry holds addresses up to {last}")]
    BeyondPhysical {
        /// The physical address.
        phys: PhysAddr,
        /// How many bytes.
        len: u64,
        /// The highest physical address.
        last: PhysAddr,
    },
    /// Part of the range is in use.
    #[error("{at} is mapped already")]
    AlreadyMapped {
        /// The lowest such address that was met.
        at: Iova,
    },
    /// No memory for a page table.
    #[error("no memory for a page table")]
    OutOfMemory,
}

/// What an unmap found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "an unmap may have found less than it was asked to remove"]
pub struct Unmapped {
    /// Bytes removed. Less than the range where it has holes, or where a larger page sticks out of it: such a
    /// page stays.
    pub bytes: u64,
}

/// A VT-d second-stage page table in memory from `F`, freed with it.
///
/// All methods take `&self` and may run on any number of CPUs at once, as long as no two of them change the
/// same pages; if they do, entries stay valid but it is open whose mapping wins, and a table may leak.
///
/// Which memory a device is let into is the caller's affair: the table maps what it is told. Its owner sees to
/// it that no hardware walks it any more when it is dropped.
#[derive(Debug)]
pub struct PageTable<F: Frames> {
    frames: F,
    root: PhysAddr,
    levels: u32,
    page_sizes: PageSizes,
    tables: AtomicUsize,
}

impl<F: Frames> PageTable<F> {
    /// An empty table of `levels` levels (3, 4 or 5: 39, 48 or 57 bits) that may use leaves of `page_sizes`.
    ///
    /// # Errors
    /// [`TableError`], with nothing allocated.
    pub fn new(frames: F, levels: u32, page_sizes: PageSizes) -> Result<Self, TableError> {
        if !(vtd::MIN_LEVELS..=vtd::MAX_LEVELS).contains(&levels) {
            return Err(TableError::Levels { levels, min: vtd::MIN_LEVELS, max: vtd::MAX_LEVELS });
        }
        let leaves = PageSizes::EMPTY.with(PageSize::SIZE_4K).with(PageSize::SIZE_2M).with(PageSize::SIZE_1G);
        if page_sizes.smallest() != Some(PageSize::SIZE_4K) || !leaves.contains_all(page_sizes) {
            return Err(TableError::PageSizes { sizes: page_sizes });
        }
        let root = frames.alloc(1).ok_or(TableError::OutOfMemory)?;
        Ok(Self { frames, root, levels, page_sizes, tables: AtomicUsize::new(1) })
    }

    /// Where the hardware finds the top table.
    pub fn root(&self) -> PhysAddr {
        self.root
    }

    /// How many levels a walk has.
    pub fn levels(&self) -> u32 {
        self.levels
    }

    /// The page sizes that leaves may have.
    pub fn page_sizes(&self) -> PageSizes {
        self.page_sizes
    }

    /// The highest address that the tables can translate.
    pub fn last_iova(&self) -> Iova {
        Iova::new((1 << (12 + vtd::BITS_PER_LEVEL * self.levels)) - 1)
    }

    /// The addresses that the tables can translate.
    pub fn aperture(&self) -> IovaRange {
        IovaRange::from_bounds(Iova::new(0), self.last_iova()).expect("57 bits at most never wrap")
    }

    /// Bytes of memory in tables, the root included.
    pub fn table_bytes(&self) -> usize {
        self.tables.load(Ordering::Relaxed) * crate::platform::FRAME_SIZE as usize
    }

    /// Maps `range` to the memory at `phys`, with the largest pages that alignment and size allow.
    ///
    /// Costs one walk for each leaf table touched and one store for each leaf. Allocates missing tables.
    ///
    /// # Errors
    /// [`MapError`]: nothing of the range is mapped by this call. Where `undone` is given a range, the call
    /// had entered those pages before it failed and has removed them again; a device may have used them
    /// meanwhile, so they need an invalidation before the range is used again.
    pub fn map(
        &self,
        range: IovaRange,
        phys: PhysAddr,
        permissions: Permissions,
        undone: &mut Option<IovaRange>,
    ) -> Result<(), MapError> {
        self.check(range, phys)?;
        let mut done = 0;
        while done < range.len() {
            let at = range.start().get() + done;
            let run = walk::map_run(self, at, phys.get() + done, range.len() - done, permissions);
            done += run.bytes;
            if let Some(conflict) = run.conflict {
                if done > 0 {
                    let entered = IovaRange::new(range.start(), done).ok();
                    let removed = entered.map(|entered| self.unmap(entered));
                    debug_assert_eq!(removed, Some(Unmapped { bytes: done }));
                    *undone = entered;
                }
                return Err(match conflict {
                    Conflict::Mapped { at } => MapError::AlreadyMapped { at: Iova::new(at) },
                    Conflict::OutOfMemory => MapError::OutOfMemory,
                });
            }
        }
        Ok(())
    }

    /// Clears every entry of `range` that it can: all but the large pages of which it covers only a part.
    ///
    /// The hardware may go on using what it has cached until it is told to forget it. One walk for each leaf
    /// table, one store for each leaf; a hole costs one step for each missing table. Allocates nothing and
    /// cannot fail.
    pub fn unmap(&self, range: IovaRange) -> Unmapped {
        let end = range.last().min(self.last_iova()).get();
        let mut at = range.start().get();
        let mut bytes = 0;
        while at <= end {
            let run = walk::unmap_run(self, at, end - at + 1);
            bytes += run.bytes;
            // The end is below 2^57, so this cannot wrap.
            at += run.bytes + run.skip;
        }
        Unmapped { bytes }
    }

    /// Where a device's access to `iova` would go and what it may do there, by the tables alone.
    /// At most five dependent loads.
    pub fn translate(&self, iova: Iova) -> Option<(PhysAddr, Permissions)> {
        if iova > self.last_iova() {
            return None;
        }
        walk::translate(self, iova.get())
    }

    fn check(&self, range: IovaRange, phys: PhysAddr) -> Result<(), MapError> {
        let granule = PageSize::SIZE_4K;
        if !range.start().is_aligned(granule)
            || !phys.is_aligned(granule)
            || range.len() & granule.offset_mask() != 0
        {
            return Err(MapError::Misaligned { range, phys, granule: granule.bytes() });
        }
        if range.last() > self.last_iova() {
            return Err(MapError::BeyondAperture { range, last: self.last_iova() });
        }
        match phys.checked_add(range.len() - 1) {
            Some(last) if last <= vtd::MAX_PHYS => Ok(()),
            _ => Err(MapError::BeyondPhysical { phys, len: range.len(), last: vtd::MAX_PHYS }),
        }
    }

    pub(super) fn frames(&self) -> &F {
        &self.frames
    }

    pub(super) fn count_table(&self) {
        // Relaxed: a figure for reports, it orders nothing.
        self.tables.fetch_add(1, Ordering::Relaxed);
    }
}

impl<F: Frames> Drop for PageTable<F> {
    fn drop(&mut self) {
        // SAFETY: `&mut self` proves that no walk of ours is under way, and whoever made this table for
        // hardware has detached it before dropping it.
        unsafe { walk::free_tables(&self.frames, self.root, self.levels) }
    }
}
