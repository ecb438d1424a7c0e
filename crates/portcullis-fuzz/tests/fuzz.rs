//! The corpus of each target, and random changes of it: as many as `PORTCULLIS_FUZZ_RUNS` says.

use std::path::{Path, PathBuf};

#[path = "../../portcullis/tests/golden/mod.rs"]
mod golden;
mod seeds;

use portcullis_fuzz::api::{FORMATS, on_format};
use portcullis_fuzz::reached::counted;
use portcullis_fuzz::{TARGETS, Target};

/// The longest that changes make of it.
const MOST_BYTES: usize = 4096;

fn corpus(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target.name);
    let entries = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<_> = entries.map(|path| (path.clone(), std::fs::read(path).unwrap())).collect();
    all.sort();
    assert!(!all.is_empty(), "{} is empty", folder.display());
    all
}

fn changed(rng: &mut fastrand::Rng, corpus: &[(PathBuf, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = corpus[rng.usize(..corpus.len())].1.clone();
    for _ in 0..1 + rng.usize(..6) {
        let at = rng.usize(..=bytes.len());
        let to = at + rng.usize(..=(bytes.len() - at).min(32));
        match rng.u8(..6) {
            0 if at < bytes.len() => bytes[at] = rng.u8(..),
            1 if at < bytes.len() => bytes[at] ^= 1 << rng.u8(..8),
            2 => drop(bytes.drain(at..to)),
            3 => bytes.extend_from_within(at..to),
            4 => drop(bytes.splice(at..at, std::iter::repeat_with(|| rng.u8(..)).take(8))),
            _ => {
                let other = &corpus[rng.usize(..corpus.len())].1;
                let from = rng.usize(..=other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
        }
    }
    bytes.truncate(MOST_BYTES);
    bytes
}

/// Says which bytes it was where a target panics.
struct Told<'a>(&'a str, &'a [u8]);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let hex: String = self.1.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("target {}, bytes {hex}", self.0);
        }
    }
}

fn run(name: &str, usual: u64) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let corpus = corpus(target);
    for (path, bytes) in &corpus {
        let _told = Told(&path.to_string_lossy(), bytes);
        (target.run)(bytes);
    }
    let runs = std::env::var("PORTCULLIS_FUZZ_RUNS").map_or(usual, |runs| runs.parse().unwrap());
    let mut rng = fastrand::Rng::with_seed(0x706f_7274);
    for _ in 0..runs {
        let bytes = changed(&mut rng, &corpus);
        let _told = Told(name, &bytes);
        (target.run)(&bytes);
    }
}

#[test]
fn api() {
    run("api", 4_000);
}

/// What a format leads to by chance is tried on the others too.
#[test]
fn the_corpus_of_api_on_every_format() {
    let target = TARGETS.iter().find(|target| target.name == "api").unwrap();
    for (path, mut bytes) in corpus(target) {
        let Some(first) = bytes.first().copied() else { continue };
        for format in 0..FORMATS {
            bytes[0] = on_format(first, format);
            let _told = Told(&path.to_string_lossy(), &bytes);
            (target.run)(&bytes);
        }
    }
}

/// What the seeds come to. A seed that no longer does what it was written for, and a target that tries less of it, fail in no other test.
#[test]
fn the_seeds_reach_what_they_did() {
    let mut text = String::new();
    for target in TARGETS.iter().filter(|target| ["ring", "acpi", "units"].contains(&target.name)) {
        for (path, bytes) in corpus(target) {
            text += &format!("{}/{}\n", target.name, path.file_name().unwrap().to_str().unwrap());
            let reached = counted(|| (target.run)(&bytes));
            reached.iter().for_each(|(what, count)| text += &format!("{count:8} {what}\n"));
        }
    }
    golden::is_golden(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reached.txt"), &text);
}

#[test]
fn iova() {
    run("iova", 20_000);
}

#[test]
fn trace() {
    run("trace", 10_000);
}

#[test]
fn profile() {
    run("profile", 20_000);
}

#[test]
fn ring() {
    run("ring", 40_000);
}

#[test]
fn acpi() {
    run("acpi", 40_000);
}

#[test]
fn units() {
    run("units", 20_000);
}
