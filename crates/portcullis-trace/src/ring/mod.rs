//! The kernel's ring buffers, as `per_cpu/cpuN/trace_pipe_raw` hands them out, to the text that the kernel would print.
//!
//! The kernel formats nothing: a recorder reads whole pages, and makes text of them when it has the time. [`Formats`] knows where the
//! fields of an event are (from tracefs's own `format` files) and writes an event as a line. [`Merge`] puts the CPUs' events in the
//! order of time.
//!
//! # Guarantees
//! No page makes this module panic, or take more memory than some times its size: what does not fit in a page is left out and counted
//! as lost. Pages have the byte order of this machine.

mod fields;
mod format;
mod merge;
mod page;

pub use format::{FormatError, Formats};
pub use merge::Merge;
pub use page::{Entry, Page};
