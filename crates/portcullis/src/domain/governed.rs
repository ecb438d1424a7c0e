//! What a change of policies for many domains asks of each: it can be told to all before one of them is waited for.

use super::{Policy, PolicyError};

/// A domain of any kind: the two steps of a change.
pub(super) trait Governed: Send + Sync {
    /// Whether it may have such a policy at all.
    fn may_have(&self, policy: Policy) -> Result<(), PolicyError>;

    /// Stores a policy; waits for nothing. Whether a flush must follow.
    fn store_policy(&self, policy: Policy) -> Result<bool, PolicyError>;

    /// Waits until nothing can be reached that was unmapped before.
    fn flush_stale(&self) -> Result<(), PolicyError>;
}
