//! A caller's cache line, on which it asks and gets its answer: what its words mean. `meeting.rs` says who stores them when, and orders
//! them.

use core::slice;

use super::state::{ANYBODY, FLIP, NEXT, SLOTS};
use crate::addr::DomainId;
use crate::invalidation::{Invalidation, InvalidationError, Request};
use crate::sync::{AtomicBool, AtomicPtr, AtomicU64, Mutex, Ordering};

#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Slot {
    pub head: AtomicU64,
    pub start: AtomicU64,
    pub bytes: AtomicU64,
    pub many: AtomicPtr<Request>,
    /// The last answer. Only leaders store it.
    pub answer: AtomicU64,
    /// On another line, as only its callers access it, and a leader that has an error for them.
    pub own: Own,
}

#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Own {
    pub held: AtomicBool,
    /// The error of its request. The lock has no contention: nobody looks before the answer says so.
    pub error: Mutex<InvalidationError>,
}

/// A slot's first word: the bit that flips, the kind of request, the number of requests, their domain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head(pub u64);

const MANY: u64 = 0;
/// The same, all of one domain.
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

    /// Its pending request. Exact for the leader; for others it may be answered at any moment.
    pub fn asked(&self) -> Option<Head> {
        let head = self.head.load(Ordering::Acquire);
        // Relaxed: leaders alone store it, and each comes after the one before.
        let is_asked = (head ^ self.answer.load(Ordering::Relaxed)) & FLIP != 0;
        is_asked.then_some(Head(head))
    }

    /// Its several requests, if `head` says so.
    ///
    /// # Safety
    /// 1. The slot is asked with this head, and is not answered while the reference lives: until then the requests stay ([`Held::ask`]).
    pub unsafe fn many<'a>(&self, head: Head) -> Option<&'a [Request]> {
        if head.kind() > MANY_OF_ONE {
            return None;
        }
        // Relaxed: it was stored before the head, and the head was loaded with `Acquire`.
        let many = self.many.load(Ordering::Relaxed);
        // SAFETY: the head says that this many are there; by clause 1, which is the caller's, they stay.
        Some(unsafe { slice::from_raw_parts(many, head.count()) })
    }

    pub fn ask(&self, requests: &[Request], bit: u64) {
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

/// A leader fetches one line of each slot, and the other one only for an error.
#[cfg(not(loom))]
const _: () = assert!(core::mem::offset_of!(Slot, own) == 64 && size_of::<Slot>() == 128 && SLOTS <= 16);
