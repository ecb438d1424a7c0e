//! One type for every platform, so that the library is compiled once for all machines of a test program.

use std::sync::Arc;

use portcullis::heap::{OutOfMemory, Weak};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};

/// A platform that is known when the test runs.
#[derive(Clone)]
pub struct Played(Arc<dyn Cpus>);

/// [`Platform`] without a type that the caller chooses.
trait Cpus: Send + Sync {
    fn cpus(&self) -> usize;
    fn number(&self) -> PlatformNumber;
    /// Calls `f` once.
    fn lend(&self, f: &mut dyn FnMut(Option<&LocalCpu<'_>>));
    /// Calls `f` once or not at all.
    fn lend_fast(&self, f: &mut dyn FnMut(&LocalCpu<'_>));
    fn now_ns(&self) -> u64;
    fn fence_all(&self);
    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory>;
    fn wake_at(&self, deadline_ns: u64);
}

impl<P: Platform> Cpus for P {
    fn cpus(&self) -> usize {
        P::cpus(self)
    }

    fn number(&self) -> PlatformNumber {
        P::number(self)
    }

    fn lend(&self, f: &mut dyn FnMut(Option<&LocalCpu<'_>>)) {
        self.with_cpu(f);
    }

    fn lend_fast(&self, f: &mut dyn FnMut(&LocalCpu<'_>)) {
        self.with_cpu_fast(f);
    }

    fn now_ns(&self) -> u64 {
        P::now_ns(self)
    }

    fn fence_all(&self) {
        P::fence_all(self);
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        P::register(self, events)
    }

    fn wake_at(&self, deadline_ns: u64) {
        P::wake_at(self, deadline_ns);
    }
}

impl Played {
    pub fn new(platform: impl Platform) -> Self {
        Self(Arc::new(platform))
    }
}

// SAFETY: all calls are passed on to a platform; clones are that platform.
unsafe impl Platform for Played {
    fn cpus(&self) -> usize {
        self.0.cpus()
    }

    fn number(&self) -> PlatformNumber {
        self.0.number()
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        let (mut f, mut result) = (Some(f), None);
        self.0.lend(&mut |cpu| result = f.take().map(|f| f(cpu)));
        result.expect("a platform calls once")
    }

    fn with_cpu_fast<R>(&self, f: impl FnOnce(&LocalCpu<'_>) -> R) -> Option<R> {
        let (mut f, mut result) = (Some(f), None);
        self.0.lend_fast(&mut |cpu| result = f.take().map(|f| f(cpu)));
        result
    }

    fn now_ns(&self) -> u64 {
        self.0.now_ns()
    }

    fn fence_all(&self) {
        self.0.fence_all();
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.0.register(events)
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.0.wake_at(deadline_ns);
    }
}
