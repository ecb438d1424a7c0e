//! An unmap on one CPU races with a flush on another: an address is given back only if the invalidation
//! came after its page-table entry was cleared.

use std::ops::Deref;

use ::loom::sync::atomic::{AtomicUsize, Ordering};
use ::loom::sync::{Arc, Mutex};
use ::loom::thread;
use portcullis::addr::{Iova, IovaRange};
use portcullis::heap::{OutOfMemory, Shared, Weak};
use portcullis::invalidation::{Cleared, FlushQueue, Pushed};
use portcullis::percpu::Marks;
use portcullis::platform::{LocalCpu, Platform, PlatformEvents};

/// A platform of visitors: full fences on both sides, as the model checker knows no others, and no CPUs.
struct Fences;

// SAFETY: it lends no CPU; fences are full.
unsafe impl Platform for Fences {
    fn cpus(&self) -> usize {
        1
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        f(None)
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, _: u64) {}
}

const RANGE: IovaRange = match IovaRange::new(Iova::new(0x1000), 0x1000) {
    Ok(range) => range,
    Err(_) => panic!(),
};

const CLEARED: Cleared = Cleared { range: RANGE, neighbours: 0 };

const WINDOW: u64 = 10;

/// The queues of one CPU and of those without, and the marks of its turns.
struct Queues(FlushQueue, Shared<Marks>);

impl Queues {
    fn new() -> Arc<Self> {
        let marks = Shared::new(Marks::new(1).unwrap()).unwrap();
        Arc::new(Self(FlushQueue::new(Some(marks.clone()), 1).unwrap(), marks))
    }

    /// Queues the range in a turn of CPU 0, after `clear`, as lazy protection does, for `window`.
    fn push_after(
        &self,
        clear: impl FnOnce(),
        window: impl Fn() -> Option<u64>,
    ) -> (Pushed, Option<IovaRange>) {
        // SAFETY: one thread of each model unmaps.
        let cpu = unsafe { LocalCpu::new(0) };
        // SAFETY: there is one platform.
        match unsafe { self.1.turn(&cpu) } {
            Some(turn) => {
                clear();
                if let Some(pushed) = self.0.push(&turn, CLEARED, &window, || 0) {
                    return pushed;
                }
            }
            None => clear(),
        }
        let mut back = None;
        (self.0.push_shared(CLEARED.waiting(), window, || 0, |range| back = Some(range)), back)
    }
}

impl Deref for Queues {
    type Target = FlushQueue;

    fn deref(&self) -> &FlushQueue {
        &self.0
    }
}

/// Queues the range once more, when nothing is known to be safe.
fn push(queue: &Queues) -> Pushed {
    let (deferred, oldest) = queue.push_after(|| (), || Some(WINDOW));
    assert_eq!(oldest, None);
    deferred
}

/// As a visitor, which has no CPU.
fn reclaim_all(queue: &Queues, mut reclaim: impl FnMut(IovaRange)) {
    queue.reclaim(&Fences, None, |_, range| reclaim(range));
}

const FIRST: Pushed = Pushed::QueuedFirst { window_ns: WINDOW };

/// Without a bound some of these take a minute.
fn bounded(check: impl Fn() + Sync + Send + 'static) {
    let mut model = ::loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(check);
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

fn flush(queue: &Queues, hardware: &Hardware) {
    let number = queue.begin_flush_of_all(&Fences);
    hardware.invalidate();
    queue.confirm_flush(number, 0);
}

/// What another CPU does meanwhile.
fn beside<R: 'static>(
    hardware: &Arc<Hardware>,
    queue: &Arc<Queues>,
    work: impl FnOnce(&Hardware, &Queues) -> R + 'static,
) -> thread::JoinHandle<R> {
    let (hardware, queue) = (Arc::clone(hardware), Arc::clone(queue));
    thread::spawn(move || work(&hardware, &queue))
}

/// By a CPU whose queue is full.
fn flush_closed(queue: &Queues, hardware: &Hardware) {
    let number = queue.begin_flush();
    hardware.invalidate();
    queue.confirm_flush(number, 0);
}

#[test]
fn an_address_comes_back_only_after_an_invalidation_that_saw_it_cleared() {
    ::loom::model(|| {
        let hardware = Hardware::new();
        let queue = Queues::new();
        let unmapping = beside(&hardware, &queue, |hardware, queue| {
            hardware.entry.store(0, Ordering::Relaxed);
            let queued = push(&queue);
            assert_eq!(queued, FIRST);
        });
        flush(&queue, &hardware);
        reclaim_all(&queue, |safe| {
            assert_eq!(safe, RANGE);
            hardware.assert_forgotten();
        });
        unmapping.join().unwrap();
    });
}

