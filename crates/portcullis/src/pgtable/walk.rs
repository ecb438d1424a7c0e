//! Walking the tables: the steps that read and write entries.
//!
//! Memory ordering. A CPU that follows a table pointer must see the table zeroed and with the entries that
//! others entered before: the pointer is installed with `AcqRel` and read with `Acquire`. A leaf is stored
//! with `Release`, so that whatever the caller wrote before (the buffer's contents, a table below) is there
//! before the translation is. Clearing a leaf needs no order of its own: the invalidation that follows is
//! what makes it count, and the invalidation queue orders itself after earlier stores.

use super::table::PageTable;
use super::vtd;
use crate::addr::{Iova, Permissions, PhysAddr};
use crate::platform::{Frames, TABLE_ENTRIES, Table};
use crate::sync::Ordering;

/// Why a run of mapping stopped early.
pub(super) enum Conflict {
    /// The page at this address is in use.
    Mapped { at: u64 },
    /// There was no frame for a table.
    OutOfMemory,
}

/// What one run of mapping entered.
pub(super) struct MapRun {
    pub bytes: u64,
    pub conflict: Option<Conflict>,
}

/// What one run of unmapping removed.
pub(super) struct UnmapRun {
    pub bytes: u64,
    /// Bytes after those in which there is nothing to remove.
    pub skip: u64,
}

/// The table at `frame`, which is the root of `table` or was read from one of its entries.
fn entries<F: Frames>(table: &PageTable<F>, frame: PhysAddr) -> &Table {
    // SAFETY: the root and every table that a non-leaf entry points to came from `frames` when this page
    // table made them, and are freed only in its `drop`, which no `&PageTable` outlives.
    unsafe { table.frames().table(frame) }
}

/// Maps as much of (`iova`, `phys`, `len`) as one table holds, in leaves of one size.
///
/// The arguments are aligned to the granule, inside the aperture and do not wrap; `len` is not 0.
pub(super) fn map_run<F: Frames>(
    table: &PageTable<F>,
    iova: u64,
    phys: u64,
    len: u64,
    permissions: Permissions,
) -> MapRun {
    let stop = |conflict| MapRun { bytes: 0, conflict: Some(conflict) };
    let mut current = entries(table, table.root());
    let mut level = table.levels();
    loop {
        let entry = &current[vtd::index(iova, level)];
        let mut value = entry.load(Ordering::Acquire);
        if !vtd::is_present(value) {
            if leaf_fits(table, level, iova | phys, len) {
                break;
            }
            value = match install_table(table, entry) {
                Ok(value) => value,
                Err(conflict) => return stop(conflict),
            };
        }
        if vtd::is_leaf(value, level) {
            return stop(Conflict::Mapped { at: iova });
        }
        // Also where a large page would fit, but a table that smaller pages once needed stands in its place.
        current = entries(table, vtd::target(value));
        level -= 1;
    }
    let size = vtd::page_size(level).bytes();
    let first = vtd::index(iova, level);
    let count = (len / size).min((TABLE_ENTRIES - first) as u64);
    let mut address = phys;
    for (done, entry) in current[first..].iter().take(count as usize).enumerate() {
        let bytes = done as u64 * size;
        let old = entry.load(Ordering::Relaxed);
        if vtd::is_present(old) {
            // A leaf: the caller's mistake. Another table below: the next run goes down into it.
            let conflict = vtd::is_leaf(old, level).then_some(Conflict::Mapped { at: iova + bytes });
            return MapRun { bytes, conflict };
        }
        entry.store(vtd::leaf_entry(PhysAddr::new(address), permissions, level), Ordering::Release);
        address = address.wrapping_add(size);
    }
    MapRun { bytes: count * size, conflict: None }
}

/// Whether a leaf at `level` fits the alignment of `address_bits` and does not exceed `len`.
fn leaf_fits<F: Frames>(table: &PageTable<F>, level: u32, address_bits: u64, len: u64) -> bool {
    let size = vtd::page_size(level);
    level <= vtd::MAX_LEAF_LEVEL
        && table.page_sizes().contains(size)
        && address_bits & size.offset_mask() == 0
        && len >= size.bytes()
}

