//! The registration cache: what is held is reached, what is forgotten or evicted is not, and nothing beyond the limits.
//! And the heap, whose frames and buffers hold the bytes that are put there.
#![cfg(not(loom))]

mod failures;
mod heap;
mod kept;
mod limits;
mod model;
#[path = "../open/mod.rs"]
mod open;
mod panics;
#[path = "../../../portcullis/tests/played/mod.rs"]
mod played;
#[path = "../../../portcullis/tests/rig/mod.rs"]
mod rig;
mod steps;
#[path = "../../../portcullis/tests/stuck/mod.rs"]
mod stuck;
mod support;
mod threads;
