//! Compressed traces give the same operations as plain ones, and broken ones are errors.

use std::io::Write;

use crate::common::{read, read_in, sample};
use flate2::Compression;
use flate2::write::GzEncoder;
use portcullis_trace::{Format, Input, ReadOptions, Trace, TraceError};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text).expect("writing to memory");
    encoder.finish().expect("writing to memory")
}

fn zstd(text: &[u8]) -> Vec<u8> {
    compress_to_vec(text, CompressionLevel::Fastest)
}

/// A skippable frame with `n` bytes in it.
fn skippable(n: u8) -> Vec<u8> {
    let mut frame = vec![0x5a, 0x2a, 0x4d, 0x18, n, 0, 0, 0];
    frame.extend(std::iter::repeat_n(0xee, usize::from(n)));
    frame
}

#[test]
fn every_packing_gives_the_same_operations() {
    let text = sample();
    let (plain, _) = read(&text);
    let (head, tail) = text.as_bytes().split_at(text.len() / 3);
    for (archive, format) in [
        (gzip(text.as_bytes()), Format::Gzip),
        ([gzip(head), gzip(tail)].concat(), Format::Gzip),
        (zstd(text.as_bytes()), Format::Zstd),
        (compress_to_vec(text.as_bytes(), CompressionLevel::Uncompressed), Format::Zstd),
        ([zstd(head), skippable(9), zstd(tail), skippable(0)].concat(), Format::Zstd),
        ([skippable(200), zstd(head), zstd(tail)].concat(), Format::Zstd),
    ] {
        assert_eq!(Input::from_bytes("x", &archive[..]).expect("memory").format(), format);
        let (packed, _) = read_in(&archive, ReadOptions::default(), 100).expect("a sound archive");
        assert_eq!(packed, plain);
    }
}

#[test]
fn a_cut_archive_is_an_error_at_every_length() {
    let text = sample();
    for archive in
        [gzip(text.as_bytes()), zstd(text.as_bytes()), [zstd(text.as_bytes()), skippable(200)].concat()]
    {
        for cut in (0..archive.len()).step_by(97).chain(archive.len() - 8..archive.len()) {
            let error = read_in(&archive[..cut], ReadOptions::default(), 100).expect_err("cut");
            match error {
                TraceError::TruncatedArchive { after_bytes, .. } => assert_eq!(after_bytes, cut as u64),
                // The rest is too short to be recognised as an archive.
                TraceError::Empty { .. } | TraceError::NotATrace { .. } => assert!(cut < 4, "{cut}"),
                other => panic!("cut at {cut}: {other}"),
            }
        }
    }
}

#[test]
fn a_damaged_archive_is_an_error() {
    let text = sample();
    let mut archive = zstd(text.as_bytes());
    let end = archive.len();
    let checksum = |archive: &[u8]| u32::from_le_bytes(archive[end - 4..].try_into().unwrap());
    let right = checksum(&archive);
    archive[end - 1] ^= 1;
    let error = read_in(&archive, ReadOptions::default(), 100).expect_err("the checksum is wrong");
    assert!(matches!(error, TraceError::CorruptArchive { .. }), "{error}");
    let stored = checksum(&archive);
    let expected = format!("the frame's checksum is {stored:#010x}, but its contents give {right:#010x}");
    assert!(error.to_string().ends_with(&expected), "{error}");
    let mut archive = gzip(text.as_bytes());
    let end = archive.len();
    archive[end - 6] ^= 1;
    let error = read_in(&archive, ReadOptions::default(), 100).expect_err("the checksum is wrong");
    assert!(error.to_string().starts_with("test: damaged gzip archive"), "{error}");
    let error = read_in(&[&zstd(text.as_bytes())[..], b"junk"].concat(), ReadOptions::default(), 100);
    assert!(matches!(error, Err(TraceError::CorruptArchive { .. })));
}

#[test]
fn progress_ends_at_the_total() {
    let archive = gzip(sample().as_bytes());
    let mut trace = Trace::from_bytes("x", &archive[..], ReadOptions::default()).expect("memory");
    let mut chunk = Default::default();
    while trace.next_chunk(&mut chunk, 10).expect("a sound archive") {}
    assert_eq!(trace.bytes_total(), Some(archive.len() as u64));
    assert_eq!(trace.bytes_read(), archive.len() as u64);
}

#[test]
fn a_missing_file_is_named() {
    let error = Trace::open("/nonexistent/a.trace", ReadOptions::default()).expect_err("no such file");
    assert!(error.to_string().starts_with("cannot read /nonexistent/a.trace: "), "{error}");
    let error = Trace::open("/", ReadOptions::default()).expect_err("a directory");
    assert!(matches!(error, TraceError::Directory { .. }), "{error}");
}
