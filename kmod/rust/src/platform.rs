//! The kernel's CPUs, clock and timer, for one domain. A CPU is lent with interrupts off; a timer is a work item of the domain's own, so
//! that no domain waits for another's hardware.

use alloc::vec::Vec;
use core::ffi::c_void;

use portcullis::heap::{OutOfMemory, Shared, Weak};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};
use spin::Mutex;

use crate::ffi;

/// Initial room for a domain's listeners: itself, its pools, its devices.
const LISTENERS: usize = 16;

/// The kernel, for one domain.
pub struct Kernel {
    number: PlatformNumber,
    /// The shim's group, which has the timer.
    group: *mut c_void,
    /// Taken with interrupts off.
    listeners: Mutex<Vec<Weak<dyn PlatformEvents>>>,
}

// SAFETY: `group` is only passed to the shim, which accepts it on any CPU.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Calls `f` with the number of its CPU, with interrupts off.
#[inline(always)]
fn interrupts_off<R>(f: impl FnOnce(usize) -> R) -> R {
    // SAFETY: each `pcs_enter` is followed by one `pcs_leave` with its result, on the same CPU. (A panic does not return.)
    let entered = unsafe { ffi::pcs_enter() };
    let result = f(entered.cpu);
    // SAFETY: as above.
    unsafe { ffi::pcs_leave(entered.flags) };
    result
}

impl Kernel {
    /// Makes the platform of the shim's `group`.
    pub fn new(group: *mut c_void) -> Result<Self, OutOfMemory> {
        let mut listeners = Vec::new();
        listeners.try_reserve_exact(LISTENERS).map_err(|_| OutOfMemory)?;
        Ok(Self { number: PlatformNumber::new(), group, listeners: Mutex::new(listeners) })
    }

    /// Calls `f` for each live listener.
    fn each(&self, f: impl Fn(&dyn PlatformEvents)) {
        // By index: without an allocation or a lock. Listeners are appended meanwhile, and do not move.
        for index in 0.. {
            match interrupts_off(|_| self.listeners.lock().get(index).map(Weak::upgrade)) {
                Some(Some(listener)) => f(&*listener),
                Some(None) => {}
                None => return,
            }
        }
    }

    /// The timer's deadline has come. Waits for hardware and for other CPUs.
    pub fn timer(&self) {
        self.each(|listener| listener.timer());
    }

    /// The CPU is offline. As [`timer`](Self::timer).
    pub fn cpu_released(&self, cpu: usize) {
        self.each(|listener| listener.cpu_released(cpu));
    }
}

/// The platform of a domain: all handles of one [`Kernel`] are the same.
#[derive(Clone)]
pub struct Machine(pub Shared<Kernel>);

// SAFETY: interrupts are off while a CPU is lent, so nothing else runs there; the processor is the CPU, and sees its own stores;
// `nr_cpu_ids` never changes; the barrier is the default one, because no proof has a light fence; `pc_domain_cpu_released` is called for a
// dead processor.
unsafe impl Platform for Machine {
    fn cpus(&self) -> usize {
        // SAFETY: it may be called in any context.
        unsafe { ffi::pcs_cpus() as usize }
    }

    #[inline]
    fn number(&self) -> PlatformNumber {
        self.0.number
    }

    #[inline]
    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // SAFETY: interrupts are off, so only this caller is on the processor, whose number is below `nr_cpu_ids`.
        interrupts_off(|cpu| f(Some(&unsafe { LocalCpu::new(cpu) })))
    }

    #[inline(always)]
    fn with_cpu_fast<R>(&self, f: impl FnOnce(&LocalCpu<'_>) -> R) -> Option<R> {
        // SAFETY: as above.
        Some(interrupts_off(|cpu| f(&unsafe { LocalCpu::new(cpu) })))
    }

    fn now_ns(&self) -> u64 {
        // SAFETY: it may be called in any context.
        unsafe { ffi::pcs_now() }
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        let mut events = Some(events);
        // Replaces a dropped one, or appends. A value that is not stored is dropped with interrupts on again.
        interrupts_off(|_| {
            let mut list = self.0.listeners.lock();
            if let Some(gone) = list.iter_mut().find(|known| known.owners() == 0) {
                events = events.take().map(|events| core::mem::replace(gone, events));
                return Ok(());
            }
            list.try_reserve(1).map_err(|_| OutOfMemory)?;
            list.extend(events.take());
            Ok(())
        })
    }

    fn wake_at(&self, deadline_ns: u64) {
        // SAFETY: the group outlives its domain.
        unsafe { ffi::pcs_arm(self.0.group, deadline_ns) }
    }
}
