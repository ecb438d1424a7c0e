//! What drivers tell their units, and when: the test watches the registers, and reads the ring at its doorbell.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::addr::{DomainId, Iova, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue};
use portcullis_hw::software::{Kind, RiscV, SmmuV3, Software, VtD};
use portcullis_hw::{Host, Iommu, Registers, riscv, smmuv3, vtd};
use portcullis_model::Memory;

use super::{DEVICE, MEMORY};

/// The advance of the clock by a read, and the host's patience, in nanoseconds.
const LOOK: u64 = 1_000;
const PATIENCE: u64 = 1_000_000;

/// A kind of unit with a ring of 256 commands of 16 bytes.
trait Ringed: Kind {
    /// The doorbell register.
    const DOORBELL: usize;

    /// The place in a value of the doorbell.
    fn place(value: u64) -> u64;

    fn ring(unit: &Software<Self, Arc<Memory>>) -> u64;
}

impl Ringed for VtD {
    const DOORBELL: usize = 0x88;

    fn place(value: u64) -> u64 {
        value >> 4
    }

    fn ring(unit: &Software<Self, Arc<Memory>>) -> u64 {
        unit.get64(0x90) & !0xfff
    }
}

impl Ringed for RiscV {
    const DOORBELL: usize = 0x24;

    fn place(value: u64) -> u64 {
        value
    }

    fn ring(unit: &Software<Self, Arc<Memory>>) -> u64 {
        (unit.get64(0x18) & 0x003f_ffff_ffff_fc00) << 2
    }
}

impl Ringed for SmmuV3 {
    const DOORBELL: usize = 0x98;

    fn place(value: u64) -> u64 {
        value % 256
    }

    fn ring(unit: &Software<Self, Arc<Memory>>) -> u64 {
        unit.get64(0x90) & 0x000f_ffff_ffff_ffe0
    }
}

struct Watched<K> {
    unit: Software<K, Arc<Memory>>,
    now: AtomicU64,
    told: Mutex<Vec<[u64; 2]>>,
    /// A delayed doorbell write, and the pauses of a waiting CPU left until the unit gets it.
    unheard: Mutex<Option<(usize, u32, u64)>>,
    slow: AtomicU64,
    /// A VT-d unit's queue was turned off with commands in it.
    cut_off: AtomicBool,
}

/// A host with a watched unit. Clones share it, and outlive the driver.
struct Watching<K>(Arc<Watched<K>>);

impl<K> Clone for Watching<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K: Ringed> Watching<K> {
    fn new() -> Self {
        // SAFETY: 1: the driver's host has the same frames.
        let unit = unsafe { Software::new(Memory::with_base(PhysAddr::new(1 << 20), MEMORY)) };
        Self(Arc::new(Watched {
            unit,
            now: AtomicU64::new(0),
            told: Mutex::default(),
            unheard: Mutex::default(),
            slow: AtomicU64::new(0),
            cut_off: AtomicBool::new(false),
        }))
    }

    fn unit(&self) -> &Software<K, Arc<Memory>> {
        &self.0.unit
    }

    /// The commands since the last call.
    fn told(&self) -> Vec<[u64; 2]> {
        std::mem::take(&mut self.0.told.lock().unwrap())
    }

    fn write(&self, offset: usize, bits: u32, value: u64) {
        let Watched { unit, told, unheard, slow, cut_off, .. } = &*self.0;
        let mut unheard = unheard.lock().unwrap();
        if offset == K::DOORBELL {
            let word = |at| unit.frames().read_u64(PhysAddr::new(at)).unwrap();
            let mut at = unit.get64(offset);
            if let Some((_, _, value)) = *unheard {
                at = value;
            }
            let (mut at, end) = (K::place(at & u64::from(u32::MAX)), K::place(value));
            while at != end {
                let command = K::ring(unit) + at * 16;
                told.lock().unwrap().push([word(command), word(command + 8)]);
                at = (at + 1) % 256;
            }
            if slow.load(Ordering::Relaxed) > 0 {
                *unheard = Some((offset, bits, value));
                return;
            }
        }
        // The queue of a VT-d unit: GCMD.QIE.
        if K::DOORBELL == VtD::DOORBELL && offset == 0x18 && value >> 26 & 1 == 0 && unheard.is_some() {
            cut_off.store(true, Ordering::Relaxed);
        }
        self.pass_on(offset, bits, value);
    }

    fn pass_on(&self, offset: usize, bits: u32, value: u64) {
        match bits {
            32 => self.unit().write32(offset, value as u32),
            _ => self.unit().write64(offset, value),
        }
    }
}

// SAFETY: the unit's clauses; it reads at a delayed doorbell later.
unsafe impl<K: Ringed> Registers for Watching<K> {
    fn read32(&self, offset: usize) -> u32 {
        self.unit().read32(offset)
    }

    fn write32(&self, offset: usize, value: u32) {
        self.write(offset, 32, value.into());
    }

    fn read64(&self, offset: usize) -> u64 {
        self.unit().read64(offset)
    }

