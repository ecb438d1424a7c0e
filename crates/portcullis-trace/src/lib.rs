//! DMA traces: reading what Linux recorded and turning it into operations that can be replayed.
//!
//! A trace is the text of `/sys/kernel/tracing/trace` with the `dma:*` and `iommu:*` events switched on, plain or
//! compressed. [`Trace`] reads it front to back and hands out [`Chunk`]s of [`Op`]s, in which every unmap names
//! the map it ends; [`Summary`] says what became of every single event.
//!
//! # Guarantees
//! No input makes this crate panic or use memory without bound for one line: what cannot be understood becomes a
//! [`Warning`] with its line number, or a [`TraceError`] that names the file. Every event falls into exactly one
//! category of the summary.
//!
//! # Cost
//! One pass. Memory grows with the number of mappings alive at once and of distinct addresses seen, not with the
//! length of the file. Nothing is allocated per line in the steady state.
#![deny(unsafe_code)]

pub mod anonymize;
pub mod budget;
pub mod error;
pub mod event;
pub mod figures;
pub mod input;
pub mod measured;
pub mod pair;
pub mod parse;
pub mod printable;
pub mod reader;
pub mod recorded;
pub mod replay;
pub mod ring;
mod stretches;
pub mod summary;
mod trace;

pub use error::{TraceError, Warning};
pub use input::{Format, Input};
pub use measured::Measured;
pub use pair::{Chunk, DIRECT_DEVICE, DeviceId, MapId, Op, OpKind, Origin, Segment, is_named};
pub use printable::Printable;
pub use recorded::{Era, Recorded};
pub use summary::Summary;
pub use trace::{ReadOptions, Trace};
