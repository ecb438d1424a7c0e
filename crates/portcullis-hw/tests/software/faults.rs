//! Failures below the driver.
//!
//! The host panics once, at every seventh of its calls. The driver works as before afterwards.
//!
//! And a unit that does not confirm the last wait, but that its queue is off.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::lead_device;
use portcullis::addr::{DomainId, PhysAddr};
use portcullis::invalidation::{Invalidation, Request};
use portcullis::pgtable::{Format, VtdSecondStage};
use portcullis::platform::{Frames, Table};
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, Software, VtD};
use portcullis_hw::{Host, Iommu, Registers, UnitError, amdvi, riscv, smmuv3, vtd};
use portcullis_model::Memory;

use crate::{DEVICE, MEMORY};

/// The payload of such a panic.
struct Planned;

const NEVER: usize = usize::MAX;

/// The calls so far, and the one that panics.
#[derive(Default)]
struct Plan {
    calls: AtomicUsize,
    at: AtomicUsize,
}

impl Plan {
    fn set(&self, at: usize) {
        self.calls.store(0, Ordering::Relaxed);
        self.at.store(at, Ordering::Relaxed);
    }

    fn call(&self) {
        if self.calls.fetch_add(1, Ordering::Relaxed) == self.at.load(Ordering::Relaxed) {
            // Bypasses the panic hook, which would print it.
            resume_unwind(Box::new(Planned));
        }
    }
}

/// Host, registers and memory in one.
struct Faulty<K> {
    unit: Software<K, Arc<Memory>>,
    now: AtomicU64,
    plan: Plan,
    /// The doorbell register, and whether the unit gets its writes.
    doorbell: usize,
    is_deaf: AtomicBool,
    /// The number of CPUs. CPU 0 makes all calls.
    cpus: usize,
}

impl<K> Faulty<K> {
    fn is_lost(&self, offset: usize) -> bool {
        offset == self.doorbell && self.is_deaf.load(Ordering::Relaxed)
    }
}

// SAFETY: the clauses are the model's memory's.
unsafe impl<K: Kind> Frames for Faulty<K> {
    /// So that `clean` is called, too.
    const COHERENT: bool = false;

    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.plan.call();
        self.unit.frames().alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        self.plan.call();
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.unit.frames().free(first, count) };
    }

    fn clean(&self, _: &[AtomicU64]) {
        self.plan.call();
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        self.plan.call();
        // SAFETY: clause 1 is the caller's.
        unsafe { self.unit.frames().table(frame) }
    }
}

// SAFETY: the unit's clauses; some writes do not reach it.
unsafe impl<K: Kind> Registers for Faulty<K> {
    fn read32(&self, offset: usize) -> u32 {
        self.plan.call();
        self.unit.read32(offset)
    }

    fn write32(&self, offset: usize, value: u32) {
        self.plan.call();
        if !self.is_lost(offset) {
            self.unit.write32(offset, value);
        }
    }

    fn read64(&self, offset: usize) -> u64 {
        self.plan.call();
        self.unit.read64(offset)
    }

    fn write64(&self, offset: usize, value: u64) {
        self.plan.call();
        if !self.is_lost(offset) {
            self.unit.write64(offset, value);
        }
    }
}

impl<K: Kind> Host for Faulty<K> {
    type Registers = Self;
    type Frames = Self;

    fn registers(&self) -> &Self {
        self
    }

    fn frames(&self) -> &Self {
        self
    }

    fn now_ns(&self) -> u64 {
        self.plan.call();
        self.now.fetch_add(10_000, Ordering::Relaxed)
    }

    fn relax(&self) {
        self.plan.call();
    }

    fn patience_ns(&self) -> u64 {
        self.plan.call();
        50_000
    }

    fn cpus(&self) -> usize {
        self.plan.call();
        self.cpus
    }

    fn cpu(&self) -> Option<usize> {
        self.plan.call();
        Some(0)
    }
}

