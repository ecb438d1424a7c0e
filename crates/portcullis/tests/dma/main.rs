//! The interface that drivers use, and how mappings end.

extern crate alloc;

#[path = "../common/mod.rs"]
mod common;
#[path = "../played/mod.rs"]
mod played;
#[path = "../queued/mod.rs"]
mod queued;
#[path = "../rig/mod.rs"]
mod rig;
#[path = "../stuck/mod.rs"]
mod stuck;

mod ends;
mod examples;
mod interface;
mod kept;
mod mishaps;
mod queue;
