//! What the tests of the engine share: ranges, tables, a format that breaks before it makes, frames that call
//! back.

use std::sync::Arc;

use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::pgtable::{Entry, Format, MapError, PageTable, Unmapped};
use portcullis::platform::{Frames, Platform, Table};
use portcullis::sync::AtomicU64;
use portcullis_model::Memory;
use portcullis_model::open::{OpenTable, Simulated};

use crate::common::PLATFORM;

/// Memory that no table is in.
pub const ELSEWHERE: u64 = 1 << 40;

pub fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), len).unwrap()
}

pub fn make<F: Frames, X: Format>(frames: F, format: X) -> PageTable<F, X> {
    PageTable::for_cpus(frames, format, PLATFORM.cpus()).unwrap()
}

/// Maps to [`ELSEWHERE`] and as far beyond as the address is large.
pub fn map<F: Frames + Simulated, X: Format>(
    table: &PageTable<F, X>,
    start: u64,
    len: u64,
) -> Result<(), MapError> {
    let phys = PhysAddr::new(ELSEWHERE + start);
    table.open(&*PLATFORM, range(start, len), phys, Permissions::READ_WRITE).map_err(|(error, _)| error)
}

pub fn unmap<F: Frames + Simulated, X: Format>(table: &PageTable<F, X>, start: u64, len: u64) -> u64 {
    table.close(&*PLATFORM, range(start, len), &mut |_| true).bytes
}

pub fn unmap_telling<F: Frames + Simulated, X: Format>(
    table: &PageTable<F, X>,
    range: IovaRange,
    mut forget: impl FnMut(IovaRange) -> bool,
) -> Unmapped {
    table.close(&*PLATFORM, range, &mut forget)
}

pub fn reached<F: Frames, X: Format>(table: &PageTable<F, X>, at: u64) -> Option<u64> {
    table.translate(&*PLATFORM, Iova::new(at)).map(|(phys, _)| phys.get())
}

pub fn is_mapped<F: Frames, X: Format>(table: &PageTable<F, X>, at: u64) -> bool {
    let found = reached(table, at);
    assert!(found.is_none_or(|phys| phys == ELSEWHERE + at), "{at:#x} leads to {found:x?}");
    found.is_some()
}

pub fn reclaim<F: Frames + Simulated, X: Format>(table: &PageTable<F, X>) -> usize {
    table.shrink(&*PLATFORM, || Ok::<_, ()>(())).unwrap()
}

/// Every frame of the memory is in the table and the other way round, and nothing has gone wrong with any.
#[track_caller]
pub fn assert_accounted<F: Frames, X: Format>(memory: &Memory, table: &PageTable<F, X>) {
    assert_eq!(memory.frames_in_use(), table.table_bytes() as u64 / 4096);
    assert_eq!((memory.bad_frees(), memory.stray_tables()), (0, 0));
}

/// A format whose large pages must be broken before they are made smaller.
#[derive(Debug, Clone, Copy)]
pub struct BreakFirst<X>(pub X);

// SAFETY: all is `X`'s; to break first is allowed everywhere.
unsafe impl<X: Format> Format for BreakFirst<X> {
    const GRANULE_SHIFT: u32 = X::GRANULE_SHIFT;
    const MARK: u64 = X::MARK;
    const SPLIT: u64 = 0;
    const PRESENT: u64 = X::PRESENT;
    const KIND: u64 = X::KIND;
    const BREAK_BEFORE_MAKE: bool = true;

    of_the_inner_format!();

    fn decode(&self, entry: u64, level: u32) -> Entry {
        self.0.decode(entry, level)
    }
}

type Hook = Box<dyn FnMut() + Send>;

/// Frames that call back before each allocation, and, not coherent, before each cleaning.
pub struct Hooked<const COHERENT: bool> {
    pub memory: Arc<Memory>,
    /// Taken out while it runs, so that it may allocate.
    pub hook: std::sync::Mutex<Option<Hook>>,
}

impl<const COHERENT: bool> Hooked<COHERENT> {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { memory: Memory::new(64 << 20), hook: std::sync::Mutex::new(None) })
    }

    /// Has the next call, and no other, run `hook`.
    pub fn once(&self, hook: impl FnMut() + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }

    fn call(&self) {
        let hook = self.hook.lock().unwrap().take();
        if let Some(mut hook) = hook {
            hook();
        }
    }
}

impl<const IS_COHERENT: bool> std::fmt::Debug for Hooked<IS_COHERENT> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hooked")
    }
}

// SAFETY: it is the software IOMMU's memory.
unsafe impl<const IS_COHERENT: bool> Simulated for Hooked<IS_COHERENT> {}

// SAFETY: everything is passed on to the memory.
unsafe impl<const IS_COHERENT: bool> Frames for Hooked<IS_COHERENT> {
    const COHERENT: bool = IS_COHERENT;

    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        if IS_COHERENT {
            self.call();
        }
        self.memory.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.memory.free(first, count) }
    }

    fn clean(&self, _: &[AtomicU64]) {
        self.call();
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.memory.table(frame) }
    }
}
