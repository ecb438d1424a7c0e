//! Shared by tests: reading a text to its end, and replaying it.
#![allow(dead_code, reason = "each test program uses its own part")]

use std::path::{Path, PathBuf};

use portcullis_trace::replay::{Mode, Options, PolicyReport, Report, replay};
use portcullis_trace::{Chunk, Op, OpKind, ReadOptions, Segment, Summary, Trace, TraceError};

/// The trace that ships with the command.
pub const SHIPPED: &[u8] = include_bytes!("../../../portcullis-cli/traces/mixed-nvme-e1000e.trace.zst");

/// Replays `text`.
pub fn run(name: &str, text: &[u8], options: &Options) -> Report {
    let mut trace = Trace::from_bytes(name, text, ReadOptions::default()).unwrap();
    let report = replay(&mut trace, options, |_| ()).unwrap();
    assert_eq!(trace.summary().accounted(), trace.summary().events, "every event has its place");
    report
}

pub fn policy<'a>(report: &'a Report, name: &str) -> &'a PolicyReport {
    report.policies.iter().find(|policy| policy.policy == name).unwrap()
}

/// The traces in the folder of `PORTCULLIS_TRACES`, in order; prints a note and returns `None` without it.
pub fn traces() -> Option<Vec<PathBuf>> {
    let Some(folder) = std::env::var_os("PORTCULLIS_TRACES") else {
        println!("skipped: PORTCULLIS_TRACES names no folder with traces");
        return None;
    };
    let entries = Path::new(&folder).read_dir().unwrap().map(|entry| entry.unwrap().path());
    let is_trace = |path: &PathBuf| path.to_string_lossy().contains(".trace");
    let mut paths: Vec<_> = entries.filter(is_trace).collect();
    paths.sort();
    assert!(!paths.is_empty(), "no trace in {}", Path::new(&folder).display());
    Some(paths)
}

/// An operation with its segments, independent of the chunk it came in.
pub type Played = (Op, Vec<Segment>);

/// Reads `bytes` in chunks of `max_events`.
pub fn read_in(
    bytes: &[u8],
    options: ReadOptions,
    max_events: usize,
) -> Result<(Vec<Played>, Summary), TraceError> {
    let mut trace = Trace::from_bytes("test", bytes, options)?;
    let mut chunk = Chunk::default();
    let mut ops = Vec::new();
    while trace.next_chunk(&mut chunk, max_events)? {
        for op in &chunk.ops {
            let mut op = op.clone();
            let mut segments = Vec::new();
            if let OpKind::Map { segments: range, .. } = &mut op.kind {
                segments.extend_from_slice(chunk.segments_of(range));
                *range = 0..segments.len() as u32;
            }
            ops.push((op, segments));
        }
    }
    assert!(!trace.next_chunk(&mut chunk, 1)?, "an ended trace stays ended");
    let summary = trace.summary().clone();
    assert!(
        summary.accounted() == summary.events,
        "{} of {} events accounted for: {summary:#?}",
        summary.accounted(),
        summary.events
    );
    Ok((ops, summary))
}

/// Reads `text` with the usual options; it must be readable.
pub fn read(text: &str) -> (Vec<Played>, Summary) {
    read_in(text.as_bytes(), ReadOptions::default(), 1000).expect("a readable trace")
}

/// Lines with a prefix in front: each item is CPU, microseconds and event.
pub fn trace(events: &[(u32, u64, &str)]) -> String {
    let mut text = String::from("# tracer: nop\n#\n");
    for (cpu, micros, event) in events {
        text += &format!("  fio-350     [{cpu:03}] d.h1.    38.{micros:06}: {event}\n");
    }
    text
}

/// As [`trace`], all on CPU 0 and a microsecond apart.
pub fn on_cpu0(events: &[&str]) -> String {
    let timed: Vec<_> = events.iter().enumerate().map(|(i, &event)| (0, i as u64, event)).collect();
    trace(&timed)
}

/// A short real-looking trace with something of everything.
pub fn sample() -> String {
    let mut events = Vec::new();
    for i in 0..40u64 {
        let (iova, phys) = (0xff00_0000 + i * 0x10000, 0x1_1300_0000 + i * 0x20000);
        events.push(format!(
            "map: IOMMU: iova=0x{iova:016x} - 0x{:016x} paddr=0x{phys:016x} size=4096",
            iova + 4096
        ));
        events.push(format!(
            "map: IOMMU: iova=0x{:016x} - 0x{:016x} paddr=0x{:016x} size=8192",
            iova + 4096,
            iova + 12288,
            phys + 0x8000
        ));
        events.push(format!(
            "dma_map_sg: 0000:00:03.0 dir=TO_DEVICE nents=2/2 ents=1/1 dma_addrs={{{iova:#x}}} sizes={{0x3000}} \
             phys_addrs={{{phys:#x},{:#x}}} attrs=NO_WARN",
            phys + 0x8000
        ));
        events.push(format!(
            "dma_map_page: 0000:00:05.0 dir=FROM_DEVICE dma_addr={:x} size=2048 phys_addr={phys:x} attrs=",
            iova + 0x8000
        ));
        events.push(format!(
            "dma_sync_single_for_cpu: 0000:00:05.0 dir=FROM_DEVICE dma_addr={:x} size=64",
            iova + 0x80c0
        ));
        if i % 3 != 0 {
            events.push(format!(
                "dma_unmap_page: 0000:00:05.0 dir=FROM_DEVICE dma_addr={:x} size=2048 attrs=",
                iova + 0x8000
            ));
        }
        events.push(format!(
            "dma_unmap_sg: 0000:00:03.0 dir=TO_DEVICE phys_addrs={{{phys:#x},{:#x}}} attrs=",
            phys + 0x8000
        ));
        events.push(format!(
            "unmap: IOMMU: iova=0x{iova:016x} - 0x{:016x} size=12288 unmapped_size=12288",
            iova + 12288
        ));
        events.push("qi_submit: iotlb_inv dmar0: 0x600f2 0x1 0x0 0x0".to_owned());
        events.push("sched_switch: prev_comm=a [0] ==> next_comm=b".to_owned());
    }
    let events: Vec<&str> = events.iter().map(String::as_str).collect();
    on_cpu0(&events)
}

pub fn replayed_modes() -> Vec<Mode> {
    Mode::ALL.into_iter().filter(|mode| mode.is_replayed()).collect()
}
