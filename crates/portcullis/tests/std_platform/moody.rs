//! A platform that panics: once, where the test wants, and what it was asked to remember is not lost with it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};

use portcullis::addr::Permissions;
use portcullis::domain::Policy;
use portcullis::platform::{LocalSlot, Platform, PlatformEvents, PlatformNumber};
use portcullis_model::Queue;
use portcullis_model::open::OpenDomain;

use super::rig::{ANYWHERE, Clocked, Rig, page};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Call {
    WithSlot = 1,
    Now,
    WakeAt,
}

/// A machine that one thread plays.
struct Moody {
    inner: Arc<Clocked>,
    /// The call that panics next.
    panics: AtomicU8,
}

impl Moody {
    fn pass(&self, call: Call) {
        let panics = self.panics.compare_exchange(call as u8, 0, Ordering::Relaxed, Ordering::Relaxed);
        assert!(panics.is_err(), "as the test wants");
    }
}

// SAFETY: slots are `Clocked`'s.
unsafe impl Platform for Moody {
    fn slots(&self) -> usize {
        self.inner.slots()
    }

    fn number(&self) -> PlatformNumber {
        self.inner.number()
    }

    fn with_slot<R>(&self, f: impl FnOnce(Option<&LocalSlot<'_>>) -> R) -> R {
        self.pass(Call::WithSlot);
        self.inner.with_slot(f)
    }

    fn now_ns(&self) -> u64 {
        self.pass(Call::Now);
        self.inner.now_ns()
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) {
        self.inner.register(events);
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.pass(Call::WakeAt);
        self.inner.wake_at(deadline_ns);
    }
}

const WINDOW: u64 = 1_000_000;

fn bench() -> Rig<Arc<Moody>, Queue> {
    let platform = Arc::new(Moody { inner: Clocked::new(2), panics: AtomicU8::new(0) });
    Rig::new(platform, Policy::Lazy { window_ns: WINDOW }, |queue| queue)
}

impl Rig<Arc<Moody>, Queue> {
    /// A page that the device has used, and may still reach if its unmap is lazy.
    fn used(&self, number: u64) -> portcullis::addr::IovaRange {
        let range = self.domain.open(&[page(number)], Permissions::READ_WRITE, ANYWHERE).unwrap();
        assert!(self.reaches(range.start()));
        range
    }

    fn panic_in(&self, call: Call, f: impl FnOnce()) {
        self.platform.panics.store(call as u8, Ordering::Relaxed);
        assert!(catch_unwind(AssertUnwindSafe(f)).is_err());
        assert_eq!(self.platform.panics.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn where_a_timer_could_not_be_set_the_next_unmap_sets_it() {
    for call in [Call::Now, Call::WakeAt] {
        let bench = bench();
        // The first push reads the clock, too.
        let first = bench.used(0);
        bench.domain.unmap(first).unwrap();
        bench.platform.inner.go_to(2 * WINDOW);
        assert!(!bench.reaches(first.start()));
        let range = bench.used(1);
        if call == Call::Now {
            // A push that reads no clock, so that it is the timer's reading that panics.
            let sampled = bench.used(2);
            bench.domain.unmap(sampled).unwrap();
            bench.platform.inner.go_to(4 * WINDOW);
        }
        bench.panic_in(call, || bench.domain.unmap(range).unwrap());
        let next = bench.used(3);
        bench.domain.unmap(next).unwrap();
        bench.platform.inner.go_to(10 * WINDOW);
        assert!(!bench.reaches(next.start()), "{call:?}: nobody has set a timer");
        assert!(!bench.reaches(range.start()));
    }
}

#[test]
fn a_timer_that_panics_comes_again() {
    for call in [Call::WithSlot, Call::Now] {
        let bench = bench();
        let range = bench.used(0);
        bench.domain.unmap(range).unwrap();
        bench.platform.inner.take(2 * WINDOW);
        let timer = || PlatformEvents::timer(&*bench.domain);
        match call {
            // The clock is read to see whether the window has ended: that is asked again with the next event.
            Call::Now => {
                bench.panic_in(call, timer);
                timer();
            }
            _ => {
                bench.panic_in(call, timer);
                assert!(bench.reaches(range.start()));
                bench.platform.inner.go_to(20 * WINDOW);
            }
        }
        assert!(!bench.reaches(range.start()), "{call:?}");
    }
}
