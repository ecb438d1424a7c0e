//! Where a thread's time goes besides work: waits in the invalidation queue, and waits for locks.
//!
//! Each is timed where it happens and summed for the thread that waits. The timed loop asks for the sums
//! between two blocks.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use portcullis::addr::DomainId;
use portcullis::invalidation::{Costs, Invalidation, InvalidationError, InvalidationQueue, Request};

use crate::timer::OpTimer;

/// What the calling thread has waited for since it was last asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Spent {
    /// Ticks in calls of an invalidation queue.
    pub wait: u64,
    /// How many calls those were.
    pub waits: u64,
    /// Ticks in which somebody else had a lock.
    pub lock: u64,
    /// How often that was so.
    pub locks: u64,
}

thread_local! {
    static SPENT: Cell<Spent> = const {
        Cell::new(Spent { wait: 0, waits: 0, lock: 0, locks: 0 })
    };
}

impl Spent {
    /// What the calling thread has waited for so far; from here on it counts from nothing.
    pub(crate) fn take() -> Self {
        SPENT.take()
    }

    fn add(change: impl FnOnce(&mut Self)) {
        let mut spent = SPENT.get();
        change(&mut spent);
        SPENT.set(spent);
    }
}

/// An invalidation queue, whichever it is, with a clock around each call.
#[derive(Clone)]
pub(crate) struct Waits {
    queue: Arc<dyn InvalidationQueue>,
    timer: OpTimer,
}

impl Waits {
    pub(crate) fn new(queue: Arc<dyn InvalidationQueue>, timer: &OpTimer) -> Self {
        Self { queue, timer: timer.clone() }
    }
}

// SAFETY: it stands for hardware that caches nothing.
unsafe impl InvalidationQueue for Waits {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let (ticks, result) = self.timer.ticks(|| self.queue.submit(requests));
        Spent::add(|spent| {
            spent.wait += ticks;
            spent.waits += 1;
        });
        result
    }

    fn costs(&self) -> Costs {
        self.queue.costs()
    }
}

/// A lock that is waited for by looking again and again, as a kernel's spin lock is. Who finds it free reads no
/// clock.
pub(crate) struct SpinLock<T> {
    lock: Mutex<T>,
    timer: OpTimer,
    /// There are more threads than cores: who has the lock may have to be let run.
    crowded: bool,
}

impl<T> SpinLock<T> {
    pub(crate) fn new(value: T, timer: &OpTimer, crowded: bool) -> Self {
        Self { lock: Mutex::new(value), timer: timer.clone(), crowded }
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.lock.try_lock() {
            Ok(guard) => Some(guard),
            // Who panicked is told as a failure, and the subject not used again.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.try_lock().unwrap_or_else(|| self.wait())
    }

    #[cold]
    fn wait(&self) -> MutexGuard<'_, T> {
        let mut pauses = 1;
        let (ticks, guard) = self.timer.ticks(|| {
            loop {
                // Looking more and more rarely: each look takes the line away from the thread that has the lock.
                (0..pauses).for_each(|_| std::hint::spin_loop());
                pauses = (pauses * 2).min(16);
                if self.crowded {
                    std::thread::yield_now();
                }
                if let Some(guard) = self.try_lock() {
                    return guard;
                }
            }
        });
        Spent::add(|spent| {
            spent.lock += ticks;
            spent.locks += 1;
        });
        guard
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    struct Nothing;

    // SAFETY: it stands for hardware that caches nothing.
    unsafe impl InvalidationQueue for Nothing {
        fn invalidate(&self, _: DomainId, _: Invalidation) -> Result<(), InvalidationError> {
            Ok(())
        }
    }

    #[test]
    fn calls_and_waits_count_for_the_thread_that_makes_them() {
        let timer = OpTimer::calibrated();
        let queue = Waits::new(Arc::new(Nothing), &timer);
        let _ = Spent::take();
        queue.invalidate(DomainId(1), Invalidation::Domain).unwrap();
        queue.submit(&[]).unwrap();
        let other = std::thread::spawn(Spent::take).join().unwrap();
        assert_eq!(other, Spent::default());
        assert_eq!(Spent::take().waits, 2);
        assert_eq!(Spent::take(), Spent::default());
    }

    #[test]
    fn a_lock_that_is_free_is_no_wait_and_one_that_is_taken_is() {
        let timer = OpTimer::calibrated();
        let lock = SpinLock::new(0, &timer, true);
        let _ = Spent::take();
        *lock.lock() += 1;
        assert_eq!(Spent::take(), Spent::default());
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            let guard = lock.lock();
            let waiter = scope.spawn(|| {
                barrier.wait();
                *lock.lock() += 1;
                Spent::take()
            });
            barrier.wait();
            std::thread::sleep(std::time::Duration::from_millis(5));
            drop(guard);
            let spent = waiter.join().unwrap();
            // It may have come so late that no thread had the lock any more.
            assert!(spent.locks <= 1 && spent.waits == 0, "{spent:?}");
            assert_eq!(spent.lock > 0, spent.locks == 1, "{spent:?}");
        });
        assert_eq!(*lock.lock(), 2);
    }
}
