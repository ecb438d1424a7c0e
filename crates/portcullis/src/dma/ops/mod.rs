//! [`DmaOps`]: mappings for a kernel whose drivers map and unmap by address, on any CPU and in interrupt handlers, as through Linux's `dma_map_ops`.
//! Each mapping ends once, as a whole, and through the handle that made it.
//!
//! A [`Queue`](super::Queue) has one owner, to which it gives buffers back. In such a DMA API a driver maps a buffer on one CPU, unmaps it on another
//! by address and length, and has it back when the call returns. So rings and batches are no choice here; [`OpsConfig`] has the others.
//!
//! # Maps and unmaps
//! | the mapping | is made | ends |
//! |---|---|---|
//! | [lasting](DmaAttributes::lasting) | mapped | strictly |
//! | [MMIO](DmaAttributes::mmio); any other under `Strict` or `Lazy` | mapped | by the configuration at that time |
//! | up to the threshold of `Bounce` | copied, through a buffer that stays mapped | without a wait |
//! | up to that of `Auto` | the cheaper of copied and, if the device may have all of its granules, mapped | without a wait; strictly |
//! | larger, of a [trusted](super::Device::trusted) device, or of whole granules | mapped | strictly |
//! | larger, any other | mapped, with copies of its unaligned ends; copied where its pieces meet inside a granule | strictly |
//!
//! The address tells an unmap how the mapping was made, so the configuration may [change](DmaOps::set_config) while mappings of all kinds are open. A
//! list has one range of addresses, and its unmap one wait.
//!
//! # Mistakes of drivers
//! An unmap of a mapping that has ended, of a part, with another length or by another device's address returns an error, as does a sync outside of a
//! mapping: nothing is changed. The caller must prevent one mistake, as the [safety sections](DmaOps::unmap) say: two CPUs that end a mapping, or
//! sync and end it, at the same moment.
//!
//! # Contexts
//! Every method says whether it may wait, and in which context it may be called. No map, unmap or sync waits for another *caller*, which an interrupt
//! handler may have interrupted: once a domain has a handle, work with such waits is left to [`maintain`](DmaOps::maintain), which the platform's
//! timer calls. The library uses per-CPU values and takes locks with a borrowed CPU ([`Platform::with_cpu`]): a kernel that has interrupts off
//! meanwhile may map and unmap in atomic context, by two rules. Its mapper waits for no caller that a handler may have interrupted (`portcullis-hw`'s
//! drivers keep handlers away while they share waits; a [`SharedQueue`](crate::invalidation::SharedQueue) waits for no other caller if its
//! [`cpu`](crate::invalidation::SharedQueue::with_cpus) is `None`). And while handlers may map, it calls no
//! [`reclaim`](crate::domain::Domain::reclaim) of a domain with a [`PageTable`](crate::pgtable::PageTable), whose maps wait at a table that is being
//! reclaimed. A wait for hardware takes as long as the mapper's.

mod book;
mod choice;
mod config;
mod ends;
mod left;
mod maps;
mod words;

pub use config::{DmaAttributes, OpsConfig, OpsUsage};

use core::mem::MaybeUninit;

use self::book::Book;
use self::choice::{Chooser, Turns};
use self::config::AtomicConfig;
use self::words::Near;
use super::{Clock, Machine};
use crate::addr::Iova;
use crate::bounce::pool::{BouncePool, Client, DeviceProfile};
use crate::domain::{AtomicPolicy, Domain, PolicyError};
use crate::heap::{Shared, write_fields};
use crate::invalidation::InvalidationError;
use crate::mapper::Mapper;
use crate::percpu::{Counter, PerCpu};
use crate::platform::{CopyMemory, LocalCpu, Platform};
use crate::setup::SetupError;
use crate::sync::{AtomicU64, Ordering};

type DomainOf<X> = Domain<<X as Machine>::Mapper, <X as Machine>::Platform>;
type PoolOf<X> = BouncePool<<X as Machine>::Mapper, <X as Machine>::Platform, <X as Machine>::Memory>;

/// Maps and unmaps by address for a device, on any number of CPUs: see the [module](self). [`Device::ops`](super::Device::ops) makes it.
pub struct DmaOps<X: Machine> {
    domain: Shared<DomainOf<X>>,
    pool: Option<Shared<PoolOf<X>>>,
    profile: DeviceProfile,
    mask: AtomicU64,
    offset_mask: AtomicU64,
    config: AtomicConfig,
    /// The policy for mappings that are not copied.
    policy: AtomicPolicy,
    book: Book,
    /// With a pool.
    chooser: Option<(Chooser, Clock)>,
    counts: PerCpu<Counts>,
}

