//! DMA traces: reads recordings of Linux and turns them into operations that can be replayed.
//!
//! A trace is the text of `/sys/kernel/tracing/trace` with the `dma:*` and `iommu:*` events enabled, plain or compressed. [`Trace`] reads
//! it front to back and returns [`Chunk`]s of [`Op`]s, in which every unmap names its map; [`Summary`] accounts for every event.
//!
//! # Guarantees
//! No input makes this crate panic or use unbounded memory for one line: text that it cannot parse becomes a [`Warning`] with its line
//! number, or a [`TraceError`] that names the file. Every event falls into exactly one category of the summary.
//!
//! # Cost
//! One pass. Memory grows with the number of concurrent mappings and of distinct addresses, not with the length of the file. Nothing is
//! allocated per line in the steady state.
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
pub use summary::{Large, Summary};
pub use trace::{ReadOptions, Trace};
