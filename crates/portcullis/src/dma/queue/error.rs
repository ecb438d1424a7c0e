//! Errors of a queue, with the buffers and mappings that come back.

use alloc::vec::Vec;

use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::dma::{DmaBuffer, Mapping};

/// A buffer that was not mapped, and why.
pub struct NotMapped<B> {
    /// The unchanged buffer; `None` if the device [may reach it](DmaMapError::may_be_reached): it is leaked.
    pub buffer: Option<B>,
    /// Why.
    pub error: DmaMapError,
}

/// Not all mappings have ended: see [`Queue::unmap_all`](super::Queue::unmap_all).
pub struct NotAllUnmapped<B: DmaBuffer> {
    /// The mappings that are still open, for another try.
    pub mappings: Vec<Mapping<B>>,
    /// The number of buffers that wait for a successful [commit](super::Queue::commit).
    pub waiting: usize,
    /// The number of leaked buffers, which the device may reach for ever.
    pub leaked: usize,
    /// The last error.
    pub error: DmaUnmapError,
}

error_by_its_reason!([B] NotMapped<B>);

error_by_its_reason!([B: DmaBuffer] NotAllUnmapped<B>, |this, f| {
    let Self { mappings, waiting, leaked, error } = this;
    let kept = mappings.len();
    write!(f, "{error}; mappings as they were: {kept}; buffers that wait for a commit: {waiting}; leaked: {leaked}")
});
