//! The registration cache: held ranges are reached, forgotten or evicted ones are not, and nothing exceeds the limits. And the heap, whose
//! frames and buffers hold their bytes.
#![cfg(not(loom))]
#![cfg_attr(watched, allow(dead_code, unused_imports, reason = "the tools run a part of the tests"))]

#[cfg(not(watched))]
#[path = "../../../portcullis/tests/dice/mod.rs"]
mod dice;
#[cfg(not(watched))]
mod failures;
#[cfg(not(watched))]
#[path = "../../../portcullis/tests/golden/mod.rs"]
mod golden;
#[cfg(not(watched))]
mod heap;
#[cfg(not(watched))]
mod kept;
#[cfg(not(watched))]
mod limits;
#[cfg(not(watched))]
mod model;
#[path = "../open/mod.rs"]
mod open;
#[cfg(not(watched))]
mod panics;
#[path = "../../../portcullis/tests/played/mod.rs"]
mod played;
#[path = "../../../portcullis/tests/rig/mod.rs"]
mod rig;
#[cfg(all(target_os = "linux", not(watched)))]
#[path = "../../../portcullis/tests/said/mod.rs"]
mod said;
#[cfg(all(target_os = "linux", not(watched)))]
mod sentences;
mod shared;
#[cfg(not(watched))]
mod steps;
#[path = "../../../portcullis/tests/stuck/mod.rs"]
mod stuck;
mod support;
mod threads;
#[cfg(not(watched))]
mod whole;
