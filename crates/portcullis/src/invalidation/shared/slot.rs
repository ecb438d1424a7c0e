//! A caller's cache line, in which it publishes its requests and gets the answer: the layout. `group.rs` says who stores the words when,
//! and what orders them.

use core::slice;

use super::state::{ANYBODY, FLIP, NEXT};
use crate::addr::DomainId;
use crate::invalidation::{Invalidation, InvalidationError, Request};
use crate::sync::{AtomicBool, AtomicPtr, AtomicU64, Mutex, Ordering};

#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Slot {
    /// A [`Head`].
    pub head: AtomicU64,
    /// The only request, if it is a range.
    pub start: AtomicU64,
    pub bytes: AtomicU64,
    /// The requests, in the caller's memory, if there are several.
    pub many: AtomicPtr<Request>,
    /// The last [answer](super::state). Only leaders store it.
    pub answer: AtomicU64,
    /// On another line: a leader accesses it only for an error.
    pub own: Own,
}

#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Own {
    /// A caller has the slot.
    pub held: AtomicBool,
    /// The error, if the answer has [`FAILED`](super::state::FAILED). The lock is never contended: the answer orders its users.
    pub error: Mutex<InvalidationError>,
}

/// A slot's first word: [`FLIP`], the kind of request (3 bits), the domain (from bit 16), the number of requests (from bit 32).
#[derive(Debug, Clone, Copy)]
pub(super) struct Head(pub u64);

/// Several requests, or none.
const MANY: u64 = 0;
/// Several requests, all for one domain.
pub(super) const MANY_OF_ONE: u64 = 1;
pub(super) const DOMAIN: u64 = 2;
const RANGE: u64 = 3;
pub(super) const LEAVES: u64 = 4;

impl Head {
    fn new(kind: u64, count: usize, domain: DomainId) -> Self {
        Self(kind << 1 | u64::from(domain.0) << 16 | (count as u64) << 32)
    }

    pub fn kind(self) -> u64 {
        self.0 >> 1 & 7
    }

    pub fn count(self) -> usize {
        (self.0 >> 32) as usize
    }

    pub fn domain(self) -> DomainId {
        DomainId((self.0 >> 16) as u16)
    }
}

impl Slot {
    pub fn new() -> Self {
        let own = Own { held: AtomicBool::new(false), error: Mutex::new(InvalidationError::Abandoned) };
        let word = || AtomicU64::new(0);
        let many = AtomicPtr::new(core::ptr::null_mut());
        let answer = AtomicU64::new((ANYBODY as u64) << NEXT);
        Self { head: word(), start: word(), bytes: word(), many, answer, own }
    }

    /// The pending request, if any. Only the leader answers it, so for others it may be answered at once.
    pub fn pending(&self) -> Option<Head> {
        let head = self.head.load(Ordering::Acquire);
        // Relaxed: only leaders store it, and each leader comes after the last one's stores.
        let is_pending = (head ^ self.answer.load(Ordering::Relaxed)) & FLIP != 0;
        is_pending.then_some(Head(head))
    }

    /// The requests, if `head` says that there are several.
    ///
    /// # Safety
    /// 1. `head` is the slot's pending request, and is not answered while the reference lives: the caller's memory stays until then
    ///    ([`Waiter::publish`](super::waiter::Waiter::publish)).
    pub unsafe fn many<'a>(&self, head: Head) -> Option<&'a [Request]> {
        if head.kind() > MANY_OF_ONE {
            return None;
        }
        // Relaxed: it was stored before the head, and the head was loaded with `Acquire`.
        let many = self.many.load(Ordering::Relaxed);
        // SAFETY: the head has their number; they stay by clause 1, which is the caller's.
        Some(unsafe { slice::from_raw_parts(many, head.count()) })
    }

    /// Publishes `requests`. `bit` is the [`FLIP`] that the last answer does not have.
    pub fn publish(&self, requests: &[Request], bit: u64) {
        let head = match requests {
            [Request { domain, invalidation: Invalidation::Domain }] => Head::new(DOMAIN, 1, *domain),
            [Request { domain, invalidation: Invalidation::Range { range, leaf_only } }] => {
                self.start.store(range.start().get(), Ordering::Relaxed);
                self.bytes.store(range.len(), Ordering::Relaxed);
                Head::new(if *leaf_only { LEAVES } else { RANGE }, 1, *domain)
            }
            _ => {
                let first = requests.first().map_or(DomainId(0), |first| first.domain);
                let is_one = requests.iter().all(|request| request.domain == first);
                self.many.store(requests.as_ptr().cast_mut(), Ordering::Relaxed);
                Head::new(if is_one { MANY_OF_ONE } else { MANY }, requests.len(), first)
            }
        };
        self.head.store(head.0 | bit, Ordering::Release);
    }
}

/// A leader fetches one line of each slot, and the second only for an error.
#[cfg(not(loom))]
const _: () =
    assert!(core::mem::offset_of!(Slot, own) == 64 && size_of::<Slot>() == 128 && super::state::SLOTS <= 16);
