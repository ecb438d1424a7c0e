//! When the timer comes: as long as the pool has more bytes of buffers than it is to keep, or something is not confirmed. An empty pool wakes no
//! CPU.
//!
//! The pool asks for the timer when it gets a buffer, or when something is not confirmed, and the timer asks for itself again. So the fast paths
//! know nothing of time. The timer finds idle buffers without looking at slots. In a depot their number is the fewest slots since the last time
//! (J. Bonwick's working set). In magazines of CPUs all are idle if no mapping was made since.

use super::BouncePool;
use crate::guard::Guard;
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Platform};
use crate::sync::{AtomicU64, Ordering};

const NEVER: u64 = u64::MAX;

/// The shortest time between two looks, in nanoseconds.
const SHORTEST_NS: u64 = 1_000_000;

#[derive(Debug)]
pub(super) struct Idle {
    at_ns: AtomicU64,
    /// Mappings through slots before the last look.
    bounced: AtomicU64,
}

impl Default for Idle {
    fn default() -> Self {
        Self { at_ns: AtomicU64::new(NEVER), bounced: AtomicU64::new(0) }
    }
}

impl Idle {
    pub(super) fn at_ns(&self) -> Option<u64> {
        let at = self.at_ns.load(Ordering::Relaxed);
        (at != NEVER).then_some(at)
    }

    /// Guards a set time that the platform does not know yet. Dropped, the next caller that wants the timer sets it anew.
    pub(super) fn not_asked(&self) -> Guard<impl FnMut()> {
        Guard::new(|| _ = self.at_ns.swap(NEVER, Ordering::Acquire))
    }

    /// Whether no mapping was made since the last call; `bounced` is the present count.
    pub(super) fn is_quiet(&self, bounced: u64) -> bool {
        self.bounced.swap(bounced, Ordering::Relaxed) == bounced
    }
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Asks for the timer after the pool's idle time, unless it comes earlier. The caller has no CPU lent.
    pub(super) fn look_later(&self) {
        if self.config.idle_ns == u64::MAX {
            return;
        }
        let platform = self.domain.platform();
        let not_asked = self.idle.not_asked();
        let at = platform.now_ns().saturating_add(self.config.idle_ns.max(SHORTEST_NS)).min(NEVER - 1);
        // Release: the timer that takes an earlier time away sees the work of this caller.
        if self.idle.at_ns.fetch_min(at, Ordering::Release) == NEVER {
            platform.wake_at(at);
        }
        not_asked.done();
    }
}
