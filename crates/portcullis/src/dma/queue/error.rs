//! Errors of a queue, and what comes back with them.

use alloc::vec::Vec;

use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::dma::{DmaBuffer, Mapping};

/// A buffer was not mapped.
pub struct NotMapped<B> {
    /// The buffer, unchanged; `None` if the device [may reach it](DmaMapError::may_be_reached): it is leaked.
    pub buffer: Option<B>,
    /// Why.
    pub error: DmaMapError,
}

/// Not all mappings have ended: see [`Queue::unmap_all`](super::Queue::unmap_all).
pub struct NotAllUnmapped<B: DmaBuffer> {
    /// Unchanged mappings, which the driver can unmap again.
    pub mappings: Vec<Mapping<B>>,
    /// How many buffers wait for a successful [commit](super::Queue::commit).
    pub waiting: usize,
    /// How many buffers are leaked, as the device may reach them for ever.
    pub leaked: usize,
    /// The last reason.
    pub error: DmaUnmapError,
}

error_by_its_reason!([B] NotMapped<B>);

error_by_its_reason!([B: DmaBuffer] NotAllUnmapped<B>, |this, f| {
    let Self { mappings, waiting, leaked, error } = this;
    let kept = mappings.len();
    write!(f, "{error}; mappings as they were: {kept}; buffers that wait for a commit: {waiting}; leaked: {leaked}")
});
