//! Page tables: the engine, the formats, and walkers that others wrote.

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
mod formats;
mod independent;
mod vtd;
mod walker;
