//! A pool of bounce buffers that stay mapped, for the devices of one domain behind an IOMMU. What
//! it keeps true: no device reaches the original of a mapping that goes through a buffer, and in a
//! buffer that it is given no device finds bytes of another [group](DeviceProfile::group)'s
//! mappings.
//!
//! Where it is expensive to change a translation, it is cheaper to copy through a buffer that the
//! device reaches anyway. That is strict, too: nothing of the original is open to the device
//! before, during or after the mapping.
//!
//! The pool is cut into size classes, by powers of two. Each class has a fixed range of addresses
//! and a fixed number of slots in it, so an address gives the slot by arithmetic. A slot gets
//! memory when it is first used. The memory is mapped once and *stays mapped* when the mapping
//! ends: it waits for the next mapping of its size and permissions. Each CPU keeps such slots in
//! magazines of its own. So in the common case a map and an unmap take no lock and no atomic
//! read-modify-write; for a list of pieces each takes two. (The mechanism is that of "Add dynamic
//! iommu backed bounce buffers", David Stevens, 2021; the magazines are Bonwick's and Adams's.)
//!
//! # Which way a mapping goes
//! | mapping | way |
//! |---|---|
//! | up to the [threshold](PoolConfig::threshold) | through a slot; a list as a whole through one slot's buffer |
//! | the same, where the class has no slot left, the device does not reach the slots, or the [offset that is kept](DeviceProfile::offset_mask) makes it too long for a slot | through a single-use buffer, unmapped strictly at the end |
//! | larger | mapped directly, by the policy of its queue's device (the domain's, where [`unmap`](BouncePool::unmap) is called without a queue) |
//! | larger, for an [untrusted](DeviceProfile::untrusted) device, and not of whole granules | head and tail bounced, the middle mapped, in one range; all of it bounced where [splitting](PoolConfig::split) is off, or where a piece ends or the next begins inside a granule |
//! | [persistent](Attributes::persistent_streaming) | mapped directly; an error where an untrusted device would reach more than the mapping |
//!
//! # What a device and a driver find in a buffer
//! - The device finds the bytes of its own mapping. Before and behind them, in the rest of the
//!   slot, it finds zeros, or what mappings of the same [group](DeviceProfile::group) had there.
//!   When a slot comes to another group, all that its buffer may hold is zeroed first. Memory comes
//!   zeroed from [`Frames`](crate::platform::Frames).
//! - With [`wipe`](Attributes::wipe) the buffer is zeroed when the mapping ends, so that nothing
//!   remains while the slot waits.
//! - Where a device writes less than a [`FromDevice`](crate::addr::Direction::FromDevice) mapping,
//!   the driver finds the rest as the buffer held it: zeros, or what devices of the same group
//!   wrote there before. It never finds a CPU's bytes: buffers for that direction get none, but for
//!   [`copy_in`](Attributes::copy_in), and such a buffer is zeroed before its next use. A driver
//!   that cannot accept this asks for `copy_in`: it costs one more copy, and where the device
//!   writes nothing the original's bytes stay.
//! - Buffers are kept apart by permission, so a device cannot write to one that is for reading.
//!
//! # Memory
//! The pool holds buffers for what is in flight, and buffers that wait. [`trim`](BouncePool::trim)
//! gives back those that wait, with one invalidation for all of them. A map that finds no memory
//! does the same by itself, and so does the platform's timer with buffers that have waited [for
//! long](PoolConfig::idle_ns). What remains then is the pool's book-keeping
//! ([`PoolUsage::bookkeeping_bytes`], 64 bytes for each slot), and page tables until the domain
//! [reclaims](Domain::reclaim) them.

// What slots are: `layout`, `slot`, `cpu`, `depot`. What the pool's ordered map holds: `single`.
// What one caller has in hand: `hands`. What a device is: `client`. Each of the following uses those before it: `memory`,
// `unlink`, `idle`, `claim`, `trim`, `refill`, `own`, `split`, `slotted`, `lent`, `device`, `named`; `events` uses
// `idle`, `claim` and `trim`.
mod claim;
mod client;
mod config;
mod cpu;
mod depot;
mod device;
mod events;
mod hands;
mod idle;
mod layout;
mod lent;
mod mapping;
mod memory;
mod named;
mod own;
mod refill;
mod single;
mod slot;
mod slotted;
mod split;
mod trim;
mod unlink;
mod wanted;

pub(crate) use client::Client;
pub use config::{Attributes, DeviceProfile, PoolConfig, PoolUsage};
pub use device::BounceDevice;
pub use mapping::{PoolMapping, Way};
pub(crate) use own::Rule;
pub(crate) use slot::Toward;
pub(crate) use split::Cut;

use alloc::boxed::Box;
use core::mem::ManuallyDrop;

use self::cpu::Cpu;
use self::depot::Depot;
use self::idle::Idle;
use self::layout::Layout;
use self::single::Singles;
use self::slot::Slot;
use self::unlink::StillMapped;
use self::wanted::Wants;
use crate::addr::IovaRange;
use crate::domain::Domain;
use crate::heap::{Shared, SharedPlace, slice, write_fields};
use crate::mapper::Mapper;
use crate::percpu::{BiasedLock, CachePadded};
use crate::platform::{CopyMemory, Platform, events_of};
use crate::setup::SetupError;
use crate::sync::Mutex;

