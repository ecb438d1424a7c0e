//! The dynamic bounce pools: data, protection to the byte, exhaustion, failing hardware, threads.
#![cfg(not(loom))]

mod adaptive;
#[path = "../chosen/mod.rs"]
mod chosen;
mod ends;
mod failures;
mod hostile;
mod model;
mod steps;
mod support;
mod threads;
