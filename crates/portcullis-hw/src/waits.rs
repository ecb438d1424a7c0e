//! The waits of CPUs for a unit, which they share where the host says which CPU calls.

use portcullis::invalidation::{InvalidationError, Request, SharedWaits};

use crate::host::Host;

/// One for each kind of table that requests do not name: a CPU that submits for others does so as for itself.
#[derive(Debug)]
pub(crate) struct Waits(SharedWaits);

impl Waits {
    /// For the CPUs of `host`.
    pub fn new<H: Host>(host: &H) -> Self {
        Self::of(host.cpus())
    }

    /// For `cpus` CPUs, whose numbers are in a row.
    pub fn of(cpus: usize) -> Self {
        Self(SharedWaits::new(cpus))
    }

    /// None are shared.
    pub fn alone() -> Self {
        Self(SharedWaits::new(0))
    }

    /// Has `requests` carried out by `submit`, or by that of another CPU, with its own: [`Shareable::submit`](portcullis::invalidation::Shareable::submit). Where they may be shared, nothing
    /// that uses the unit interrupts this CPU meanwhile ([`Host::undisturbed`]): so no caller waits for another one on its own CPU.
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
