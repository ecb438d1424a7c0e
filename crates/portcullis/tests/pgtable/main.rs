//! Page tables: the engine, the formats, and walkers that others wrote. Our own walkers are in `tests/walker`.
#![cfg_attr(watched, allow(dead_code, unused_imports, reason = "the tools run a part of the tests"))]

#[path = "../common/mod.rs"]
mod common;
#[path = "../dice/mod.rs"]
mod dice;
#[macro_use]
#[path = "../common/inner_format.rs"]
mod inner_format;
#[path = "../played/mod.rs"]
mod played;

mod engine;
#[cfg(not(watched))]
mod formats;
#[cfg(not(watched))]
mod independent;
