//! One CPU's queue from the first entry to the last, by numbers alone.

use alloc::vec::Vec;

use super::*;
use crate::addr::Iova;

const WINDOW_NS: u64 = 10;

fn range(number: usize) -> IovaRange {
    IovaRange::new(Iova::new((number as u64) << 12), 4096).unwrap()
}

/// Queues the range of this number by slot 0, or without a slot. What came back for it.
fn push(queue: &DeferredQueue, slot: bool, number: usize) -> (Deferred, Option<IovaRange>) {
    let cleared = Cleared { range: range(number), used: 4096 };
    // SAFETY: there is one thread.
    let zero = unsafe { LocalSlot::new(0) };
    let mut back = None;
    let reclaim = |range| assert_eq!(back.replace(range), None, "one for one");
    let deferred = queue.push(slot.then_some(&zero), cleared, || Some(WINDOW_NS), || 0, reclaim);
    (deferred, back)
}

fn flush(queue: &DeferredQueue) {
    let number = queue.begin_flush();
    queue.confirm_flush(number, 0);
}

#[test]
fn a_queue_takes_256_and_gives_each_back_once_in_its_turn() {
    let first = Deferred::QueuedFirst { window_ns: WINDOW_NS };
    let queue = DeferredQueue::per_cpu(1);
    for (slot, own) in [(true, 0), (false, 1)] {
        for number in 0..QUEUE_ENTRIES {
            let expected = if number == 0 { first } else { Deferred::Queued };
            assert_eq!(push(&queue, slot, number), (expected, None), "one timer");
        }
        assert_eq!(push(&queue, slot, 999), (Deferred::Full, None));
        assert!(queue.is_pending());
        // One flush was under way before, and does not count.
        let early = queue.begin_flush() - 1;
        queue.confirm_flush(early, 0);
        assert_eq!(push(&queue, slot, 999), (Deferred::Full, None));
        flush(&queue);
        assert!(!queue.is_pending());
        // Each that comes takes the oldest one's place.
        for number in 0..10 {
            assert_eq!(push(&queue, slot, 1000 + number), (Deferred::Queued, Some(range(number))));
        }
        let mut back = Vec::new();
        for (more, count) in [(true, 64), (true, 128), (true, 192), (false, 246), (false, 246)] {
            assert_eq!(queue.reclaim_slice(own, |range| back.push(range)), more);
            assert_eq!(back.len(), count);
        }
        assert_eq!(back, (10..QUEUE_ENTRIES).map(range).collect::<Vec<_>>());
        // The ten wait, and for a timer that is asked for again when this one has come.
        assert!(queue.timer());
        assert_eq!(push(&queue, slot, 2000), (first, None));
        flush(&queue);
        assert!(!queue.timer());
        while queue.reclaim_slice(own, |_| ()) {}
    }
}

#[test]
fn a_slot_has_a_queue_of_its_own_or_all_have_one() {
    let queue = DeferredQueue::per_cpu(2);
    assert_eq!([0, 1, 2, 3].map(|index| queue.queue_of(index)), [Some(0), Some(1), None, None]);
    assert_eq!((queue.queues(), DeferredQueue::shared().queues()), (3, 1));
    assert_eq!(DeferredQueue::shared().queue_of(0), None);
    assert!(!queue.reclaim_slice(3, |_| panic!("there is none")));
}

/// A late confirmation of an early flush takes nothing back.
#[test]
fn flushes_may_be_confirmed_in_any_order() {
    let queue = DeferredQueue::per_cpu(1);
    let early = queue.begin_flush();
    let _ = push(&queue, true, 1);
    let late = queue.begin_flush();
    assert!(late > early);
    queue.confirm_flush(late, 0);
    queue.confirm_flush(early, 0);
    assert_eq!(push(&queue, true, 2).1, Some(range(1)));
    assert_eq!(push(&queue, true, 3).1, None);
}
