//! How mappings end together: batches, by type and by number, and rings.

mod batch;
mod bench;
#[cfg(not(watched))]
mod contract;
#[cfg(not(watched))]
mod lifecycle;
#[cfg(not(watched))]
mod oracle;
#[cfg(not(watched))]
mod pieces;
mod queues;
mod ring;
mod strangers;
