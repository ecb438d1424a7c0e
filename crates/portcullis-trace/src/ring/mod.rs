//! The kernel's ring buffers, from `per_cpu/cpuN/trace_pipe_raw`, to the text that the kernel would print.
//!
//! The kernel formats nothing: a recorder reads whole pages, and formats them later. [`Formats`] knows the layout of events (from tracefs's
//! own `format` files) and writes an event as a line. [`Merge`] sorts the CPUs' events by timestamp.
//!
//! # Guarantees
//! No page makes this module panic, or take more memory than a few times its size: it drops what does not fit in a page, and counts it as
//! lost. Pages have this machine's byte order.

mod fields;
mod format;
mod merge;
mod page;

pub use format::{FormatError, Formats};
pub use merge::Merge;
pub use page::{Entry, Page};