/// The queue is one that flushes know of, so that no announcement orders the unmap, and the flush
/// waits for no turn: the two fences do, that of the segment and that of the flush.
#[test]
fn a_flush_that_began_before_a_segment_was_closed_does_not_cover_it() {
    bounded(|| {
        let hardware = Hardware::new();
        let queue = Queues::new();
        // Four make a segment.
        for expected in [FIRST, Pushed::Queued, Pushed::Queued] {
            assert_eq!(push(&queue), expected);
        }
        queue.confirm_flush(queue.begin_flush(), 0);
        reclaim_all(&queue, |_| ());
        let unmapping = beside(&hardware, &queue, |hardware, queue| {
            hardware.entry.store(0, Ordering::Relaxed);
            assert_eq!(push(&queue), Pushed::Queued);
        });
        flush_closed(&queue, &hardware);
        unmapping.join().unwrap();
        reclaim_all(&queue, |_| hardware.assert_forgotten());
        // What this flush did not cover waits for another.
        assert!(queue.is_pending(&Fences) || *hardware.cached.lock().unwrap() == 0);
    });
}

/// The same by a caller without a CPU, whom no fence of a turn orders: the segment's alone does.
#[test]
fn nor_one_of_the_queue_that_is_shared() {
    bounded(|| {
        let hardware = Hardware::new();
        let queue = Queues::new();
        let unmapping = beside(&hardware, &queue, |hardware, queue| {
            hardware.entry.store(0, Ordering::Relaxed);
            // Four make a segment.
            for expected in [FIRST, Pushed::Queued, Pushed::Queued, Pushed::Queued] {
                let none = |_| panic!("nothing is older");
                assert_eq!(queue.push_shared(CLEARED.waiting(), || Some(WINDOW), || 0, none), expected);
            }
        });
        flush_closed(&queue, &hardware);
        unmapping.join().unwrap();
        reclaim_all(&queue, |_| hardware.assert_forgotten());
    });
}

/// The same beside a flush of all queues: the entry may be in a segment that is open, or not yet
/// there. It is one that takes no more than some stores, in the turn in which the translation is
/// cleared.
#[test]
fn a_flush_of_all_covers_what_is_queued_and_nothing_that_comes_later() {
    bounded(|| {
        let hardware = Hardware::new();
        let queue = Queues::new();
        assert_eq!(push(&queue), FIRST);
        let unmapping = beside(&hardware, &queue, |hardware, queue| {
            let clear = || hardware.entry.store(0, Ordering::Relaxed);
            let (_, oldest) = queue.push_after(clear, || Some(WINDOW));
            // The first one's, which the flush covered.
            usize::from(oldest.is_some())
        });
        flush(&queue, &hardware);
        let mut back = unmapping.join().unwrap();
        reclaim_all(&queue, |_| back += 1);
        if back == 2 {
            hardware.assert_forgotten();
        }
        assert!(back == 2 || back == 1 && queue.is_pending(&Fences));
    });
}

/// The same in the queue that is shared, by a caller in no turn: its lock orders the two.
#[test]
fn nor_one_of_the_queue_that_is_shared_that_comes_after_a_flush_of_all() {
    bounded(|| {
        let hardware = Hardware::new();
        let queue = Queues::new();
        let push = |queue: &Queues| {
            let mut back = 0;
            let pushed = queue.push_shared(CLEARED.waiting(), || Some(WINDOW), || 0, |_| back += 1);
            assert!(pushed == FIRST || pushed == Pushed::Queued);
            back
        };
        assert_eq!(push(&queue), 0);
        let unmapping = beside(&hardware, &queue, move |hardware, queue| {
            hardware.entry.store(0, Ordering::Relaxed);
            push(queue)
        });
        flush(&queue, &hardware);
        let mut back = unmapping.join().unwrap();
        reclaim_all(&queue, |_| back += 1);
        if back == 2 {
            hardware.assert_forgotten();
        }
        assert!(back == 2 || back == 1 && queue.is_pending(&Fences));
    });
}

/// The same where the CPU announces its queue meanwhile: the flush looks who is announced after it
/// has asked.
#[test]
fn nor_one_of_a_queue_that_is_announced_beside_a_flush_of_all() {
    bounded(|| {
        let hardware = Hardware::new();
        let queue = Queues::new();
        let unmapping = beside(&hardware, &queue, |hardware, queue| {
            let (_, oldest) = queue.push_after(|| (), || Some(WINDOW));
            assert_eq!(oldest, None);
            let clear = || hardware.entry.store(0, Ordering::Relaxed);
            usize::from(queue.push_after(clear, || Some(WINDOW)).1.is_some())
        });
        flush(&queue, &hardware);
        let mut back = unmapping.join().unwrap();
        reclaim_all(&queue, |_| back += 1);
        if back == 2 {
            hardware.assert_forgotten();
        }
    });
}

