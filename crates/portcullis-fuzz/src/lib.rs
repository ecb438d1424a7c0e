//! What the fuzzers do with their bytes. Each [`Target`] is a function that any bytes may be given to, and that panics
//! where a promise of the library is broken.
//!
//! `tests/fuzz.rs` replays the corpus of each target, and changes it at random, as part of the tests; the programs under
//! `fuzz/` let libFuzzer look for bytes that reach more of the code. `CONTRIBUTING.md` says how.

pub mod api;
mod budget;
pub mod hw;
mod input;
pub mod iova;
pub mod profile;
pub mod reached;
pub mod ring;
pub mod trace;

/// A fuzzer.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, as that of the program and of the folder with its corpus.
    pub name: &'static str,
    /// What it does with its bytes.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: [Target; 7] = [
    Target { name: "api", run: api::run },
    Target { name: "iova", run: iova::run },
    Target { name: "trace", run: trace::run },
    Target { name: "profile", run: profile::run },
    Target { name: "ring", run: ring::run },
    Target { name: "acpi", run: hw::acpi::run },
    Target { name: "units", run: hw::units::run },
];
