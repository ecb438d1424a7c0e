//! I/O page tables: one engine ([`PageTable`]) over the layouts of hardware formats ([`Format`]). A table is freed only
//! after every CPU and the hardware have stopped using it.
//!
//! Tables lie in [`Frames`](crate::platform::Frames) that the hardware reads while CPUs write them. Updates of disjoint
//! ranges take no lock: an entry is one atomic word, one compare-and-swap installs a missing table, and empty tables
//! are freed on demand ([`PageTable::reclaim`]).
//!
//! Read `format.rs`, `table.rs`, `walk.rs` (memory ordering) and `calls.rs` (map and unmap) first. `fast.rs` and
//! `near.rs` have the fast paths, `split.rs`, `replace.rs` and `reclaim.rs` the slow ones. `vtd.rs`, `x86.rs`,
//! `amd_v1.rs`, `arm.rs` and `riscv.rs` are layouts. This layer uses `addr`, `heap`, `sync`, `platform`, `percpu` and
//! `setup`.

mod amd_v1;
mod arm;
mod calls;
#[cfg(feature = "parts")]
mod entries;
mod error;
mod fast;
mod format;
mod map;
mod near;
mod place;
mod read;
mod reclaim;
mod replace;
mod riscv;
mod split;
mod table;
mod unmap;
mod vtd;
mod walk;
mod x86;

pub use amd_v1::AmdV1;
pub use arm::{ARM_MAIR, Arm};
pub use calls::Unmapped;
#[cfg(feature = "parts")]
pub use entries::Leaf;
pub use error::MapError;
pub use format::{Attributes, Format, Layout, Memory};
#[cfg(feature = "parts")]
pub use format::{Entry, LeafSize};
pub use riscv::Riscv;
pub use table::PageTable;
pub use vtd::VtdSecondStage;
pub use x86::X86FirstStage;