/// The bounce buffers of one domain, shared by its devices: see the [module](self).
///
/// All methods take `&self` and may run on any number of CPUs at once. A mapping is synced and
/// unmapped by one CPU at a time, which need not be the one that mapped it.
///
/// When the pool is dropped, its buffers are unmapped strictly and given back. Mappings through it
/// that have not ended then end without a copy; mappings that were made directly stay as they are.
/// What the hardware does not confirm is leaked rather than freed. The platform holds the pool
/// while it tells it of an event, so the drop may come a moment after the last handle has gone: on
/// the timer's thread, or on one that is giving its CPU back.
// Alone on its cache lines: what counts the handles lies in front of it, and changes with each event that the platform tells.
#[derive(Debug)]
#[repr(align(128))]
pub struct BouncePool<M: Mapper, P: Platform, C: CopyMemory> {
    domain: Shared<Domain<M, P>>,
    /// Not dropped where a device may still reach memory of it.
    memory: ManuallyDrop<C>,
    config: PoolConfig,
    layout: Layout,
    region: IovaRange,
    slots: Box<[Slot]>,
    cpus: BiasedLock<Cpu>,
    /// One for each class.
    depots: Box<[CachePadded<Mutex<Depot>>]>,
    singles: Singles,
    idle: Idle,
    still_mapped: StillMapped,
    wants: Wants,
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Makes a pool of `domain`, without buffers yet; it takes them from `memory`. Reserves the
    /// slots' addresses, and registers the pool with the domain's platform for timers and released
    /// CPUs. Allocates its book-keeping: O(slots). The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`SetupError`], with nothing kept: [`NotTranslated`](SetupError::NotTranslated),
    /// [`Threshold`](SetupError::Threshold), [`ClassBytes`](SetupError::ClassBytes),
    /// [`OutOfMemory`](SetupError::OutOfMemory), or [`Space`](SetupError::Space) where there are no
    /// addresses for the slots.
    #[inline(never)]
    pub fn new(
        domain: Shared<Domain<M, P>>,
        memory: C,
        config: PoolConfig,
    ) -> Result<Shared<Self>, SetupError> {
        if !domain.is_translated() {
            return Err(SetupError::NotTranslated);
        }
        let (classes, class_shift) = config.classes(domain.granule())?;
        let mut layout = Layout::new(domain.granule(), class_shift, classes);
        let total = layout.first(classes);
        let slots = slice(total, |_| Ok(Slot::new()))?;
        // Before there is something to give back, should the platform panic.
        let cpus = BiasedLock::new_in(domain.platform().cpus(), Cpu::make_in)?;
        let depot = |class| Depot::new(layout.first(class), layout.first(class + 1));
        let depots = slice(classes, |class| Ok(CachePadded(Mutex::new(depot(class)))))?;
        let mut place = SharedPlace::<Self>::new()?;
        let region = domain.reserve(layout.bytes(), config.limit)?.divided().into_range();
        layout.begin_at(region.start().get());
        let at = place.as_mut_ptr();
        // In its place from the beginning, as a kernel's stack has no room for it.
        // SAFETY: each write is to a field in the place; then all of them are there.
        let pool = unsafe {
            write_fields!(
                at,
                made [],
                cpus: cpus,
                depots: depots,
                singles: Singles::default(),
                idle: Idle::default(),
                still_mapped: StillMapped::default(),
                wants: Wants::default(),
                slots: slots,
                memory: ManuallyDrop::new(memory),
                domain: domain,
                config: config,
                layout: layout,
                region: region,
            );
            place.filled()
        };
        pool.domain.platform().register(events_of(&pool))?;
        Ok(pool)
    }

    /// The pool's domain.
    pub fn domain(&self) -> &Shared<Domain<M, P>> {
        &self.domain
    }

    /// The largest mapping that goes through a slot, in bytes.
    pub fn threshold(&self) -> u64 {
        self.layout.slot_bytes(self.layout.classes() - 1)
    }

    /// Returns what the pool holds and has done. O(CPUs x classes); takes the lock of each class in
    /// turn. The caller holds no lock.
    pub fn usage(&self) -> PoolUsage {
        let mut usage = PoolUsage {
            iova_bytes: self.region.len(),
            singles: self.singles.count(),
            bookkeeping_bytes: size_of_val(&*self.slots) + size_of_val(&*self.depots) + self.cpus.bytes(),
            ..PoolUsage::default()
        };
        usage.reused = self.cpus.peek().map(|cpu| cpu.reused.get()).sum();
        usage.bounced = usage.reused;
        for class in 0..self.layout.classes() {
            let bytes = self.layout.slot_bytes(class);
            let cached = self.cached_slots(class);
            self.with_depot(class, |depot| {
                let (buffers, peak) = depot.buffers();
                usage.buffer_bytes += buffers * bytes;
                usage.peak_buffer_bytes += peak * bytes;
                usage.cached_bytes += cached.min(buffers) * bytes;
                usage.unconfirmed_bytes += depot.count_retired() * bytes;
                usage.lost_slots += depot.lost;
                usage.bounced += depot.bounced;
            });
        }
        usage
    }

    /// Returns the free slots of `class` that have a buffer, on all CPUs and in the depot. A hint
    /// while other CPUs go on.
    fn cached_slots(&self, class: usize) -> u64 {
        let kept: u64 = self.cpus.peek().map(|cpu| cpu.free(class)).sum();
        kept + self.with_depot(class, |depot| depot.free())
    }

    /// The memory of its buffers.
    #[inline]
    pub(crate) fn memory(&self) -> &C {
        &self.memory
    }

    /// Calls `f` with the depot of `class`, locked, and with a CPU lent, as for every lock of this crate.
    fn with_depot<R>(&self, class: usize, f: impl FnOnce(&mut Depot) -> R) -> R {
        // There is one for each class of the layout.
        let depot = &self.depots[class];
        self.domain.platform().with_cpu(|_| f(&mut depot.lock()))
    }
}
