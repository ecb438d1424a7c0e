//! The registration cache: what is held is reached, what is forgotten or evicted is not, and nothing beyond the limits.
#![cfg(not(loom))]

mod failures;
mod limits;
mod model;
mod panics;

#[path = "../rig/mod.rs"]
mod rig;
mod steps;
mod support;
mod threads;
