//! How mappings end together: batches, by type and by number, and rings.

mod batch;
mod bench;
mod contract;
mod lifecycle;
mod oracle;
#[path = "../queued/mod.rs"]
mod queued;
mod queues;
#[path = "../rig/mod.rs"]
mod rig;
mod ring;
mod strangers;
