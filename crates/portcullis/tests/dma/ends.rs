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
#[cfg(not(watched))]
mod quick;
mod ring;
mod strangers;
mod tokens;
#[cfg(not(watched))]
mod torn;
