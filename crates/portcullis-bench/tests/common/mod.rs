//! What the tests of all benchmarks share.

// Each test binary uses its part.
#![allow(dead_code)]

use std::sync::{Mutex, PoisonError};

use portcullis_bench::request::Request;
use portcullis_bench::runner::Options;

/// Everything there is, on a tiny scale.
pub fn request() -> Request {
    Request {
        workloads: Vec::new(),
        subjects: Vec::new(),
        threads: Vec::new(),
        rival: None,
        options: Options::tiny(),
    }
}

/// Subjects, as a request names them.
pub fn subjects(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

/// Runs `f` with no other test's threads on the cores: those of two would spin, waiting for each other.
pub fn with_all_cores<R>(f: impl FnOnce() -> R) -> R {
    static CORES: Mutex<()> = Mutex::new(());
    let _mine = CORES.lock().unwrap_or_else(PoisonError::into_inner);
    f()
}

/// Threads that this machine runs at once.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
