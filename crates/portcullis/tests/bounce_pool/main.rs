//! The dynamic bounce pools: data, protection to the byte, exhaustion, failing hardware, threads.
#![cfg(not(loom))]

mod adaptive_fixes;
mod adaptive_ring;
#[path = "../chosen/mod.rs"]
mod chosen;
mod costs;
#[path = "../dice/mod.rs"]
mod dice;
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
mod support;
mod threads;
mod world;
