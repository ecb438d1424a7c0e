//! The protection [`Policy`] of a domain, a device or a mapping, and the word that keeps one while
//! I/O runs. What each policy promises stands at its name. A reader of the word always gets a
//! policy that was stored whole.

use crate::heap::OutOfMemory;
use crate::invalidation::{Costs, InvalidationError};
use crate::sync::{AtomicU64, Ordering};

/// A domain's policy: how long a device may reach memory after it was unmapped, and at what price.
///
/// It is about unmaps that end by themselves. Of queues whose unmaps wait together, or that copy, the
/// [`QueueConfig`](crate::dma::QueueConfig) says when devices lose their access. What the command line calls a policy
/// (`--policy strict-ring`) is a domain's policy together with a queue's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// The device uses physical addresses and reaches everything, always. Costs nothing.
    Passthrough,
    /// The device may reach what was unmapped until the next flush: at the latest `window_ns` (and the time
    /// the flush takes) after the unmap, earlier when a CPU has 256 unmaps waiting (or all of them 32,768, where they
    /// [share one queue](Costs::shares_one_queue)). The *page* is the unit of protection. Costs a share of a flush.
    Lazy {
        /// The longest time in nanoseconds from an unmap to the start of the flush that covers it.
        window_ns: u64,
    },
    /// When an unmap has returned `Ok`, the device reaches nothing of the pages that were unmapped.
    /// Costs one invalidation, with its wait, for each unmap.
    Strict,
}

impl Policy {
    /// Lazy protection with the window that Linux has used since 2016, 10 ms.
    pub const LAZY: Self = Self::Lazy { window_ns: 10_000_000 };

    /// Lazy protection with the window that suits what a flush costs: 1 s where all CPUs
    /// [share one queue](Costs::shares_one_queue), as Linux has it there since 2023, else 10 ms.
    pub const fn lazy_for(costs: &Costs) -> Self {
        if costs.shares_one_queue() { Self::Lazy { window_ns: 1_000_000_000 } } else { Self::LAZY }
    }

    /// The policy's name, as the command line writes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Passthrough => "passthrough",
            Self::Lazy { .. } => "lazy",
            Self::Strict => "strict",
        }
    }

    /// Whether memory may be reached for longer under this policy than under `other`.
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

/// A policy that could not be changed, or whose promise is not kept yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// Whether a domain translates is settled when it is made: its devices hold addresses of one kind or the other.
    /// Nothing has changed.
    #[error("a domain is made with translation or without: it cannot change from {from} to {to}")]
    Translation {
        /// The domain's policy.
        from: &'static str,
        /// What was asked for.
        to: &'static str,
    },
    /// The new policy holds for what is unmapped from now on, but the hardware did not confirm the flush of what was
    /// unmapped before: **devices may still reach that**. Ask again.
    #[error("the policy is changed, but devices may still reach what was unmapped before: {0}")]
    Unconfirmed(#[from] InvalidationError),
    /// The heap has no memory to keep account of it. Nothing has changed.
    #[error("no memory to keep account of a policy")]
    OutOfMemory,
}

impl From<OutOfMemory> for PolicyError {
    fn from(_: OutOfMemory) -> Self {
        Self::OutOfMemory
    }
}

/// A policy that may be read and changed at any time, or none.
#[derive(Debug)]
pub(crate) struct AtomicPolicy(AtomicU64);

/// The content of an [`AtomicPolicy`]: a policy or none, in one word.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PolicyWord(u64);

/// The numbers that stand for policies. Those from `LAZY` on stand for lazy ones: `LAZY` plus the
/// window in nanoseconds.
const NONE: u64 = 0;
const STRICT: u64 = 1;
const PASSTHROUGH: u64 = 2;
const LAZY: u64 = 3;

impl AtomicPolicy {
    pub(crate) fn new(policy: Option<Policy>) -> Self {
        Self(AtomicU64::new(encode(policy)))
    }

    /// Relaxed: what a change promises is kept by the flush that follows it (see
    /// `FlushQueue::push`).
    #[inline]
    pub(crate) fn get(&self) -> Option<Policy> {
        decode(self.word().0)
    }

    /// As [`get`](Self::get), but returns the word as it is kept.
    #[inline]
    pub(crate) fn word(&self) -> PolicyWord {
        PolicyWord(self.0.load(Ordering::Relaxed))
    }

    /// Stores `policy` and returns the one before.
    pub(crate) fn swap(&self, policy: Option<Policy>) -> Option<Policy> {
        decode(self.0.swap(encode(policy), Ordering::Relaxed))
    }
}

impl PolicyWord {
    /// None.
    pub(crate) const NONE: Self = Self(NONE);

    /// Returns this policy, or `other` where this is none.
    #[inline]
    pub(crate) const fn or(self, other: Self) -> Self {
        if self.0 == NONE { other } else { self }
    }

    /// For how many nanoseconds a mapping that ends under this policy may wait for a flush; `None`
    /// where it must not wait.
    #[inline]
    pub(crate) const fn window(self) -> Option<u64> {
        self.0.checked_sub(LAZY)
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
        // A window of more than 584 years is cut to that.
        Some(Policy::Lazy { window_ns }) => window_ns.saturating_add(LAZY),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_policy_is_kept_as_it_is() {
        let all = [Policy::Passthrough, Policy::Strict, Policy::LAZY, Policy::Lazy { window_ns: 0 }];
        for policy in all.map(Some).into_iter().chain([None]) {
            assert_eq!(decode(encode(policy)), policy);
        }
        let longest = decode(encode(Some(Policy::Lazy { window_ns: u64::MAX })));
        assert_eq!(longest, Some(Policy::Lazy { window_ns: u64::MAX - LAZY }));
    }

    #[test]
    fn the_window_is_that_of_the_exception_or_of_the_domain() {
        let lazy = |window_ns| Some(Policy::Lazy { window_ns });
        let window = |exception: Option<Policy>, own: Option<Policy>| {
            AtomicPolicy::new(exception).word().or(AtomicPolicy::new(own).word()).window()
        };
        assert_eq!([window(None, lazy(7)), window(lazy(0), lazy(7))], [Some(7), Some(0)]);
        assert_eq!([window(Some(Policy::Strict), lazy(7)), window(None, Some(Policy::Strict))], [None; 2]);
        assert_eq!(window(None, Some(Policy::Passthrough)), None);
        assert_eq!(PolicyWord(STRICT).or(PolicyWord(encode(lazy(7)))).window(), None);
        assert_eq!(PolicyWord::NONE.or(PolicyWord(encode(lazy(7)))).window(), Some(7));
    }

    #[test]
    fn policies_are_ordered_by_what_they_leave_open() {
        let short = Policy::Lazy { window_ns: 1 };
        let order = [Policy::Strict, short, Policy::LAZY, Policy::Passthrough];
        for (index, policy) in order.iter().enumerate() {
            assert!(order[..index].iter().all(|stricter| policy.is_weaker_than(*stricter)));
            assert!(order[index..].iter().all(|weaker| !policy.is_weaker_than(*weaker)));
        }
    }

    #[test]
    fn the_usual_window_is_long_where_all_share_one_queue() {
        let dear = Costs { submission_ns: 1_000_000, ..Costs::BARE_METAL };
        assert!(dear.shares_one_queue() && !Costs::BARE_METAL.shares_one_queue());
        assert_eq!(Policy::lazy_for(&dear), Policy::Lazy { window_ns: 1_000_000_000 });
        assert_eq!(Policy::lazy_for(&Costs::BARE_METAL), Policy::Lazy { window_ns: 10_000_000 });
    }
}
