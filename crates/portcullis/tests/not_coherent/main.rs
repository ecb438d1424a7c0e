//! Devices that are not coherent, over a model of a CPU's cache: what the device wrote the CPU
//! finds, what the CPU wrote the device finds, and what lies beside either stays what it was.

#![allow(unsafe_code, reason = "the traits' signatures, and maps by number; all of the memory is simulated")]

mod cache;
#[path = "../dice/mod.rs"]
mod dice;
mod each;
mod owned;
mod parts;
mod random;
mod refused;
mod world;
