//! The dynamic bounce pools: data, protection to the byte, exhaustion, failing hardware, threads.
#![cfg(not(loom))]

mod adaptive_ends;
mod adaptive_fixes;
mod adaptive_ring;
mod costs;
mod ends;
mod failures;
mod hostile;
mod idle;
mod integrity;
mod model;
mod play;
mod singles;
mod steps;
mod strangers;
pub mod support;
mod threads;
mod world;