    fn write64(&self, offset: usize, value: u64) {
        self.write(offset, 64, value);
    }
}

impl<K: Ringed> Host for Watching<K> {
    type Registers = Self;
    type Frames = Arc<Memory>;

    fn registers(&self) -> &Self {
        self
    }

    fn frames(&self) -> &Arc<Memory> {
        self.unit().frames()
    }

    fn now_ns(&self) -> u64 {
        self.0.now.fetch_add(LOOK, Ordering::Relaxed)
    }

    fn relax(&self) {
        let slow = &self.0.slow;
        if slow.load(Ordering::Relaxed) > 0 && slow.fetch_sub(1, Ordering::Relaxed) == 1 {
            let heard = self.0.unheard.lock().unwrap().take();
            heard.into_iter().for_each(|(offset, bits, value)| self.pass_on(offset, bits, value));
        }
    }

    fn patience_ns(&self) -> u64 {
        PATIENCE
    }
}

/// Opcodes of RISC-V's IOMMU (version 1.0, section "In-memory queue interface").
mod opcode {
    pub const IOTINVAL: u64 = 1;
    pub const IOFENCE: u64 = 2;
    pub const IODIR: u64 = 3;
}

/// "IOMMU Command-queue Fence commands": PR waits for processed reads, PW for writes; AV stores a confirmation.
#[test]
fn the_fence_that_confirms_waits_for_reads_and_writes() {
    const AV: u64 = 1 << 10;
    const PR: u64 = 1 << 12;
    const PW: u64 = 1 << 13;
    let host = Watching::<RiscV>::new();
    let unit = riscv::Unit::start(host.clone()).unwrap();
    unit.enable().unwrap();
    host.told();
    unit.invalidate(DomainId(7), Invalidation::Domain).unwrap();
    let told = host.told();
    let [fence, _] = told[told.len() - 1];
    assert_eq!(fence & (0x7f | AV | PR | PW), opcode::IOFENCE | AV | PR | PW, "{told:x?}");
}

/// "IOMMU Command-queue": the unit may reorder commands except across a fence. Translations of an entry could be refetched, if they were
/// invalidated before the entry.
#[test]
fn a_fence_is_between_a_device_s_context_and_its_translations() {
    for (stage, second) in [(riscv::Stage::First, 1), (riscv::Stage::Second, 2)] {
        let host = Watching::<RiscV>::new();
        let unit = riscv::Unit::start_in(host.clone(), stage).unwrap();
        unit.enable().unwrap();
        super::lead_device(&unit);
        host.told();
        unit.detach(DEVICE).unwrap();
        let told: Vec<u64> = host.told().iter().map(|[first, _]| first & 0x7f).collect();
        let at = |wanted| move |opcode: &u64| *opcode == wanted;
        let context = told.iter().rposition(at(opcode::IODIR)).unwrap();
        let translations = told.iter().position(at(opcode::IOTINVAL)).unwrap();
        assert!(context < translations, "{stage:?}: {told:?}");
        assert!(told[context..translations].iter().any(at(opcode::IOFENCE)), "{stage:?}: {told:?}");
        assert_eq!(told.iter().filter(|opcode| at(opcode::IOTINVAL)(opcode)).count(), second, "{stage:?}");
    }
}

/// CR0.ATSCHK (section 6.3.9): without it, translated requests pass unchecked.
#[test]
fn a_unit_with_ats_checks_what_devices_have_translated() {
    for ats in [0, 1 << 10] {
        let host = Watching::<SmmuV3>::new();
        let unit = host.unit();
        unit.set(0, unit.get(0) | ats);
        let driver = smmuv3::Unit::<_, 12>::start(host.clone()).unwrap();
        driver.enable().unwrap();
        // SMMUEN, EVENTQEN, CMDQEN; ATSCHK is reserved where there is no ATS (IDR0.ATS).
        assert_eq!(unit.get(0x20), 1 | 1 << 2 | 1 << 3 | if ats == 0 { 0 } else { 1 << 4 });
    }
}

/// A stopped unit misses doorbells: the driver rings again after it has acknowledged the error, before its patience ends.
#[test]
fn a_unit_that_had_stopped_is_told_of_what_came_meanwhile() {
    fn rings<K: Ringed>(
        start: impl FnOnce(Watching<K>) -> Box<dyn InvalidationQueue>,
        stop: impl Fn(&Software<K, Arc<Memory>>),
    ) {
        let host = Watching::<K>::new();
        let unit = start(host.clone());
        stop(host.unit());
        let began = host.0.now.load(Ordering::Relaxed);
        let stopped = unit.invalidate(DomainId(7), Invalidation::Domain);
        assert!(matches!(stopped, Err(InvalidationError::Rejected { .. })), "{stopped:?}");
        let looks = (host.0.now.load(Ordering::Relaxed) - began) / LOOK;
        assert!(looks < PATIENCE / LOOK / 2, "{looks} looks at the clock");
    }
    rings::<VtD>(
        |host| {
            let unit = vtd::Unit::start(host).unwrap();
            unit.enable().unwrap();
            Box::new(unit)
        },
        |unit| unit.set(0x34, 1 << 4),
    );
    rings::<RiscV>(
        |host| Box::new(riscv::Unit::start(host).unwrap()),
        |unit| unit.set(0x48, unit.get(0x48) | 1 << 10),
    );
}

