//! A kernel's side of the library: [`Kernel`] is its CPU, clock and timer; [`Memory`] its page frames; [`Unit`] its IOMMU's
//! queue, and with it each wait for hardware. [`run`] is a driver's first mapping on top.

use alloc::alloc::{alloc_zeroed, dealloc};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::alloc::Layout;
use core::convert::Infallible;
use core::error::Error;
use core::sync::atomic::{AtomicU64, Ordering};

use portcullis::heap::{OutOfMemory, Weak};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue};
use portcullis::platform::{FRAME_SIZE, Frames, LocalCpu, Platform, PlatformEvents, PlatformNumber, Table};
use portcullis::prelude::*;
use spin::Mutex;

/// One CPU, and a clock that the timer's interrupt drives.
pub struct Kernel {
    number: PlatformNumber,
    now_ns: AtomicU64,
    /// When the timer is to be heard of; `u64::MAX` if nobody asked.
    deadline_ns: AtomicU64,
    listeners: Mutex<Vec<Weak<dyn PlatformEvents>>>,
}

impl Kernel {
    pub fn new() -> Self {
        let listeners = Mutex::new(Vec::new());
        let (now_ns, deadline_ns) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
        Self { number: PlatformNumber::new(), now_ns, deadline_ns, listeners }
    }

    /// The timer's interrupt, or better the thread that it wakes: a flush waits for hardware.
    pub fn tick(&self, ns: u64) {
        let now_ns = self.now_ns.fetch_add(ns, Ordering::Relaxed) + ns;
        if now_ns < self.deadline_ns.load(Ordering::Relaxed) {
            return;
        }
        // First, as listeners ask again.
        self.deadline_ns.store(u64::MAX, Ordering::Relaxed);
        let listeners: Vec<_> = self.listeners.lock().iter().filter_map(Weak::upgrade).collect();
        listeners.iter().for_each(|listener| listener.timer());
    }
}

// SAFETY: the kernel has one CPU and one thread, and no interrupt handler maps. With more, `with_cpu` turns preemption off
// (and interrupts, if their handlers map) and lends the number of the processor that it runs on.
unsafe impl Platform for Kernel {
    fn cpus(&self) -> usize {
        1
    }

    fn number(&self) -> PlatformNumber {
        self.number
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // SAFETY: as above: nobody else has CPU 0.
        f(Some(&unsafe { LocalCpu::new(0) }))
    }

    fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.listeners.lock().push(events);
        Ok(())
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.deadline_ns.fetch_min(deadline_ns, Ordering::Relaxed);
    }
}

/// What a physical address is less than the address by which the kernel reaches the memory. Here they are the same.
const DIRECT_MAP: usize = 0;

/// Page frames. These come from the kernel's heap; a page allocator serves as well.
#[derive(Debug, Clone, Copy)]
pub struct Memory;

impl Memory {
    fn layout(count: usize) -> Option<Layout> {
        let align = count.checked_next_power_of_two()?.checked_mul(FRAME_SIZE as usize)?;
        Layout::from_size_align(count * FRAME_SIZE as usize, align).ok().filter(|_| count > 0)
    }
}

// SAFETY: the allocator gives each block to one owner, zeroed and aligned as the layout says, below 2^52; its words are where
// the direct map has them.
unsafe impl Frames for Memory {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        // SAFETY: the layout has a size.
        let first = unsafe { alloc_zeroed(Self::layout(count)?) };
        (!first.is_null()).then(|| PhysAddr::new((first.expose_provenance() - DIRECT_MAP) as u64))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        if let Some(layout) = Self::layout(count) {
            let first = core::ptr::with_exposed_provenance_mut(first.get() as usize + DIRECT_MAP);
            // SAFETY: the caller's promise: of one `alloc` of as many.
            unsafe { dealloc(first, layout) };
        }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's frame, which exists as long as the reference.
        unsafe { &*core::ptr::with_exposed_provenance(frame.get() as usize + DIRECT_MAP) }
    }
}

/// The IOMMU's queue. `portcullis-hw` has those of real units; this one answers at once.
#[derive(Debug, Default)]
pub struct Unit {
    asked: AtomicU64,
}

impl Unit {
    /// How many invalidations were waited for.
    pub fn waits(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// How many the hardware has carried out: a real unit writes that to memory.
    fn done(&self) -> u64 {
        self.asked.load(Ordering::Acquire)
    }
}

// SAFETY: no hardware is behind it, and nothing caches. A real one returns `Ok` only when the unit has forgotten the range.
unsafe impl InvalidationQueue for Unit {
    fn invalidate(&self, _domain: DomainId, _invalidation: Invalidation) -> Result<(), InvalidationError> {
        // A real one writes commands to its ring and rings the doorbell.
        let number = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        // Nobody waits for ever: what is not confirmed stays out of use.
        for _ in 0..1_000_000 {
            if self.done() >= number {
                return Ok(());
            }
            core::hint::spin_loop();
        }
        Err(InvalidationError::TimedOut { waited_ns: 0 })
    }
}

/// What [`run`] saw.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    pub phys: PhysAddr,
    pub iova: Iova,
    pub strict_waits: u64,
    pub lazy_waits: u64,
    pub flushes: u64,
}

/// A driver's first mapping: strict, and then lazy, whose flush the timer brings.
pub fn run() -> Result<Seen, Box<dyn Error>> {
    let (kernel, unit) = (Arc::new(Kernel::new()), Arc::new(Unit::default()));
    let table = PageTable::new(Memory, VtdSecondStage::four_level())?;
    // Here a kernel leads the unit to the table (`table.root()`): `docs/porting.md` shows it.
    let domain = Domain::builder(table, Arc::clone(&unit), DomainId(1)).policy(Policy::Strict);
    let domain = domain.build(Arc::clone(&kernel))?;
    let card = domain.attach(DeviceId(0), DmaMask::BITS_32)?;
    // A kernel that keeps account of its buffers itself maps them by number. Others have the queue own them.
    let mut queue = card.queue::<Infallible>(QueueConfig::direct())?;

    let phys = PhysAddr::new(0x1234_5678);
    let mut map_and_unmap = || -> Result<Iova, Box<dyn Error>> {
        let translate = |iova| domain.space().mapper().table().iova_to_phys(&kernel, iova);
        let mut view = [DmaSegment::default()];
        // SAFETY: the kernel has no device that walks the table.
        let mapped =
            unsafe { queue.map_raw(&[PhysSegment { phys, len: 10_000 }], Direction::FromDevice, &mut view) };
        let ((mapping, _), iova) = (mapped?, view[0].iova);
        let before = translate(iova);
        let ended = queue.unmap_raw(mapping)?;
        if (before, translate(iova), ended) == (Some(phys), None, Ended::Done(())) {
            Ok(iova)
        } else {
            Err("the table does not lead where it should".into())
        }
    };
    let iova = map_and_unmap()?;
    let strict_waits = unit.waits();

    domain.set_policy(Policy::LAZY)?;
    let before = unit.waits();
    for _ in 0..10 {
        map_and_unmap()?;
    }
    let lazy_waits = unit.waits() - before;
    kernel.tick(10_000_000);
    Ok(Seen { phys, iova, strict_waits, lazy_waits, flushes: unit.waits() - before - lazy_waits })
}
