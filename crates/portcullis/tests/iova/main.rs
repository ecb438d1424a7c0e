//! Spaces of I/O virtual addresses, and what they are made of.
#![cfg_attr(watched, allow(dead_code, unused_imports, reason = "the tools run a part of the tests"))]

#[path = "../chosen/mod.rs"]
mod chosen;
#[cfg(not(watched))]
#[path = "../iova_model/mod.rs"]
mod iova_model;

#[cfg(not(watched))]
mod arena;
#[cfg(not(watched))]
mod bitmap;
#[cfg(not(watched))]
mod bitmap_oracle;
#[cfg(not(watched))]
mod borders;
#[cfg(not(watched))]
mod failures;
#[cfg(not(watched))]
mod limits;
#[cfg(not(watched))]
mod platforms;
mod space;
#[cfg(not(watched))]
mod space_oracle;
