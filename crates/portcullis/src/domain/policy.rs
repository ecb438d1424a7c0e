//! The protection [`Policy`] of a domain, a device or a mapping, and the atomic word that holds one while I/O runs.

use crate::invalidation::{Costs, InvalidationError};
use crate::setup::SetupError;
use crate::sync::{AtomicU64, Ordering};

/// A domain's policy: how long a device may reach memory after it was unmapped, and at what price.
///
/// It applies to unmaps that are not batched or copied. For queues that batch or copy, the [`QueueConfig`](crate::dma::QueueConfig) says
/// when devices lose access. A policy of the command line (`--policy strict-ring`) is a domain's policy together with a queue's
/// configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// Devices use physical addresses and always reach everything. Costs nothing.
    Passthrough,
    /// Devices may reach unmapped memory until the next flush. It begins at most `window_ns` after the unmap, and earlier when a CPU has
    /// deferred 256 unmaps (or all CPUs together 32,768, if they [share one queue](Costs::shares_one_queue)). Devices reach whole *pages*.
    /// Costs a share of a flush.
    Lazy {
        /// The longest time in nanoseconds from an unmap to the start of the flush that covers it.
        window_ns: u64,
    },
    /// When an unmap has returned `Ok`, devices reach nothing of the unmapped pages. Costs one invalidation for each unmap, which waits for
    /// it.
    Strict,
}

impl Policy {
    /// Lazy with Linux's window since 2016, 10 ms.
    pub const LAZY: Self = Self::Lazy { window_ns: 10_000_000 };

    /// Lazy with a window that suits the cost of a flush: 1 s if all CPUs [share one queue](Costs::shares_one_queue), as in Linux since
    /// 2023, else 10 ms.
    pub const fn lazy_for(costs: &Costs) -> Self {
        if costs.shares_one_queue() { Self::Lazy { window_ns: 1_000_000_000 } } else { Self::LAZY }
    }

    /// The policy's name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Passthrough => "passthrough",
            Self::Lazy { .. } => "lazy",
            Self::Strict => "strict",
        }
    }

    /// Whether unmapped memory stays reachable for longer under this policy than under `other`.
    pub(super) const fn is_weaker_than(self, other: Self) -> bool {
        match (self, other) {
            (Self::Lazy { window_ns }, Self::Lazy { window_ns: others }) => window_ns > others,
            (Self::Lazy { .. }, Self::Strict) => true,
            (Self::Passthrough, other) => !matches!(other, Self::Passthrough),
            _ => false,
        }
    }

    pub(super) const fn is_translated(self) -> bool {
        !matches!(self, Self::Passthrough)
    }
}

/// A policy, or the configuration of a [`DmaOps`](crate::dma::DmaOps), could not be changed, or does not hold yet for earlier unmaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A domain translates or does not for its whole life, as its devices hold addresses of one kind. Nothing has changed.
    #[error("a domain is made with translation or without: it cannot change from {from} to {to}")]
    Translation {
        /// The domain's policy.
        from: &'static str,
        /// What was asked for.
        to: &'static str,
    },
    /// The domain has no pool for the [configuration](crate::dma::DmaOps::set_config), or none for its threshold. Nothing has changed.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The new policy holds for later unmaps, but the hardware did not confirm the flush of earlier ones: **devices may still reach that
    /// memory**. Call again.
    #[error("the policy is changed, but devices may still reach what was unmapped before: {0}")]
    Unconfirmed(#[from] InvalidationError),
}

#[derive(Debug)]
pub(crate) struct AtomicPolicy(AtomicU64);

/// Words from `LAZY` on are lazy: `LAZY` plus the window in nanoseconds.
const NONE: u64 = 0;
const STRICT: u64 = 1;
const PASSTHROUGH: u64 = 2;
const LAZY: u64 = 3;

impl AtomicPolicy {
    pub(crate) fn new(policy: Option<Policy>) -> Self {
        Self(AtomicU64::new(encode(policy)))
    }

    /// Relaxed: the flush after a change makes its promise hold (see `FlushQueue::push`).
    #[inline]
    pub(crate) fn get(&self) -> Option<Policy> {
        decode(self.word())
    }

    #[inline]
    fn word(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// The nanoseconds for which a mapping that ends now may be deferred, by the policy of `exception`, or, if that has none, by this one;
    /// `None` if it must not be.
    #[inline]
    pub(crate) fn window(&self, exception: Option<&Self>) -> Option<u64> {
        let (own, word) = (self.word(), exception.map_or(NONE, Self::word));
        (if word == NONE { own } else { word }).checked_sub(LAZY)
    }

    pub(crate) fn swap(&self, policy: Option<Policy>) -> Option<Policy> {
        decode(self.0.swap(encode(policy), Ordering::Relaxed))
    }
}

#[inline]
fn decode(word: u64) -> Option<Policy> {
    match word {
        NONE => None,
        STRICT => Some(Policy::Strict),
        PASSTHROUGH => Some(Policy::Passthrough),
        lazy => Some(Policy::Lazy { window_ns: lazy - LAZY }),
    }
}

fn encode(policy: Option<Policy>) -> u64 {
    match policy {
        None => NONE,
        Some(Policy::Strict) => STRICT,
        Some(Policy::Passthrough) => PASSTHROUGH,
        // A window above 584 years is cut to that.
        Some(Policy::Lazy { window_ns }) => window_ns.saturating_add(LAZY),
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/domain/policy.rs"]
mod tests;
