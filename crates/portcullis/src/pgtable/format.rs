//! What a page-table format implements for the engine. The engine follows an entry to a table only if the format has
//! made it lead there. A layout file holds bits and no behaviour; the engine walks, allocates and synchronises.
//!
//! Levels count from the leaves: 1 is the lowest, and [`Format::levels`] is the root's. (Arm's manual counts from the
//! root, and ends at 3.)

use core::fmt::Debug;

use crate::addr::{Iova, PageSize, PageSizes, Permissions, PhysAddr};
use crate::broken::broken;
use crate::platform::TABLE_ENTRIES;

/// How the memory behind a translation may be cached, if the format has bits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Memory {
    /// Ordinary memory, cached and coherent.
    #[default]
    WriteBack,
    /// Ordinary memory, not cached.
    Uncached,
    /// Registers of a device: neither cached nor reordered.
    Device,
}

/// What a translation allows, and how devices access the memory through it. A format drops attributes that it has no
/// bits for: [`Layout::kept`] returns the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Attributes {
    /// What the device may do.
    pub permissions: Permissions,
    /// How the memory is cached.
    pub memory: Memory,
    /// Accesses snoop the CPUs' caches, even if the device requests no snoop.
    pub snoop: bool,
    /// Only accesses that the device marks as privileged are allowed.
    pub privileged: bool,
    /// The device may fetch instructions.
    pub execute: bool,
}

impl From<Permissions> for Attributes {
    /// Cached memory without any special demands.
    fn from(permissions: Permissions) -> Self {
        Self { permissions, memory: Memory::WriteBack, snoop: false, privileged: false, execute: false }
    }
}

/// A size that a leaf can have: one entry at `level`, or 2^`run` contiguous PTEs (Arm's contiguous hint, AMD's sizes
/// between two levels).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LeafSize {
    /// The level of the entries, 1 for the lowest.
    pub level: u32,
    /// The binary logarithm of the number of entries.
    pub run: u32,
}

/// The sizes of leaves of one entry, for formats without contiguous PTEs.
pub(super) static ONE_ENTRY: [LeafSize; 5] = [size(1, 0), size(2, 0), size(3, 0), size(4, 0), size(5, 0)];

pub(super) const fn size(level: u32, run: u32) -> LeafSize {
    LeafSize { level, run }
}

/// The meaning of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Entry {
    /// The hardware stops here.
    Absent,
    /// The walk goes on in the table at `table`, which is one of `level`.
    Table {
        /// The table's address.
        table: PhysAddr,
        /// Its level, below that of the entry, usually by one.
        level: u32,
    },
    /// The walk ends: 2^`run` entries like this one translate one page.
    Leaf {
        /// The binary logarithm of the number of entries.
        run: u32,
    },
}

/// A page-table format of some hardware: the layout of its entries and the widths of its addresses. The author of one
/// needs `Entry` and `LeafSize`, and so the feature `parts`.
///
/// The functions are pure, and are called for every entry, so each should take a few instructions. The engine passes
/// only levels and runs that the format has, and addresses that are aligned and at most [`last_phys`](Self::last_phys).
///
/// # Safety
/// The engine follows entries to tables as references, and a device reaches what the hardware reads in them.
///
/// 1. All functions always return the same for the same arguments, of one value and of its copies.
/// 2. **[`decode`](Self::decode) leads only to tables that [`table`](Self::table) was given**: `decode(table(t, l), k)`
///    in a table of level `k` is `Entry::Table` with just `t` and `l`, with or without the [busy bit](Self::MARK). No
///    other entry is: not 0, none that [`leaf`](Self::leaf) and [`stride`](Self::stride) make, nothing without a
///    [present](Self::PRESENT) bit. `l` is below `k`, and the table at `t` has one entry for each address bit between
///    the two.
/// 3. [`MARK`](Self::MARK) is one bit, which no entry of [`table`](Self::table) has set and no address needs.
/// 4. There is at least one level and one leaf size; [`GRANULE_SHIFT`](Self::GRANULE_SHIFT) is 4 to 16; the [input
///    bits](Self::input_bits) are more than the root's [shift](Layout::shift), by at most 18, and 63 at the most;
///    [`last_phys`](Self::last_phys) is below 2^52.
/// 5. Levels in [`leaf_sizes`](Self::leaf_sizes) are 1 to [`levels`](Self::levels), runs are shorter than a table,
///    sizes ascend, and the first is the granule's.
/// 6. **Hardware reads what the engine means**: through a leaf that is entered at an address, a device reaches just the
///    page that the leaf was made for, with no more than its permissions; through a [table](Self::table), what is
///    entered there; through an entry without a [present](Self::PRESENT) bit, nothing.
pub unsafe trait Format: Copy + Debug + Send + Sync + 'static {
    /// The binary logarithm of the smallest page, and of the size of a table below the root.
    const GRANULE_SHIFT: u32;

    /// The *busy bit*, which hardware ignores in the entry of a table: another CPU is removing or replacing the table,
    /// or has not yet shown it to the hardware. An entry with only this bit is a
    /// [break-before-make](Self::BREAK_BEFORE_MAKE) placeholder.
    const MARK: u64;

    /// Another bit that hardware ignores in the entry of a table: the table took the place of a large page. Until the
    /// table is reclaimed, hardware may still hold the page as a whole, so an unmap of a part invalidates the whole
    /// page. 0 with [break-before-make](Self::BREAK_BEFORE_MAKE), which invalidates the page first.
    const SPLIT: u64;

    /// The hardware follows an entry if any of these bits is set, and ignores the rest of an entry that has none. The
    /// entry of a table has all of them; with [break-before-make](Self::BREAK_BEFORE_MAKE) it also has other bits, even
    /// for a table at address 0, so that a table that a reclaim sets aside is no placeholder.
    const PRESENT: u64;

    /// The bits that tell, at a given level, a leaf from a table, and leaves of different sizes: entries of a table
    /// that agree in them are the same kind of `Entry`. (Leaves whose [stride](Self::stride) is 0 may hold their size
    /// in other bits.)
    const KIND: u64;

    /// The architecture requires break-before-make: an entry is cleared and invalidated before one of another size
    /// takes its place, so a large page cannot be split in use. Elsewhere the engine splits contiguous PTEs in a copy
    /// of their table, which replaces the table. The root cannot be replaced, so it should offer no contiguous PTEs.
    const BREAK_BEFORE_MAKE: bool;

    /// Returns the name by which the command line knows the format.
    fn name(&self) -> &'static str;

    /// The number of levels.
    fn levels(&self) -> u32;

    /// The number of address bits that the tables translate. It decides the size of the root, which is smaller than
    /// other tables, or larger if hardware concatenates several.
    fn input_bits(&self) -> u32;

    /// The highest physical address, for tables and pages alike.
    fn last_phys(&self) -> PhysAddr;

    /// The sizes of leaves in ascending order. The first is the granule's.
    fn leaf_sizes(&self) -> &'static [LeafSize];

    /// The first entry of a leaf of `size` for the page at `page`.
    fn leaf(&self, page: PhysAddr, size: LeafSize, attributes: Attributes) -> u64;

    /// The difference between one entry and the next: of the contiguous PTEs of one leaf if `size.run` is not 0, else
    /// of adjoining leaves of `size`. It holds for any pages whose addresses agree from bit 48 on. By default each
    /// entry holds its own address, in its place.
    #[inline]
    fn stride(&self, size: LeafSize) -> u64 {
        1 << self.shift(size.level)
    }

    /// The entry that leads to the table at `table`, which is one of `level`.
    fn table(&self, table: PhysAddr, level: u32) -> u64;

    /// The meaning of `entry` in a table of `level`. [`MARK`](Self::MARK) and [`SPLIT`](Self::SPLIT) make no
    /// difference.
    fn decode(&self, entry: u64, level: u32) -> Entry;

    /// The memory of the whole leaf to which `entry` of a table of `level` belongs, from any of its entries.
    fn page(&self, entry: u64, level: u32) -> PhysAddr;

    /// The attributes of the leaf entry `entry` in a table of `level`.
    fn attributes(&self, entry: u64, level: u32) -> Attributes;
}

