//! How mappings end together: batches, by type and by number, and rings.

mod batch;
mod bench;
mod oracle;
mod ring;
mod steps;
