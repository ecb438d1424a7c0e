//! Registrations: ranges of memory that stay mapped because drivers use them again, within limits.
//! No range stays open to devices unless its owner has said that it may.
//!
//! Buffers that live long (a storage stack's pool, a GPU's staging area, memory registered for
//! RDMA) are handed to a device again and again. Each time they are mapped and unmapped costs an
//! invalidation. A [`RegistrationCache`] maps such a range once, and lends it from then on: a loan
//! takes a lookup, without page table or hardware.
//!
//! # What is open when
//! Strict protection says that a device reaches no memory that no mapping covers. An idle
//! registration would break that, so **no range stays open on its own account, however often it
//! comes back**: its owner must have said that it is long-lived ([`Keep::UntilForgotten`]), once. A
//! range that was acquired [`WhileHeld`](Keep::WhileHeld) is shared by the callers that hold it at
//! the same time, and the last of them unmaps it strictly, whatever the domain's policy.
//!
//! | range | the device reaches it |
//! |---|---|
//! | held | yes |
//! | idle, `WhileHeld` | no: the last release has returned, or said that it is not confirmed |
//! | idle, `UntilForgotten` | yes, counted as exposure, until it is forgotten, evicted or trimmed |
//! | forgotten | no: [`forget`](RegistrationCache::forget) has returned, or said that it is not confirmed |
//!
//! The bytes that idle entries leave open count in
//! [`Domain::exposure`](portcullis::domain::Domain::exposure) as bytes beside mapped ones, and so do the
//! bytes that share a granule with a held range. (If an entry is held in parts only, all its bytes
//! count.)
//!
//! # What goes wrong with such caches elsewhere, and here
//! - *Memory goes away and its address comes back* (`munmap`, `fork` and copy-on-write, migration):
//!   the entry still leads to the old memory, and a cache by address lends it. A cache cannot know:
//!   **the owner must say so** with [`forget`](RegistrationCache::forget), from its notifier,
//!   before the memory has another owner. Then every entry that shares a byte with the range is
//!   unmapped, including entries that are held, that are being mapped at this moment, or that
//!   another caller is unmapping, and the call returns after the hardware has confirmed.
//! - *The addresses of a forgotten entry come back* while a holder still knows them, and its device
//!   writes into another owner's memory. Here no caller gets them until the last holder has
//!   released them.
//! - *A larger entry outlives its reason*: a range inside another is lent from that only if the
//!   larger one is kept. A larger one that is `WhileHeld` is shared only by callers that ask for
//!   exactly it.
//! - *Permissions are widened* to reuse an entry: here an entry has one kind of access, and another
//!   kind takes another entry.
//! - *Memory is pinned without bound*: entries and bytes are limited, unconfirmed entries count,
//!   and an acquisition beyond that returns an error that names the limit.
//! - *An entry is evicted in use*: only idle ones are.
//! - *Double release*: a [`Registration`] cannot be copied, and a cache refuses another cache's.
//! - *Thrash* just above the limit: the order is by last use, so a rotation over more ranges than
//!   fit never hits. The cost is bounded: each acquisition is a map and some hundreds of
//!   nanoseconds of book-keeping, and one entry in sixteen, 16 at the most, is evicted in one go
//!   and shares an invalidation. A cache of fewer than 32 entries waits for one each time, as
//!   strict mappings would.
//!
//! # One lock
//! One lock protects all book-keeping. A call holds it for a search and a few words; it never waits
//! there, and changes translations outside it. An acquisition and a release by one CPU cost tens of
//! nanoseconds, where a mapping of its own would wait for an invalidation. CPUs that use one buffer
//! pool all the time should hold what they use, or have caches of their own: each cache has its own
//! limits.
//!
//! It is a lock of the standard library. No mapper, queue or platform is called under it, so none
//! of their panics poisons it: they meet a call when its lock is free, and guards return its work
//! to the book-keeping as the caller unwinds. A lock that is poisoned all the same goes on: every
//! entry that the book-keeping still knows can be forgotten.
//!
//! Memory is named by its physical address, in one piece; a list is registered piece by piece.

mod acquire;
mod config;
mod end;
mod error;
mod hands;
mod index;
mod recent;
mod slot;
mod state;