/// The ring is filled while the unit misses doorbells; then it gets them; then it has stopped, by `stop`; and a device comes and goes.
fn work<K: Kind, X: Format + Copy, U: Iommu<X>>(
    unit: &U,
    host: &Faulty<K>,
    stop: fn(&Software<K, Arc<Memory>>),
) {
    let many = [Request { domain: DomainId(7), invalidation: Invalidation::Domain }; 100];
    host.is_deaf.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        assert!(unit.submit(&many).is_err());
    }
    host.is_deaf.store(false, Ordering::Relaxed);
    assert_eq!(unit.submit(&many[..1]), Ok(()));
    stop(&host.unit);
    assert!(unit.submit(&many[..3]).is_err());
    assert_eq!(unit.submit(&many[..1]), Ok(()));
    lead_device(unit);
    assert_eq!(unit.next_fault(), None);
    unit.detach(DEVICE).unwrap();
}

/// It still works, also after as many submissions as there are places and status words.
fn is_well<X: Format + Copy>(unit: &impl Iommu<X>) {
    // Outstanding submissions fail with the stop; and a device whose attach or detach was outstanding is attached, or not.
    let well = (0..4).any(|_| unit.invalidate(DomainId(7), Invalidation::Domain).is_ok());
    assert!(well, "the ring has stopped");
    let detached = unit.detach(DEVICE);
    assert!(matches!(detached, Ok(()) | Err(UnitError::NotAttached { .. })), "{detached:?}");
    for round in 0..600 {
        assert_eq!(unit.invalidate(DomainId(7), Invalidation::Domain), Ok(()), "{round}");
    }
    lead_device(unit);
    unit.detach(DEVICE).unwrap();
}

/// A host that does not panic, with the doorbell register of its unit, which gets its writes or not.
fn host<K: Kind>(memory: &Arc<Memory>, doorbell: usize, is_deaf: bool) -> Faulty<K> {
    // SAFETY: the driver's host has the same frames.
    let unit = unsafe { Software::new(Arc::clone(memory)) };
    let (plan, is_deaf) = (Plan::default(), AtomicBool::new(is_deaf));
    plan.set(NEVER);
    Faulty { unit, now: AtomicU64::new(0), plan, doorbell, is_deaf, cpus: 0 }
}

/// A unit that is on, with a host that does not panic.
fn make<K: Kind, X: Format + Copy, U: Iommu<X>>(
    start: impl Fn(Faulty<K>) -> Result<U, UnitError>,
    doorbell: usize,
) -> (U, Arc<Memory>) {
    let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
    let unit = start(host(&memory, doorbell, false)).unwrap();
    unit.enable().unwrap();
    // Tables for the device stay.
    lead_device(&unit);
    unit.detach(DEVICE).unwrap();
    (unit, memory)
}

fn survives<K: Kind, X: Format + Copy, U: Iommu<X>>(
    start: impl Fn(Faulty<K>) -> Result<U, UnitError>,
    of: fn(&U) -> &Faulty<K>,
    doorbell: usize,
    stop: fn(&Software<K, Arc<Memory>>),
) {
    let make = || make(&start, doorbell);
    let (unit, _) = make();
    let host = of(&unit);
    host.plan.set(NEVER);
    work(&unit, host, stop);
    let calls = host.plan.calls.load(Ordering::Relaxed);
    // Waits repeat the same calls.
    let (mut at, mut met) = (0, 0);
    while at < calls {
        let (unit, memory) = make();
        let host = of(&unit);
        host.plan.set(at);
        let unwound = catch_unwind(AssertUnwindSafe(|| work(&unit, host, stop)));
        assert!(unwound.is_err_and(|payload| payload.is::<Planned>()), "call {at} of {calls}");
        host.plan.set(NEVER);
        host.is_deaf.store(false, Ordering::Relaxed);
        is_well(&unit);
        unit.shut_down().unwrap();
        assert_eq!(memory.frames_in_use(), 0, "call {at} of {calls}");
        (at, met) = (at + 7, met + 1);
    }
    assert!(met > 300, "{met} of {calls}");
    // During waits for the unit: more often than there are status words.
    let (unit, _) = make();
    let host = of(&unit);
    for _ in 0..600 {
        host.is_deaf.store(true, Ordering::Relaxed);
        host.plan.set(50);
        let submit = || unit.invalidate(DomainId(7), Invalidation::Domain);
        let unwound = catch_unwind(AssertUnwindSafe(submit));
        assert!(unwound.is_err_and(|payload| payload.is::<Planned>()));
        host.is_deaf.store(false, Ordering::Relaxed);
        assert_eq!(unit.invalidate(DomainId(7), Invalidation::Domain), Ok(()));
    }
}

