//! A [`Domain`]: one I/O address space, with its addresses, its translations and its protection
//! policy. An address at which memory was mapped is handed out again only after an invalidation is
//! confirmed that began when its page-table entries were clear. For that, callers end only mappings
//! of their own, and free what they unlink only once it is confirmed.

mod account;
mod error;
mod governed;
mod parts;
mod pieces;
mod policies;
mod policy;
mod space;
mod view;

pub use crate::iova::IovaError;
pub use error::{MapListError, UnmapError};
pub use pieces::Pieces;
pub use policies::Policies;
pub(crate) use policy::{AtomicPolicy, PolicyWord};
pub use policy::{Policy, PolicyError};
pub(crate) use space::{Changing, Ending, Fate, LinkFailed, Tally, last_byte};
pub use space::{Domain, DomainStats, Linked, Refused, Reserved, Unlinked};
pub(crate) use view::DeviceView;
