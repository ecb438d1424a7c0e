//! One CPU's queue from the first entry to the last.

extern crate std;

use alloc::vec::Vec;

use super::*;
use crate::addr::Iova;
use crate::platform::{LocalCpu, Platform};
use crate::std_platform::StdPlatform;

const WINDOW_NS: u64 = 10;
const SEGMENT: usize = QUEUE_ENTRIES / account::SEGMENTS;

fn range(number: usize) -> IovaRange {
    IovaRange::new(Iova::new((number as u64) << 12), 4096).unwrap()
}

/// Queues the range of this number on the thread's CPU, or without a CPU. Returns the result, and the addresses that came back.
fn push(queue: &FlushQueue, platform: &StdPlatform, cpu: bool, number: usize) -> (Pushed, Option<IovaRange>) {
    let cleared = Cleared { range: range(number), neighbours: 0 };
    platform.with_cpu(|own| {
        let turn = own.filter(|_| cpu).and_then(|own| queue.own.turn(own));
        let own = turn.and_then(|turn| queue.push(&turn, cleared, || Some(WINDOW_NS), || 0));
        own.unwrap_or_else(|| {
            let mut back = None;
            let reclaim = |range| back = Some(range);
            (queue.push_shared(cleared.waiting(), || Some(WINDOW_NS), || 0, reclaim), back)
        })
    })
}

fn per_cpu() -> FlushQueue {
    FlushQueue::new(Some(Shared::new(Marks::new(1).unwrap()).unwrap()), 1).unwrap()
}

fn flush(queue: &FlushQueue, platform: &StdPlatform) {
    let flush = queue.begin_flush_of_all(platform);
    queue.confirm_flush(flush, 0);
}

const FIRST: Pushed = Pushed::QueuedFirst { window_ns: WINDOW_NS };

#[test]
fn a_queue_takes_256_and_gives_each_back_once_in_its_turn() {
    let platform = StdPlatform::with_cpus(1);
    let queue = per_cpu();
    for cpu in [true, false] {
        let push = |number| push(&queue, &platform, cpu, number);
        let early = queue.begin_flush();
        for number in 0..QUEUE_ENTRIES {
            let expected = if number == 0 { FIRST } else { Pushed::Queued };
            assert_eq!(push(number), (expected, None), "one timer");
        }
        assert_eq!(push(999), (Pushed::Full, None));
        assert!(queue.is_pending(&platform));
        // A flush that began before does not count.
        queue.confirm_flush(early, 0);
        assert_eq!(push(999), (Pushed::Full, None));
        flush(&queue, &platform);
        assert!(!queue.is_pending(&platform));
        for number in 0..10 {
            assert_eq!(push(1000 + number), (Pushed::Queued, Some(range(number))));
        }
        let mut back = Vec::new();
        queue.reclaim(&platform, None, |_, range| back.push(range));
        assert_eq!(back, (10..QUEUE_ENTRIES).map(range).collect::<Vec<_>>());
        // The ten wait, and ask for a timer again when this one has ended.
        queue.end_timers();
        assert_eq!(push(2000), (FIRST, None));
        flush(&queue, &platform);
        queue.reclaim(&platform, None, |_, _| ());
    }
}

/// A flush covers closed segments without a visit; a queue learns of it with its next segment.
#[test]
fn a_flush_covers_whole_segments_without_a_visit() {
    let platform = StdPlatform::with_cpus(1);
    let queue = per_cpu();
    let push = |number| push(&queue, &platform, true, number).1;
    let entries = 2 * SEGMENT - 1;
    assert!((0..entries).all(|number| push(number).is_none()));
    queue.confirm_flush(queue.begin_flush(), 0);
    assert_eq!(push(entries), None, "it has just heard");
    let back: Vec<_> = (0..=SEGMENT).filter_map(|number| push(1000 + number)).collect();
    assert_eq!(back, (0..SEGMENT).map(range).collect::<Vec<_>>(), "the second was open");
}

/// A flush-all closes a segment that is not full: the next one begins with the entry after it.
#[test]
fn a_segment_that_is_closed_early_costs_neither_the_clock_nor_the_bound() {
    let platform = StdPlatform::with_cpus(1);
    let queue = per_cpu();
    let push_at = |number, now_ns| {
        let cleared = Cleared { range: range(number), neighbours: 0 };
        platform.with_cpu(|cpu| {
            let turn = queue.own.turn(cpu.unwrap()).unwrap();
            queue.push(&turn, cleared, || Some(WINDOW_NS), || now_ns).unwrap()
        })
    };
    // The clock is read for two of the first four; without a flush the next would be the seventh.
    (0..4).for_each(|number| assert_eq!(push_at(number, 100).1, None));
    let first = queue.begin_flush_of_all(&platform);
    // The first of the new segment is timed, and waits from then on.
    assert_eq!(push_at(4, 500).0, Pushed::Queued);
    queue.confirm_flush(first, 600);
    assert_eq!(queue.exposure(&platform, 900).1, 500);
    queue.confirm_flush(queue.begin_flush_of_all(&platform), 2_000);
    assert_eq!(queue.exposure(&platform, 9_000).1, 1_500);
    // In the middle of a segment the queue is as full as at its end.
    queue.reclaim(&platform, None, |_, _| ());
    (0..10).for_each(|number| assert_eq!(push_at(number, 9_000), (Pushed::Queued, None)));
    let _is_not_confirmed = queue.begin_flush_of_all(&platform);
    let queued = (10..QUEUE_ENTRIES).map(|number| push_at(number, 9_000));
    assert!({ queued }.all(|queued| queued == (Pushed::Queued, None)));
    assert_eq!(push_at(999, 9_000), (Pushed::Full, None));
}

