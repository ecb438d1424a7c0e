//! A pool of bounce buffers that stay mapped, for the devices of one domain behind an IOMMU. It guarantees that no device reaches the original of a
//! mapping that goes through a buffer, and that no device finds bytes of another [group](DeviceProfile::group)'s mappings in a buffer.
//!
//! Where map, unmap and invalidation are expensive, copying through a buffer that stays mapped is cheaper. It is strict, too.
//!
//! The pool is cut into size classes, by powers of two. Each class has a fixed range of addresses and a fixed number of slots in it, so an address
//! gives the slot by arithmetic. A slot gets memory when it is first used. The memory is mapped once and *stays mapped* when the mapping ends: it is
//! then idle until the next mapping of its size and permissions. Each CPU keeps such slots in magazines of its own. So the fast path of a map and an
//! unmap takes no lock and no atomic read-modify-write; for a list each takes two exchanges. (The mechanism is that of "Add dynamic iommu backed
//! bounce buffers", David Stevens, 2021; the magazines are Bonwick's and Adams's.)
//!
//! # The way of a mapping
//! | mapping | way |
//! |---|---|
//! | up to the [threshold](PoolConfig::threshold) | through a slot; a list as a whole through one slot's buffer |
//! | the same, but the class has no slot left, the device does not reach the slots, or the [offset to keep](DeviceProfile::offset_mask) makes it too long for a slot | through a single-use buffer, unmapped strictly at the end |
//! | larger | mapped directly, by the policy of its queue's device (the domain's, where [`unmap`](BouncePool::unmap) is called without a queue) |
//! | larger, for an [untrusted](DeviceProfile::untrusted) device, and not of whole granules | head and tail bounced, the middle mapped, in one range; all of it bounced where [splitting](PoolConfig::split) is off, or where a piece ends or the next begins inside a granule |
//!
//! # The contents of a buffer
//! - The device finds the bytes of its own mapping. Before and behind them, in the rest of the slot, it finds zeros, or bytes of earlier mappings
//!   of the same [group](DeviceProfile::group). When a slot moves to another group, everything that its buffer may hold is zeroed first. Memory
//!   comes zeroed from [`Frames`](crate::platform::Frames).
//! - With [`wipe`](PoolConfig::wipe) the buffer is zeroed when the mapping ends, so nothing remains while the slot is idle.
//! - Where a device writes less than a [`FromDevice`](crate::addr::Direction::FromDevice) mapping, the driver finds in the rest what the buffer
//!   held: zeros, or bytes that devices of the same group wrote there before. It never finds a CPU's bytes: buffers for that direction get none,
//!   except by [`copy_in`](Attributes::copy_in), and such a buffer is zeroed before its next use. A driver that cannot accept this asks for
//!   `copy_in`: it costs one more copy, and where the device writes nothing the original's bytes stay.
//! - Buffers are kept apart by permission, so a device cannot write to one that is for reading.
//!
//! # Memory
//! The pool holds buffers in use, and idle ones. [`trim`](BouncePool::trim) frees idle ones, with one invalidation for all of them. So do a map that
//! finds no memory, and the platform's timer for buffers that were idle [for long](PoolConfig::idle_ns). The pool's metadata remains
//! ([`PoolUsage::bookkeeping_bytes`], 64 bytes for each slot), and page tables until the domain [reclaims](Domain::reclaim) them.

// Slots: `layout`, `slot`, `cpu`, `depot`. The pool's ordered map: `single`. Guards: `hands`. Each of the following uses the ones
// before it: `memory`, `events`, `claim`, `trim`, `refill`, `own`, `split`, `slotted`, `lent`, `device`, `named`; `events` uses
// `claim` and `trim`, too.
mod claim;
mod client;
mod config;
mod cpu;
mod depot;
mod device;
mod events;
mod hands;
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
mod syncs;
mod trim;
mod wanted;

pub(crate) use client::Client;
pub use config::{Attributes, DeviceProfile, PoolConfig, PoolUsage};
pub use device::BounceDevice;

pub use mapping::{PoolMapping, Way};
pub(crate) use slot::Toward;
pub(crate) use split::Cut;

use alloc::boxed::Box;
use core::mem::ManuallyDrop;

use self::cpu::Cpu;
use self::depot::Depot;
use self::layout::Layout;
use self::single::Singles;
use self::slot::Slot;
use super::deadline::Deadline;
use crate::addr::IovaRange;
use crate::domain::Domain;
use crate::heap::{Shared, SharedPlace, slice, write_fields};
use crate::mapper::Mapper;
use crate::percpu::{BiasedLock, CachePadded};
use crate::platform::{CopyMemory, Platform, events_of};
use crate::setup::SetupError;
use crate::sync::{AtomicU64, Mutex};