/// A fetched wait that is not confirmed may be confirmed after the queue is off: that memory stays allocated. An SMMUv3 stores no
/// confirmation.
fn keeps_its_memory<K: Kind, X: Format + Copy, U: Iommu<X>>(
    start: impl Fn(Faulty<K>) -> Result<U, UnitError>,
    of: fn(&U) -> &Faulty<K>,
    doorbell: usize,
) {
    let (unit, memory) = make(start, doorbell);
    of(&unit).is_deaf.store(true, Ordering::Relaxed);
    let shut_down = unit.shut_down();
    assert!(matches!(shut_down, Err(UnitError::Unconfirmed(_))), "{shut_down:?}");
    assert!(memory.frames_in_use() >= 3, "the ring, the words in which it confirms, and its tables");
}

fn amdvi(host: Faulty<AmdVi>) -> Result<amdvi::Unit<Faulty<AmdVi>>, UnitError> {
    amdvi::Unit::start(host, amdvi::Config { last_device: 0xff, capability: None })
}

#[test]
fn vtd_survives_its_host() {
    survives::<VtD, _, _>(vtd::Unit::start, vtd::Unit::host, 0x88, |unit| unit.set(0x34, 1 << 4));
}

#[test]
fn amdvi_survives_its_host() {
    survives(amdvi, amdvi::Unit::host, 0x2008, |unit| unit.set(0x2020, 1 << 3));
}

#[test]
fn riscv_survives_its_host() {
    survives::<RiscV, _, _>(riscv::Unit::start, riscv::Unit::host, 0x24, |unit| {
        unit.set(0x48, unit.get(0x48) | 1 << 10);
    });
}

#[test]
fn smmuv3_survives_its_host() {
    let start = smmuv3::Unit::<Faulty<SmmuV3>, 12>::start;
    survives::<SmmuV3, _, _>(start, smmuv3::Unit::host, 0x98, |unit| unit.set(0x60, unit.get(0x60) ^ 1));
}

/// The same with the CPU's own queue.
#[test]
fn smmuv3_with_queues_of_cpus_survives_its_host() {
    let start = |mut host: Faulty<SmmuV3>| {
        host.unit = host.unit.with_own_queues(0, 1);
        host.cpus = 2;
        smmuv3::Unit::<_, 12>::start(host)
    };
    // ECMDQ_CONS.ERR.
    let stop = |unit: &Software<SmmuV3, _>| unit.set(0x2_000c, unit.get(0x2_000c) ^ 1 << 23);
    survives(start, smmuv3::Unit::host, 0x2_0008, stop);
}

#[test]
fn a_unit_that_may_still_store_keeps_its_memory() {
    keeps_its_memory::<VtD, VtdSecondStage, _>(vtd::Unit::start, vtd::Unit::host, 0x88);
    keeps_its_memory(amdvi, amdvi::Unit::host, 0x2008);
    keeps_its_memory::<RiscV, _, _>(riscv::Unit::start, riscv::Unit::host, 0x24);
}

/// A queue that does not turn on is an error: it would execute no submission. (An AMD-Vi turns its queue on with translation.)
#[test]
fn a_unit_that_does_not_turn_its_queue_on_is_not_started() {
    fn is_waited_for<K: Kind, U>(start: impl Fn(Faulty<K>) -> Result<U, UnitError>, control: usize) {
        let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
        let error = start(host(&memory, control, true)).err();
        assert!(matches!(error, Some(UnitError::TimedOut { .. })), "{error:?}");
    }
    is_waited_for::<VtD, _>(vtd::Unit::start, 0x18);
    is_waited_for::<RiscV, _>(riscv::Unit::start, 0x48);
    is_waited_for::<SmmuV3, _>(smmuv3::Unit::<Faulty<SmmuV3>, 12>::start, 0x20);
}
