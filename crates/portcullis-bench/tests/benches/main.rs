//! The benches and what they measure beside: each runs, counts what it says, and leaves nothing behind.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../portcullis/tests/iova_model/mod.rs"]
mod iova_model;

mod bounce;
mod figures;
mod hole_tree;
mod hole_tree_oracle;
mod invalidation;
mod iova;
mod linux;
mod path;
mod pgtable;
mod runner;
#[path = "../../../portcullis/tests/said/mod.rs"]
mod said;
mod sentences;
mod team;
mod whole;
