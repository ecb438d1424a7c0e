//! A machine that one thread plays, and whose platform panics where the test wants.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use portcullis::heap::{OutOfMemory, Weak};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};

use super::Clocked;

/// What may panic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Call {
    WithCpu = 1,
    Now,
    WakeAt,
}

/// The platform that does so.
pub struct Moody {
    pub inner: Arc<Clocked>,
    /// The call that panics next.
    pub panics: AtomicU8,
    /// How many of them do not panic before.
    passes: AtomicU8,
}

impl Moody {
    pub fn new(cpus: usize) -> Arc<Self> {
        Arc::new(Self { inner: Clocked::new(cpus), panics: AtomicU8::new(0), passes: AtomicU8::new(0) })
    }

    /// The next call that is `call` panics.
    pub fn panic_in(&self, call: Call) {
        self.panic_behind(0, call);
    }

    /// The next call but `passes` that is `call` panics.
    pub fn panic_behind(&self, passes: u8, call: Call) {
        self.passes.store(passes, Ordering::Relaxed);
        self.panics.store(call as u8, Ordering::Relaxed);
    }

    /// None does.
    pub fn be_well(&self) {
        self.panics.store(0, Ordering::Relaxed);
    }

    fn pass(&self, call: Call) {
        let one_less = |passes: u8| passes.checked_sub(1);
        if self.panics.load(Ordering::Relaxed) == call as u8
            && self.passes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
        {
            return;
        }
        let panics = self.panics.compare_exchange(call as u8, 0, Ordering::Relaxed, Ordering::Relaxed);
        assert!(panics.is_err(), "as the test wants");
    }
}

// SAFETY: CPUs are `Clocked`'s.
unsafe impl Platform for Moody {
    fn cpus(&self) -> usize {
        self.inner.cpus()
    }

    fn number(&self) -> PlatformNumber {
        self.inner.number()
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        self.pass(Call::WithCpu);
        self.inner.with_cpu(f)
    }

    fn now_ns(&self) -> u64 {
        self.pass(Call::Now);
        self.inner.now_ns()
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.inner.register(events)
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.pass(Call::WakeAt);
        self.inner.wake_at(deadline_ns);
    }
}
