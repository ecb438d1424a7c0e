//! Traces: any bytes are one, or an error that can be printed. Every event is accounted for, every mapping ends once at the
//! most and on its own device, and how a trace is cut into chunks changes nothing.

use std::collections::HashMap;

use portcullis::domain::Policy;
use portcullis_trace::printable::is_plain;
use portcullis_trace::replay::{Mode, Options, Profile, replay};
use portcullis_trace::{Chunk, OpKind, ReadOptions, Summary, Trace, TraceError};

use crate::budget;
use crate::input::Input;

/// Reads `bytes` as a trace; the first of them are options.
pub fn run(bytes: &[u8]) {
    let (head, text) = bytes.split_at(bytes.len().min(2));
    let mut input = Input::new(head);
    let options = input.byte();
    let options = ReadOptions {
        strict: options & 3 == 1,
        device: (options & 12 == 4).then(|| "nvme".into()),
        limit: (options & 48 == 16).then_some(u64::from(options >> 6)),
    };
    budget::keep();
    let once = read(text, &options, usize::from(input.byte()) + 1);
    let again = read(text, &options, usize::MAX);
    match (once, again) {
        (Ok(once), Ok(again)) => assert_eq!(once, again, "chunks matter"),
        (Err(once), Err(again)) => assert_eq!(once.to_string(), again.to_string()),
        (once, again) => panic!("{once:?} in chunks, {again:?} as a whole"),
    }
    // One in some: a replay takes milliseconds before it begins.
    if bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)) & 63 == 0 {
        replayed(text, options);
    }
}

/// Replays `text` under a policy that maps and one that copies: it ends, with figures or an error that can be printed, within
/// the memory that there is.
fn replayed(text: &[u8], options: ReadOptions) {
    let Ok(mut trace) = Trace::from_bytes("fuzz", text, options) else { return };
    let policies = vec![Policy::LAZY.into(), Mode::Bounce];
    let profile = Profile::load("vtd").expect("it ships");
    match replay(&mut trace, &Options { policies, ..Options::new(profile) }, |_| ()) {
        Ok(report) => assert!(report.policies.iter().all(|policy| policy.violations == 0), "{report:#?}"),
        Err(error) => assert!(error.to_string().chars().all(is_plain), "{error:?}"),
    }
}

/// Live mappings by number, and what is counted: events, operations, bytes.
type Read = (Vec<u64>, u64, u64, u64);

fn read(text: &[u8], options: &ReadOptions, max_events: usize) -> Result<Read, TraceError> {
    let mut trace = Trace::from_bytes("fuzz", text, options.clone())?;
    let (mut chunk, mut live) = (Chunk::default(), HashMap::new());
    let (mut time, mut operations, mut bytes) = (0, 0, 0_u64);
    while trace.next_chunk(&mut chunk, max_events)? {
        for op in &chunk.ops {
            assert!(op.time_ns >= time, "time runs back");
            time = op.time_ns;
            operations += 1;
            match &op.kind {
                OpKind::Map { id, segments, .. } => {
                    let segments = chunk.segments_of(segments);
                    assert!(!segments.is_empty());
                    assert!(segments.iter().all(|s| s.len > 0 && s.phys + s.len <= 1 << 52));
                    bytes = segments.iter().fold(bytes, |sum, s| sum.wrapping_add(s.len));
                    assert!(live.insert(*id, op.device).is_none(), "number {id} given twice");
                }
                OpKind::Unmap { id } => assert_eq!(live.remove(id), Some(op.device)),
                OpKind::SyncForCpu { id, .. } | OpKind::SyncForDevice { id, .. } => {
                    assert_eq!(live.get(id), Some(&op.device));
                }
            }
        }
    }
    let summary: &Summary = trace.summary();
    assert_eq!(summary.accounted(), summary.events, "{summary:#?}");
    let mut live: Vec<u64> = live.into_keys().map(u64::from).collect();
    live.sort_unstable();
    Ok((live, summary.events, operations, bytes))
}
