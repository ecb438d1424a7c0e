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
    /// [`Shareable::submit`](portcullis::invalidation::Shareable::submit). While waits may be shared, nothing that uses the unit interrupts
    /// this CPU ([`Host::undisturbed`]): so no caller waits for another one on its own CPU.
    pub fn share<H: Host>(
        &self,
        host: &H,
        requests: &[Request],
        submit: impl Fn(&[Request]) -> Result<(), InvalidationError>,
    ) -> Result<(), InvalidationError> {
        match self.0.share(requests) {
            Some(shareable) => host.undisturbed(|| shareable.submit(|| host.cpu(), submit)),
            None => submit(requests),
        }
    }
}