/// A handle's counters of one CPU, or of all callers without a CPU.
#[derive(Debug, Default)]
struct Counts {
    /// Maps, including `refused` ones, which failed after they were counted.
    maps: Counter,
    refused: Counter,
    copies: Counter,
    /// Bytes of these.
    copied: Counter,
    unmaps: Counter,
    syncs: Counter,
    errors: Counter,
    /// Mapped bytes, and their neighbours. Negative if more is unmapped on a CPU than was mapped there.
    open: Counter,
    exposed: Counter,
    /// Callers without a CPU time nothing.
    timed_maps: Turns,
    timed_unmaps: Turns,
}

impl Counts {
    #[inline]
    fn opened(&self, alone: bool, (used, neighbours): (u64, u64)) {
        self.maps.add(alone, 1);
        self.open.add(alone, used);
        self.exposed.add(alone, neighbours);
    }

    /// Undoes [`opened`](Self::opened).
    #[inline]
    fn refused(&self, alone: bool, (used, neighbours): (u64, u64)) {
        self.refused.add(alone, 1);
        self.open.add(alone, used.wrapping_neg());
        self.exposed.add(alone, neighbours.wrapping_neg());
    }

    #[inline]
    fn closed(&self, alone: bool, (used, neighbours): (u64, u64)) {
        self.unmaps.add(alone, 1);
        self.open.add(alone, used.wrapping_neg());
        self.exposed.add(alone, neighbours.wrapping_neg());
    }
}

impl<X: Machine> core::fmt::Debug for DmaOps<X> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("DmaOps")
            .field("config", &self.config())
            .field("profile", &self.profile)
            .finish_non_exhaustive()
    }
}

