//! A kernel's platform, and the hardware behind it: a slot for each CPU, and an invalidation queue that takes its time.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use portcullis::invalidation::{
    Costs, DomainId, Invalidation, InvalidationError, InvalidationQueue, Request,
};
use portcullis::platform::{LocalSlot, Platform, PlatformEvents, PlatformNumber};

use crate::simulator::Simulator;

thread_local! {
    /// The slot of the CPU that this thread is; `usize::MAX` for none.
    static SLOT: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// CPUs as the simulator has them.
#[derive(Clone)]
pub struct Simulated {
    shared: Arc<Shared>,
}

struct Shared {
    simulator: &'static Simulator,
    number: PlatformNumber,
    slots: usize,
    listeners: Mutex<Vec<Weak<dyn PlatformEvents>>>,
}

impl Simulated {
    /// `cpus` CPUs, and a slot for the thread that prepares them and takes down what is left.
    pub fn new(simulator: &'static Simulator, cpus: usize) -> Self {
        SLOT.set(cpus);
        let (number, listeners) = (PlatformNumber::new(), Mutex::default());
        Self { shared: Arc::new(Shared { simulator, number, slots: cpus + 1, listeners }) }
    }

    /// This thread is `cpu` from now on.
    pub fn come(&self, cpu: usize) {
        SLOT.set(cpu);
    }

    /// It is no more, and what it had is given back.
    pub fn go(&self) {
        let slot = SLOT.replace(usize::MAX);
        for listener in self.listeners() {
            listener.slot_released(slot);
        }
    }

    fn listeners(&self) -> Vec<Arc<dyn PlatformEvents>> {
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

// SAFETY: a thread is one CPU until it is another or none, no two threads are the same at the same time, and a slot is lent
// to its thread alone. `fence_all` is a fence; the simulator runs one CPU at a time, and each sees all that those before it
// did. The number is made with the platform.
unsafe impl Platform for Simulated {
    fn slots(&self) -> usize {
        self.shared.slots
    }

    #[inline]
    fn number(&self) -> PlatformNumber {
        self.shared.number
    }

    #[inline]
    fn with_slot<R>(&self, f: impl FnOnce(Option<&LocalSlot<'_>>) -> R) -> R {
        let slot = SLOT.get();
        // SAFETY: the slot is this thread's, and it is below `slots`.
        f((slot < self.shared.slots).then(|| unsafe { LocalSlot::with_light_fence(slot) }).as_ref())
    }

    #[inline]
    fn with_slot_fast<R>(&self, f: impl FnOnce(&LocalSlot<'_>) -> R) -> Option<R> {
        let slot = SLOT.get();
        // SAFETY: as above.
        (slot < self.shared.slots).then(|| f(&unsafe { LocalSlot::with_light_fence(slot) }))
    }

    fn now_ns(&self) -> u64 {
        self.shared.simulator.now()
    }

    fn fence_all(&self) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.shared.simulator.interrupt();
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) {
        self.shared.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(events);
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
