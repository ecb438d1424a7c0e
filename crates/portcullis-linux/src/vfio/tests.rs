//! Over a kernel that behaves as its documents say, and fails where the test likes.

mod calls;
mod device;
mod fake;
#[cfg(not(watched))]
mod file;
pub mod kernel;
mod mapper;
mod says;
#[cfg(not(watched))]
mod scope;
#[cfg(not(any(loom, watched)))]
mod whole;
