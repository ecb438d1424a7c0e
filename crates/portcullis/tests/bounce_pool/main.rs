//! The dynamic bounce pools: data, protection to the byte, exhaustion, failing hardware, threads.
#![cfg(not(loom))]

mod adaptive;
#[path = "../chosen/mod.rs"]
mod chosen;
#[path = "../dice/mod.rs"]
mod dice;
mod ends;
mod failures;
mod hostile;
mod idle;
mod integrity;
mod model;
mod play;
mod steps;
mod support;
mod threads;
mod world;
