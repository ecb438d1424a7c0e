//! Threads as CPUs, with something that happens at each border of a turn.

use std::sync::Arc;

use portcullis::heap::{OutOfMemory, Weak};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};
use portcullis::std_platform::StdPlatform;

/// The two borders of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Border {
    Before,
    After,
}

#[derive(Clone)]
pub struct Turns {
    inner: StdPlatform,
    at: Arc<dyn Fn(Border) + Send + Sync>,
}

impl Turns {
    /// `cpus` CPUs; `at` is called before a CPU is lent, and when it has come back.
    pub fn new(cpus: usize, at: impl Fn(Border) + Send + Sync + 'static) -> Self {
        Self { inner: StdPlatform::with_cpus(cpus), at: Arc::new(at) }
    }
}

// SAFETY: CPUs are `StdPlatform`'s, and lent by it.
unsafe impl Platform for Turns {
    fn cpus(&self) -> usize {
        self.inner.cpus()
    }

    fn number(&self) -> PlatformNumber {
        self.inner.number()
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        (self.at)(Border::Before);
        let result = self.inner.with_cpu(f);
        (self.at)(Border::After);
        result
    }

    fn now_ns(&self) -> u64 {
        self.inner.now_ns()
    }

    fn fence_all(&self) {
        self.inner.fence_all();
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.inner.register(events)
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.inner.wake_at(deadline_ns);
    }
}
