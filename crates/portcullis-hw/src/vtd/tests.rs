//! The driver on units unlike QEMU's: with a write buffer, and with non-coherent leftovers of firmware.

mod left;
mod seen;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::convert::Infallible;

use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, PageSize, PhysAddr, PhysSegment};
use portcullis::dma::{DmaMask, Queue, QueueConfig};
use portcullis::domain::Domain;
use portcullis::invalidation::{Invalidation, InvalidationQueue};
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::std_platform::StdPlatform;

use super::Unit;
use super::layout::{cap, descriptor, entry, global, reg};
use crate::fake::{FakeHost, Memory, Unit as Registers};
use crate::iommu::{Attachment, Iommu};
use crate::sync::{Mutex, Ordering};

/// Frames of memory: root, context and page tables, the queue, its status words.
const FRAMES: u64 = 12;

/// What a unit sees, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    FlushBuffer,
    TakeRoot,
    TurnOn,
    Forget([u64; 2]),
}

/// A unit whose write buffer hides all stores until a flush, by command or by an invalidation.
#[derive(Debug)]
struct Buffered {
    memory: Memory,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    status: u32,
    root: u64,
    queue: u64,
    head: u64,
    told: Vec<Told>,
    /// Memory as the unit sees it.
    seen: Vec<u64>,
}

impl Buffered {
    fn told(&self) -> Vec<Told> {
        core::mem::take(&mut self.state.lock().told)
    }

    fn sees(&self, at: u64) -> u64 {
        self.state.lock().seen[((at - Memory::FIRST) / 8) as usize]
    }

    fn flush(&self, state: &mut State) {
        let words = (0..FRAMES * 512).map(|index| self.memory.word(Memory::FIRST + index * 8));
        state.seen = words.map(|word| word.load(Ordering::Acquire)).collect();
    }
}

impl Registers for Buffered {
    fn read(&self, offset: usize, _: u32) -> u64 {
        let state = self.state.lock();
        match offset {
            reg::VER => 0x10,
            // 16 bits of domains, a write buffer, four levels of 48 bits, drains.
            reg::CAP => 6 | cap::RWBF | 1 << 10 | 47 << 16 | cap::PSI | 9 << 48 | cap::DWD | cap::DRD,
            // Coherent, with a queue.
            reg::ECAP => 3,
            reg::GSTS => u64::from(state.status),
            reg::IQH | reg::IQT => state.head,
            _ => 0,
        }
    }

    fn write(&self, offset: usize, _: u32, value: u64) {
        let mut state = self.state.lock();
        match offset {
            reg::RTADDR => state.root = value,
            reg::IQA => state.queue = value,
            reg::GCMD => {
                let value = value as u32;
                if value & global::WBF != 0 {
                    state.told.push(Told::FlushBuffer);
                    self.flush(&mut state);
                }
                if value & global::SRTP != 0 {
                    state.told.push(Told::TakeRoot);
                }
                if value & !state.status & global::TE != 0 {
                    state.told.push(Told::TurnOn);
                }
                state.status = value & (global::TE | global::QIE) | (state.status | value) & global::SRTP;
            }
            reg::IQT => {
                // The unit reads the queue when the doorbell rings: the write buffer does not hide it.
                while state.head != value {
                    let word = |at: u64| self.memory.word(at).load(Ordering::Acquire);
                    let at = state.queue + state.head;
                    match [word(at), word(at + 8)] {
                        [low, address] if low & 0xf == 5 => {
                            self.memory.word(address).store(low >> 32, Ordering::Release);
                        }
                        forget => state.told.push(Told::Forget(forget)),
                    }
                    state.head = (state.head + 16) % 4096;
                }
                self.flush(&mut state);
            }
            _ => {}
        }
    }
}

fn started() -> Unit<FakeHost<Buffered>> {
    let memory = Memory::new(FRAMES as usize);
    let unit = Buffered { memory: memory.clone(), state: Mutex::default() };
    Unit::start(FakeHost::new(unit, &memory)).unwrap()
}

const DEVICE: DeviceId = DeviceId(0x28);

#[test]
fn what_is_stored_leaves_a_write_buffer_before_the_unit_is_to_see_it() {
    let unit = started();
    assert!(unit.caches_absent(), "so that each map ends with an invalidation, which flushes");
    unit.enable().unwrap();
    let fake = unit.host().unit();
    assert_eq!(fake.told()[0], Told::FlushBuffer, "the root table");
    let format = VtdSecondStage::four_level();
    let to = Attachment::Table { domain: DomainId(7), root: PhysAddr::new(0x7000), format };
    // SAFETY: this unit reads no page tables.
    unsafe { unit.attach(DEVICE, to) }.unwrap();
    let root = fake.state.lock().root;
    let context = (fake.sees(root) & entry::ADDRESS) + u64::from(DEVICE.0) * 16;
    assert_eq!(fake.sees(context), 0x7000 | entry::PRESENT, "the context's entry");
    assert_eq!(fake.told(), [Told::FlushBuffer]);
    unit.detach(DEVICE).unwrap();
    let [Told::FlushBuffer, Told::Forget(first), Told::Forget(_)] = fake.told()[..] else { panic!() };
    assert_eq!(first, descriptor::context_of(7, 0x28), "the entry is seen to be gone before it is forgotten");
    unit.invalidate(DomainId(7), Invalidation::Domain).unwrap();
    assert_eq!(fake.told()[0], Told::FlushBuffer, "the page table");
}

/// A mapping is complete when `map` returns: the driver may tell the device then.
#[test]
fn what_is_mapped_is_seen_before_a_device_is_told() {
    let unit = Arc::new(started());
    unit.enable().unwrap();
    let fake = unit.host().unit();
    let table = PageTable::new(fake.memory.clone(), unit.layout().unwrap()).unwrap();
    let domain = Domain::builder(table, Arc::clone(&unit), DomainId(7)).build(StdPlatform::new()).unwrap();
    let device = domain.attach(DEVICE, DmaMask::BITS_64).unwrap();
    let mut queue: Queue<_, Infallible> = device.queue(QueueConfig::direct()).unwrap();
    for phys in [0x1234_5000, 0x6789_a000] {
        let (page, mut view) =
            ([PhysSegment { phys: PhysAddr::new(phys), len: 4096 }], [DmaSegment::default()]);
        // SAFETY: no device of this unit accesses it.
        let _ = unsafe { queue.map_raw(&page, Direction::FromDevice, &mut view) }.unwrap();
        let iova = view[0].iova.get();
        let root = domain.space().mapper().table().root().get();
        let leaf = [39, 30, 21, 12]
            .into_iter()
            .fold(root, |at, shift| fake.sees((at & entry::ADDRESS) + (iova >> shift & 0x1ff) * 8));
        assert_eq!(leaf & entry::ADDRESS, phys, "the unit sees another entry");
    }
}

#[test]
fn what_was_cached_under_another_root_is_forgotten_before_the_unit_is_on() {
    let unit = started();
    unit.enable().unwrap();
    let drain = descriptor::DRAIN_READS | descriptor::DRAIN_WRITES;
    let forget = [descriptor::CONTEXT_ALL, descriptor::iotlb_all(drain)].map(Told::Forget);
    let wanted = [Told::FlushBuffer, Told::TakeRoot, forget[0], forget[1], Told::TurnOn];
    assert_eq!(unit.host().unit().told(), wanted);
}
