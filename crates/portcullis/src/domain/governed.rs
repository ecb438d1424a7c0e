//! The two steps of a policy change, for domains of any kind: [`Policies`](super::Policies) stores in all domains before it flushes one.

use super::{Policy, PolicyError};

pub(super) trait Governed: Send + Sync {
    fn may_have(&self, policy: Policy) -> Result<(), PolicyError>;

    /// Stores `policy`, and returns whether a flush must follow. Does not wait.
    fn store_policy(&self, policy: Policy) -> Result<bool, PolicyError>;

    /// Waits until devices reach nothing that was unmapped before the call.
    fn flush_stale(&self) -> Result<(), PolicyError>;
}
