//! A machine with a non-coherent IOMMU. Memory has two copies: that of the caches, which hold everything, and the unit's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use portcullis::addr::{DeviceId, DomainId, PhysAddr};
use portcullis::invalidation::Invalidation;
use portcullis::pgtable::Format;
use portcullis::platform::{FRAME_SIZE, Frames, TABLE_ENTRIES, Table};
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, Software, VtD};
use portcullis_hw::{Attachment, Host, Iommu, UnitError, amdvi, riscv, smmuv3, vtd};

use crate::DEVICE;

const BASE: u64 = 1 << 20;
const FRAMES: usize = 64;

struct Machine {
    caches: Vec<Table>,
    memory: Vec<Table>,
    taken: AtomicUsize,
}

impl Machine {
    fn new() -> Arc<Self> {
        let table = || core::array::from_fn::<_, TABLE_ENTRIES, _>(|_| AtomicU64::new(0));
        let bank = || (0..FRAMES).map(|_| table()).collect();
        Arc::new(Self { caches: bank(), memory: bank(), taken: AtomicUsize::new(0) })
    }

    fn frame(bank: &[Table], frame: PhysAddr) -> &Table {
        &bank[((frame.get() - BASE) / FRAME_SIZE) as usize]
    }

    /// The unit's copy of these words of the caches.
    fn behind(&self, words: &[AtomicU64]) -> &[AtomicU64] {
        let first = (words.as_ptr().addr() - self.caches.as_ptr().addr()) / 8;
        let (frame, word) = (first / TABLE_ENTRIES, first % TABLE_ENTRIES);
        &self.memory[frame][word..word + words.len()]
    }
}

/// Memory, as the CPUs see it.
struct ByCpu(Arc<Machine>);

/// Memory, as the unit sees it.
struct ByUnit(Arc<Machine>);

// SAFETY: 1: frames are allocated once, zeroed in both copies. 2 and 3: of the machine behind an `Arc`. 4: `clean` and `invalidate` copy.
unsafe impl Frames for ByCpu {
    const COHERENT: bool = false;

    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let size = count.next_power_of_two();
        let first = self.0.taken.load(Ordering::Relaxed).next_multiple_of(size);
        self.0.taken.store(first + count, Ordering::Relaxed);
        (first + count <= FRAMES).then(|| PhysAddr::new(BASE + first as u64 * FRAME_SIZE))
    }

    unsafe fn free(&self, _: PhysAddr, _: usize) {}

    fn clean(&self, words: &[AtomicU64]) {
        for (cached, word) in words.iter().zip(self.0.behind(words)) {
            word.store(cached.load(Ordering::Relaxed), Ordering::Release);
        }
    }

    fn invalidate(&self, words: &[AtomicU64]) {
        for (cached, word) in words.iter().zip(self.0.behind(words)) {
            cached.store(word.load(Ordering::Acquire), Ordering::Relaxed);
        }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        Machine::frame(&self.0.caches, frame)
    }
}

// SAFETY: as above; the unit allocates nothing.
unsafe impl Frames for ByUnit {
    fn alloc(&self, _: usize) -> Option<PhysAddr> {
        None
    }

    unsafe fn free(&self, _: PhysAddr, _: usize) {}

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        Machine::frame(&self.0.memory, frame)
    }
}

struct Behind<K> {
    unit: Software<K, ByUnit>,
    frames: ByCpu,
    now: AtomicU64,
}

impl<K: Kind> Host for Behind<K> {
    type Registers = Software<K, ByUnit>;
    type Frames = ByCpu;

    fn registers(&self) -> &Software<K, ByUnit> {
        &self.unit
    }

    fn frames(&self) -> &ByCpu {
        &self.frames
    }

    fn now_ns(&self) -> u64 {
        self.now.fetch_add(1_000, Ordering::Relaxed)
    }

    fn patience_ns(&self) -> u64 {
        100_000
    }
}

