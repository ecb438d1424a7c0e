//! A safe version, for simulated memory, of the cache's call that opens memory by number, as in `portcullis_model::open` for the core's.

use portcullis::addr::{Direction, PhysSegment};
use portcullis::mapper::Mapper;
use portcullis::platform::Platform;
use portcullis_linux::registration::{AcquireError, Keep, Registration, RegistrationCache};
use portcullis_model::open::Simulated;

/// [`RegistrationCache`], of a simulated device.
pub trait OpenCache {
    /// [`RegistrationCache::acquire`].
    ///
    /// # Errors
    /// As there.
    fn open(
        &self,
        memory: PhysSegment,
        direction: Direction,
        keep: Keep,
    ) -> Result<Registration, AcquireError>;
}

impl<M: Mapper + Simulated, P: Platform> OpenCache for RegistrationCache<M, P> {
    #[inline]
    fn open(
        &self,
        memory: PhysSegment,
        direction: Direction,
        keep: Keep,
    ) -> Result<Registration, AcquireError> {
        // SAFETY: only simulated devices reach it, and those only access atomics.
        unsafe { self.acquire(memory, direction, keep) }
    }
}