/// Any CPU's flush makes room in a full queue.
#[test]
fn a_full_queue_needs_no_flush_of_its_own() {
    let platform = StdPlatform::with_cpus(1);
    let queue = per_cpu();
    (0..QUEUE_ENTRIES).for_each(|number| assert_eq!(push(&queue, &platform, true, number).1, None));
    queue.confirm_flush(queue.begin_flush(), 0);
    assert_eq!(push(&queue, &platform, true, 999), (Pushed::Queued, Some(range(0))));
}

/// No flush is needed where all entries are confirmed, even if the queue does not know of it yet.
#[test]
fn a_cpu_that_goes_takes_a_flush_where_something_waits() {
    let platform = StdPlatform::with_cpus(1);
    let queue = per_cpu();
    assert!(!queue.close_of(&platform, 0));
    assert_eq!(push(&queue, &platform, true, 0).0, FIRST);
    assert!(queue.close_of(&platform, 0));
    flush(&queue, &platform);
    assert!(!queue.close_of(&platform, 0));
}

#[test]
fn a_timer_that_was_lost_is_asked_for_again_once() {
    let platform = StdPlatform::with_cpus(1);
    let queue = per_cpu();
    let push = |number| push(&queue, &platform, true, number).0;
    assert_eq!([push(0), push(1), push(2)], [FIRST, Pushed::Queued, Pushed::Queued]);
    // The clock is not due for the next entry, so it would take the fast path otherwise.
    queue.end_timers();
    // Each queue asks, although another asks meanwhile.
    let other = |number| self::push(&queue, &platform, false, number).0;
    assert_eq!((other(9), other(10)), (FIRST, Pushed::Queued));
    assert_eq!((push(3), push(4)), (FIRST, Pushed::Queued));
}

/// A clock that panics leaves neither an entry nor a taken place behind.
#[test]
fn a_clock_that_panics_queues_nothing() {
    let platform = StdPlatform::with_cpus(1);
    let queue = per_cpu();
    let cleared = Cleared { range: range(1), neighbours: 0 };
    for _ in 0..2 * QUEUE_ENTRIES {
        let clock = || -> u64 { panic!("the clock") };
        let push = |cpu: Option<&LocalCpu<'_>>| {
            queue.push(&queue.own.turn(cpu.unwrap()).unwrap(), cleared, || Some(WINDOW_NS), clock)
        };
        let pushed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| platform.with_cpu(push)));
        assert!(pushed.is_err());
    }
    assert!(!queue.is_pending(&platform));
    assert_eq!(push(&queue, &platform, true, 2), (FIRST, None));
}

#[test]
fn a_cpu_has_a_queue_of_its_own_or_all_have_one() {
    let platform = StdPlatform::with_cpus(1);
    for (queue, own) in [(per_cpu(), 1), (FlushQueue::new(None, 1).unwrap(), 0)] {
        let _ = push(&queue, &platform, true, 1);
        flush(&queue, &platform);
        let mut back = 0;
        queue.reclaim(&platform, Some(0), |_, _| back += 1);
        assert_eq!(back, own);
        queue.reclaim(&platform, Some(7), |_, _| panic!("there is none"));
        queue.reclaim(&platform, None, |_, _| back += 1);
        assert_eq!(back, 1);
    }
}

/// A late confirmation of an early flush takes nothing back.
#[test]
fn flushes_may_be_confirmed_in_any_order() {
    let platform = StdPlatform::with_cpus(1);
    for cpu in [true, false] {
        let queue = per_cpu();
        let push = |number| push(&queue, &platform, cpu, number).1;
        let begin: [&dyn Fn() -> Flush; 2] =
            [&|| queue.begin_flush(), &|| queue.begin_flush_of_all(&platform)];
        for begin in begin {
            let early = begin();
            assert_eq!(push(1), None);
            let late = queue.begin_flush_of_all(&platform);
            queue.confirm_flush(late, 0);
            queue.confirm_flush(early, 0);
            assert_eq!((push(2), push(3)), (Some(range(1)), None));
            flush(&queue, &platform);
            queue.reclaim(&platform, None, |_, _| ());
        }
    }
}

/// A flush-all does not cover later entries, whenever it is confirmed, and however segments are closed in between.
#[test]
fn a_flush_of_all_queues_covers_nothing_that_comes_after_it_asked() {
    let platform = StdPlatform::with_cpus(1);
    for cpu in [true, false] {
        let queue = per_cpu();
        let push = |number| push(&queue, &platform, cpu, number).1;
        assert_eq!(push(0), None);
        let early = queue.begin_flush_of_all(&platform);
        assert_eq!(push(1), None);
        let late = queue.begin_flush_of_all(&platform);
        // Into the segment after the next.
        assert!((2..SEGMENT + 9).all(|number| push(number).is_none()));
        queue.confirm_flush(early, 0);
        let mut back = Vec::new();
        queue.reclaim(&platform, None, |_, range| back.push(range));
        assert_eq!(back, [range(0)]);
        queue.confirm_flush(late, 0);
        queue.reclaim(&platform, None, |_, range| back.push(range));
        assert_eq!(back, [range(0), range(1)]);
        assert!(queue.is_pending(&platform));
    }
}
