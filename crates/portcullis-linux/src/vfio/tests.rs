//! Over a kernel that behaves as its documents say, and fails where the test likes.

mod calls;
mod device;
mod fake;
#[cfg(not(watched))]
mod file;
mod interrupts;
pub mod kernel;
mod leaves;
mod mapper;
mod says;
#[cfg(not(watched))]
mod scope;
#[cfg(all(feature = "virtio-drivers", not(watched)))]
mod virtio;
#[cfg(not(any(loom, watched)))]
mod whole;
