//! [`DmaOps`]: mappings for a kernel whose drivers map and unmap by number, from every CPU and from interrupt handlers at
//! once, as Linux's `dma_map_ops` do. Each mapping ends once, as a whole, and through the handle that made it.
//!
//! A [`Queue`](super::Queue) has one owner, which it gives buffers back to. A DMA API of another kind has neither: a driver maps a
//! buffer on one CPU and ends it on another by its address and length alone, and has it back when the call returns.
//! So of the ways to protect it rings and batches fall away, and what remains is an [`OpsConfig`].
//!
//! # How a mapping is made, and ends
//! | the mapping | is made | ends |
//! |---|---|---|
//! | [lasting](MapAttributes::lasting) | mapped | strictly |
//! | [MMIO](MapAttributes::mmio); any other under `Strict` or `Lazy` | mapped | by the configuration at that time |
//! | up to the threshold of `Bounce` | copied, through a buffer that stays mapped | without a wait |
//! | up to that of `Auto` | copied, or mapped if all of its granules may be the device's, whichever is cheaper | without a wait; strictly |
//! | larger, of a device that is [trusted](super::Device::trusted), or of whole granules | mapped | strictly |
//! | larger, any other | mapped, but for copies of its unaligned ends; copied where its pieces meet inside a granule | strictly |
//!
//! An unmap finds out from the address which way the mapping went, so the configuration may [change](DmaOps::set_config) while
//! mappings of all kinds live. A list has one range of addresses, and its unmap one wait.
//!
//! # Mistakes of drivers
//! A mapping that is ended twice, in part, with another length or by another device's address is refused with an error that
//! says so, as is a sync outside of a mapping: nothing is changed, and the buffer is as well protected as before. One mistake is
//! the caller's to prevent, as the [safety sections](DmaOps::unmap) say: a mapping that two CPUs end, or sync and end, at the same
//! moment.
//!
//! # Contexts
//! Every method says whether it may wait, and where it may be called. No map, unmap or sync waits for what another *caller* does, as an
//! interrupt handler may have interrupted just that one: from the time when a domain has its first handle, what would take
//! such waits is left to [`maintain`](DmaOps::maintain), which the platform's timer calls. Waits for hardware are as long as the mapper's. So two
//! things are up to a kernel that maps in interrupt handlers: its mapper waits for no caller that a handler may have interrupted (`portcullis-hw`'s drivers keep handlers away while they share waits; a
//! [`SharedQueue`](crate::invalidation::SharedQueue) waits for none where its [`cpu`](crate::invalidation::SharedQueue::with_cpus) is `None`), and while handlers may map, it calls no
//! [`reclaim`](crate::domain::Domain::reclaim) of a domain whose translations are a [`PageTable`](crate::pgtable::PageTable), whose maps
//! wait at a table that is being taken out. What takes a CPU's values or a lock of the library's does
//! so with a CPU lent ([`Platform::with_cpu`]): a kernel that has interrupts off meanwhile may map and unmap in interrupt handlers.

mod book;
mod choice;
mod config;
mod ends;
mod left;
mod maps;
mod words;

pub use config::{MapAttributes, OpsConfig, OpsUsage, UnmapAttributes};
pub use left::Leftover;

use core::mem::MaybeUninit;

use self::book::Book;
use self::choice::{Chooser, Turns};
use self::config::AtomicConfig;
use self::words::Near;
use super::{Clock, Machine};
use crate::addr::Iova;
use crate::bounce::pool::{BouncePool, Client, DeviceProfile};
use crate::domain::{AtomicPolicy, Domain, Policy, PolicyError};
use crate::heap::{Shared, write_fields};
use crate::invalidation::InvalidationError;
use crate::mapper::Mapper;
use crate::percpu::{Counter, PerCpu};
use crate::platform::{CopyMemory, LocalCpu, Platform};
use crate::setup::SetupError;
use crate::sync::{AtomicU64, Ordering};

