//! An unmap on one CPU races with a flush on another: an address is given back only if the invalidation
//! came after its page-table entry was cleared.

use ::loom::sync::atomic::{AtomicUsize, Ordering};
use ::loom::sync::{Arc, Mutex};
use ::loom::thread;
use portcullis::addr::{Iova, IovaRange};
use portcullis::invalidation::{Deferred, DeferredQueue};
use portcullis::platform::LocalSlot;

fn range() -> IovaRange {
    IovaRange::new(Iova::new(0x1000), 0x1000).unwrap()
}

/// The page-table entry, and what the hardware has cached of it.
struct Hardware {
    entry: AtomicUsize,
    cached: Mutex<usize>,
}

impl Hardware {
    fn new() -> Arc<Self> {
        Arc::new(Self { entry: AtomicUsize::new(1), cached: Mutex::new(1) })
    }

    /// The worst a device can do: translate again right after the invalidation, with what memory holds then.
    fn invalidate(&self) {
        let mut cached = self.cached.lock().unwrap();
        *cached = self.entry.load(Ordering::Relaxed);
    }

    fn assert_forgotten(&self) {
        assert_eq!(*self.cached.lock().unwrap(), 0, "given back while still cached");
    }
}

fn flush(queue: &DeferredQueue, hardware: &Hardware) {
    let number = queue.begin_flush();
    hardware.invalidate();
    queue.confirm_flush(number);
}

#[test]
fn an_address_comes_back_only_after_an_invalidation_that_saw_it_cleared() {
    ::loom::model(|| {
        let hardware = Hardware::new();
        let queue = Arc::new(DeferredQueue::new(1));
        let unmapping = {
            let (hardware, queue) = (Arc::clone(&hardware), Arc::clone(&queue));
            thread::spawn(move || {
                hardware.entry.store(0, Ordering::Relaxed);
                let queued = queue.push(Some(&LocalSlot::new(0)), range(), |_| panic!("nothing is older"));
                assert_eq!(queued, Deferred::QueuedFirst);
            })
        };
        flush(&queue, &hardware);
        queue.reclaim_all(|safe| {
            assert_eq!(safe, range());
            hardware.assert_forgotten();
        });
        unmapping.join().unwrap();
    });
}

#[test]
fn two_flushes_at_once_do_not_count_for_each_other() {
    ::loom::model(|| {
        let hardware = Hardware::new();
        let queue = Arc::new(DeferredQueue::new(1));
        let other = {
            let (hardware, queue) = (Arc::clone(&hardware), Arc::clone(&queue));
            // This flush may begin before the unmap below and end after it.
            thread::spawn(move || flush(&queue, &hardware))
        };
        hardware.entry.store(0, Ordering::Relaxed);
        let queued = queue.push(Some(&LocalSlot::new(0)), range(), |_| panic!("nothing is older"));
        assert_eq!(queued, Deferred::QueuedFirst);
        queue.reclaim_all(|_| hardware.assert_forgotten());
        flush(&queue, &hardware);
        queue.reclaim_all(|_| hardware.assert_forgotten());
        other.join().unwrap();
        // Both are over now, and at least ours covered the entry.
        assert!(!queue.is_pending());
        hardware.assert_forgotten();
    });
}

#[test]
fn whoever_sees_a_flush_confirmed_sees_what_came_before_it() {
    ::loom::model(|| {
        // No lock orders this test's own word: only the confirmation can.
        let forgotten = Arc::new(AtomicUsize::new(0));
        let queue = Arc::new(DeferredQueue::new(1));
        assert_eq!(queue.push(Some(&LocalSlot::new(0)), range(), |_| ()), Deferred::QueuedFirst);
        let flushing = {
            let (forgotten, queue) = (Arc::clone(&forgotten), Arc::clone(&queue));
            thread::spawn(move || {
                let number = queue.begin_flush();
                forgotten.store(1, Ordering::Relaxed);
                queue.confirm_flush(number);
            })
        };
        queue.reclaim_all(|_| assert_eq!(forgotten.load(Ordering::Relaxed), 1));
        flushing.join().unwrap();
    });
}

#[test]
fn a_timer_that_misses_an_entry_is_asked_for_again() {
    ::loom::model(|| {
        let queue = Arc::new(DeferredQueue::new(1));
        // A first entry has set the timer.
        let slot = LocalSlot::new(0);
        assert_eq!(queue.push(Some(&slot), range(), |_| ()), Deferred::QueuedFirst);
        let unmapping = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || queue.push(Some(&LocalSlot::new(0)), range(), |_| ()))
        };
        assert!(queue.timer(), "the first entry waits");
        queue.confirm_flush(queue.begin_flush());
        let late = unmapping.join().unwrap();
        // Either this flush covers the second entry, or somebody has been told to come back for it.
        assert!(!queue.is_pending() || late == Deferred::QueuedFirst);
    });
}
