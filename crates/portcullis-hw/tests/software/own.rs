//! An SMMUv3 with ECMDQs: CPUs have queues of their own, and each is independent.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Instant;

use portcullis::addr::{DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis_hw::software::{SmmuV3, Software, SoftwareHost};
use portcullis_hw::{Host, Iommu, Registers, UnitError, smmuv3};
use portcullis_model::Memory;

use super::{Behind, CPU, DEVICE, MEMORY, lead_device};

/// The first ECMDQ, and the offsets of its registers.
const OWN: usize = 0x2_0000;
const BASE: usize = 0;
const PROD: usize = 8;
const CONS: usize = 12;
const ON: u32 = 1 << 31;
const ERR: u32 = 1 << 23;
const INDEX: u32 = 0xf_ffff;
/// The tail of the main queue.
const MAIN_PROD: usize = 0x98;

type Unit = smmuv3::Unit<Behind<SmmuV3>, 12>;

/// SMMU_GERROR and SMMU_GERRORN (sections 6.3.18 and 19): an error is active while their bits differ, and the driver acknowledges it by
/// making them equal. Bit 9: an ECMDQ has stopped.
const GERROR: usize = 0x60;
const GERRORN: usize = 0x64;
const OWN_STOPPED: u32 = 1 << 9;

type Watch = Box<dyn Fn([u64; 2]) -> bool + Send + Sync>;

/// A unit with 2^`pages` pages of 2^`each` ECMDQs, with a `watcher` of its commands.
fn software(
    memory: &Arc<Memory>,
    pages: u32,
    each: u32,
    watcher: Option<Watch>,
) -> Software<SmmuV3, Arc<Memory>> {
    // SAFETY: 1: the driver's host has the same frames.
    let unit = unsafe {
        match watcher {
            Some(watcher) => Software::watched(Arc::clone(memory), watcher),
            None => Software::new(Arc::clone(memory)),
        }
    };
    unit.with_own_queues(pages, each)
}

fn memory() -> Arc<Memory> {
    Memory::with_base(PhysAddr::new(1 << 20), MEMORY)
}

fn host(unit: Software<SmmuV3, Arc<Memory>>, cpus: usize) -> Behind<SmmuV3> {
    static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
    let now = || BEGAN.elapsed().as_nanos() as u64;
    let patience = 60_000_000_000;
    SoftwareHost { unit, now, relax: std::hint::spin_loop, patience, cpus, cpu: || CPU.get() }
}

/// A unit that is on, for `cpus` CPUs, with the device in domain 7.
fn on(memory: &Arc<Memory>, pages: u32, each: u32, cpus: usize, watcher: Option<Watch>) -> Unit {
    let unit = Unit::start(host(software(memory, pages, each, watcher), cpus)).unwrap();
    unit.enable().unwrap();
    lead_device(&unit);
    unit
}

fn page(page: u64) -> Request {
    let range = IovaRange::new(Iova::new(page << 12), 4096).unwrap();
    Request { domain: DomainId(7), invalidation: Invalidation::Range { range, leaf_only: true } }
}

/// The tails of `queues` queues, which lie `apart`, and of the main one.
fn told(unit: &Software<SmmuV3, Arc<Memory>>, queues: usize, apart: usize) -> (Vec<u32>, u32) {
    let tail = |at| unit.get(at) & INDEX;
    ((0..queues).map(|queue| tail(OWN + queue * apart + PROD)).collect(), tail(MAIN_PROD))
}

fn submit_as(unit: &Unit, cpus: impl IntoIterator<Item = Option<usize>>) {
    for cpu in cpus {
        CPU.set(cpu);
        unit.submit(&[page(5)]).unwrap();
    }
    CPU.set(None);
}

#[test]
fn each_cpu_has_a_queue_or_shares_one_with_its_neighbours() {
    for (pages, each, cpus, apart, has) in [
        (0, 3, 4, 0x2000, vec![2, 2, 2, 2, 0, 0, 0, 0]),
        (0, 2, 4, 0x4000, vec![2, 2, 2, 2]),
        // Two for three CPUs, one of which has a queue to itself.
        (0, 1, 3, 0x8000, vec![4, 2]),
        // Four for nine: three each.
        (0, 2, 9, 0x4000, vec![6, 6, 6, 0]),
        (1, 1, 8, 0x8000, vec![4, 4, 4, 4]),
        (1, 8, 2, 0x100, vec![2, 2, 0]),
    ] {
        let memory = memory();
        let unit = on(&memory, pages, each, cpus, None);
        let queues = has.iter().filter(|commands| **commands > 0).count();
        assert_eq!(unit.own_queues(), queues);
        let (before, main) = told(&unit.host().unit, has.len(), apart);
        assert!(before.iter().all(|commands| *commands == 0), "nothing but invalidations goes there");
        submit_as(&unit, (0..cpus).map(Some));
        assert_eq!(told(&unit.host().unit, has.len(), apart), (has.clone(), main), "{cpus} CPUs");
        // A CPU without a number, or beyond the host's CPUs.
        submit_as(&unit, [None, Some(cpus), Some(usize::MAX)]);
        assert_eq!(told(&unit.host().unit, has.len(), apart), (has, main + 6), "{cpus} CPUs");
        unit.detach(DEVICE).unwrap();
        unit.shut_down().unwrap();
        assert_eq!(memory.frames_in_use(), 0);
    }
}

#[test]
fn a_host_of_one_cpu_and_a_unit_of_one_queue_have_the_main_one() {
    for (each, cpus) in [(3, 0), (3, 1), (0, 4)] {
        let memory = memory();
        let unit = on(&memory, 0, each, cpus, None);
        assert_eq!(unit.own_queues(), 0);
        submit_as(&unit, [Some(0), None]);
        let (own, main) = told(&unit.host().unit, 1, 0);
        assert!(own == [0] && main > 4, "{own:?}, {main}");
        assert_eq!(unit.host().unit.get(OWN + CONS), 0, "it is off");
    }
}

/// More CPU threads than queues, and a device that comes and goes: a confirmed command was executed, and a refused one fails its
/// submission. All calls end.
#[test]
fn confirmed_is_carried_out_on_every_queue() {
    const CPUS: usize = 4;
    for each in [1, 3] {
        let memory = memory();
        let done = Arc::new(Mutex::new(HashSet::new()));
        let (watched, met) = (Arc::clone(&done), AtomicU64::new(0));
        let pages = 1 << 20..1 << 21;
        let named = pages.clone();
        let takes = move |command: [u64; 2]| {
            let page = command[1] >> 12;
            if !named.contains(&page) || met.fetch_add(1, Ordering::Relaxed) % 89 != 88 {
                watched.lock().unwrap().insert(page);
                return true;
            }
            false
        };
        let unit = on(&memory, 0, each, CPUS, Some(Box::new(takes)));
        assert_eq!(unit.own_queues(), 1 << each.min(2));
        let (rounds, failed) = (500, AtomicU64::new(0));
        std::thread::scope(|scope| {
            for cpu in 0..CPUS {
                let (unit, done, failed, start) = (&unit, &done, &failed, pages.start);
                scope.spawn(move || {
                    CPU.set(Some(cpu));
                    for round in 0..rounds {
                        let pages = [0, 2].map(|next| start + (cpu as u64 * rounds + round) * 4 + next);
                        match unit.submit(&pages.map(page)) {
                            Ok(()) => {
                                let done = done.lock().unwrap();
                                assert!(pages.iter().all(|page| done.contains(page)), "{pages:x?}");
                            }
                            Err(error) => {
                                assert_eq!(error, InvalidationError::Rejected { code: 1 });
                                failed.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                });
            }
            for _ in 0..50 {
                unit.detach(DEVICE).unwrap();
                lead_device(&unit);
            }
        });
        let (failed, all) = (failed.into_inner(), CPUS as u64 * rounds);
        assert!((all / 89..all).contains(&failed), "{failed} of {all} failed: some, and not all");
        unit.detach(DEVICE).unwrap();
        unit.shut_down().unwrap();
        assert_eq!(memory.frames_in_use(), 0);
    }
}

#[test]
fn a_queue_that_stops_stops_no_other() {
    const NONE: u64 = u64::MAX;
    let memory = memory();
    // The page that is refused.
    let refused = Arc::new(AtomicU64::new(NONE));
    let bad = Arc::clone(&refused);
    let takes = move |command: [u64; 2]| command[1] >> 12 != bad.load(Ordering::Relaxed);
    let unit = on(&memory, 0, 2, 4, Some(Box::new(takes)));
    let at = |cpu| OWN + cpu * 0x4000;
    for round in 0..300 {
        let (cpu, other) = (round % 4, (round + 1) % 4);
        refused.store(0x77, Ordering::Relaxed);
        // The queue of `cpu` stops. No CPU submits to it yet.
        let software = &unit.host().unit;
        let cons = software.get(at(cpu) + CONS);
        software.set(at(cpu) + CONS, cons ^ ERR | 1 << 24);
        submit_as(&unit, [Some(other), None]);
        unit.detach(DEVICE).unwrap();
        lead_device(&unit);
        assert_ne!(software.get(at(cpu) + CONS) & ERR, cons & ERR, "it is still to be acknowledged");
        CPU.set(Some(cpu));
        assert_eq!(unit.submit(&[page(5)]), Err(InvalidationError::Rejected { code: 1 }), "{round}");
        assert_eq!((software.get(at(cpu) + PROD) ^ software.get(at(cpu) + CONS)) & (ON | ERR), 0);
        unit.submit(&[page(5)]).unwrap();
        // Stopped by a command of its own. GERROR reports the first error, and each after the previous one was acknowledged.
        software.set(GERRORN, software.get(GERROR));
        let errors = software.get(GERROR);
        assert_eq!(unit.submit(&[page(0x77)]), Err(InvalidationError::Rejected { code: 1 }), "{round}");
        assert_eq!(software.get(GERROR) ^ errors, OWN_STOPPED, "{round}");
        refused.store(NONE, Ordering::Relaxed);
        unit.submit(&[page(0x77)]).unwrap();
        CPU.set(None);
    }
    // The main one, besides the ECMDQs.
    let software = &unit.host().unit;
    software.set(0x60, software.get(0x60) ^ 1);
    submit_as(&unit, (0..4).map(Some));
    assert_eq!(unit.submit(&[page(5)]), Err(InvalidationError::Rejected { code: 0 }));
    unit.submit(&[page(5)]).unwrap();
    unit.detach(DEVICE).unwrap();
    unit.shut_down().unwrap();
    assert_eq!(memory.frames_in_use(), 0);
}

/// A host with a faulty unit.
struct Odd {
    memory: Arc<Memory>,
    cpus: usize,
    now: AtomicU64,
    registers: OddRegisters,
}

/// The unit's registers, with faults.
#[derive(Clone)]
struct OddRegisters {
    unit: Arc<Software<SmmuV3, Arc<Memory>>>,
    /// The unit ignores writes there.
    deaf: usize,
    is_deaf: Arc<AtomicBool>,
    /// Nothing answers from here on.
    end: usize,
    /// A queue was on when CR1 was written.
    cr1_too_early: Arc<AtomicBool>,
}

// SAFETY: the unit's clauses; some writes do not reach it, and nothing answers beyond the end.
unsafe impl Registers for OddRegisters {
    fn read32(&self, offset: usize) -> u32 {
        if offset >= self.end { u32::MAX } else { self.unit.read32(offset) }
    }

    fn write32(&self, offset: usize, value: u32) {
        if offset == 0x28 && (0..4).any(|queue| self.unit.get(OWN + queue * 0x4000 + CONS) & ON != 0) {
            self.cr1_too_early.store(true, Ordering::Relaxed);
        }
        if offset < self.end && !(offset == self.deaf && self.is_deaf.load(Ordering::Relaxed)) {
            self.unit.write32(offset, value);
        }
    }

    fn read64(&self, offset: usize) -> u64 {
        if offset >= self.end { u64::MAX } else { self.unit.read64(offset) }
    }

    fn write64(&self, offset: usize, value: u64) {
        if offset < self.end {
            self.unit.write64(offset, value);
        }
    }
}

impl Host for Odd {
    type Registers = OddRegisters;
    type Frames = Arc<Memory>;

    fn registers(&self) -> &OddRegisters {
        &self.registers
    }

    fn frames(&self) -> &Arc<Memory> {
        &self.memory
    }

    fn now_ns(&self) -> u64 {
        self.now.fetch_add(1_000, Ordering::Relaxed)
    }

    fn relax(&self) {}

    fn patience_ns(&self) -> u64 {
        1_000_000
    }

    fn cpus(&self) -> usize {
        self.cpus
    }

    fn cpu(&self) -> Option<usize> {
        CPU.get()
    }
}

/// A host of four CPUs, whose unit has four queues.
fn odd(memory: &Arc<Memory>) -> Odd {
    let registers = OddRegisters {
        unit: Arc::new(software(memory, 0, 2, None)),
        deaf: usize::MAX,
        is_deaf: Arc::new(AtomicBool::new(true)),
        end: usize::MAX,
        cr1_too_early: Arc::default(),
    };
    Odd { memory: Arc::clone(memory), cpus: 4, now: AtomicU64::new(0), registers }
}

type OddUnit = smmuv3::Unit<Odd, 12>;

/// A queue that the unit was told of, and never acknowledges, stays allocated: the unit may begin to read it. All else is freed.
#[test]
fn a_queue_that_is_never_on_is_an_error_and_all_other_memory_comes_back() {
    for queue in 0..4 {
        let memory = memory();
        let mut host = odd(&memory);
        host.registers.deaf = OWN + queue * 0x4000 + PROD;
        let registers = host.registers.clone();
        let error = OddUnit::start(host).err();
        let waited = matches!(error, Some(UnitError::TimedOut { what: "turn a CPU's queue on", .. }));
        assert!(waited, "{error:?}");
        assert_eq!(memory.frames_in_use(), 1, "that of the queue");
        let unit = &registers.unit;
        assert!((0..4).all(|queue| unit.get(OWN + queue * 0x4000 + CONS) & ON == 0), "the others are off");
        assert_eq!(unit.get(0x24), 0, "and those of the unit");
    }
}

#[test]
fn a_queue_that_is_not_turned_off_keeps_all_memory() {
    let memory = memory();
    let mut host = odd(&memory);
    host.registers.deaf = OWN + 2 * 0x4000 + PROD;
    let is_deaf = Arc::clone(&host.registers.is_deaf);
    is_deaf.store(false, Ordering::Relaxed);
    let unit = OddUnit::start(host).unwrap();
    let before = memory.frames_in_use();
    is_deaf.store(true, Ordering::Relaxed);
    let error = unit.shut_down();
    assert!(matches!(error, Err(UnitError::TimedOut { what: "turn a CPU's queue off", .. })), "{error:?}");
    assert_eq!(memory.frames_in_use(), before);
}

/// Commands that are never executed, on the queues of two CPUs, while the unit ignores doorbells: the waits end, and the unit shuts down.
#[test]
fn a_unit_ends_with_commands_in_a_cpu_s_queue() {
    let memory = memory();
    let mut host = odd(&memory);
    host.registers.deaf = OWN + PROD;
    let (is_deaf, software) = (Arc::clone(&host.registers.is_deaf), Arc::clone(&host.registers.unit));
    is_deaf.store(false, Ordering::Relaxed);
    let unit = OddUnit::start(host).unwrap();
    unit.enable().unwrap();
    lead_device(&unit);
    is_deaf.store(true, Ordering::Relaxed);
    CPU.set(Some(0));
    for _ in 0..300 {
        let lost = unit.submit(&[page(5)]);
        assert!(matches!(lost, Err(InvalidationError::TimedOut { .. })), "{lost:?}");
    }
    CPU.set(Some(1));
    unit.submit(&[page(5)]).unwrap();
    CPU.set(Some(0));
    is_deaf.store(false, Ordering::Relaxed);
    software.set(OWN + CONS, software.get(OWN + CONS) ^ ERR | 1 << 24);
    unit.detach(DEVICE).unwrap();
    unit.shut_down().unwrap();
    CPU.set(None);
    assert_eq!(software.get(OWN + CONS) & ON, 0);
    assert_eq!(memory.frames_in_use(), 0);
}

/// Firmware, or the previous kernel, has left queues on, one of which has stopped. They are off before the driver sets queue attributes,
/// and CPUs' queues start anew.
#[test]
fn queues_that_were_left_on_are_turned_off_first() {
    for cpus in [0, 4] {
        let memory = memory();
        let mut host = odd(&memory);
        host.cpus = cpus;
        let (software, too_early) =
            (Arc::clone(&host.registers.unit), Arc::clone(&host.registers.cr1_too_early));
        for (queue, err) in [(1, 0), (3, ERR)] {
            software.set64(OWN + queue * 0x4000 + BASE, 0xdead_0008);
            software.set(OWN + queue * 0x4000 + PROD, ON | 9);
            software.set(OWN + queue * 0x4000 + CONS, ON | err | 5);
        }
        let unit = OddUnit::start(host).unwrap();
        assert!(!too_early.load(Ordering::Relaxed));
        assert_eq!(unit.own_queues(), cpus);
        for queue in 0..4 {
            let at = OWN + queue * 0x4000;
            let (is_on, cons) = (software.get(at + PROD) & ON != 0, software.get(at + CONS));
            assert_eq!((is_on, cons & ON != 0), (cpus > 0, cpus > 0), "queue {queue}");
            assert!(cpus == 0 || cons == ON, "at 0, without an error");
        }
        unit.enable().unwrap();
        lead_device(&unit);
        for cpu in 0..4 {
            CPU.set(Some(cpu));
            unit.submit(&[page(5)]).unwrap();
        }
        CPU.set(None);
        unit.shut_down().unwrap();
        assert_eq!(memory.frames_in_use(), 0);
    }
}

/// Registers that the host does not reach, a page in memory, one among the unit's other registers, or more pages than possible.
#[test]
fn queues_that_are_not_where_they_could_be_are_left_alone() {
    let cases: [fn(&mut OddRegisters); 5] = [
        |registers| registers.end = OWN,
        |registers| registers.end = 0x1000,
        |registers| registers.unit.set(0x4000, 0x2_0002),
        |registers| registers.unit.set(0x4000, 0x1_0003),
        |registers| registers.unit.set(0x190, 9 << 16),
    ];
    for (case, change) in cases.into_iter().enumerate() {
        let memory = memory();
        let mut host = odd(&memory);
        // The event queue's are in page 1, so this unit comes up if these answer.
        change(&mut host.registers);
        let software = Arc::clone(&host.registers.unit);
        let unit = OddUnit::start(host).unwrap();
        assert_eq!(unit.own_queues(), 0, "case {case}");
        assert!((0..4).all(|queue| software.get64(OWN + queue * 0x4000 + BASE) == 0), "case {case}");
    }
    // Reserved bits of IDR6 mean nothing.
    let memory = memory();
    let host = odd(&memory);
    let unit = &host.registers.unit;
    unit.set(0x190, unit.get(0x190) | 0xf0f0_ffff);
    assert_eq!(OddUnit::start(host).unwrap().own_queues(), 4);
    // Three of four answer.
    let memory = self::memory();
    let mut host = odd(&memory);
    host.registers.end = OWN + 3 * 0x4000;
    assert_eq!(OddUnit::start(host).unwrap().own_queues(), 2, "two CPUs for each");
    // A second page at the offset of the first: no queue is used twice. Offsets ascend.
    for second in [OWN, OWN + 0x2_0000] {
        let memory = self::memory();
        let mut host = odd(&memory);
        let software = Arc::new(software(&memory, 1, 1, None));
        software.set(0x4020, second as u32 | 3);
        host.registers.unit = software;
        assert_eq!(OddUnit::start(host).unwrap().own_queues(), 2, "those of the first page");
    }
}

/// Which writes an ECMDQ's registers accept, and when.
#[test]
fn a_queue_s_registers_are_written_as_the_manual_says() {
    let memory = memory();
    let unit = software(&memory, 0, 3, None);
    let at = OWN + 0x2000;
    unit.write64(at + BASE, 0x10_0008);
    unit.write32(at + CONS, ERR | 3);
    unit.write32(at + PROD, ERR | 3);
    assert_eq!((unit.get(at + CONS), unit.get(at + PROD)), (ERR | 3, ERR | 3), "off: all are written");
    unit.write32(at + PROD, ON | ERR | 5);
    assert_eq!(unit.get(at + CONS), ON | ERR | 5, "on, and it has taken two commands");
    unit.write64(at + BASE, 0);
    unit.write32(at + CONS, 0);
    assert_eq!((unit.get64(at + BASE), unit.get(at + CONS)), (0x10_0008, ON | ERR | 5), "on: neither");
    unit.write32(at + PROD, ON | 7);
    assert_eq!(unit.get(at + CONS), ON | ERR | 5, "an error that is not acknowledged");
    unit.write32(at + PROD, 7);
    assert_eq!(unit.get(at + CONS), ERR | 5, "off, all the same");
    unit.set(at + CONS, ON | ERR | 5);
    unit.write32(at + PROD, ON);
    assert_eq!(unit.get(at + PROD), 7, "between two states");
    for (told, value) in [(0x190, 3 << 16), (0x4000, OWN as u32 | 3), (0x4008, 1), (0x400c, 1)] {
        unit.write32(told, !value);
        assert_eq!(unit.get(told), value, "{told:#x}");
    }
    for nowhere in [0x2_0010, 0x2_00fc, 0x4_0000, 0x4_000c, 0x4040] {
        unit.write32(nowhere, 5);
        assert!(nowhere == 0x4040 || unit.get(nowhere) == u32::MAX, "{nowhere:#x}");
    }
}
