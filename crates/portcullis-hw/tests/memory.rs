//! A kernel's heap is out of memory: bringing a unit up, and attaching a device, fail and change nothing.
#![allow(unsafe_code, reason = "frames are a pool of this test's, reached as atomics only")]

#[path = "../../portcullis/tests/limited/mod.rs"]
mod limited;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use portcullis::addr::{DeviceId, DomainId, PhysAddr};
use portcullis::pgtable::Format;
use portcullis::platform::{FRAME_SIZE, Frames, TABLE_ENTRIES, Table};
use portcullis_hw::acpi::{AcpiError, Dmar, Iort, Ivrs};
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, Software, SoftwareHost, VtD};
use portcullis_hw::{Attachment, Iommu, UnitError, amdvi, riscv, smmuv3, vtd};

use limited::{grant, grant_all, granting};

const FRAMES: usize = 64;
const BASE: u64 = 1 << 20;

/// Preallocated frames: their allocation does not use the heap.
#[derive(Clone)]
struct Pool(Arc<Vec<(AtomicBool, Box<Table>)>>);

impl Pool {
    fn new() -> Self {
        let table = || Box::new([const { AtomicU64::new(0) }; TABLE_ENTRIES]);
        Self(Arc::new((0..FRAMES).map(|_| (AtomicBool::new(false), table())).collect()))
    }

    fn taken(&self) -> usize {
        self.0.iter().filter(|(taken, _)| taken.load(Ordering::Relaxed)).count()
    }
}

// SAFETY: 1: one thread, so frames have one owner until they are freed, and are zeroed then; runs are at multiples of their size. 2 and 3:
// of boxed tables behind an `Arc`. 4: all accesses are atomic.
unsafe impl Frames for Pool {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let is_free = |first: &usize| {
            let run = self.0.get(*first..*first + count);
            run.is_some_and(|run| run.iter().all(|(taken, _)| !taken.load(Ordering::Relaxed)))
        };
        let first = (0..FRAMES).step_by(count.next_power_of_two()).find(is_free)?;
        for (taken, table) in &self.0[first..first + count] {
            taken.store(true, Ordering::Relaxed);
            table.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        Some(PhysAddr::new(BASE + first as u64 * FRAME_SIZE))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        let first = ((first.get() - BASE) / FRAME_SIZE) as usize;
        for (taken, _) in &self.0[first..first + count] {
            assert!(taken.swap(false, Ordering::Relaxed), "freed twice");
        }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        &self.0[((frame.get() - BASE) / FRAME_SIZE) as usize].1
    }
}

type Behind<K> = SoftwareHost<K, Pool>;

const DEVICE: DeviceId = DeviceId(0x28);

/// Runs `work` with no allocation allowed, then one, and so on, until it succeeds. Returns the result, and the number.
fn until_it_succeeds<T>(mut work: impl FnMut() -> Result<T, UnitError>, unchanged: impl Fn()) -> (T, usize) {
    for pieces in 0..100 {
        match granting(pieces, &mut work).0 {
            Ok(done) => return (done, pieces),
            Err(error) => assert_eq!(error, UnitError::OutOfMemory, "with {pieces} pieces"),
        }
        unchanged();
    }
    panic!("it takes a hundred pieces")
}

fn starts_and_attaches<X, U, K>(
    prepare: fn(&Software<K, Pool>),
    start: impl Fn(Behind<K>) -> Result<U, UnitError>,
) where
    X: Format + Copy,
    U: Iommu<X>,
    K: Kind,
{
    let pool = Pool::new();
    let mut hosts = Vec::new();
    // The units' own registers use the heap, too.
    hosts.extend((0..100).map(|_| {
        // SAFETY: 1: the driver's host has the same frames.
        let unit = unsafe { Software::new(pool.clone()) };
        prepare(&unit);
        SoftwareHost { unit, now: || 0, relax: || {}, patience: 1_000_000, cpus: 4, cpu: || None }
    }));
    let (unit, pieces) =
        until_it_succeeds(|| start(hosts.pop().expect("a unit")), || assert_eq!(pool.taken(), 0));
    assert!(pieces > 0, "nothing of the heap's: this shows nothing");
    unit.enable().unwrap();
    let to =
        Attachment::Table { domain: DomainId(7), root: PhysAddr::new(BASE), format: unit.layout().unwrap() };
    for device in [DEVICE, DeviceId(0x30)] {
        // SAFETY: the unit walks no tables.
        let attach = || unsafe { unit.attach(device, to) };
        let is_absent = || assert_eq!(unit.detach(device), Err(UnitError::NotAttached { device: device.0 }));
        let ((), _) = until_it_succeeds(attach, is_absent);
        unit.detach(device).unwrap();
    }
    unit.shut_down().unwrap();
    assert_eq!(pool.taken(), 0);
}

