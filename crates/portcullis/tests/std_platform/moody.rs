//! A platform that panics, where the test wants, and what it was asked to remember is not lost with it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{Direction, Permissions};
use portcullis::dma::DmaDevice;
use portcullis::domain::Policy;
use portcullis::invalidation::InvalidationQueue;
use portcullis::platform::PlatformEvents;
use portcullis_model::Queue;
use portcullis_model::open::{OpenDevice, OpenDomain};

use super::rig::{ANYWHERE, Call, Hooked, LAZY_FOREVER, Moody, Rig, page};

const WINDOW: u64 = 1_000_000;

fn bench() -> Rig<Arc<Moody>, Queue> {
    Rig::new(Moody::new(2), Policy::Lazy { window_ns: WINDOW }, |queue| queue)
}

impl<Q: InvalidationQueue> Rig<Arc<Moody>, Q> {
    /// A page that the device has used, and may still reach if its unmap is lazy.
    fn used(&self, number: u64) -> portcullis::addr::IovaRange {
        let range = self.domain.open(&[page(number)], Permissions::READ_WRITE, ANYWHERE).unwrap();
        assert!(self.reaches(range.start()));
        range
    }

    fn panic_in(&self, call: Call, f: impl FnOnce()) {
        self.platform.panic_in(call);
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
    for call in [Call::WithCpu, Call::Now] {
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

/// More unmaps than a queue has places: what a panic leaves in it goes with a flush, as what came before it does.
#[test]
fn a_clock_that_panics_often_leaves_the_queue_in_order() {
    const UNMAPS: u64 = 300;
    const ENOUGH: u64 = 10 * UNMAPS;
    let bench = Rig::new(Moody::new(2), LAZY_FOREVER, Hooked::new);
    let submitted = Arc::new(AtomicU64::new(0));
    let counts = Arc::clone(&submitted);
    bench.queue.set(move || {
        assert!(counts.fetch_add(1, Ordering::Relaxed) < ENOUGH, "it flushes for ever");
    });
    let ranges: Vec<_> = (0..UNMAPS).map(|number| bench.used(number)).collect();
    for range in &ranges {
        bench.platform.panic_in(Call::Now);
        // Not every unmap reads the clock.
        let _ = catch_unwind(AssertUnwindSafe(|| bench.domain.unmap(*range)));
    }
    bench.platform.be_well();
    let last = bench.used(UNMAPS);
    bench.domain.unmap(last).unwrap();
    bench.domain.flush().unwrap();
    assert!(!ranges.iter().chain([&last]).any(|range| bench.reaches(range.start())));
}

/// The timer of callers without a CPU, whose window is longer, is none for those of another window.
#[test]
fn a_timer_that_was_lost_is_asked_for_again_by_the_cpu_that_lost_it() {
    const LONG: u64 = 1000 * WINDOW;
    let bench = bench();
    let longer = DmaDevice::new(bench.domain.clone(), u64::MAX).unwrap();
    longer.set_policy(Some(Policy::Lazy { window_ns: LONG })).unwrap();
    let first = bench.used(0);
    bench.panic_in(Call::WakeAt, || bench.domain.unmap(first).unwrap());
    bench.platform.inner.be(2);
    let iova = longer.open_single(page(1).phys, page(1).len, Direction::Bidirectional).unwrap();
    longer.unmap_single(iova, page(1).len).unwrap();
    bench.platform.inner.be(0);
    let next = bench.used(2);
    bench.domain.unmap(next).unwrap();
    bench.platform.inner.go_to(2 * WINDOW);
    assert!(![first, next].iter().any(|range| bench.reaches(range.start())), "nobody has set a timer");
}
