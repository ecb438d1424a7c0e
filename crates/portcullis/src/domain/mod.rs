//! A [`Domain`]: one I/O address space, with its addresses, its translations and its protection policy.

mod account;
mod error;
mod governed;
mod policies;
mod policy;
mod space;
mod view;

pub use crate::iova::IovaError;
pub use error::{MapListError, UnmapError};
pub use policies::Policies;
pub(crate) use policy::{AtomicPolicy, PolicyWord};
pub use policy::{Policy, PolicyError};
pub(crate) use space::{Changing, Ending, Fate, LinkFailed, Tally, last_byte};
pub use space::{Domain, DomainStats, Linked, Refused, Reserved, Unlinked};
pub(crate) use view::DeviceView;
