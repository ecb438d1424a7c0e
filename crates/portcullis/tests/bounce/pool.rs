//! The dynamic bounce pools: data, protection to the byte, exhaustion, failing hardware, threads.
#![cfg(not(loom))]

#[cfg(not(watched))]
mod adaptive_ends;
#[cfg(not(watched))]
mod adaptive_fixes;
#[cfg(not(watched))]
mod adaptive_ring;
#[cfg(not(watched))]
mod costs;
#[cfg(not(watched))]
mod ends;
#[cfg(not(watched))]
mod failures;
#[cfg(not(watched))]
mod hostile;
#[cfg(not(watched))]
mod idle;
#[cfg(not(watched))]
mod integrity;
#[cfg(not(watched))]
mod model;
#[cfg(not(watched))]
mod panics;
mod play;
#[cfg(not(watched))]
mod singles;
mod steps;
#[cfg(not(watched))]
mod strangers;
pub mod support;
mod threads;
mod world;