/// The bounce buffers of one domain, shared by its devices: see the [module](self).
///
/// Any number of CPUs may call its methods at once. One CPU at a time syncs or unmaps a mapping; it need not be the CPU that mapped it.
///
/// Dropping the pool unmaps its buffers strictly and frees them. Open mappings through buffers then end without a copy; direct mappings stay. Buffers
/// whose unmap the hardware does not confirm leak. The platform holds the pool while it delivers an event, so the drop may come a moment after the
/// last handle has gone: on the timer's thread, or on one that is releasing its CPU.
// On cache lines of its own: the count of its handles lies in front of it, and changes with each event.
#[derive(Debug)]
#[repr(align(128))]
pub struct BouncePool<M: Mapper, P: Platform, C: CopyMemory> {
    domain: Shared<Domain<M, P>>,
    /// Not dropped where a device may still reach some of it.
    memory: ManuallyDrop<C>,
    config: PoolConfig,
    layout: Layout,
    region: IovaRange,
    slots: Box<[Slot]>,
    cpus: BiasedLock<Cpu>,
    depots: Box<[CachePadded<Mutex<Depot>>]>,
    singles: Singles,
    /// When the timer looks for idle buffers next.
    look: Deadline,
    /// [`PoolUsage::bounced`] when it looked last.
    bounced_before: AtomicU64,
    /// Bytes that the mapper has failed to unmap.
    still_mapped: AtomicU64,
    /// Bits of work that maps have left to the timer.
    wants: AtomicU64,
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// Makes a pool of `domain`, whose buffers will come from `memory`. Reserves the slots' addresses, and registers the pool with the domain's
    /// platform for timers and released CPUs.
    ///
    /// Context: allocates its metadata, O(slots). The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`SetupError`], with nothing kept: [`NotTranslated`](SetupError::NotTranslated), [`Threshold`](SetupError::Threshold),
    /// [`ClassBytes`](SetupError::ClassBytes), [`OutOfMemory`](SetupError::OutOfMemory), or [`Space`](SetupError::Space) without addresses for the
    /// slots.
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
        // Made before the addresses are reserved, as the platform may panic.
        let cpus = BiasedLock::new_in(domain.platform().cpus(), Cpu::make_in)?;
        let depot = |class| Depot::new(layout.first(class), layout.first(class + 1));
        let depots = slice(classes, |class| Ok(CachePadded(Mutex::new(depot(class)))))?;
        let mut place = SharedPlace::<Self>::new()?;
        let region = domain.reserve(layout.bytes(), config.limit)?.divided().into_range();
        layout.begin_at(region.start().get());
        let at = place.as_mut_ptr();
        // Built in place, as a kernel's stack has no room for it.
        // SAFETY: each write is to a field of `place`, which only this function has; after them all fields are initialised.
        let pool = unsafe {
            write_fields!(
                at,
                made [],
                cpus: cpus,
                depots: depots,
                singles: Singles::default(),
                look: Deadline::default(),
                bounced_before: AtomicU64::new(0),
                still_mapped: AtomicU64::new(0),
                wants: AtomicU64::new(0),
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

    /// The pool's counters. O(CPUs x classes); takes the lock of each class in turn. The caller holds no lock.
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
                usage.buffer_bytes += depot.buffers * bytes;
                usage.peak_buffer_bytes += depot.peak * bytes;
                usage.cached_bytes += cached.min(depot.buffers) * bytes;
                usage.unconfirmed_bytes += depot.retired.slots * bytes;
                usage.lost_slots += depot.lost;
                usage.bounced += depot.not_reused;
            });
        }
        usage
    }

    /// The free slots of `class` with a buffer, on all CPUs and in the depot. A hint while other CPUs use the pool.
    fn cached_slots(&self, class: usize) -> u64 {
        let kept: u64 = self.cpus.peek().map(|cpu| cpu.free(class)).sum();
        kept + self.with_depot(class, |depot| depot.free())
    }

    #[inline]
    pub(crate) fn memory(&self) -> &C {
        &self.memory
    }

    /// Calls `f` with the depot of `class`, locked, and with a CPU lent, as for every lock of this crate.
    fn with_depot<R>(&self, class: usize, f: impl FnOnce(&mut Depot) -> R) -> R {
        let depot = &self.depots[class];
        self.domain.platform().with_cpu(|_| f(&mut depot.lock()))
    }
}
