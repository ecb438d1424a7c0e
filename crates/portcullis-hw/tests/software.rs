//! Drivers on software units: they come up, execute submissions of several threads, report errors, and free all memory.

#[path = "software/blocks.rs"]
mod blocks;
#[path = "software/caches.rs"]
mod caches;
#[path = "software/domains.rs"]
mod domains;
#[path = "software/ends.rs"]
mod ends;
#[path = "software/faults.rs"]
mod faults;
#[path = "software/own.rs"]
mod own;
#[path = "../examples/port.rs"]
mod port;
#[path = "software/registers.rs"]
mod registers;
#[path = "software/stops.rs"]
mod stops;
#[path = "software/told.rs"]
mod told;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationError, Request};
use portcullis::pgtable::Format;
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, Software, SoftwareHost, VtD};
use portcullis_hw::{Attachment, Iommu, Registers, UnitError, amdvi, riscv, smmuv3, vtd};
use portcullis_model::Memory;

/// Enough for a device table of 256 devices, and the other structures.
const MEMORY: u64 = 4 << 20;

const DEVICE: DeviceId = DeviceId(0x28);

type Behind<K> = SoftwareHost<K, Arc<Memory>>;

/// The example: a toy kernel brings up the software VT-d unit, and a device behind it reaches only what is mapped.
#[test]
fn a_port_comes_up() {
    port::main().unwrap();
}

thread_local! {
    /// The CPU of a thread that shares waits.
    static CPU: Cell<Option<usize>> = const { Cell::new(None) };
}

/// CPUs that may share waits.
const CPUS: usize = 4;

fn now() -> u64 {
    // While one submits, the others run and submit, too.
    if CPU.get().is_some() {
        std::thread::yield_now();
    }
    static BEGAN: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    BEGAN.get_or_init(std::time::Instant::now).elapsed().as_nanos() as u64
}

fn host<K: Kind>(memory: &Arc<Memory>) -> Behind<K> {
    // SAFETY: 1: the driver's host has the same frames.
    let unit = unsafe { Software::new(Arc::clone(memory)) };
    let patience = Duration::from_secs(10).as_nanos() as u64;
    SoftwareHost { unit, now, relax: std::thread::yield_now, patience, cpus: CPUS, cpu: || CPU.get() }
}

/// Attaches the device to domain 7.
fn lead_device<X: Format + Copy>(unit: &impl Iommu<X>) {
    let format = unit.layout().unwrap();
    let to = Attachment::Table { domain: DomainId(7), root: PhysAddr::new(1 << 20), format };
    // SAFETY: the unit walks no tables.
    unsafe { unit.attach(DEVICE, to) }.unwrap();
}

/// `stop` makes a unit report that it has stopped at a command, and `head` returns how many it has consumed.
fn works<X, U, K>(
    start: impl Fn(Behind<K>) -> Result<U, UnitError>,
    stop: impl Fn(&Software<K, Arc<Memory>>),
    of: fn(&U) -> &Behind<K>,
) where
    X: Format + Copy,
    U: Iommu<X> + 'static,
    K: Kind,
{
    let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
    let before = memory.frames_in_use();
    let unit = Arc::new(start(host(&memory)).unwrap());
    unit.enable().unwrap();
    lead_device(&*unit);
    let page = |page: u64| {
        let range = IovaRange::new(Iova::new(page << 12), 4096).unwrap();
        Request { domain: DomainId(7), invalidation: Invalidation::Range { range, leaf_only: true } }
    };
    std::thread::scope(|scope| {
        for thread in 0..CPUS {
            let unit = &unit;
            scope.spawn(move || {
                use portcullis::invalidation::InvalidationQueue;
                for round in 0..2000 {
                    CPU.set((round % 2 == 0).then_some(thread));
                    unit.submit(&[page(thread as u64 * 10_000 + round), page(round)]).unwrap();
                }
            });
        }
    });
    // A stopped unit resumes when its error is acknowledged, and the submission fails.
    stop(&of(&unit).unit);
    let stopped = unit.submit(&[page(1)]);
    assert!(matches!(stopped, Err(InvalidationError::Rejected { .. })), "{stopped:?}");
    unit.submit(&[page(1)]).unwrap();
    assert_eq!(unit.next_fault(), None);
    unit.detach(DEVICE).unwrap();
    Arc::into_inner(unit).unwrap().shut_down().unwrap();
    assert_eq!(memory.frames_in_use(), before);
}

#[test]
fn vtd() {
    works::<_, _, VtD>(vtd::Unit::start, |unit| unit.set(0x34, 1 << 4), vtd::Unit::host);
}

#[test]
fn amdvi() {
    let config = amdvi::Config { last_device: 0xff, capability: None };
    works::<_, _, AmdVi>(
        |host| amdvi::Unit::start(host, config),
        |unit| unit.set(0x2020, 1 << 3),
        amdvi::Unit::host,
    );
}

