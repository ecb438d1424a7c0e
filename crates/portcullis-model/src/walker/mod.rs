//! The page-table walk: tables of any format, read entry by entry from simulated memory.
//!
//! Written only from the manuals, so that it checks the library's tables independently of the code that writes them. A [`TableFormat`]
//! names a layout; each family of formats has one file, which decodes its entries (`Layout`). The walk through levels is here.
//!
//! Levels are numbered from 1, the lowest, whatever a manual calls them. A walk changes nothing (it sets no accessed or dirty bit); its
//! result has all tables on the path, for the caller to cache and count. It reads the tables as they are, allocated or not, and never
//! trusts an entry: an address outside the memory, a reserved bit that hardware checks, or a missing permission is a fault.
//!
//! Cost: one dependent memory read per level from its start, at most 6. For an entry that claims to be in a contiguous run (Arm's
//! contiguous hint, AMD's replicated entries) it reads and compares the whole run.

mod amd;
mod arm;
mod format;
mod geometry;
mod rights;
mod riscv;
mod vtd;
mod x86;

use portcullis::addr::{Iova, PageSize, Permissions, PhysAddr};
use smallvec::SmallVec;

use crate::fault::FaultReason;
use crate::memory::Memory;

pub use arm::{ArmStage, ArmTables, Granule};
pub use format::TableFormat;
pub use rights::Rights;
pub use riscv::RiscvMode;

use format::with_layout;
pub(crate) use geometry::Geometry;

/// A table on the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TablePointer {
    /// Its level; 1 is the lowest.
    pub level: u32,
    /// Its physical address.
    pub table: PhysAddr,
    /// The intersection of the rights of all entries above it.
    pub rights: Rights,
}

impl TablePointer {
    /// The root of `levels` levels at `table`, with all rights.
    pub const fn root(table: PhysAddr, levels: u32) -> Self {
        Self { level: levels, table, rights: Rights::ALL }
    }
}

/// The page at the end of a walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaf {
    /// The physical address of the page.
    pub page: PhysAddr,
    /// Its size: that of the one entry, even if a hint says that its neighbours continue it.
    pub size: PageSize,
    /// The intersection of the rights of all entries on the path.
    pub rights: Rights,
    /// The entry's cacheability bits, by format:
    /// - VT-d second stage: bit 0 is SNP;
    /// - x86-64 first stage: PAT, PCD, PWT (bits 2 to 0);
    /// - AMD-Vi: FC and U (bits 1 and 0);
    /// - Arm: SH above AttrIndx (3 bits) in stage 1, or above MemAttr (4 bits) in stage 2;
    /// - RISC-V: PBMT.
    pub attributes: u8,
}

impl Leaf {
    /// The permissions of an ordinary device request: unprivileged, for data.
    pub fn allowed(&self) -> Option<Permissions> {
        self.rights.for_device()
    }
}

/// The result of a walk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walk {
    /// The page, or the fault.
    pub result: Result<Leaf, FaultReason>,
    /// Entries that were read, without entries that were only compared with the leaf of their run.
    pub table_reads: u32,
    /// Those of them in frames that are not allocated, whichever frame of a large table that is.
    pub freed_reads: u32,
    /// The tables below the start, highest first, even if the walk then faulted: hardware caches the present entries that it passed.
    pub tables: SmallVec<[TablePointer; 4]>,
}

/// A decoded entry.
#[derive(Debug, Clone, Copy)]
enum Decoded {
    /// A pointer to a table, whose `level` is lower than the entry's.
    Table {
        table: u64,
        level: u32,
        rights: Rights,
    },
    Leaf(Page),
}

/// A decoded leaf.
#[derive(Debug, Clone, Copy)]
struct Page {
    page: u64,
    /// The binary logarithm of its size.
    shift: u32,
    rights: Rights,
    attributes: u8,
    /// The binary logarithm of the entries, aligned to their number, of its run.
    run: u32,
}

/// One format of tables: its geometry, and its decoder.
trait Layout: Copy {
    /// Whether hardware would accept these dimensions.
    fn is_valid(self) -> bool;

    /// The dimensions. Meaningless but harmless for an invalid layout.
    fn geometry(self) -> Geometry;

    /// Decodes `entry`, found at `level` on the path to `iova`.
    fn decode(self, entry: u64, level: u32, iova: u64) -> Result<Decoded, FaultReason>;

