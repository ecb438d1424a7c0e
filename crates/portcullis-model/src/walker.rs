//! The page-table walk: the VT-d second-stage tables, read entry by entry out of simulated memory.
//!
//! A walk changes nothing; what it found on its way is part of its answer, for the caller to cache and count.
//! It reads the tables as they are, allocated or not, and never trusts an entry: an address outside the
//! memory, a reserved bit or a missing permission is a fault.
//!
//! Cost: one dependent memory read per level from where it starts, at most 5.

use portcullis::addr::{Iova, PageSize, Permissions, PhysAddr};
use portcullis::pgtable::vtd;
use smallvec::SmallVec;

use crate::fault::FaultReason;
use crate::memory::Memory;

/// A table on the way down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TablePointer {
    /// Its level; 1 is the lowest.
    pub level: u32,
    /// Where it is.
    pub table: PhysAddr,
    /// What all entries above it allow together.
    pub permissions: Permissions,
}

impl TablePointer {
    /// The root of `levels` levels at `table`: nothing has been taken away yet.
    pub const fn root(table: PhysAddr, levels: u32) -> Self {
        Self { level: levels, table, permissions: Permissions::READ_WRITE }
    }
}

/// The page at the end of a walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaf {
    /// The first address of the page in memory.
    pub page: PhysAddr,
    /// Its size.
    pub size: PageSize,
    /// What all entries on the way allow together.
    pub permissions: Permissions,
}

/// What a walk found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walk {
    /// The page, or why there is none.
    pub result: Result<Leaf, FaultReason>,
    /// Entries that were read.
    pub table_reads: u32,
    /// Those of them in frames that are not allocated.
    pub freed_reads: u32,
    /// The tables below the one it started at, the highest first. They count even if the walk then faulted:
    /// hardware caches the present entries it passed.
    pub tables: SmallVec<[TablePointer; 4]>,
}

/// Whether an address fits the tables of `levels` levels.
pub fn in_width(iova: Iova, levels: u32) -> bool {
    let bits = 12 + levels.saturating_mul(vtd::BITS_PER_LEVEL);
    iova.get().checked_shr(bits).unwrap_or(0) == 0
}

/// Walks from `start` down to the page of `iova`. `start.level` is 1 to 5.
pub fn walk(memory: &Memory, iova: Iova, start: TablePointer) -> Walk {
    let (mut table_reads, mut freed_reads, mut tables) = (0, 0, SmallVec::new());
    let read = |table| {
        table_reads += 1;
        freed_reads += u32::from(!memory.is_allocated(table));
    };
    let result = descend(memory, iova, start, read, |below| tables.push(below));
    Walk { result, table_reads, freed_reads, tables }
}

/// The page at the end of a [`walk`], for those who do not ask for its cost.
pub(crate) fn find_leaf(memory: &Memory, iova: Iova, start: TablePointer) -> Result<Leaf, FaultReason> {
    descend(memory, iova, start, |_| (), |_| ())
}

/// Goes down from `start`, telling of each table that was `read` and of each that is found `below` one.
#[inline]
fn descend(
    memory: &Memory,
    iova: Iova,
    start: TablePointer,
    mut read: impl FnMut(PhysAddr),
    mut below: impl FnMut(TablePointer),
) -> Result<Leaf, FaultReason> {
    let mut at = start;
    while (1..=vtd::MAX_LEVELS).contains(&at.level) {
        let step = step(memory, iova, at, &mut read)?;
        match step {
            Step::Leaf(leaf) => return Ok(leaf),
            Step::Down(next) => {
                below(next);
                at = next;
            }
        }
    }
    Err(FaultReason::BadContext)
}

enum Step {
    Down(TablePointer),
    Leaf(Leaf),
}

/// Reads one entry.
#[inline]
fn step(
    memory: &Memory,
    iova: Iova,
    at: TablePointer,
    read: &mut impl FnMut(PhysAddr),
) -> Result<Step, FaultReason> {
    let TablePointer { level, table, permissions } = at;
    let entry = table
        .checked_add(8 * vtd::index(iova.get(), level) as u64)
        .and_then(|address| memory.read_u64(address))
        .ok_or(FaultReason::BadTable(table))?;
    read(table);

    let allowed = vtd::permissions(entry).ok_or(FaultReason::NotPresent { level })?;
    let target = vtd::target(entry);
    if !vtd::is_leaf(entry, level) {
        let permissions = permissions.intersection(allowed).ok_or(FaultReason::Permission)?;
        return Ok(Step::Down(TablePointer { level: level - 1, table: target, permissions }));
    }
    let size = vtd::page_size(level);
    // The address bits below a large page's size are reserved, as is the leaf bit above 1 GiB.
    if level > vtd::MAX_LEAF_LEVEL || !target.is_aligned(size) {
        return Err(FaultReason::ReservedBit);
    }
    let permissions = permissions.intersection(allowed).ok_or(FaultReason::Permission)?;
    Ok(Step::Leaf(Leaf { page: target, size, permissions }))
}