/// Puts a new, empty table into `entry`, unless another CPU has done so meanwhile. The entry's value.
fn install_table<F: Frames>(table: &PageTable<F>, entry: &crate::sync::AtomicU64) -> Result<u64, Conflict> {
    let frame = table.frames().alloc(1).ok_or(Conflict::OutOfMemory)?;
    let value = vtd::table_entry(frame);
    match entry.compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            table.count_table();
            Ok(value)
        }
        Err(installed) => {
            // SAFETY: the frame came from the line above and no entry ever pointed to it.
            unsafe { table.frames().free(frame, 1) };
            Ok(installed)
        }
    }
}

/// Clears the leaves of (`iova`, `len`) that lie in one table, up to the first that is not there.
///
/// `iova` and `len` lie inside the aperture, and `len` is not 0. What is removed and what is skipped together
/// are at least one byte.
pub(super) fn unmap_run<F: Frames>(table: &PageTable<F>, iova: u64, len: u64) -> UnmapRun {
    let mut current = entries(table, table.root());
    let mut level = table.levels();
    let page = loop {
        let value = current[vtd::index(iova, level)].load(Ordering::Acquire);
        let page = vtd::page_size(level);
        let leaf = vtd::is_leaf(value, level);
        let sticks_out = leaf && (iova & page.offset_mask() != 0 || len < page.bytes());
        if !vtd::is_present(value) || sticks_out {
            // On to the next entry of this table.
            return UnmapRun { bytes: 0, skip: page.bytes() - (iova & page.offset_mask()) };
        }
        if leaf {
            break page;
        }
        current = entries(table, vtd::target(value));
        level -= 1;
    };
    let first = vtd::index(iova, level);
    let count = (len / page.bytes()).min((TABLE_ENTRIES - first) as u64);
    let leaves = current[first..].iter().take(count as usize);
    let removed = leaves.take_while(|entry| {
        let value = entry.load(Ordering::Relaxed);
        let leaf = vtd::is_present(value) && vtd::is_leaf(value, level);
        if leaf {
            entry.store(0, Ordering::Relaxed);
        }
        leaf
    });
    let bytes = removed.count() as u64 * page.bytes();
    // Another CPU may have removed the first one meanwhile: that is passed over, too.
    UnmapRun { bytes, skip: if bytes == 0 { page.bytes() } else { 0 } }
}

/// What the tables say about `iova`, which lies inside the aperture.
pub(super) fn translate<F: Frames>(table: &PageTable<F>, iova: u64) -> Option<(PhysAddr, Permissions)> {
    let mut allowed = Permissions::READ_WRITE;
    let mut current = entries(table, table.root());
    let mut level = table.levels();
    loop {
        let value = current[vtd::index(iova, level)].load(Ordering::Acquire);
        allowed = allowed.intersection(vtd::permissions(value)?)?;
        if vtd::is_leaf(value, level) {
            let page = vtd::page_size(level);
            let offset = Iova::new(iova).page_offset(page);
            return Some((PhysAddr::new(vtd::target(value).align_down(page).get() | offset), allowed));
        }
        current = entries(table, vtd::target(value));
        level -= 1;
    }
}

/// Frees the table at `frame` and all tables below it. `level` is its level; recursion is that deep.
///
/// # Safety
/// The tables came from `frames`, and nobody, hardware included, uses them any more.
pub(super) unsafe fn free_tables<F: Frames>(frames: &F, frame: PhysAddr, level: u32) {
    if level > 1 {
        // SAFETY: the frame came from `frames` and is freed only below.
        let entries = unsafe { frames.table(frame) };
        for entry in entries {
            let value = entry.load(Ordering::Acquire);
            if vtd::is_present(value) && !vtd::is_leaf(value, level) {
                // SAFETY: as for `frame`: a non-leaf entry points to a table of the same page table.
                unsafe { free_tables(frames, vtd::target(value), level - 1) };
            }
        }
    }
    // SAFETY: the caller says that nobody uses it; each table is pointed to by one entry only.
    unsafe { frames.free(frame, 1) };
}
