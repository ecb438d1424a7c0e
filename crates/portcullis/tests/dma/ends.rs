//! How mappings end together: batches, by type and by number, and rings.

mod batch;
mod bench;
mod contract;
mod lifecycle;
mod oracle;
mod queues;
mod ring;
mod strangers;
