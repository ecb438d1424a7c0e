//! With a fake kernel that follows its documentation, and fails where the test says.

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
