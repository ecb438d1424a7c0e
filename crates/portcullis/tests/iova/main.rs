//! Spaces of I/O virtual addresses, and what they are made of.

#[path = "../chosen/mod.rs"]
mod chosen;
#[path = "../iova_model/mod.rs"]
mod iova_model;

mod arena;
mod bitmap;
mod bitmap_oracle;
mod borders;
mod failures;
mod limits;
mod platforms;
mod space;