/// Memory limits the number of CPUs' queues: a unit comes up with fewer, or with none.
#[test]
fn smmuv3_with_as_many_queues_of_cpus_as_there_is_memory_for() {
    let pool = Pool::new();
    let host = || {
        // SAFETY: 1: the driver's host has the same frames.
        let unit = unsafe { Software::new(pool.clone()) }.with_own_queues(0, 3);
        SoftwareHost { unit, now: || 0, relax: || {}, patience: 1_000_000, cpus: 8, cpu: || None }
    };
    let start = smmuv3::Unit::<Behind<SmmuV3>, 12>::start;
    let ends_with = |all: Vec<usize>| {
        // Two for each of four, one for each of eight.
        assert_eq!(all, [0, 2, 3, 4, 8]);
    };
    let mut all = Vec::new();
    for pieces in 0..100 {
        let host = host();
        let Ok(unit) = granting(pieces, || start(host)).0 else { continue };
        all.push(unit.own_queues());
        unit.shut_down().unwrap();
        assert_eq!(pool.taken(), 0, "with {pieces} pieces");
    }
    all.dedup();
    ends_with(all);
    let (mut all, mut held) = (Vec::new(), Vec::new());
    held.extend((0..FRAMES).filter_map(|_| pool.alloc(1)));
    while let Some(frame) = held.pop() {
        // SAFETY: allocated above.
        unsafe { pool.free(frame, 1) };
        let taken = pool.taken();
        if let Ok(unit) = start(host()) {
            all.push(unit.own_queues());
            unit.shut_down().unwrap();
        }
        assert_eq!(pool.taken(), taken);
    }
    all.dedup();
    ends_with(all);
}

/// Out of memory, parsing is an error: it never omits a part of a table.
#[test]
fn firmware_s_tables() {
    fn is_whole<T: std::fmt::Debug + PartialEq>(parse: fn(&[u8]) -> Result<T, AcpiError>, table: &[u8]) {
        let whole = parse(table).unwrap();
        for pieces in 0.. {
            grant(pieces, true);
            let read = parse(table);
            if grant_all() == 0 {
                assert_eq!(read, Ok(whole));
                assert!(pieces > 1, "nothing of the heap's: this shows nothing");
                return;
            }
            assert_eq!(read, Err(AcpiError::OutOfMemory), "without piece {pieces}");
        }
    }
    is_whole(Dmar::parse, include_bytes!("../src/acpi/tests/cases/d09-rmrr-overlap-same-device.dmar"));
    is_whole(Dmar::parse, include_bytes!("../src/acpi/tests/cases/d06-namespace-only.dmar"));
    is_whole(Iort::parse, include_bytes!("../src/acpi/tests/cases/i01-count-not-minus-1.iort"));
    is_whole(Iort::parse, include_bytes!("../src/acpi/tests/cases/i03-rmr-zero-length.iort"));
    is_whole(Ivrs::parse, include_bytes!("../src/acpi/tests/cases/v01-ivmd-of-segment-1.ivrs"));
}

#[test]
fn vtd_in_either_mode() {
    starts_and_attaches::<_, _, VtD>(|_| {}, vtd::Unit::start);
    // Scalable mode, its second stage, and coherent walks, in the Extended Capability Register.
    let scalable = |unit: &Software<VtD, Pool>| unit.set(0x14, 1 << 11 | 1 << 14 | 1 << 16);
    starts_and_attaches(scalable, |host| vtd::Unit::start_in(host, vtd::Mode::Scalable));
}

#[test]
fn amdvi_of_256_devices() {
    let config = amdvi::Config { last_device: 0xff, capability: None };
    starts_and_attaches::<_, _, AmdVi>(|_| {}, |host| amdvi::Unit::start(host, config));
}

#[test]
fn riscv_of_three_levels() {
    starts_and_attaches::<_, _, RiscV>(|_| {}, riscv::Unit::start);
}

#[test]
fn smmuv3_with_a_stream_table_of_two_levels() {
    starts_and_attaches::<_, _, SmmuV3>(|_| {}, smmuv3::Unit::<Behind<SmmuV3>, 12>::start);
}
