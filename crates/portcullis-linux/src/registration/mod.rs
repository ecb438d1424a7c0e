//! Registrations: a limited cache of mappings that drivers reuse. No range stays open to devices unless its owner has said that it may.
//!
//! Long-lived buffers (a storage stack's pool, a GPU's staging area, RDMA memory) go to a device again and again. Each map and unmap costs
//! an invalidation. A [`RegistrationCache`] maps such a range once, and shares it from then on: a hit takes a lookup, without page table or
//! hardware.
//!
//! # What is open when
//! Strict protection says that a device reaches no memory without a mapping. An idle registration would break that, so **no range stays
//! open by itself, however often it is used again**: its owner must have said once that it is long-lived ([`Keep::UntilForgotten`]). A
//! range that was acquired [`WhileHeld`](Keep::WhileHeld) is shared by its concurrent holders, and the last release unmaps it strictly,
//! whatever the domain's policy.
//!
//! | range | the device reaches it |
//! |---|---|
//! | held | yes |
//! | idle, `WhileHeld` | no: the last release has returned, or said that it is not confirmed |
//! | idle, `UntilForgotten` | yes, counted as exposure, until it is forgotten, evicted or trimmed |
//! | forgotten | no: [`forget`](RegistrationCache::forget) has returned, or said that it is not confirmed |
//!
//! [`Domain::exposure`](portcullis::domain::Domain::exposure) counts the bytes of idle entries as bytes beside mapped ones, and so it does
//! the bytes that share a granule with a held range. (If only parts of an entry are held, all its bytes count.)
//!
//! # Known faults of such caches
//! - *Memory is freed and its address reused* (`munmap`, `fork` and copy-on-write, migration): the entry still translates to the old
//!   memory, and a cache by address returns it. A cache cannot know: **the owner must call** [`forget`](RegistrationCache::forget), from
//!   its notifier, before the memory has another owner. This unmaps every entry that shares a byte with the range, including entries that
//!   are held, that are being mapped at this moment, or that another caller is unmapping, and returns after the hardware has confirmed.
//! - *Addresses of a forgotten entry are reused* while a holder still knows them, and its device writes into another owner's memory. Here
//!   no caller gets them until the last holder has released them.
//! - *A larger entry outlives its reason*: a subrange is only shared from a persistent entry. A larger one that is `WhileHeld` is shared
//!   only by callers of exactly the same range.
//! - *Permissions are widened* for reuse: here an entry has one kind of access, and another kind takes another entry.
//! - *Memory is pinned without bound*: entries and bytes are limited, unconfirmed entries count, and an acquisition beyond that returns an
//!   error that names the limit.
//! - *An entry is evicted in use*: only idle ones are.
//! - *Double release*: a [`Registration`] cannot be copied, and a cache refuses another cache's.
//! - *Thrash* just above the limit: eviction is LRU, so a rotation over more ranges than fit never hits. The cost is bounded: each
//!   acquisition is a map and some hundreds of nanoseconds, and one entry in sixteen, at most 16, are evicted together and share an
//!   invalidation. A cache of fewer than 32 entries waits for one each time, as strict mappings would.
//!
//! # One lock
//! One lock protects the cache. A call holds it for a search and a few words; it never waits there, and changes translations outside it. An
//! acquisition and a release on one CPU cost tens of nanoseconds; a mapping would wait for an invalidation. CPUs that use one buffer pool
//! all the time should keep their registrations, or have caches of their own: each cache has its own limits.
//!
//! It is a lock of the standard library. No mapper, queue or platform is called under it, so their panics do not poison it: they unwind
//! with the lock free, and guards return the call's work to the state. The cache ignores poisoning: every entry that the state still knows
//! can be forgotten.
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

/// Yields to a CPU that the caller waits for.
fn pause() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::thread::yield_now();
}

/// Long-lived mappings of one device's domain: see the [module](self).
///
/// All methods take `&self` and may run concurrently. As with the raw methods of [`DmaDevice`], the caller promises that it may open the
/// memory to the device, until it is unmapped by the table above.
///
/// If a mapper, its queue or the platform panics, its caller unwinds, and the entries of the call become unconfirmed: they are not shared,
/// and a later call unmaps what is left of them. Addresses that the call had begun to map or to unmap are leaked, and counted. A
/// registration that was being acquired or released is released. (A second panic during the unwind aborts.)
///
/// Drop unmaps every entry strictly. If the hardware does not confirm that, the addresses stay reserved until a later flush of the domain
/// is confirmed, and devices may reach the memory until then. The addresses of held entries are leaked. If a call below panics meanwhile,
/// the remaining entries may stay mapped for the life of the domain, and their addresses are leaked: an owner that must be sure forgets its
/// memory before.
#[derive(Debug)]
pub struct RegistrationCache<M: Mapper, P: Platform> {
    device: DmaDevice<M, P>,
    limits: RegistrationLimits,
    /// Distinguishes this cache's registrations from another cache's.
    number: u64,
    state: Mutex<State>,
}

impl<M: Mapper, P: Platform> RegistrationCache<M, P> {
    /// Makes an empty cache of mappings in the domain of `device`, at addresses that `device` reaches. Allocates about 120 bytes for each
    /// entry of the limit; the index allocates as entries come.
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

    /// Returns the device of [`new`](Self::new).
    pub fn device(&self) -> &DmaDevice<M, P> {
        &self.device
    }

    /// Returns the limits of the cache.
    pub fn limits(&self) -> RegistrationLimits {
        self.limits
    }

    /// Returns the contents of the cache, and its counts. O(1), takes the lock.
    pub fn usage(&self) -> RegistrationUsage {
        self.with(|state| state.usage())
    }

    /// Calls `f` with the locked state, and then, without the lock, reports to the domain what that has opened or closed. If the platform
    /// panics there, the effects of `f` remain.
    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = f(&mut state);
        self.tell(state);
        result
    }

    /// Unlocks the state, and reports its changes to the domain. (The fast paths lock and report by themselves: the compiler does not
    /// inline closures here, and a call would pass results through memory.)
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

fn unique() -> u64 {
    // Not the model checker's atomic: it has nothing to check here.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Relaxed: only the number counts. 2^64 caches are never made.
    NEXT.fetch_add(1, Ordering::Relaxed)
}
