//! A domain in the software IOMMU whose page tables lie in memory that says when it is used, and that hardware may see
//! only where it was cleaned.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use portcullis::addr::{DomainId, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::dma::DmaDevice;
use portcullis::domain::{Domain, Policy};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{Entry, Format, PageTable, VtdSecondStage};
use portcullis::platform::{FRAME_SIZE, Frames, Platform, Table};
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::Simulated;
use portcullis_model::{Context, DeviceId, Iommu, IommuConfig, Memory, Queue, TableFormat};

use crate::reviewed::steps::step;

pub const DEVICE: DeviceId = DeviceId(7);
pub const PAGE: u64 = 4096;

/// Each use is a step of the calling thread. Without coherence CPUs have words of their own, the walker those of the memory.
pub struct Stepped<const COHERENT: bool> {
    pub memory: Arc<Memory>,
    /// What CPUs see, of each frame.
    own: Mutex<BTreeMap<u64, &'static Table>>,
}

// SAFETY: it is the software IOMMU's memory, and words that stay for ever.
unsafe impl<const IS_COHERENT: bool> Simulated for Stepped<IS_COHERENT> {}

// SAFETY: frames are the memory's; words of their own are no other frame's.
unsafe impl<const IS_COHERENT: bool> Frames for Stepped<IS_COHERENT> {
    const COHERENT: bool = IS_COHERENT;

    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        step();
        let first = self.memory.alloc(count)?;
        if !IS_COHERENT {
            let mut own = self.own.lock().unwrap();
            let words = || Box::leak(Box::new(std::array::from_fn(|_| 0.into())));
            own.extend((0..count as u64).map(|number| (first.get() + number * FRAME_SIZE, &*words())));
        }
        Some(first)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.memory.free(first, count) }
    }

    fn clean(&self, words: &[portcullis::sync::AtomicU64]) {
        step();
        let own = self.own.lock().unwrap();
        let (frame, table) =
            own.iter().find(|(_, table)| table.as_ptr_range().contains(&words.as_ptr())).unwrap();
        let first = (words.as_ptr().addr() - table.as_ptr().addr()) / 8;
        let seen = &self.memory.table_at(PhysAddr::new(*frame))[first..];
        for (seen, word) in seen.iter().zip(words) {
            seen.store(word.load(std::sync::atomic::Ordering::SeqCst), std::sync::atomic::Ordering::SeqCst);
        }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        if IS_COHERENT {
            step();
            return self.memory.table_at(frame);
        }
        self.own.lock().unwrap()[&frame.get()]
    }
}

pub type Tables<const COHERENT: bool, X> = TableMapper<Arc<Stepped<COHERENT>>, Queue, X>;
pub type Device<const COHERENT: bool, X = VtdSecondStage> = DmaDevice<Tables<COHERENT, X>, StdPlatform>;

pub struct Machine<const COHERENT: bool, X: Format = VtdSecondStage> {
    pub memory: Arc<Memory>,
    pub iommu: Arc<Iommu>,
    pub device: Device<COHERENT, X>,
}

/// `X`, in which it is a step of the calling thread to have read a granule's entry, and not acted on it yet.
#[derive(Debug, Clone, Copy)]
pub struct Watched<X>(pub X);

// SAFETY: all of it is `X`'s.
unsafe impl<X: Format> Format for Watched<X> {
    const GRANULE_SHIFT: u32 = X::GRANULE_SHIFT;
    const MARK: u64 = X::MARK;
    const SPLIT: u64 = X::SPLIT;
    const PRESENT: u64 = X::PRESENT;
    const KIND: u64 = X::KIND;
    const BREAK_BEFORE_MAKE: bool = X::BREAK_BEFORE_MAKE;

    of_the_inner_format!();

    fn decode(&self, entry: u64, level: u32) -> Entry {
        let found = self.0.decode(entry, level);
        if level == 1 && found == (Entry::Leaf { run: 0 }) {
            step();
        }
        found
    }
}

/// VT-d's tables of four levels.
pub fn vtd() -> (VtdSecondStage, TableFormat) {
    (VtdSecondStage::new(4, 3, 48).unwrap(), TableFormat::VtdSecondStage { levels: 4 })
}

impl<const COHERENT: bool> Machine<COHERENT> {
    pub fn new() -> Arc<Self> {
        Self::with(vtd())
    }
}

impl<const COHERENT: bool, X: Format> Machine<COHERENT, X> {
    pub fn with(made: (X, TableFormat)) -> Arc<Self> {
        Self::without(made, |_| Vec::new())
    }

    /// Where what `reserved` says of the aperture is nobody's.
    pub fn without(
        (format, tables): (X, TableFormat),
        reserved: impl FnOnce(IovaRange) -> Vec<IovaRange>,
    ) -> Arc<Self> {
        let memory = Memory::new(16 << 20);
        // An IOTLB that forgets next to nothing by itself: what was not invalidated is found.
        let iommu =
            Iommu::new(IommuConfig { iotlb_entries: 1 << 14, ..IommuConfig::new(Arc::clone(&memory)) });
        let platform = StdPlatform::with_cpus(2);
        let frames = Arc::new(Stepped { memory: Arc::clone(&memory), own: Mutex::default() });
        let table = PageTable::for_cpus(frames, format, platform.cpus()).unwrap();
        iommu.attach(DEVICE, Context::Translated { domain: DomainId(1), root: table.root(), format: tables });
        let reserved = reserved(table.aperture());
        let mapper = TableMapper::new(table, iommu.queue(), DomainId(1), reserved);
        let domain = Domain::new(platform, mapper, Policy::Strict).unwrap();
        let device = DmaDevice::new(domain, u64::MAX).unwrap();
        Arc::new(Self { memory, iommu, device })
    }

    /// How many pages the device may write to, of `len` bytes from `iova` on.
    pub fn reached(&self, iova: Iova, len: u64) -> usize {
        let write = |offset| self.iommu.access(DEVICE, Iova::new(iova.get() + offset), 1, Permissions::WRITE);
        (0..len).step_by(PAGE as usize).filter(|offset| write(*offset).is_ok()).count()
    }
}
