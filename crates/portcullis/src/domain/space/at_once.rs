//! Domains whose maps may be called in atomic context (by interrupt handlers). A handler may have interrupted the very caller that it would
//! wait for. So a map of such a domain waits for hardware only, and leaves other work to [`Domain::maintain`].
//!
//! | a map finds | in any other domain | here |
//! |---|---|---|
//! | no addresses | it flushes, and takes back other CPUs' caches and deferred ranges | an error; `maintain` does that |
//! | no memory for tables | it frees empty tables | an error; empty tables wait for [`Domain::reclaim`] |
//! | no slot of a pool's class | it takes free slots of other CPUs and directions | a single buffer; the pool's `maintain` |
//! | no memory for a pool's buffer | it evicts idle buffers | an error; the pool's `maintain` |
//!
//! Memory ordering. A map stores `wanted`, and then stores the timer's time with a release. The timer takes that time with an acquire, so
//! it sees `wanted`.

use super::Domain;
use crate::guard::Guard;
use crate::invalidation::InvalidationError;
use crate::mapper::Mapper;
use crate::platform::Platform;
use crate::sync::{AtomicBool, Ordering};

#[derive(Debug)]
pub(super) struct AtOnce {
    set: AtomicBool,
    wanted: AtomicBool,
}

impl Default for AtOnce {
    fn default() -> Self {
        Self { set: AtomicBool::new(false), wanted: AtomicBool::new(false) }
    }
}

impl<M: Mapper, P: Platform> Domain<M, P> {
    pub(crate) fn map_at_once(&self) {
        self.at_once.set.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_at_once(&self) -> bool {
        self.at_once.set.load(Ordering::Relaxed)
    }

    /// Has the platform call the domain's timer soon, which calls [`maintain`](Self::maintain).
    #[cold]
    pub(super) fn want_maintenance(&self) {
        self.at_once.wanted.store(true, Ordering::Relaxed);
        self.set_timer(0);
    }

    /// Does the work that maps have left, if any: takes back other CPUs' caches and deferred ranges. Context: waits for hardware and for
    /// other CPUs' exclusive sections. The caller holds no lock and no CPU, and is no interrupt handler.
    ///
    /// # Errors
    /// [`InvalidationError`]: ranges are still deferred. A later call tries again.
    pub(crate) fn maintain(&self) -> Result<(), InvalidationError> {
        if !self.at_once.wanted.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let again = Guard::new(|| self.at_once.wanted.store(true, Ordering::Relaxed));
        if self.is_pending() {
            self.flush()?;
        }
        again.done();
        self.reclaim_deferred(None);
        self.space.drain_all(&self.platform);
        Ok(())
    }
}
