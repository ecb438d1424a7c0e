//! Waits for a unit, which CPUs share if the host says which CPU calls.

use portcullis::invalidation::{InvalidationError, Request, SharedWaits};

use crate::host::Host;

/// One for each stage, because requests do not name their stage, and a CPU submits others' requests as it submits its own.
#[derive(Debug)]
pub(crate) struct Waits(SharedWaits);

impl Waits {
    pub fn new<H: Host>(host: &H) -> Self {
        Self::of(host.cpus())
    }

    /// For `cpus` CPUs, with consecutive numbers.
    pub fn of(cpus: usize) -> Self {
        Self(SharedWaits::new(cpus))
    }

    pub fn alone() -> Self {
        Self(SharedWaits::new(0))
    }

    /// Carries out `requests` by `submit`, or by another CPU's together with its own:
    /// [`SharedWaits::submit`]. While waits may be shared, nothing that uses the unit interrupts
    /// this CPU ([`Host::undisturbed`]): so no caller waits for another one on its own CPU.
    pub fn share<H: Host>(
        &self,
        host: &H,
        requests: &[Request],
        submit: impl Fn(&[Request]) -> Result<(), InvalidationError>,
    ) -> Result<(), InvalidationError> {
        if !self.0.shares(requests) {
            return submit(requests);
        }
        host.undisturbed(|| self.0.submit(requests, || host.cpu(), submit))
    }
}
