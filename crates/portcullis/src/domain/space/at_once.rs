//! Domains whose maps come from interrupt handlers, too. Such a handler may have interrupted the very caller that it would
//! wait for: so a map of these domains waits for hardware alone, and what takes more is left to [`Domain::maintain`].
//!
//! | what a map finds | in any other domain | here |
//! |---|---|---|
//! | no addresses | it flushes, and takes back what other CPUs keep and what waits in their queues | an error; `maintain` does that |
//! | no memory for tables | it frees tables that have become empty | an error; empty tables wait for [`Domain::reclaim`] |
//! | no slot of a pool's class | it takes free ones of other CPUs and directions | a buffer of its own; the pool's `maintain` |
//! | no memory for a pool's buffer | it gives up buffers that wait | an error; the pool's `maintain` |
//!
//! Memory ordering. A map stores that there is work, and then asks the platform for its timer; the timer that comes has taken the
//! time of its call away with an acquire, so it sees that.

use super::Domain;
use crate::guard::Guard;
use crate::invalidation::InvalidationError;
use crate::mapper::Mapper;
use crate::platform::Platform;
use crate::sync::{AtomicBool, Ordering};

/// Whether a domain is one of these, and whether maps have left it something to do.
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
    /// From now on no map of the domain's waits for what another caller does.
    pub(crate) fn map_at_once(&self) {
        self.at_once.set.store(true, Ordering::Relaxed);
    }

    /// Whether no map of the domain's may wait for what another caller does.
    pub(crate) fn is_at_once(&self) -> bool {
        self.at_once.set.load(Ordering::Relaxed)
    }

    /// Has the platform call the domain's timer soon, which [maintains](Self::maintain) it.
    #[cold]
    pub(super) fn want_maintenance(&self) {
        self.at_once.wanted.store(true, Ordering::Relaxed);
        self.set_timer(0);
    }

    /// Does what maps have left: takes back all addresses that other CPUs keep, and those that wait for a flush. Does
    /// nothing where no map has left anything. Waits for hardware and for other CPUs' turns; the caller holds no lock and no CPU,
    /// and is no interrupt handler.
    ///
    /// # Errors
    /// [`InvalidationError`]: what waits for a flush still does. A later call tries again.
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
