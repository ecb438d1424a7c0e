//! A platform that is told which CPU it is and what time it is.

// Each test binary uses its part.
#![allow(dead_code)]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::heap::{OutOfMemory, Weak};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};

/// No CPU.
pub const NONE: usize = usize::MAX;

/// A machine of four CPUs, used by one thread.
#[derive(Clone, Default)]
pub struct Manual(Arc<State>);

#[derive(Default)]
struct State {
    number: PlatformNumber,
    cpu: AtomicUsize,
    now_ns: AtomicU64,
    wakes: Mutex<Vec<u64>>,
}

impl Manual {
    /// From now on the caller is this CPU.
    pub fn run_on(&self, cpu: usize) {
        self.0.cpu.store(cpu, Ordering::Relaxed);
    }

    pub fn set_time(&self, now_ns: u64) {
        self.0.now_ns.store(now_ns, Ordering::Relaxed);
    }

    /// The times that were asked for since the last call.
    pub fn wakes(&self) -> Vec<u64> {
        std::mem::take(&mut self.0.wakes.lock().unwrap())
    }
}

// SAFETY: one thread plays all CPUs, so no two callers have a CPU at once; it sees its own stores without a fence.
unsafe impl Platform for Manual {
    fn cpus(&self) -> usize {
        4
    }

    fn number(&self) -> PlatformNumber {
        self.0.number
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        let cpu = self.0.cpu.load(Ordering::Relaxed);
        // SAFETY: one thread plays all CPUs, of which there are four.
        f((cpu != NONE).then(|| unsafe { LocalCpu::new(cpu) }).as_ref())
    }

    fn now_ns(&self) -> u64 {
        self.0.now_ns.load(Ordering::Relaxed)
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.0.wakes.lock().unwrap().push(deadline_ns);
    }
}
