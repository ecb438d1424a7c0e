//! What every subject does: hand out ranges of pages and take them back.

use std::sync::Arc;

use super::workload::Space;
use crate::runner::Failure;

/// Pages `[first, first + pages)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Pages {
    pub first: u64,
    pub pages: u64,
}

/// A subject's allocator, shared by all threads. Called by members of the team only: each is bound to its
/// core, which Linux's allocator relies on.
pub(crate) trait Allocator: Send + Sync + Sized + 'static {
    /// What a caller keeps to give a range back.
    type Range: Copy + Send + 'static;

    /// Whether a range begins at a multiple of its size rounded up to a power of two.
    fn aligned(&self) -> bool {
        true
    }

    /// Takes at least `pages` pages; `None` where there is no room.
    fn alloc(&self, pages: u64) -> Option<Self::Range>;

    /// Gives a range back; `false` where the allocator says that it is none of its own.
    fn free(&self, range: Self::Range) -> bool;

    /// What `range` takes of the space, as far as the range itself tells.
    fn pages(&self, range: Self::Range) -> Pages;

    /// What was found wrong, if this allocator is being watched.
    fn fault(&self) -> Option<String> {
        None
    }
}

/// Makes fresh allocators.
pub(crate) type Make<A> = Arc<dyn Fn(&Space) -> Result<A, Failure> + Send + Sync>;

/// Why a request failed in a loop that only noticed that it did.
pub(crate) fn cause(allocator: &impl Allocator) -> Failure {
    match allocator.fault() {
        Some(fault) => Failure::Broken(fault),
        None => {
            Failure::Refused("it failed to allocate with room left, or to free what was allocated".into())
        }
    }
}