/// A unit that reports an error, and does not resume: the caller gets that error, and no time-out.
#[test]
fn what_a_unit_refused_is_said_also_where_it_stays_where_it_is() {
    let host = Watching::<VtD>::new();
    let unit = vtd::Unit::start(host.clone()).unwrap();
    unit.enable().unwrap();
    host.0.slow.store(u64::MAX, Ordering::Relaxed);
    host.unit().set(0x34, 1 << 4);
    host.unit().set(0xb0, 5);
    let stuck = unit.invalidate(DomainId(7), Invalidation::Domain);
    assert_eq!(stuck, Err(InvalidationError::Rejected { code: 5 }));
    // The next has no error to report.
    let silent = unit.invalidate(DomainId(7), Invalidation::Domain);
    assert!(matches!(silent, Err(InvalidationError::TimedOut { .. })), "{silent:?}");
}

/// FSTS.PFO (section 11.4.7.1): after an overflow a unit records no fault until it is cleared.
#[test]
fn a_unit_whose_fault_records_overflowed_records_again() {
    const RECORD: usize = 0x220;
    let host = Watching::<VtD>::new();
    let driver = vtd::Unit::start(host.clone()).unwrap();
    driver.enable().unwrap();
    let unit = host.unit();
    // A read of page 5 by device 0x28, reason 6; pending, with an overflow.
    unit.set64(RECORD, 0x5000);
    unit.set64(RECORD + 8, 1 << 63 | 1 << 62 | 6 << 32 | 0x28);
    unit.set(0x34, 1 << 1 | 1);
    let fault = driver.next_fault().unwrap();
    assert_eq!((fault.device, fault.address.map(Iova::get)), (DEVICE, Some(0x5000)));
    assert_eq!(unit.get(0x34) & 1, 0, "it records again");
    assert_eq!(driver.next_fault(), None);
}

/// The queue is idle when it is turned off, with a wait as its last descriptor (section 6.5.2): also if the unit is late with earlier ones.
#[test]
fn a_queue_is_not_turned_off_while_commands_are_in_it() {
    let host = Watching::<VtD>::new();
    let before = host.frames().frames_in_use();
    let unit = vtd::Unit::start(host.clone()).unwrap();
    unit.enable().unwrap();
    host.0.slow.store(u64::MAX, Ordering::Relaxed);
    let late = unit.invalidate(DomainId(7), Invalidation::Domain);
    assert!(matches!(late, Err(InvalidationError::TimedOut { .. })), "{late:?}");
    host.0.slow.store(5, Ordering::Relaxed);
    host.told();
    unit.shut_down().unwrap();
    assert!(!host.0.cut_off.load(Ordering::Relaxed));
    let told = host.told();
    let [last, _] = told[told.len() - 1];
    assert_eq!(last & 0xf, 5, "a wait: {told:x?}");
    assert_eq!(host.frames().frames_in_use(), before);
}

/// IQT and IQH (sections 11.4.8.1 and 2) have more bits than a queue of 256 descriptors needs: these are ignored.
#[test]
fn a_queue_s_places_are_told_modulo_its_length() {
    let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
    let taken = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&taken);
    let watcher = move |_| {
        assert!(count.fetch_add(1, Ordering::Relaxed) < 1000, "it never gets there");
        true
    };
    // SAFETY: 1: the test alone uses these frames, and only through the unit.
    let unit = unsafe { Software::<VtD, _>::watched(memory, Box::new(watcher)) };
    unit.write64(0x90, 1 << 20);
    unit.write32(0x18, 1 << 26);
    for (tail, more) in [(0, 0), (256, 0), (3, 3), (256 + 5, 2), (255, 250), (512, 1), (4, 4)] {
        let before = taken.load(Ordering::Relaxed);
        unit.write64(0x88, tail << 4);
        assert_eq!(taken.load(Ordering::Relaxed) - before, more, "{tail}");
        assert_eq!(unit.read64(0x80) >> 4, tail % 256);
    }
    // IQH restarts when the queue is turned on (section 11.4.4.1, QIE), and at no other command.
    for (command, status, head) in [
        (1 << 26 | 1 << 30, 1 << 26 | 1 << 30, 4),
        (1 << 26 | 1 << 31, 3 << 30 | 1 << 26, 4),
        (1 << 31, 3 << 30, 4),
        (u32::MAX, 3 << 30 | 1 << 26, 0),
        (1 << 31, 3 << 30, 0),
        (0, 1 << 30, 0),
    ] {
        unit.write32(0x18, command);
        assert_eq!((unit.read32(0x1c), unit.read64(0x80) >> 4), (status, head), "{command:#x}");
    }
}
