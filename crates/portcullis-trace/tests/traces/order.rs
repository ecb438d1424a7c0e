//! Events are read in timestamp order, even if the file has another.

use proptest::prelude::*;

use crate::common::{Played, read, read_in, trace};
use portcullis_trace::{Chunk, OpKind, ReadOptions, Trace, TraceError};

fn map(number: u64) -> String {
    format!("dma_map_page: nvme dir=TO_DEVICE dma_addr=1000 size={number} phys_addr=1000 attrs=")
}

fn unmap(number: u64) -> String {
    format!("dma_unmap_page: nvme dir=TO_DEVICE dma_addr=1000 size={number} attrs=")
}

/// Each item is CPU, microseconds and the number of a map.
fn maps(events: &[(u32, u64, u64)]) -> String {
    let events: Vec<_> = events.iter().map(|&(cpu, us, number)| (cpu, us, map(number))).collect();
    trace(&events.iter().map(|(cpu, us, event)| (*cpu, *us, event.as_str())).collect::<Vec<_>>())
}

/// The maps' numbers, and their microseconds after those that [`trace`] begins with.
fn order(ops: &[Played]) -> Vec<(u64, u64)> {
    let of = |(op, segments): &Played| (segments[0].len, (op.time_ns - 38_000_000_000) / 1000);
    ops.iter().map(of).collect()
}

#[test]
fn events_of_several_cpus_are_merged_by_time() {
    // The unmap stands above the map that it ends.
    let (first, last) = (map(512), unmap(512));
    let (ops, summary) = read(&trace(&[(1, 900, &last), (0, 300, &first), (2, 5000, "sched_switch: x")]));
    assert!(matches!((&ops[0].0.kind, &ops[1].0.kind), (OpKind::Map { .. }, OpKind::Unmap { .. })));
    assert_eq!((ops[0].0.line, ops[1].0.line), (4, 3), "what a line is called does not change");
    assert_eq!((summary.moved_events, summary.unpaired.total(), summary.warnings), (1, 0, 0));
    // As far as a millisecond, and no further than by time.
    let (ops, summary) = read(&maps(&[(0, 5, 1), (1, 1005, 2), (0, 5, 3), (2, 5, 4), (0, 900, 5)]));
    assert_eq!(order(&ops), [(1, 5), (3, 5), (4, 5), (5, 900), (2, 1005)]);
    assert_eq!(summary.moved_events, 3);
}

#[test]
fn the_events_of_one_cpu_and_of_one_time_stay_in_the_file_s_order() {
    let (ops, summary) = read(&maps(&[(0, 5, 1), (1, 3, 2), (1, 4, 3), (0, 5, 4), (2, 4, 5)]));
    assert_eq!(order(&ops), [(2, 3), (3, 4), (5, 4), (1, 5), (4, 5)]);
    assert_eq!((summary.moved_events, summary.warnings), (3, 0));
    // A clock that runs back is warned of, once for each CPU. Its events do not overtake each other.
    let (ops, summary) = read(&maps(&[(0, 5, 1), (0, 3, 2), (1, 4, 3), (0, 2, 4)]));
    assert_eq!(order(&ops), [(3, 4), (1, 5), (2, 5), (4, 5)]);
    assert_eq!((summary.moved_events, summary.warnings), (1, 1));
}

#[test]
fn what_is_no_event_stays_behind_the_event_above_it() {
    let text = trace(&[(0, 500, &unmap(1)), (1, 200, &unmap(2))])
        + "CPU:1 [LOST 3 EVENTS]\nDear Sir,\n"
        + &trace(&[(1, 300, &unmap(3)), (2, 400, &unmap(4))]);
    let (_, summary) = read(&text);
    assert_eq!((summary.unpaired.before_recording, summary.unpaired.after_loss), (1, 3));
    assert_eq!((summary.kept_warnings[0].line, summary.moved_events), (6, 3));
}

#[test]
fn what_cannot_be_merged_is_refused_behind_what_can_be_read() {
    let text = maps(&[(0, 1, 1), (0, 900_000, 2), (1, 2, 3)]);
    let mut trace = Trace::from_bytes("x", text.as_bytes(), ReadOptions::default()).unwrap();
    let mut chunk = Chunk::default();
    let error = trace.next_chunk(&mut chunk, 10).unwrap_err();
    assert!(
        matches!(error, TraceError::Disorder { line: 5, cpu: 1, before: 0, back_ns: 899_998_000, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("line 5: an event of CPU 1 is 899.998 ms older"), "{error}");
    assert_eq!((chunk.ops.len(), trace.summary().events), (2, 2));
    let fails = |events: &[(u32, u64, u64)]| {
        read_in(maps(events).as_bytes(), ReadOptions::default(), 10).is_err_and(|error| match error {
            TraceError::Disorder { back_ns, .. } => back_ns == 1_001_000,
            _ => false,
        })
    };
    assert!(fails(&[(0, 1001, 1), (1, 0, 2)]) && !fails(&[(0, 1001, 1), (1, 1, 2)]));
    // An event that cannot be read has its place, too.
    let unreadable = maps(&[(0, 2000, 1)]) + &crate::common::trace(&[(1, 2, "map: x")]);
    assert!(matches!(
        read_in(unreadable.as_bytes(), ReadOptions::default(), 10),
        Err(TraceError::Disorder { .. })
    ));
}

/// More lines than the reader keeps within a millisecond: they go on, and what should have come before them is refused.
#[test]
fn what_waits_is_bounded() {
    let mut text = maps(&[(0, 10, 1)]).repeat(200_000);
    assert_eq!(read(&text).1.maps, 200_000);
    text += &maps(&[(0, 11, 2), (1, 10, 3)]);
    assert_eq!(read(&text).1.moved_events, 1);
    text += &maps(&[(1, 10, 3), (2, 9, 4)]);
    let error = read_in(text.as_bytes(), ReadOptions::default(), 1000).unwrap_err();
    assert!(matches!(error, TraceError::Disorder { cpu: 2, before: 0, back_ns: 2000, .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_order_is_that_of_a_stable_sort(
        mut events in prop::collection::vec((0..4000_u64, 0..=1000_u64), 1..60),
        limit in 1..60_usize,
    ) {
        // Each is on a CPU of its own, and as late as it may be.
        events.sort_by_key(|&(time, late)| time + late);
        let file: Vec<_> = events.iter().enumerate().map(|(n, &(time, _))| (n as u32, time, n as u64 + 1)).collect();
        let mut sorted: Vec<_> = file.iter().map(|&(_, time, number)| (number, time)).collect();
        sorted.sort_by_key(|&(_, time)| time);
        let text = maps(&file);
        let (ops, summary) = read(&text);
        prop_assert_eq!(order(&ops), &sorted[..]);
        let mut latest = 0;
        let late = file.iter().filter(|&&(_, time, _)| {
            latest = time.max(latest);
            time < latest
        });
        prop_assert_eq!(summary.moved_events, late.count() as u64);
        // A limit is one of that order.
        let limited = ReadOptions { limit: Some(limit as u64), ..ReadOptions::default() };
        let (ops, _) = read_in(text.as_bytes(), limited, 7).unwrap();
        prop_assert_eq!(order(&ops), &sorted[..limit.min(sorted.len())]);
    }
}