pub use config::{Forgotten, Keep, Registration, RegistrationLimits, RegistrationUsage, Released};
pub use error::{AcquireError, ForgetError, RegistrationConfigError, ReleaseRegistrationError};

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::{Mutex, MutexGuard};

#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};
use portcullis::dma::DmaDevice;
use portcullis::mapper::Mapper;
use portcullis::platform::Platform;

use self::slot::Slots;
use self::state::State;

/// Lets others get on while the caller waits for one of them.
fn pause() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::thread::yield_now();
}

/// Long-lived mappings of one device's domain: see the [module](self).
///
/// All methods take `&self` and may run on any number of CPUs at once. They trust their caller as the raw methods of
/// [`DmaDevice`] do: that the memory is the caller's to open to the device, until it is unmapped as the table says.
///
/// If a mapper, its queue or the platform panics, its caller unwinds, and the entries that it
/// worked on count as not confirmed: they are not lent, and a later call unmaps whatever of them is
/// there. The addresses of those that it had begun to map or to unmap are given up, and counted. A
/// registration that was being acquired or released at the time is released. (A second panic while
/// the caller unwinds aborts.)
///
/// When the cache is dropped, every entry is unmapped strictly. If the hardware does not confirm
/// that, the addresses stay out of use until a later flush of the domain is confirmed, and devices
/// may reach the memory until then. The addresses of entries that are still held are given up for
/// good. If a call below panics meanwhile, the entries that are left may stay mapped for the life
/// of the domain, and their addresses are given up: an owner that must be sure forgets its memory
/// before.
#[derive(Debug)]
pub struct RegistrationCache<M: Mapper, P: Platform> {
    device: DmaDevice<M, P>,
    limits: RegistrationLimits,
    /// Tells this cache's registrations from another cache's.
    number: u64,
    state: Mutex<State>,
}

impl<M: Mapper, P: Platform> RegistrationCache<M, P> {
    /// Makes an empty cache of mappings in the domain of `device`, at addresses that `device`
    /// reaches. Allocates about 120 bytes for each entry that there may be; the index allocates as
    /// entries come.
    ///
    /// # Errors
    /// [`RegistrationConfigError`].
    pub fn new(device: DmaDevice<M, P>, limits: RegistrationLimits) -> Result<Self, RegistrationConfigError> {
        let RegistrationLimits { entries, bytes } = limits;
        if !device.domain().is_translated() {
            return Err(RegistrationConfigError::NoTranslation);
        }
        let granule = device.domain().granule();
        let most = Slots::MOST;
        if entries == 0 || entries > most || bytes < granule.bytes() {
            return Err(RegistrationConfigError::Limits { entries, bytes, most });
        }
        let state = State::new(limits, granule).ok_or(RegistrationConfigError::OutOfMemory { entries })?;
        Ok(Self { device, limits, number: unique(), state: Mutex::new(state) })
    }

    /// Returns the device that the cache was made with.
    pub fn device(&self) -> &DmaDevice<M, P> {
        &self.device
    }

    /// Returns the limits of the cache.
    pub fn limits(&self) -> RegistrationLimits {
        self.limits
    }

    /// Returns what the cache holds now, and its counts. O(1), takes the lock.
    pub fn usage(&self) -> RegistrationUsage {
        self.with(|state| state.usage())
    }

    /// Calls `f` with the state, locked, and then, with the lock free, tells the domain what that
    /// has opened or closed. `f` is done when the platform panics there, and what it changed counts.
    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = f(&mut state);
        self.tell(state);
        result
    }

    /// Unlocks the state, and tells the domain what has changed in it. (The short ways lock and tell by themselves: as closures, the
    /// compiler leaves them out of line, and a call hands results over through memory.)
    #[inline(always)]
    fn tell(&self, mut state: MutexGuard<'_, State>) {
        let opened = std::mem::take(&mut state.opened);
        drop(state);
        self.device.domain().count_neighbours(opened);
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a number that no other cache has.
fn unique() -> u64 {
    // The model checker has nothing to look for in a number, so this is not its own atomic.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Relaxed: only the number counts. 2^64 caches are never made.
    NEXT.fetch_add(1, Ordering::Relaxed)
}
