//! I/O page tables: one engine ([`PageTable`]) over a hardware format's layout ([`vtd`]).
//!
//! Tables live in [`Frames`](crate::platform::Frames) that the hardware reads while CPUs write them. Updates
//! of disjoint ranges take no lock: an entry is one atomic word, a missing table is installed by one
//! compare-and-swap, and tables are freed only with the whole [`PageTable`], so that a walk never meets a
//! freed one.

mod table;
pub mod vtd;
mod walk;

pub use table::{MapError, PageTable, TableError, Unmapped};
