//! A [`Domain`]: one I/O address space, with its addresses, its translations and its policy.
//!
//! Mapped addresses are handed out again only after an invalidation is confirmed that began after their entries were cleared. Callers do their
//! part: each ends its own mappings only, and frees unlinked addresses only after the confirmation.
//!
//! Read `policy`, then `space` (the domain), and below it `lifecycle` (what becomes of addresses), `maps`, `unmaps`, `deferred` (what awaits a
//! flush, and the timer) and `tokens` (the steps one by one). This layer uses `mapper`, `invalidation`, `exposure`, `pgtable`, `iova`,
//! `percpu`, `platform` and those below them.

mod account;
mod error;
mod parts;
mod pieces;
mod policy;
mod space;
mod view;

pub use crate::iova::IovaError;
pub(crate) use account::Tally;
pub use error::{MapListError, UnmapError};
pub use pieces::Pieces;
pub(crate) use policy::AtomicPolicy;
pub use policy::{Policy, PolicyError};
pub(crate) use space::{Changing, Fate, LinkFailed, Rule, last_byte};
pub use space::{Domain, DomainStats, Linked, Refused, Reserved, Unlinked};
pub(crate) use view::DeviceView;