/// Functions that follow from a format, the same for all.
pub trait Layout: Format {
    /// The binary logarithm of the entries of a table below the root.
    const INDEX_BITS: u32 = Self::GRANULE_SHIFT - 3;

    /// The binary logarithm of the bytes that one entry of a table of `level` translates.
    #[inline]
    fn shift(&self, level: u32) -> u32 {
        Self::GRANULE_SHIFT + Self::INDEX_BITS * (level - 1)
    }

    /// The index into a table of `level` below the root for the address `iova`.
    #[inline]
    fn index(&self, iova: u64, level: u32) -> usize {
        (iova >> self.shift(level)) as usize & ((1 << Self::INDEX_BITS) - 1)
    }

    /// The binary logarithm of the root's entries.
    fn root_bits(&self) -> u32 {
        self.input_bits() - self.shift(self.levels())
    }

    /// The number of adjoining frames of [`FRAME_SIZE`](crate::platform::FRAME_SIZE) in the root: more than one if
    /// hardware concatenates tables there, or has larger ones. [`PageTable::new`](super::PageTable::new) gets them by
    /// one [`Frames::alloc`](crate::platform::Frames::alloc).
    fn root_frames(&self) -> usize {
        (1_usize << self.root_bits()).div_ceil(TABLE_ENTRIES)
    }

    /// The number of adjoining frames in a table below the root: 1, 4 or 16 with granules of 4, 16 or 64 KiB.
    fn table_frames(&self) -> usize {
        (1_usize << Self::INDEX_BITS).div_ceil(TABLE_ENTRIES)
    }

    /// What a mapping with `attributes` really gets: a format drops attributes that it has no bits for. If it cannot
    /// allow writing without reading, it allows both.
    fn kept(&self, attributes: Attributes) -> Attributes {
        self.attributes(self.leaf(PhysAddr::new(0), LeafSize { level: 1, run: 0 }, attributes), 1)
    }

    /// The size of a leaf.
    fn page_size(&self, size: LeafSize) -> PageSize {
        PageSize::from_shift(self.shift(size.level) + size.run)
            .unwrap_or_else(|| broken("a leaf is smaller than all addresses"))
    }

    /// All sizes that leaves can have.
    fn page_sizes(&self) -> PageSizes {
        self.leaf_sizes().iter().fold(PageSizes::EMPTY, |sizes, size| sizes.with(self.page_size(*size)))
    }

    /// The highest address that the tables translate.
    fn last_iova(&self) -> Iova {
        Iova::new(u64::MAX >> (u64::BITS - self.input_bits()))
    }
}

impl<T: Format> Layout for T {}

/// Returns whether `entry` is a [break-before-make](super::split) placeholder, which the [busy bit](Format::MARK)
/// reserves.
#[inline]
pub(super) const fn is_broken<X: Format>(entry: u64) -> bool {
    X::BREAK_BEFORE_MAKE && entry == X::MARK
}

/// Returns the entry of a table as it is stored, non-present, while the table is [set aside](super::reclaim).
pub(super) fn aside<X: Format>(entry: u64) -> u64 {
    entry & !X::PRESENT | X::MARK
}

/// Returns the entry of the table whose entry was set aside as `aside`.
pub(super) fn put_back<X: Format>(aside: u64) -> u64 {
    aside & !X::MARK | X::PRESENT
}