impl<X: Machine> DmaOps<X> {
    #[inline(never)]
    pub(super) fn new_in<'a>(
        place: &'a mut MaybeUninit<Self>,
        domain: &Shared<DomainOf<X>>,
        pool: Option<Shared<PoolOf<X>>>,
        profile: DeviceProfile,
        (config, clock): (OpsConfig, Clock),
    ) -> Result<&'a mut Self, SetupError> {
        if !domain.is_translated() {
            return Err(SetupError::NotTranslated);
        }
        // First all that may fail, as nothing in the place may need a drop.
        allows(pool.as_deref(), config)?;
        check(domain, pool.as_deref(), profile)?;
        let last = domain.mapper().geometry().aperture.last();
        let chooser = match &pool {
            Some(pool) => Some((Chooser::new(pool.threshold())?, clock)),
            None => None,
        };
        let counts = PerCpu::new(domain.platform().cpus(), Counts::default)?;
        let near = Near::new()?;
        domain.map_at_once();
        let at = place.as_mut_ptr();
        // SAFETY: each write is to a field in the place; after them all fields are initialised.
        Ok(unsafe {
            write_fields!(
                at,
                made [],
                profile: profile,
                mask: AtomicU64::new(profile.mask),
                offset_mask: AtomicU64::new(profile.offset_mask),
                config: AtomicConfig::new(config),
                policy: AtomicPolicy::new(Some(config.policy())),
                book: Book::new(last, domain.granule(), near),
                chooser: chooser,
                counts: counts,
                domain: domain.clone(),
                pool: pool,
            );
            place.assume_init_mut()
        })
    }

    /// The domain.
    pub fn domain(&self) -> &Shared<DomainOf<X>> {
        &self.domain
    }

    /// The configuration.
    pub fn config(&self) -> OpsConfig {
        self.config.get(self.policy.get())
    }

    /// Changes how mappings are made and end, while drivers map. After `Ok`, every unmap that returns later, of a mapping that is not
    /// copied, follows the new policy; a stricter one holds for earlier unmaps, too, as [`Domain::set_policy`] says. Copied mappings stay copied until
    /// they end, and lasting ones always end strictly.
    ///
    /// Context: may wait for hardware, and for other callers; not with interrupts off. Allocates nothing.
    ///
    /// # Errors
    /// [`PolicyError`]: after [`Setup`](PolicyError::Setup) nothing has changed; after [`Unconfirmed`](PolicyError::Unconfirmed) the change holds, but
    /// devices may still reach what was unmapped before.
    pub fn set_config(&self, config: OpsConfig) -> Result<(), PolicyError> {
        allows(self.pool.as_deref(), config)?;
        self.config.set(config);
        self.domain.change(&self.policy, Some(config.policy()))
    }

    /// The highest address that the device can use, and the low bits of a buffer's address that copies keep.
    pub fn limits(&self) -> (u64, u64) {
        (self.mask.load(Ordering::Relaxed), self.offset_mask.load(Ordering::Relaxed))
    }

    /// Changes the limits of later mappings: the highest address that the device can use (Linux's `dma_set_mask`), and the low bits of a buffer's
    /// address that a copy keeps (`dma_set_min_align_mask`). A concurrent map uses the old ones or the new, or one of each. A device that does not
    /// reach the pool's buffers gets single-use ones, each with a wait.
    ///
    /// Context: any. O(1), never waits, allocates nothing.
    ///
    /// # Errors
    /// [`SetupError::BeyondReach`] if the device reaches none of the domain's addresses, [`SetupError::OffsetMask`] if the bits to keep are not the
    /// lowest, or more than a granule's. Nothing is changed.
    pub fn set_limits(&self, mask: u64, offset_mask: u64) -> Result<(), SetupError> {
        check(&self.domain, self.pool.as_deref(), DeviceProfile { mask, offset_mask, ..self.profile })?;
        self.mask.store(mask, Ordering::Relaxed);
        self.offset_mask.store(offset_mask, Ordering::Relaxed);
        Ok(())
    }

    /// Does the domain's deferred work, which may wait for other callers: takes back addresses and buffers that other CPUs hold, flushes for them,
    /// and evicts idle buffers. The platform's timer does the same ([`Platform::wake_at`]); a kernel may call this when it is short of memory or
    /// addresses, or a map has failed. Costs little without such work.
    ///
    /// Context: may wait for hardware and for other CPUs; not with interrupts off, and not in an interrupt handler. Allocates nothing.
    ///
    /// # Errors
    /// [`InvalidationError`]: the hardware did not confirm. A later call, or timer, tries again.
    pub fn maintain(&self) -> Result<(), InvalidationError> {
        if let Some(pool) = &self.pool {
            pool.maintain();
        }
        self.domain.maintain()
    }

    /// The handle's counters. O(CPUs x size classes of the pool); takes the lock of each class in turn.
    ///
    /// Context: any. Never waits, allocates nothing.
    pub fn usage(&self) -> OpsUsage {
        let sum = |count: fn(&Counts) -> &Counter| {
            self.counts.iter().map(|counts| count(counts).get()).fold(0, u64::wrapping_add)
        };
        // Before `maps`, so that concurrent calls cannot make the number of open mappings negative.
        let unmaps = sum(|counts| &counts.unmaps);
        let refused = sum(|counts| &counts.refused);
        OpsUsage {
            unmaps,
            maps: sum(|counts| &counts.maps).wrapping_sub(refused),
            copies: sum(|counts| &counts.copies),
            copied_bytes: sum(|counts| &counts.copied),
            syncs: sum(|counts| &counts.syncs),
            errors: sum(|counts| &counts.errors),
            open_bytes: sum(|counts| &counts.open),
            exposed_bytes: sum(|counts| &counts.exposed),
            book_bytes: size_of::<Self>() + self.book.bytes(),
            pool: self.pool.as_ref().map(|pool| pool.usage()),
        }
    }

    #[inline]
    fn client(&self, pool: &PoolOf<X>) -> Option<Client> {
        let (mask, offset_mask) = self.limits();
        pool.client(DeviceProfile { mask, offset_mask, ..self.profile }).ok().map(Client::by_number)
    }

    /// The CPU's counters, or those of callers without one; and whether only this CPU changes them.
    #[inline]
    fn counts_of(&self, cpu: Option<&LocalCpu<'_>>) -> (&Counts, bool) {
        self.counts.get(cpu.map(LocalCpu::index))
    }

    #[inline]
    fn count(&self, f: impl FnOnce(&Counts, bool)) {
        self.domain.platform().with_cpu(|cpu| {
            let (counts, alone) = self.counts_of(cpu);
            f(counts, alone);
        });
    }

    #[cold]
    fn count_error(&self) {
        self.count(|counts, alone| counts.errors.add(alone, 1));
    }
}

/// Checks that the pool, if `config` needs one, exists and has its threshold. The domain translates.
fn allows<M: Mapper, P: Platform, C: CopyMemory>(
    pool: Option<&BouncePool<M, P, C>>,
    config: OpsConfig,
) -> Result<(), SetupError> {
    let Some(threshold) = config.threshold() else { return Ok(()) };
    let most = pool.ok_or(SetupError::NoCopyMemory)?.threshold();
    if threshold > most { Err(SetupError::Threshold { threshold, most }) } else { Ok(()) }
}

/// Checks that a device of this profile reaches addresses of the domain, and can have copies of the pool.
fn check<M: Mapper, P: Platform, C: CopyMemory>(
    domain: &Domain<M, P>,
    pool: Option<&BouncePool<M, P, C>>,
    profile: DeviceProfile,
) -> Result<(), SetupError> {
    let first = domain.mapper().geometry().aperture.start().get().max(domain.granule().bytes());
    if first > profile.mask {
        return Err(SetupError::BeyondReach { last: profile.mask, first: Iova::new(first) });
    }
    if let Some(pool) = pool {
        pool.client(profile)?;
    }
    Ok(())
}
