//! A [`Domain`]: one I/O address space, with its addresses, its translations and its protection policy.

mod account;
mod error;
mod policies;
mod policy;
mod space;

pub use error::{DomainError, MapListError, UnmapError};
pub use policies::Policies;
pub(crate) use policy::AtomicPolicy;
pub use policy::{Policy, PolicyError};
pub use space::{Domain, DomainStats};
pub(crate) use space::{Ending, LinkFailed, Tally, last_byte};

use crate::addr::PhysAddr;

/// A piece of a buffer that lies in one piece in physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PhysSegment {
    /// Where it begins.
    pub phys: PhysAddr,
    /// Its length in bytes.
    pub len: u64,
}
