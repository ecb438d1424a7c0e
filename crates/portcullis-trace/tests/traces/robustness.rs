//! Hostile and broken input: no panic, bounded memory, nothing unaccounted for.

use crate::common::{read_in, sample};
use portcullis_trace::{Chunk, OpKind, ReadOptions, Trace, TraceError};
use proptest::prelude::*;

/// Reads anything; checks the invariants of the operations if it can be read.
pub(super) fn survives(bytes: &[u8], max_events: usize) {
    let Ok((ops, _)) = read_in(bytes, ReadOptions::default(), max_events) else { return };
    let mut live = std::collections::HashMap::new();
    let mut time = 0;
    for (op, segments) in ops {
        assert!(op.time_ns >= time, "time runs back");
        time = op.time_ns;
        match op.kind {
            OpKind::Map { id, .. } => {
                assert!(!segments.is_empty());
                assert!(segments.iter().all(|s| s.len > 0 && s.phys + s.len <= 1 << 52));
                let total: u64 = segments.iter().map(|s| s.len).sum();
                assert!(live.insert(id, (op.device, total)).is_none(), "number {id} given twice");
            }
            OpKind::Unmap { id } => assert_eq!(live.remove(&id).map(|(device, _)| device), Some(op.device)),
            OpKind::SyncForCpu { id, .. } | OpKind::SyncForDevice { id, .. } => {
                assert_eq!(live.get(&id).map(|&(device, _)| device), Some(op.device));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2000), magic in 0..4usize) {
        let heads: [&[u8]; 4] = [b"", &[0x1f, 0x8b, 8], &[0x28, 0xb5, 0x2f, 0xfd], &[0x50, 0x2a, 0x4d, 0x18]];
        survives(&[heads[magic], &bytes].concat(), 7);
    }

    #[test]
    fn mutated_lines(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 1..60)) {
        let mut bytes = sample().into_bytes();
        for (at, value, how) in edits {
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = value,
                1 => bytes[at] = b"0123456789abcdef {},=:[]\n"[usize::from(value) % 25],
                2 => { bytes.remove(at); }
                _ => bytes.insert(at, value),
            }
        }
        survives(&bytes, 16);
    }

    #[test]
    fn mutated_archives(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8), gzip: bool) {
        let text = sample();
        let mut bytes = if gzip {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            std::io::Write::write_all(&mut encoder, text.as_bytes()).expect("writing to memory");
            encoder.finish().expect("writing to memory")
        } else {
            ruzstd::encoding::compress_to_vec(text.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest)
        };
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        survives(&bytes, 100);
    }

    #[test]
    fn shuffled_lines(seed in prop::collection::vec(any::<prop::sample::Index>(), 300)) {
        let text = sample();
        let lines: Vec<&str> = text.lines().collect();
        let shuffled: String = seed.iter().map(|i| format!("{}\n", lines[i.index(lines.len())])).collect();
        survives(shuffled.as_bytes(), 16);
    }

    #[test]
    fn chunks_do_not_matter(size in 1..500usize) {
        let text = sample();
        let whole = read_in(text.as_bytes(), ReadOptions::default(), usize::MAX).expect("a trace");
        let parts = read_in(text.as_bytes(), ReadOptions::default(), size).expect("a trace");
        prop_assert_eq!(whole.0, parts.0);
    }
}

#[test]
fn an_overlong_line_is_passed_over() {
    let mut text = sample().into_bytes();
    let (_, before) = read_in(&text, ReadOptions::default(), 100).expect("a trace");
    text.extend(std::iter::repeat_n(b'[', 5 << 20));
    text.push(b'\n');
    let good = b"t-1 [000] ..... 99.0: sched_switch: x";
    text.extend_from_slice(good);
    let (_, after) = read_in(&text, ReadOptions::default(), 100).expect("a trace");
    assert_eq!(after.events, before.events + 1);
    assert_eq!((after.warnings, after.unrecognised_lines), (1, 1));
    assert_eq!(after.kept_warnings[0].found, "5,242,880 bytes");
    assert_eq!(after.text_bytes, text.len() as u64 + 1, "each line and its end");
}

/// A chunk of large lists ends early, whatever its requested size.
#[test]
fn a_chunk_holds_a_bounded_number_of_pieces() {
    let phys: Vec<String> = (0..128).map(|page| format!("{:#x}", page * 0x2000)).collect();
    let event = format!(
        "t-1 [000] ..... 1.0: dma_map_sg: d dir=TO_DEVICE nents=128/128 ents=1/1 dma_addrs={{0x1000}} sizes={{0x80000}} \
         phys_addrs={{{}}} attrs=\n",
        phys.join(",")
    );
    let text = event.repeat(10_000);
    let mut trace = Trace::from_bytes("large", text.as_bytes(), ReadOptions::default()).expect("memory");
    let (mut chunk, mut chunks) = (Chunk::default(), 0);
    while trace.next_chunk(&mut chunk, usize::MAX).expect("a trace") {
        assert!(chunk.segments.len() <= (1 << 20) + 128, "{} pieces", chunk.segments.len());
        chunks += 1;
    }
    assert_eq!((chunks, trace.summary().maps), (2, 10_000));
}

#[test]
fn what_is_not_a_trace() {
    let fails = |text: &[u8]| read_in(text, ReadOptions::default(), 10).expect_err("no trace");
    assert!(matches!(fails(b""), TraceError::Empty { lines: 0, .. }));
    assert!(matches!(fails(b"# tracer: nop\n\n"), TraceError::Empty { lines: 2, .. }));
    let error = fails(b"# x\n\x7fELF\x02\x01\n");
    assert_eq!(
        error.to_string(),
        "test is not a trace: no line is an event (\"TASK-PID [CPU] TIME: EVENT: ...\"), and line 2 is \
         \"\\u{7f}ELF\\u{2}\\u{1}\". Expected is the text of Linux's tracefs, `perf script` or `trace-cmd report`, plain, gzip \
         or zstd: docs/replay.md#recording-a-trace says how to record it"
    );
}
