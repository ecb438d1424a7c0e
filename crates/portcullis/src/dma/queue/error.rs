//! What comes back of what a queue could not do.

use alloc::vec::Vec;

use crate::bounce::error::{DmaMapError, DmaUnmapError};
use crate::dma::{DmaBuffer, Mapping};

/// A buffer that was not mapped, and why.
pub struct NotMapped<B> {
    /// The buffer, untouched; `None` where the device [may reach it](DmaMapError::may_be_reached): it is leaked.
    pub buffer: Option<B>,
    /// Why.
    pub error: DmaMapError,
}

/// Mappings of which not all have ended, and why: see [`Queue::unmap_all`](super::Queue::unmap_all).
pub struct NotAllUnmapped<B: DmaBuffer> {
    /// Mappings that are as they were: the driver can unmap them again.
    pub mappings: Vec<Mapping<B>>,
    /// How many buffers wait for a [commit](super::Queue::commit) that succeeds.
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