#[test]
fn two_flushes_at_once_do_not_count_for_each_other() {
    bounded(|| {
        let hardware = Hardware::new();
        let queue = Queues::new();
        // This flush may begin before the unmap below and end after it.
        let other = beside(&hardware, &queue, |hardware, queue| flush(queue, hardware));
        hardware.entry.store(0, Ordering::Relaxed);
        let queued = push(&queue);
        assert_eq!(queued, FIRST);
        reclaim_all(&queue, |_| hardware.assert_forgotten());
        flush(&queue, &hardware);
        reclaim_all(&queue, |_| hardware.assert_forgotten());
        other.join().unwrap();
        // Both are over now, and at least ours covered the entry.
        assert!(!queue.is_pending(&Fences));
        hardware.assert_forgotten();
    });
}

#[test]
fn whoever_sees_a_flush_confirmed_sees_what_came_before_it() {
    ::loom::model(|| {
        // No lock orders this test's own word: only the confirmation can.
        let forgotten = Arc::new(AtomicUsize::new(0));
        let queue = Queues::new();
        assert_eq!(push(&queue), FIRST);
        let flushing = {
            let (forgotten, queue) = (Arc::clone(&forgotten), Arc::clone(&queue));
            thread::spawn(move || {
                let number = queue.begin_flush();
                forgotten.store(1, Ordering::Relaxed);
                queue.confirm_flush(number, 0);
            })
        };
        reclaim_all(&queue, |_| assert_eq!(forgotten.load(Ordering::Relaxed), 1));
        flushing.join().unwrap();
    });
}

#[test]
fn a_timer_that_misses_an_entry_is_asked_for_again() {
    // Whether the first entry still waits when its window ends.
    for waits in [true, false] {
        bounded(move || {
            let hardware = Hardware::new();
            let queue = Queues::new();
            // A first entry has set the timer.
            assert_eq!(push(&queue), FIRST);
            if !waits {
                flush(&queue, &hardware);
            }
            let unmapping = beside(&hardware, &queue, |_, queue| queue.push_after(|| (), || Some(WINDOW)).0);
            queue.end_timers();
            let pending = queue.is_pending(&Fences);
            assert!(pending || !waits, "the first entry waits");
            if pending {
                flush(&queue, &hardware);
            }
            let late = unmapping.join().unwrap();
            // Either this flush covers the second entry, or a timer is asked for again.
            assert!(!queue.is_pending(&Fences) || late == FIRST);
        });
    }
}

/// The policy becomes strict on one CPU while another unmaps by the old one, the first of its queue.
#[test]
fn after_a_change_of_policy_nothing_is_left_that_was_unmapped_by_the_old_one() {
    change_of_policy(0);
}

/// The same with a queue that flushes visit already: the CPU does not announce it again.
#[test]
fn nor_in_a_queue_that_is_in_use() {
    change_of_policy(1);
}

/// `before` entries are in the queue, of which the next takes no more than some stores if there is one.
fn change_of_policy(before: usize) {
    bounded(move || {
        let hardware = Hardware::new();
        let queue = Queues::new();
        (0..before).for_each(|_| assert_eq!(push(&queue), FIRST));
        let strict = Arc::new(AtomicUsize::new(0));
        let unmapping = {
            let (hardware, queue, strict) = (Arc::clone(&hardware), Arc::clone(&queue), Arc::clone(&strict));
            thread::spawn(move || {
                let clear = || hardware.entry.store(0, Ordering::Relaxed);
                let window = || (strict.load(Ordering::Relaxed) == 0).then_some(WINDOW);
                let (queued, _) = queue.push_after(clear, window);
                if queued == Pushed::Refused {
                    hardware.invalidate();
                    hardware.assert_forgotten();
                }
                queued
            })
        };
        strict.store(1, Ordering::Relaxed);
        flush(&queue, &hardware);
        // The change has returned. Whoever comes back after it from an unmap, comes back from a strict one.
        let cached = *hardware.cached.lock().unwrap();
        if unmapping.join().unwrap() != Pushed::Refused {
            assert_eq!(cached, 0, "queued by the old policy, and not covered by the change's flush");
        }
    });
}

/// A CPU goes away while another, which takes back what is left in its queue, flushes.
#[test]
fn what_a_cpu_leaves_behind_is_given_back_once_and_forgotten_before() {
    bounded(|| {
        let hardware = Hardware::new();
        let queue = Queues::new();
        let given = Arc::new(AtomicUsize::new(0));
        let leave = |hardware: &Hardware, queue: &Queues, given: &AtomicUsize| {
            flush(queue, hardware);
            queue.reclaim(&Fences, None, |_, _| {
                hardware.assert_forgotten();
                given.fetch_add(1, Ordering::Relaxed);
            });
        };
        let leaving = {
            let (hardware, queue, given) = (Arc::clone(&hardware), Arc::clone(&queue), Arc::clone(&given));
            thread::spawn(move || {
                hardware.entry.store(0, Ordering::Relaxed);
                assert_eq!(push(&queue), FIRST);
                leave(&hardware, &queue, &given);
            })
        };
        // The space is exhausted elsewhere at the same time.
        leave(&hardware, &queue, &given);
        leaving.join().unwrap();
        assert_eq!(given.load(Ordering::Relaxed), 1);
    });
}
