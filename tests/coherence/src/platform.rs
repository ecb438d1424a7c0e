//! A kernel's platform, and the hardware behind it: a number for each CPU, and an invalidation queue that takes its time.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};

use portcullis::addr::DomainId;
use portcullis::heap::{self, OutOfMemory, Weak};
use portcullis::invalidation::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};

use crate::simulator::Simulator;

thread_local! {
    /// The CPU that this thread is; `usize::MAX` for none.
    static CPU: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// The CPU that calls.
pub fn cpu() -> Option<usize> {
    Some(CPU.get()).filter(|cpu| *cpu != usize::MAX)
}

/// CPUs as the simulator has them.
#[derive(Clone)]
pub struct Simulated {
    shared: Arc<Shared>,
}

struct Shared {
    simulator: &'static Simulator,
    number: PlatformNumber,
    cpus: usize,
    listeners: Mutex<Vec<Weak<dyn PlatformEvents>>>,
}

impl Simulated {
    /// `cpus` CPUs, and one more for the thread that prepares them and takes down what is left.
    pub fn new(simulator: &'static Simulator, cpus: usize) -> Self {
        CPU.set(cpus);
        let (number, listeners) = (PlatformNumber::new(), Mutex::default());
        Self { shared: Arc::new(Shared { simulator, number, cpus: cpus + 1, listeners }) }
    }

    /// This thread is `cpu` from now on.
    pub fn come(&self, cpu: usize) {
        CPU.set(cpu);
    }

    /// It is no more, and what it had is given back.
    pub fn go(&self) {
        let cpu = CPU.replace(usize::MAX);
        for listener in self.listeners() {
            listener.cpu_released(cpu);
        }
    }

    fn listeners(&self) -> Vec<heap::Shared<dyn PlatformEvents>> {
        let listeners = self.shared.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.iter().filter_map(Weak::upgrade).collect()
    }

    /// What the timer's interrupt does on the CPU that it comes to, if it is due.
    pub fn tick(&self) {
        if self.shared.simulator.timer_is_due() {
            for listener in self.listeners() {
                listener.timer();
            }
        }
    }
}

// SAFETY: a thread is one CPU until it is another or none, no two threads are the same at the same time, and a CPU is lent
// to its thread alone. `fence_all` is a fence; the simulator runs one CPU at a time, and each sees all that those before it
// did. The number is made with the platform.
unsafe impl Platform for Simulated {
    fn cpus(&self) -> usize {
        self.shared.cpus
    }

    #[inline]
    fn number(&self) -> PlatformNumber {
        self.shared.number
    }

    #[inline]
    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        let cpu = CPU.get();
        // SAFETY: the CPU is this thread's, and it is below `cpus`.
        f((cpu < self.shared.cpus).then(|| unsafe { LocalCpu::with_light_fence(cpu) }).as_ref())
    }

    #[inline]
    fn with_cpu_fast<R>(&self, f: impl FnOnce(&LocalCpu<'_>) -> R) -> Option<R> {
        let cpu = CPU.get();
        // SAFETY: as above.
        (cpu < self.shared.cpus).then(|| f(&unsafe { LocalCpu::with_light_fence(cpu) }))
    }

    fn now_ns(&self) -> u64 {
        self.shared.simulator.now()
    }

    fn fence_all(&self) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.shared.simulator.interrupt();
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.shared.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(events);
        Ok(())
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.shared.simulator.wake_at(deadline_ns);
    }
}

/// An invalidation queue that does one submission after the other.
pub struct Hardware {
    pub simulator: &'static Simulator,
    /// Which one it is.
    pub number: u32,
    /// Nanoseconds for each submission, and for each request in it.
    pub submission: f64,
    pub request: f64,
    pub costs: Costs,
}

// SAFETY: nothing is cached by anything, so there is nothing to forget.
unsafe impl InvalidationQueue for Hardware {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let ns = self.submission + self.request * requests.len() as f64;
        self.simulator.serve(self.number, ns.round() as u64);
        Ok(())
    }

    fn costs(&self) -> Costs {
        self.costs
    }
}
