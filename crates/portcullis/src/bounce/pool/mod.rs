//! Bounce buffers that stay mapped: a pool for each domain, behind its IOMMU.
//!
//! Where changing a translation is expensive, copying through a buffer that the device reaches anyway is cheaper, and
//! still strict: the device never reaches the original, so nothing is open to it before, beside or after the mapping.
//! The pool is cut into size classes by powers of two. Each has a fixed range of addresses and a fixed number of
//! slots in it, so an address gives the slot by arithmetic. A slot gets memory when it is first used; the memory is
//! mapped once and *stays mapped* when the mapping ends, waiting for the next mapping of its size and permissions.
//! Each CPU keeps such slots in magazines of its own: in the common case map and unmap take no lock and no atomic
//! read-modify-write, but two for a list of pieces. (The mechanism is that of "Add dynamic iommu backed bounce
//! buffers", David Stevens, 2021; the magazines are Bonwick's and Adams's.)
//!
//! # Which way a mapping goes
//! | mapping | way |
//! |---|---|
//! | up to the [threshold](PoolConfig::threshold) | a slot; the whole list through its one buffer |
//! | the same, and the class has no slot left, or the device does not reach the slots | a single-use buffer, unmapped strictly at the end |
//! | larger | mapped directly, by the domain's policy |
//! | larger, for an [untrusted](DeviceProfile::untrusted) device, and not of whole granules | head and tail bounced, the middle mapped, in one range; all bounced where that is [switched off](PoolConfig::split), or pieces of the list share a granule |
//! | [persistent](Attributes::persistent_streaming) | mapped directly, or an error where an untrusted device would see more than the mapping |
//!
//! # What a device finds in a buffer, and a driver
//! - The bytes of its own mapping. Behind and before them, in the rest of the slot: zeros, or what mappings of the
//!   same [group](DeviceProfile::group) had there before. When a slot comes to another group, all of it is zeroed first. Memory comes
//!   zeroed from [`Frames`](crate::platform::Frames).
//! - With [`wipe`](Attributes::wipe) the buffer is zeroed when the mapping ends, so that nothing remains while the
//!   slot waits.
//! - A device that writes less than a [`FromDevice`](crate::addr::Direction::FromDevice) mapping leaves the driver
//!   with what the buffer held: zeros, or what devices of the same group wrote there before. CPUs' bytes it never is:
//!   buffers for that direction get none, and one that got some by [`copy_in`](Attributes::copy_in) is
//!   zeroed before its next use. Who cannot have even that asks for `copy_in`: it costs a copy more, and leaves
//!   the original's bytes where the device wrote none.
//! - Buffers are kept apart by permission, so a device cannot write to one that is for reading.
//!
//! # Memory
//! Buffers for what is in flight, and those that wait. [`trim`](BouncePool::trim) gives the latter back, with one
//! invalidation for all of them; a map that finds no memory does that by itself, and the platform's timer with those that
//! have waited [for long](PoolConfig::idle_ns). What remains then is the pool's book-keeping
//! ([`PoolUsage::bookkeeping_bytes`], 64 bytes a slot), and page tables until the domain [reclaims](Domain::reclaim) them.

// What slots are: `layout`, `slot`, `cpu`, `depot`. What one caller has of them: `hands`. Each of the following uses those
// before it: `memory`, `unlink`, `idle`, `claim` (with `single`), `trim`, `refill`, `own`, `split`, `slotted`, `device`; and
// `events`, `trim`.
mod claim;
mod config;
mod cpu;
mod depot;
mod device;
mod events;
mod hands;
mod idle;
mod layout;
mod mapping;
mod memory;
mod own;
mod refill;
mod single;
mod slot;
mod slotted;
mod split;
mod trim;
mod unlink;

pub use config::{Attributes, DeviceProfile, PoolConfig, PoolUsage};
pub use device::BounceDevice;
pub use mapping::{PoolMapping, Way};

