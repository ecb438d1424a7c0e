//! Both kinds of bounce buffers, and what a CPU lends to them.
#![cfg_attr(watched, allow(dead_code, unused_imports, reason = "the tools run a part of the tests"))]

#[path = "../chosen/mod.rs"]
mod chosen;
#[path = "../dice/mod.rs"]
mod dice;
#[path = "../manual/mod.rs"]
mod manual;
#[path = "../played/mod.rs"]
mod played;
#[path = "../rig/mod.rs"]
mod rig;

#[cfg(not(watched))]
mod lends;
mod pool;
mod swiotlb;