/// A unit's fault log: the register with its address, its shift and bits; the index register, its step, and the number of records including
/// laps; the words of a record; and the first word of one for a device.
struct Log {
    base: (usize, u32, u64),
    tail: (usize, u32, u32),
    records: u32,
    words: usize,
    record: fn(u64) -> u64,
}

impl Log {
    fn report<K: Kind>(&self, unit: &Software<K, ByUnit>, device: u64) {
        let (register, shift, bits) = self.base;
        let address = (unit.get64(register) & bits) << shift;
        let (tail, step, laps) = self.tail;
        let at = unit.get(tail) / step;
        let table = Machine::frame(&unit.frames().0.memory, PhysAddr::new(address));
        let first = (at % self.records) as usize * self.words;
        table[first].store((self.record)(device), Ordering::Release);
        unit.set(tail, (at + 1) % laps * step);
    }
}

fn works<K: Kind, X: Format + Copy, U: Iommu<X>>(
    start: impl FnOnce(Behind<K>) -> Result<U, UnitError>,
    of: fn(&U) -> &Behind<K>,
    log: Option<Log>,
) {
    let machine = Machine::new();
    // SAFETY: 1: the driver's host has the same memory, and frees none.
    let software = unsafe { Software::new(ByUnit(Arc::clone(&machine))) };
    let host = Behind { unit: software, frames: ByCpu(machine), now: AtomicU64::new(0) };
    let unit = start(host).unwrap();
    unit.enable().unwrap();
    let format = unit.layout().unwrap();
    let to = Attachment::Table { domain: DomainId(7), root: PhysAddr::new(BASE), format };
    // SAFETY: the unit walks no tables.
    unsafe { unit.attach(DEVICE, to) }.unwrap();
    // Status words have more than one owner, too.
    for round in 0..1_000 {
        assert_eq!(unit.invalidate(DomainId(7), Invalidation::Domain), Ok(()), "{round}");
    }
    if let Some(log) = log {
        // More than two laps.
        for device in 1..600 {
            log.report(&of(&unit).unit, device);
            let fault = unit.next_fault().expect("a fault is reported");
            assert_eq!(fault.device, DeviceId(device as u32), "not what was there a lap before");
            assert_eq!(unit.next_fault(), None);
        }
    }
    unit.detach(DEVICE).unwrap();
    unit.shut_down().unwrap();
}

#[test]
fn vtd_beyond_caches() {
    works::<VtD, _, _>(vtd::Unit::start, vtd::Unit::host, None);
}

#[test]
fn amdvi_beyond_caches() {
    let config = amdvi::Config { last_device: 0xff, capability: None };
    let log = Log {
        base: (0x10, 0, 0x000f_ffff_ffff_f000),
        tail: (0x2018, 16, 256),
        records: 256,
        words: 2,
        record: |device| 2 << 60 | 7 << 32 | device,
    };
    works::<AmdVi, _, _>(|host| amdvi::Unit::start(host, config), amdvi::Unit::host, Some(log));
}

#[test]
fn riscv_beyond_caches() {
    let log = Log {
        base: (0x28, 2, 0x003f_ffff_ffff_fc00),
        tail: (0x34, 1, 128),
        records: 128,
        words: 4,
        record: |device| device << 40 | 2 << 34 | 13,
    };
    works::<RiscV, _, _>(riscv::Unit::start, riscv::Unit::host, Some(log));
}

#[test]
fn smmuv3_beyond_caches() {
    let log = Log {
        base: (0xa0, 0, 0x000f_ffff_ffff_ffe0),
        tail: (0x1_00a8, 1, 256),
        records: 128,
        words: 4,
        record: |device| device << 32 | 0x10,
    };
    let start = smmuv3::Unit::<Behind<SmmuV3>, 12>::start;
    works::<SmmuV3, _, _>(start, smmuv3::Unit::host, Some(log));
}