use alloc::boxed::Box;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use self::cpu::Cpu;
use self::depot::Depot;
use self::idle::Idle;
use self::layout::Layout;
use self::single::Singles;
use self::slot::Slot;
use self::unlink::StillMapped;
use crate::addr::IovaRange;
use crate::domain::Domain;
use crate::mapper::Mapper;
use crate::percpu::{BiasedLock, CachePadded};
use crate::platform::{CopyMemory, Platform};
use crate::setup::SetupError;
use crate::sync::Mutex;

/// The bounce buffers of one domain, shared by its devices: see the [module](self).
///
/// All methods take `&self` and may run on any number of CPUs at once. A mapping is synced and unmapped by one CPU at a
/// time, by any.
///
/// When the pool is dropped, its buffers are unmapped strictly and given back; mappings through it that have not ended
/// end without a copy. Mappings that were made directly stay as they are. What the hardware does not confirm then is
/// leaked rather than freed. The platform holds the pool while it tells it of an event, so the end may come a moment
/// after the last handle has gone: on the timer's thread, or on one that is giving its slot back.
// Alone on its cache lines: what counts the handles lies in front of it, and changes with each event that the platform tells.
#[derive(Debug)]
#[repr(align(128))]
pub struct BouncePool<M: Mapper, P: Platform, C: CopyMemory> {
    domain: Arc<Domain<M, P>>,
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
}

impl<M: Mapper, P: Platform, C: CopyMemory> BouncePool<M, P, C> {
    /// A pool of `domain` without buffers, which will be of `memory`. Reserves the slots' addresses, and registers
    /// itself with the domain's platform for timers and released slots. Allocates its book-keeping.
    ///
    /// # Errors
    /// [`SetupError`], with nothing kept.
    pub fn new(domain: Arc<Domain<M, P>>, memory: C, config: PoolConfig) -> Result<Arc<Self>, SetupError> {
        if !domain.is_translated() {
            return Err(SetupError::NotTranslated);
        }
        let (classes, class_shift) = config.classes(domain.granule())?;
        let bare = Layout::new(domain.granule(), class_shift, classes);
        let total = bare.first(classes);
        let mut slots = Vec::new();
        slots.try_reserve_exact(total).map_err(|_| SetupError::OutOfMemory)?;
        slots.extend((0..total).map(|_| Slot::new()));
        // Before there is something to give back, should the platform panic.
        let cpus = BiasedLock::new(domain.platform().cpus(), Cpu::default);
        let region = domain.reserve(bare.bytes(), config.limit)?.into_range();
        let layout = bare.at(region.start().get());
        let depot = |class| Depot::new(layout.first(class), layout.first(class + 1));
        let pool = Arc::new(Self {
            cpus,
            depots: (0..classes).map(|class| CachePadded(Mutex::new(depot(class)))).collect(),
            singles: Singles::default(),
            idle: Idle::default(),
            still_mapped: StillMapped::default(),
            slots: slots.into_boxed_slice(),
            memory: ManuallyDrop::new(memory),
            domain,
            config,
            layout,
            region,
        });
        let events: Weak<Self> = Arc::downgrade(&pool);
        pool.domain.platform().register(events);
        Ok(pool)
    }

    /// The pool's domain.
    pub fn domain(&self) -> &Arc<Domain<M, P>> {
        &self.domain
    }

    /// The largest mapping that goes through a slot, in bytes.
    pub fn threshold(&self) -> u64 {
        self.layout.slot_bytes(self.layout.classes() - 1)
    }

    /// What the pool holds and has done. O(CPUs and classes), takes each class's lock in turn.
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

    /// Free slots of `class` that have a buffer, on all CPUs and in the depot. A hint.
    fn cached_slots(&self, class: usize) -> u64 {
        let kept: u64 = self.cpus.peek().map(|cpu| cpu.free(class)).sum();
        kept + self.with_depot(class, |depot| depot.free())
    }

    /// Calls `f` with the depot of `class`, locked, and with a CPU lent, as for every lock of this crate.
    fn with_depot<R>(&self, class: usize, f: impl FnOnce(&mut Depot) -> R) -> R {
        // There is one for each class of the layout.
        let depot = &self.depots[class];
        self.domain.platform().with_cpu(|_| f(&mut depot.lock()))
    }
}