type DomainOf<X> = Domain<<X as Machine>::Mapper, <X as Machine>::Platform>;
type PoolOf<X> = BouncePool<<X as Machine>::Mapper, <X as Machine>::Platform, <X as Machine>::Memory>;

/// A device's mappings by number, for any number of CPUs at once: see the [module](self). A kernel makes one for each device, by
/// [`Device::ops`](super::Device::ops).
pub struct DmaOps<X: Machine> {
    domain: Shared<DomainOf<X>>,
    pool: Option<Shared<PoolOf<X>>>,
    /// What the device is, but for its limits, which may change.
    profile: DeviceProfile,
    mask: AtomicU64,
    offset_mask: AtomicU64,
    config: AtomicConfig,
    /// How what is mapped, and not copied, ends.
    policy: AtomicPolicy,
    /// How what is lasting ends, always.
    strictly: AtomicPolicy,
    book: Book,
    /// Where there is a pool: what is measured, and the clock that it is measured by.
    chooser: Option<(Chooser, Clock)>,
    counts: PerCpu<Counts>,
}

/// What one CPU counts of a handle, or all callers without a CPU.
#[derive(Debug, Default)]
struct Counts {
    /// Maps, and of these the ones that failed after they had been counted.
    maps: Counter,
    refused: Counter,
    copies: Counter,
    /// Bytes of these.
    copied: Counter,
    unmaps: Counter,
    syncs: Counter,
    errors: Counter,
    /// Bytes that are mapped, and bytes beside them. Below zero where more is unmapped on a CPU than was mapped there.
    open: Counter,
    exposed: Counter,
    /// When this CPU times its next mapping, and its next unmap. Callers without a CPU time nothing.
    timed_maps: Turns,
    timed_unmaps: Turns,
}

impl Counts {
    /// Counts a mapping of so many bytes with so many beside them.
    #[inline]
    fn opened(&self, alone: bool, (used, neighbours): (u64, u64)) {
        self.maps.add(alone, 1);
        self.open.add(alone, used);
        self.exposed.add(alone, neighbours);
    }

    /// Takes that back, as nothing was mapped after all.
    #[inline]
    fn refused(&self, alone: bool, (used, neighbours): (u64, u64)) {
        self.refused.add(alone, 1);
        self.open.add(alone, used.wrapping_neg());
        self.exposed.add(alone, neighbours.wrapping_neg());
    }

