//! A unit that may have scalable mode, and a host with memory for its tables.

extern crate std;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use portcullis::addr::{DeviceId, DomainId, PhysAddr};
use portcullis::pgtable::{VtdSecondStage, X86FirstStage};
use portcullis::platform::{Frames, Table};

use super::super::layout::{IQA_WIDE, RTADDR_MODE, cap, descriptor, ecap, entry, fsts, global, reg};
use super::super::{Mode, Unit};
use crate::fake;
use crate::fake::{FakeHost, Faked, Memory};
use crate::host::{Host, UnitError};
use crate::iommu::{Attachment, Iommu};
use crate::sync::Mutex;

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) cap: u64,
    pub(super) ecap: u64,
    pub(super) status: u32,
    pub(super) root: u64,
    /// Its root, and how often translation was turned off.
    pub(super) taken: u64,
    pub(super) stops: u32,
    pub(super) queue: u64,
    /// Consumed bytes of the queue.
    pub(super) head: u64,
    /// It confirms nothing.
    pub(super) deaf: bool,
    /// It never takes a root.
    pub(super) rootless: bool,
    /// The descriptor type that it does not know, and whether it has stopped at one.
    pub(super) unknown: Option<u64>,
    pub(super) stopped: bool,
    pub(super) tail: u64,
    /// Executed descriptors except waits, and the number of waits.
    pub(super) done: Vec<[u64; 2]>,
    pub(super) waits: u64,
}

/// A unit that executes all commands at once, and caches nothing.
#[derive(Debug)]
pub(super) struct FakeUnit {
    pub(super) memory: Memory,
    pub(super) state: Mutex<State>,
}

impl FakeUnit {
    pub(super) fn done(&self) -> Vec<[u64; 2]> {
        core::mem::take(&mut self.state.lock().done)
    }

    pub(super) fn word(&self, at: u64) -> u64 {
        self.memory.word(at).load(Ordering::Acquire)
    }

    pub(super) fn words<const N: usize>(&self, at: u64) -> [u64; N] {
        core::array::from_fn(|index| self.word(at + index as u64 * 8))
    }

    pub(super) fn run(&self, state: &mut State) {
        let size = if state.queue & IQA_WIDE == IQA_WIDE { 32 } else { 16 };
        while !state.deaf && !state.stopped && state.head != state.tail {
            let at = (state.queue & entry::ADDRESS) + state.head;
            match self.words(at) {
                [low, _] if state.unknown == Some(low & 0xf) => {
                    state.stopped = true;
                    return;
                }
                [low, address] if low & 0xf == 5 => {
                    self.memory.word(address).store(low >> 32, Ordering::Release);
                    state.waits += 1;
                }
                other => {
                    assert!(
                        state.status & global::SRTP != 0,
                        "something is to be forgotten, and there is no root"
                    );
                    let names_pasids = [6, 7].contains(&(other[0] & 0xf));
                    assert!(!names_pasids || state.taken & RTADDR_MODE == 1 << 10, "there are no PASIDs");
                    state.done.push(other);
                }
            }
            assert!(size == 16 || self.words(at + 16) == [0, 0], "reserved");
            state.head = (state.head + size) % (size * 256);
        }
    }
}

impl fake::Unit for FakeUnit {
    fn read(&self, offset: usize, _: u32) -> u64 {
        let state = self.state.lock();
        match offset {
            reg::VER => 0x10,
            reg::CAP => state.cap,
            reg::ECAP => state.ecap,
            reg::GSTS => state.status.into(),
            reg::RTADDR => state.root,
            reg::IQH => state.head,
            reg::FSTS if state.stopped => fsts::IQE.into(),
            reg::IQERCD => 3,
            _ => 0,
        }
    }

    fn write(&self, offset: usize, _: u32, value: u64) {
        let mut state = self.state.lock();
        match offset {
            reg::GCMD => {
                let was_on = state.status & global::TE != 0;
                let command = value as u32 & !if state.rootless { global::SRTP } else { 0 };
                if command & global::SRTP != 0 {
                    let same = (state.taken ^ state.root) & RTADDR_MODE == 0;
                    assert!(
                        same || !was_on || state.cap & cap::ESRTPS != 0,
                        "the mode changes under a unit that walks"
                    );
                    state.taken = state.root;
                }
                state.stops += u32::from(was_on && command & global::TE == 0);
                state.status = command | state.status & global::SRTP;
            }
            reg::RTADDR => state.root = value,
            reg::IQA => (state.queue, state.head) = (value, 0),
            reg::IQT => {
                state.tail = value;
                self.run(&mut state);
            }
            reg::FSTS if value & u64::from(fsts::IQE) != 0 => state.stopped = false,
            _ => {}
        }
    }
}

/// Memory that is coherent for the unit, or not.
#[derive(Debug, Clone)]
pub(super) struct Seen<const COHERENT: bool>(pub(super) Memory);