    /// Whether `other`, which is `distance` entries further in the run of `entry`, is consistent with it.
    fn continues(self, entry: u64, other: u64, distance: i64, level: u32) -> bool {
        let _ = (distance, level);
        entry == other
    }
}

/// Walks from `start` down to the page of `iova`. `start.level` is 1 to the levels of `format`.
pub fn walk(memory: &Memory, iova: Iova, format: TableFormat, start: TablePointer) -> Walk {
    let (mut table_reads, mut freed_reads, mut tables) = (0, 0, SmallVec::new());
    let read = |entry| {
        table_reads += 1;
        freed_reads += u32::from(!memory.is_allocated(entry));
    };
    let result = with_layout!(format, layout => {
        if layout.is_valid() {
            descend(memory, iova, layout, start, read, |below| tables.push(below))
                .and_then(|found| found.checked(memory, iova, layout))
        } else {
            Err(FaultReason::BadContext)
        }
    });
    Walk { result, table_reads, freed_reads, tables }
}

/// The page at the end of a [`walk`] of a valid format, without the cost. It ignores the other entries of a run: the memory of this entry
/// can be reached, whatever those say.
pub(crate) fn find_leaf(
    memory: &Memory,
    iova: Iova,
    format: TableFormat,
    start: TablePointer,
) -> Result<Leaf, FaultReason> {
    with_layout!(format, layout => {
        descend(memory, iova, layout, start, |_| (), |_| ()).map(|found| found.leaf)
    })
}

/// A leaf, and its place.
struct Found {
    leaf: Leaf,
    address: PhysAddr,
    entry: u64,
    level: u32,
    run: u32,
}

impl Found {
    /// The leaf, if the other entries of its run are consistent: hardware may use any of them.
    #[inline]
    fn checked(self, memory: &Memory, iova: Iova, layout: impl Layout) -> Result<Leaf, FaultReason> {
        if self.run == 0 { Ok(self.leaf) } else { self.check_run(memory, iova, layout) }
    }

    fn check_run(self, memory: &Memory, iova: Iova, layout: impl Layout) -> Result<Leaf, FaultReason> {
        let Self { leaf, address, entry, level, run } = self;
        let geometry = layout.geometry();
        let length = 1_u64 << run;
        let own = geometry.index(iova, level) % length;
        // The leaf's entry was in memory, so the subtraction of its offset does not wrap.
        let first = PhysAddr::new(address.get() - 8 * own);
        let alike = |place: u64| {
            let other = first.checked_add(8 * place).and_then(|at| memory.read_u64(at));
            let distance = place as i64 - own as i64;
            other.is_some_and(|other| layout.continues(entry, other, distance, level))
        };
        // A run longer than the table is invalid.
        let fits = run <= geometry.index_bits(level);
        if fits && (0..length).all(alike) { Ok(leaf) } else { Err(FaultReason::InconsistentRun) }
    }
}

/// Descends from `start`, calling `read` for each entry and `below` for each table.
#[inline]
fn descend(
    memory: &Memory,
    iova: Iova,
    layout: impl Layout,
    start: TablePointer,
    mut read: impl FnMut(PhysAddr),
    mut below: impl FnMut(TablePointer),
) -> Result<Found, FaultReason> {
    let geometry = layout.geometry();
    let mut at = start;
    while (1..=geometry.levels).contains(&at.level) {
        let TablePointer { level, table, rights } = at;
        let place = table.checked_add(8 * geometry.index(iova, level));
        let (address, entry) = place
            .and_then(|address| Some((address, memory.read_u64(address)?)))
            .ok_or(FaultReason::BadTable(table))?;
        read(address);
        match layout.decode(entry, level, iova.get())? {
            Decoded::Table { table, level, rights: allowed } => {
                let rights = rights.intersection(allowed).ok_or(FaultReason::Permission)?;
                at = TablePointer { level, table: PhysAddr::new(table), rights };
                below(at);
            }
            Decoded::Leaf(page) => {
                let rights = rights.intersection(page.rights).ok_or(FaultReason::Permission)?;
                let size = PageSize::from_shift(page.shift).ok_or(FaultReason::ReservedBit)?;
                let leaf = Leaf { page: PhysAddr::new(page.page), size, rights, attributes: page.attributes };
                return Ok(Found { leaf, address, entry, level, run: page.run });
            }
        }
    }
    Err(FaultReason::BadContext)
}

/// The bits `low` to `high`, both included. `high` is at most 63.
const fn bits(high: u32, low: u32) -> u64 {
    u64::MAX >> (63 - high) & !((1 << low) - 1)
}
