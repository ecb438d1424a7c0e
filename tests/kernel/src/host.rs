//! What Portcullis asks of a kernel: CPUs and a clock, registers, and where they are.

extern crate alloc;

use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use portcullis::heap::{OutOfMemory, Weak};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};
use portcullis_hw::{Host, Registers};
use spin::{Mutex, Once};

use crate::memory::Memory;
use crate::{boot, interrupts};

/// CPUs that the kernel brings up.
pub const CPUS: usize = 2;

/// This kernel as a platform. Its tasks stay on their CPUs, and interrupt handlers map: so a CPU is
/// its caller's own from when interrupts are off until they are on again.
#[derive(Debug, Clone, Copy)]
pub struct Kernel;

static NUMBER: Once<PlatformNumber> = Once::new();
static EVENTS: Mutex<Vec<Weak<dyn PlatformEvents>>> = Mutex::new(Vec::new());
static WAKE_AT: AtomicU64 = AtomicU64::new(u64::MAX);
/// Whether each CPU has a holder: so an interrupt that comes between is noticed when it does.
static LENT: [AtomicBool; CPUS] = [const { AtomicBool::new(false) }; CPUS];

// SAFETY: a CPU's number is its own, and nothing interrupts its holder; `fence_all` is a fence, and
// proofs are made by `LocalCpu::new`.
unsafe impl Platform for Kernel {
    fn cpus(&self) -> usize {
        CPUS
    }

    fn number(&self) -> PlatformNumber {
        *NUMBER.call_once(PlatformNumber::new)
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        let index = boot::cpu();
        if index >= CPUS {
            return f(None);
        }
        interrupts::off(|| {
            assert!(!LENT[index].swap(true, Ordering::Relaxed), "CPU {index} is lent twice");
            // SAFETY: this CPU's own number, without interrupts.
            let result = f(Some(&unsafe { LocalCpu::new(index) }));
            LENT[index].store(false, Ordering::Relaxed);
            result
        })
    }

    fn now_ns(&self) -> u64 {
        boot::now_ns()
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        EVENTS.lock().push(events);
        Ok(())
    }

    fn wake_at(&self, deadline_ns: u64) {
        WAKE_AT.fetch_min(deadline_ns, Ordering::AcqRel);
    }
}

/// Calls the timers that are due: a kernel with interrupts does this from its own timer's thread.
pub fn run_timers() {
    let due = WAKE_AT.load(Ordering::Acquire);
    if boot::now_ns() >= due
        && WAKE_AT.compare_exchange(due, u64::MAX, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    {
        let listeners: Vec<_> = EVENTS.lock().iter().filter_map(Weak::upgrade).collect();
        listeners.iter().for_each(|listener| listener.timer());
    }
}

/// Registers at an address, one to one and uncached.
#[derive(Debug, Clone, Copy)]
pub struct Mmio(u64);

impl Mmio {
    /// # Safety
    /// Registers of a device of which this is the only driver begin there.
    pub unsafe fn new(at: u64) -> Self {
        Self(at)
    }
}

// SAFETY: accesses are volatile, to uncached memory, in order, and behind what was stored before (x86 orders stores); what lies
// beyond the registers is no memory.
unsafe impl Registers for Mmio {
    fn read32(&self, offset: usize) -> u32 {
        // SAFETY: the promise of `new`.
        unsafe { ((self.0 + offset as u64) as *const u32).read_volatile() }
    }

    fn write32(&self, offset: usize, value: u32) {
        // SAFETY: as above.
        unsafe { ((self.0 + offset as u64) as *mut u32).write_volatile(value) }
    }

    fn read64(&self, offset: usize) -> u64 {
        // SAFETY: as above.
        unsafe { ((self.0 + offset as u64) as *const u64).read_volatile() }
    }

    fn write64(&self, offset: usize, value: u64) {
        // SAFETY: as above.
        unsafe { ((self.0 + offset as u64) as *mut u64).write_volatile(value) }
    }
}

/// What the driver of the IOMMU stands on.
#[derive(Debug, Clone, Copy)]
pub struct UnitHost(pub Mmio);

impl Host for UnitHost {
    type Registers = Mmio;
    type Frames = Memory;

    fn registers(&self) -> &Mmio {
        &self.0
    }

    fn frames(&self) -> &Memory {
        &Memory
    }

    fn now_ns(&self) -> u64 {
        boot::now_ns()
    }

    /// A handler that came while its task fills a place of the unit's ring would wait for that place.
    fn undisturbed<R>(&self, f: impl FnOnce() -> R) -> R {
        interrupts::off(f)
    }

    fn cpus(&self) -> usize {
        CPUS
    }

    /// In handlers, too: none comes while its CPU shares waits.
    fn cpu(&self) -> Option<usize> {
        Some(boot::cpu())
    }

    fn patience_ns(&self) -> u64 {
        // An emulator's processor may stand still for long.
        10_000_000_000
    }
}
