//! The interface that drivers use, and how mappings end.
#![cfg_attr(watched, allow(dead_code, unused_imports, reason = "the tools run a part of the tests"))]

extern crate alloc;

#[path = "../common/mod.rs"]
mod common;
#[cfg(not(watched))]
#[path = "../dice/mod.rs"]
mod dice;
#[path = "../played/mod.rs"]
mod played;
#[path = "../queued/mod.rs"]
mod queued;
#[path = "../rig/mod.rs"]
mod rig;
#[path = "../stuck/mod.rs"]
mod stuck;
#[cfg(not(watched))]
#[path = "../transcript/mod.rs"]
mod transcript;

mod ends;
#[cfg(not(watched))]
mod examples;
#[cfg(not(watched))]
mod interface;
#[cfg(not(watched))]
mod kept;
mod mishaps;
#[cfg(not(watched))]
mod ops;
#[cfg(not(watched))]
mod parts;
mod queue;
#[cfg(not(watched))]
mod reach;
#[cfg(not(watched))]
mod transcripts;