    /// Counts the end of such a mapping.
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
    /// Makes a handle in `place`, as a kernel's stack has no room for it.
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
        // All that may fail comes first, so that nothing is dropped in the place.
        allows(domain, pool.as_deref(), config)?;
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
        // SAFETY: each write is to a field in the place; then all of them are there.
        Ok(unsafe {
            write_fields!(
                at,
                made [],
                profile: profile,
                mask: AtomicU64::new(profile.mask),
                offset_mask: AtomicU64::new(profile.offset_mask),
                config: AtomicConfig::new(config),
                policy: AtomicPolicy::new(Some(config.policy())),
                strictly: AtomicPolicy::new(Some(Policy::Strict)),
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

    /// The configuration now.
    pub fn config(&self) -> OpsConfig {
        self.config.get()
    }

    /// Changes how mappings are made and end, while others live and are made. When the call returns, the stricter of the two
    /// promises holds for every mapping that is mapped and not copied, as [`Domain::set_policy`] says. What is copied stays so until
    /// it ends.
    ///
    /// May wait for hardware, and for what other callers do; not with interrupts off. Allocates nothing.
    ///
    /// # Errors
    /// [`OpsConfigError`]: [`Setup`](OpsConfigError::Setup) with nothing changed; after [`Policy`](OpsConfigError::Policy) the change holds, but devices may
    /// still reach what was unmapped before.
    pub fn set_config(&self, config: OpsConfig) -> Result<(), OpsConfigError> {
        allows(&self.domain, self.pool.as_deref(), config)?;
        self.config.set(config);
        Ok(self.domain.change(&self.policy, Some(config.policy()))?)
    }

    /// The highest address that the device can put on the bus, and the low bits of a buffer's address that copies keep.
    pub fn limits(&self) -> (u64, u64) {
        (self.mask.load(Ordering::Relaxed), self.offset_mask.load(Ordering::Relaxed))
    }

    /// Changes the limits of later mappings: the highest address that the device can put on the bus (Linux's `dma_set_mask`),
    /// and the low bits of a buffer's address that a copy keeps (`dma_set_min_align_mask`). A map beside the call goes by the old
    /// ones or the new, or by one of each. A device that does not reach the pool's buffers gets copies of its own, each with
    /// a wait.
    ///
    /// O(1): never waits, allocates nothing, any context.
    ///
    /// # Errors
    /// [`SetupError::BeyondReach`] where the device reaches none of the domain's addresses, [`SetupError::OffsetMask`] where
    /// the bits to keep are not the lowest, or more than a granule's. Nothing is changed.
    pub fn set_limits(&self, mask: u64, offset_mask: u64) -> Result<(), SetupError> {
        check(&self.domain, self.pool.as_deref(), DeviceProfile { mask, offset_mask, ..self.profile })?;
        self.mask.store(mask, Ordering::Relaxed);
        self.offset_mask.store(offset_mask, Ordering::Relaxed);
        Ok(())
    }

    /// Does what maps and unmaps have left, of this device and of all others of the domain, as it takes waits for other callers:
    /// taking back addresses and buffers that other CPUs keep, flushes for their sake, giving up buffers that wait. They ask for it by
    /// the platform's timer ([`Platform::wake_at`]), whose call does the same: so nobody need call this, and a kernel may wherever it is
    /// short of memory or addresses, or a map has failed. Costs little where nothing was left.
    ///
    /// May wait for hardware and for other CPUs; allocates nothing; not with interrupts off, and not in an interrupt handler.
    ///
    /// # Errors
    /// [`InvalidationError`]: the hardware did not confirm. A later call, or timer, tries again.
    pub fn maintain(&self) -> Result<(), InvalidationError> {
        if let Some(pool) = &self.pool {
            pool.maintain();
        }
        self.domain.maintain()
    }

    /// What the handle has done, and what is open now. O(CPUs x size classes of the pool); takes the lock of each class in turn.
    /// Never waits, allocates nothing, any context.
    pub fn usage(&self) -> OpsUsage {
        let sum = |count: fn(&Counts) -> &Counter| {
            self.counts.iter().map(|counts| count(counts).get()).fold(0, u64::wrapping_add)
        };
        // Ended before made, so that what goes on meanwhile makes no number of open mappings negative.
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

    /// The device as it is now, for the pool.
    #[inline]
    fn client(&self, pool: &PoolOf<X>) -> Option<Client> {
        let (mask, offset_mask) = self.limits();
        pool.client(DeviceProfile { mask, offset_mask, ..self.profile }).ok().map(Client::by_number)
    }

    /// What the CPU counts of the handle, or callers without one, and whether it alone does.
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

/// Whether handles of a domain with this pool may have the configuration.
fn allows<M: Mapper, P: Platform, C: CopyMemory>(
    domain: &Domain<M, P>,
    pool: Option<&BouncePool<M, P, C>>,
    config: OpsConfig,
) -> Result<(), SetupError> {
    domain.allows(config.policy()).map_err(|_| SetupError::NotTranslated)?;
    let Some(threshold) = config.threshold() else { return Ok(()) };
    let most = pool.ok_or(SetupError::NoCopyMemory)?.threshold();
    if threshold > most { Err(SetupError::Threshold { threshold, most }) } else { Ok(()) }
}

/// Whether a device of this profile reaches addresses of the domain, and can have copies of the pool.
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

/// Why a configuration was not changed, or whose promise is not kept yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpsConfigError {
    /// The domain has no such configuration: there is nothing to copy through, or not for as much. Nothing has changed.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The configuration holds, but the hardware did not confirm the flush of what was unmapped before: **devices may still
    /// reach that**. Ask again.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}