// SAFETY: the memory's clauses.
unsafe impl<const COHERENT: bool> Frames for Seen<COHERENT> {
    const COHERENT: bool = COHERENT;

    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.0.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.0.free(first, count) };
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: clause 1 is the caller's.
        unsafe { self.0.table(frame) }
    }
}

#[derive(Debug)]
pub(super) struct TestHost<const COHERENT: bool> {
    pub(super) host: FakeHost<FakeUnit>,
    pub(super) frames: Seen<COHERENT>,
    /// How many CPUs share waits, and which one calls.
    pub(super) cpus: usize,
    pub(super) cpu: fn() -> Option<usize>,
}

impl<const COHERENT: bool> Host for TestHost<COHERENT> {
    type Registers = Faked<FakeUnit>;
    type Frames = Seen<COHERENT>;

    fn registers(&self) -> &Faked<FakeUnit> {
        self.host.registers()
    }

    fn frames(&self) -> &Seen<COHERENT> {
        &self.frames
    }

    fn now_ns(&self) -> u64 {
        // While one submits, the others run and submit, too.
        if self.cpu().is_some() {
            std::thread::yield_now();
        }
        self.host.now_ns()
    }

    fn cpus(&self) -> usize {
        self.cpus
    }

    fn cpu(&self) -> Option<usize> {
        (self.cpu)()
    }

    fn patience_ns(&self) -> u64 {
        self.host.patience_ns()
    }
}

/// Six bits of domains; four levels, 48 bits; pages of 1 GiB; blocks of 2 MiB; drains.
pub(super) const CAP: u64 = 1 | 1 << 10 | 47 << 16 | 3 << 34 | cap::PSI | 9 << 48 | cap::DWD | cap::DRD;
pub(super) const NO_TABLES: u64 = CAP & !(0x1f << 8);
pub(super) const QUEUED: u64 = ecap::QI | ecap::PT;
pub(super) const BOTH: u64 = QUEUED | ecap::C | ecap::SMTS | ecap::SSTS | ecap::FSTS | ecap::SMPWC;

pub(super) const FRAMES: usize = 24;

pub(super) fn host<const COHERENT: bool>(cap: u64, ecap: u64) -> (TestHost<COHERENT>, Memory) {
    let memory = Memory::new(FRAMES);
    let unit =
        FakeUnit { memory: memory.clone(), state: Mutex::new(State { cap, ecap, ..State::default() }) };
    let (host, frames) = (FakeHost::new(unit, &memory), Seen(memory.clone()));
    (TestHost { host, frames, cpus: 0, cpu: || None }, memory)
}

pub(super) type TestUnit = Unit<TestHost<true>>;

pub(super) fn scalable(cap: u64) -> (Arc<TestUnit>, Memory) {
    let (host, memory) = host(cap, BOTH);
    let unit = Unit::start_in(host, Mode::Scalable).unwrap();
    unit.enable().unwrap();
    let everything = [descriptor::CONTEXT_ALL, descriptor::PASIDS_ALL, descriptor::iotlb_all(3 << 6)];
    assert_eq!(fake(&unit).done(), everything);
    (Arc::new(unit), memory)
}

pub(super) fn fake(unit: &TestUnit) -> &FakeUnit {
    unit.host().host.unit()
}

pub(super) const ROOT: PhysAddr = PhysAddr::new(0x7000);

pub(super) fn second(domain: u16) -> Attachment<VtdSecondStage> {
    Attachment::Table { domain: DomainId(domain), root: ROOT, format: VtdSecondStage::four_level() }
}

pub(super) fn first(domain: u16) -> Attachment<X86FirstStage> {
    Attachment::Table { domain: DomainId(domain), root: ROOT, format: X86FirstStage::four_level() }
}

pub(super) fn attach<X: portcullis::pgtable::Format>(
    unit: &impl Iommu<X>,
    device: u32,
    to: Attachment<X>,
) -> Result<(), UnitError> {
    // SAFETY: this unit reads no page tables.
    unsafe { unit.attach(DeviceId(device), to) }
}

/// A device's context entry and its entry of PASID 0, found from the registers.
pub(super) fn entries(unit: &TestUnit, device: u64) -> ([u64; 4], [u64; 8]) {
    let fake = fake(unit);
    let root = fake.state.lock().root;
    assert_eq!(root & RTADDR_MODE, 1 << 10, "scalable mode");
    // The halves of a bus's 16-byte root entry name tables of 128 devices.
    let half = fake.word((root & entry::ADDRESS) + (device >> 8) * 16 + (device >> 7 & 1) * 8);
    assert_eq!(half & 0xfff, 1);
    let context: [u64; 4] = fake.words((half & entry::ADDRESS) + (device & 0x7f) * 32);
    if context[0] & 1 == 0 {
        return (context, [0; 8]);
    }
    let table = fake.word(context[0] & entry::ADDRESS);
    assert_eq!(table & 0xfff, 1);
    (context, fake.words(table & entry::ADDRESS))
}