#[test]
fn riscv() {
    works::<_, _, RiscV>(
        riscv::Unit::start,
        |unit| unit.set(0x48, unit.get(0x48) | 1 << 10),
        riscv::Unit::host,
    );
}

#[test]
fn smmuv3() {
    let start = smmuv3::Unit::<Behind<SmmuV3>, 12>::start;
    works::<_, _, SmmuV3>(start, |unit| unit.set(0x60, unit.get(0x60) ^ 1), smmuv3::Unit::host);
}

/// An offset beyond the registers, or between two of them, reads as all ones, as on a bus. No two registers share a word.
#[test]
fn beyond_the_registers_nothing_answers() {
    fn reads<K: Kind>() {
        let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
        let host = host::<K>(&memory);
        let registers = || (0..0x400).chain(0x1000..0x1400).step_by(4);
        for offset in registers() {
            host.unit.set(offset, offset as u32 | 1 << 31);
        }
        for nowhere in [1, 2, 3, 0x3fd, 0x400, 0x7fc, 0xffc, 0x1002, 0x1400, 0x1ffc] {
            host.unit.set(nowhere, 5);
            assert_eq!(host.unit.get(nowhere), u32::MAX, "{nowhere:#x}");
        }
        for offset in registers() {
            assert_eq!(host.unit.get(offset), offset as u32 | 1 << 31);
        }
    }
    reads::<VtD>();
    reads::<AmdVi>();
    reads::<RiscV>();
    reads::<SmmuV3>();
}

/// A VT-d unit stores a confirmation of 4 bytes at a multiple of 4 (section 6.5.2.8).
#[test]
fn what_a_unit_confirms_is_where_it_is_told_to() {
    let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
    let host = host::<VtD>(&memory);
    let [queue, words] = [(); 2].map(|()| portcullis::platform::Frames::alloc(&*memory, 1).unwrap());
    let unit = &host.unit;
    unit.write64(0x90, queue.get());
    unit.write32(0x18, 1 << 26);
    for (index, (place, word)) in [(0, 0x1234_5678), (12, 0x1234_5678 << 32)].into_iter().enumerate() {
        let at = words.get() + place;
        // A wait that stores 0x1234_5678.
        for (word, value) in [0x1234_5678 << 32 | 1 << 5 | 5, at].into_iter().enumerate() {
            memory.table_at(queue)[index * 2 + word].store(value, Ordering::Release);
        }
        unit.write64(0x88, (index as u64 + 1) * 16);
        assert_eq!(memory.read_u64(PhysAddr::new(at & !7)).unwrap(), word, "at {place}");
    }
}

/// `place` is the second command's in the register at `tail`; `on` is the write that turns the queue on, whose base is at `base`. After off
/// and on, the queue's head is `anew`.
fn takes_nothing_while_off<K: Kind>(
    (base, queue): (usize, fn(u64) -> u64),
    (head, tail, place): (usize, usize, u32),
    on: (usize, u32),
    anew: u32,
) {
    let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
    let unit = host::<K>(&memory).unit;
    let frame = portcullis::platform::Frames::alloc(&*memory, 1).unwrap();
    let has = |at: u32, when: &str| assert_eq!(unit.get(head), at, "{}: {when}", std::any::type_name::<K>());
    unit.write64(base, queue(frame.get()));
    unit.write32(tail, place);
    has(0, "the queue is off");
    unit.write32(on.0, on.1);
    unit.write32(tail, place);
    has(place, "the queue is on");
    unit.write32(on.0, on.1);
    has(place, "the queue was on before");
    unit.write32(on.0, 0);
    unit.write32(on.0, on.1);
    has(anew, "the queue is on again");
}

#[test]
fn a_unit_takes_no_command_of_a_queue_that_is_off() {
    takes_nothing_while_off::<VtD>((0x90, |frame| frame), (0x80, 0x88, 16), (0x18, 1 << 26), 0);
    takes_nothing_while_off::<AmdVi>((0x8, |frame| frame), (0x2000, 0x2008, 16), (0x18, 1 | 1 << 12), 16);
    takes_nothing_while_off::<RiscV>((0x18, |frame| frame >> 2), (0x20, 0x24, 1), (0x48, 1), 0);
    takes_nothing_while_off::<SmmuV3>((0x90, |frame| frame | 4), (0x9c, 0x98, 1), (0x20, 1 << 3), 1);
}

/// RISC-V's queues: an error stays until it is cleared by a 1, or the queue is turned on again.
#[test]
fn errors_of_a_queue_end_when_it_is_turned_on() {
    let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
    let unit = host::<RiscV>(&memory).unit;
    let (on, error) = (1 | 1 << 16, 1 << 10);
    for control in [0x48, 0x4c] {
        unit.set(control, on | error);
        for (written, said) in [(1, on | error), (0, error), (1, on), (1 | error, on)] {
            unit.write32(control, written);
            assert_eq!(unit.get(control), said, "{control:#x}, {written:#x}");
        }
        unit.set(control, on | error);
        unit.write32(control, 1 | error);
        assert_eq!(unit.get(control), on, "{control:#x}");
    }
}
