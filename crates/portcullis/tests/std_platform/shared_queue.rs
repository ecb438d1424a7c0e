//! Waits shared by threads: everybody is served, by fewer submissions than requests; failures reach those that
//! they concern; a queue that panics stops nobody.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{DomainId, Iova, IovaRange};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request, SharedQueue};

#[derive(Default)]
struct Hardware {
    /// Requests carried out so far, by domain.
    done: Mutex<[u64; 8]>,
    waits: AtomicU64,
    /// Every so many submissions one fails, or panics.
    fail_every: u64,
    panic_every: u64,
}

// SAFETY: no hardware is behind it.
unsafe impl InvalidationQueue for Hardware {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        // Others get on meanwhile: nobody holds a lock.
        std::thread::yield_now();
        let number = self.waits.fetch_add(1, Ordering::Relaxed) + 1;
        if self.fail_every > 0 && number.is_multiple_of(self.fail_every) {
            return Err(InvalidationError::Rejected { code: 9 });
        }
        assert!(self.panic_every == 0 || !number.is_multiple_of(self.panic_every), "a driver's bug");
        let mut done = self.done.lock().unwrap();
        requests.iter().for_each(|request| done[request.domain.0 as usize] += 1);
        Ok(())
    }
}

fn range(page: u64) -> Invalidation {
    let range = IovaRange::new(Iova::new(page << 12), 4096).unwrap();
    Invalidation::Range { range, leaf_only: true }
}

/// Miri interprets.
const EACH: u64 = if cfg!(miri) { 8 } else { 500 };

/// Eight threads; how many calls failed.
fn run(hardware: Hardware) -> (SharedQueue<Hardware>, u64) {
    let queue = SharedQueue::new(hardware);
    let failures = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..8_u16 {
            let (queue, failures) = (&queue, &failures);
            scope.spawn(move || {
                for n in 0..EACH {
                    let before = queue.queue().done.lock().unwrap()[thread as usize];
                    let call = || queue.invalidate(DomainId(thread), range(n));
                    match catch_unwind(AssertUnwindSafe(call)) {
                        Ok(Ok(())) => {
                            let after = queue.queue().done.lock().unwrap()[thread as usize];
                            assert!(after > before, "served");
                        }
                        _ => _ = failures.fetch_add(1, Ordering::Relaxed),
                    }
                }
            });
        }
    });
    let failures = failures.into_inner();
    (queue, failures)
}

#[test]
fn everybody_is_served_and_waits_are_shared() {
    let (queue, failures) = run(Hardware::default());
    assert_eq!(failures, 0);
    let done: u64 = queue.queue().done.lock().unwrap().iter().sum();
    assert_eq!(done, 8 * EACH);
    let waits = queue.queue().waits.load(Ordering::Relaxed);
    assert!(waits < 8 * EACH, "{waits} submissions");
}

#[test]
fn a_failure_reaches_those_it_concerns() {
    let (queue, failures) = run(Hardware { fail_every: 3, ..Hardware::default() });
    let done: u64 = queue.queue().done.lock().unwrap().iter().sum();
    // Nobody is told of success that was none, and nobody of a failure that was another's.
    assert_eq!(done + failures, 8 * EACH);
    assert!(failures > 0);
}

#[test]
fn a_queue_that_panics_stops_nobody() {
    let (queue, failures) =
        run(Hardware { panic_every: if cfg!(miri) { 5 } else { 50 }, ..Hardware::default() });
    let done: u64 = queue.queue().done.lock().unwrap().iter().sum();
    assert_eq!(done + failures, 8 * EACH);
    assert!(failures > 0);
    // The next one may be one that panics; the one after it is not.
    let call = || queue.invalidate(DomainId(0), range(0));
    assert!((0..2).any(|_| matches!(catch_unwind(AssertUnwindSafe(call)), Ok(Ok(())))));
}

#[test]
fn more_requests_than_a_batch_holds_are_carried_out() {
    let queue = SharedQueue::new(Hardware::default());
    let ranges: Vec<Request> =
        (0..100).map(|n| Request { domain: DomainId((n % 8) as u16), invalidation: range(n) }).collect();
    queue.submit(&ranges).unwrap();
    assert!(queue.queue().done.lock().unwrap().iter().all(|done| *done > 0));
    queue.submit(&[]).unwrap();
}
