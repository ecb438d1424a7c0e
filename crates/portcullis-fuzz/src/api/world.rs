//! A machine, and everything that the library makes there.

use std::convert::Infallible;
use std::sync::Arc;

use portcullis::addr::{DeviceId, DomainId, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{BounceDevice, BouncePool, DeviceProfile, PoolConfig};
use portcullis::bounce::swiotlb::{Swiotlb, SwiotlbConfig};
use portcullis::dma::{DmaDevice, DmaDomain, DmaMask, QueueConfig, RawBatch, StrictRing, StrictRingConfig};
use portcullis::domain::{Domain, Policy, UnmapError};
use portcullis::heap::Shared;
use portcullis::invalidation::InvalidationError;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{Attributes, Format, Layout, PageTable};
use portcullis::platform::{Platform, PlatformEvents};
use portcullis_linux::registration::{RegistrationCache, RegistrationLimits};
use portcullis_model::{Buffer, Context, Iommu, IommuConfig, Memory, Queue, TableFormat};

use super::Clocked;
use super::bounced::Bounced;
use super::eager::Eager;
use super::mapped::{BATCH, Typed};
use super::model::{DEVICE, End, Model, PAGE, State};
use super::observed::Observed;
use super::raw::Raw;
use crate::input::Input;

pub type Mapper<X> = Observed<TableMapper<Arc<Memory>, Queue, X>>;
pub type Dom<X> = Domain<Mapper<X>, Arc<Clocked>>;
pub type Device<X> = DmaDevice<Mapper<X>, Arc<Clocked>>;
pub type Machine<X> = (Mapper<X>, Arc<Clocked>, Infallible);
pub type Pool<X> = BouncePool<Mapper<X>, Arc<Clocked>, Arc<Memory>>;

/// Memory that was never allocated: what is mapped by number leads there.
pub const NOWHERE: u64 = 0x9_0000_0000;
pub const TIMEOUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 1 };
/// How long a lazy window is, in nanoseconds.
pub const WINDOW_NS: u64 = 1_000_000;

pub struct World<X: Format> {
    pub memory: Arc<Memory>,
    pub iommu: Arc<Iommu>,
    pub platform: Arc<Clocked>,
    pub domain: Shared<Dom<X>>,
    /// As the domain is, and with a policy of its own.
    pub devices: [Device<X>; 2],
    pub model: Model,
    eager: Arc<Eager>,
    /// Frames of the buffers below: reached only where the model says so.
    user: Vec<(u64, u64)>,
    /// Buffers that are free now.
    pub free: Vec<Buffer>,
    pub typed: Typed<X>,
    pub raw: Raw<X>,
    pub bounced: Bounced<X>,
    /// Invalidations or allocations may fail.
    pub weak: bool,
    /// Somebody unmapped something by number that was not his.
    pub tainted: bool,
    flushes: u64,
}

impl<X: Format> World<X> {
    /// A machine of this many slots, whose tables are written as `format` says and read as `read` says.
    pub fn new(slots: usize, format: X, read: TableFormat, input: &mut Input<'_>) -> Self {
        let platform = Clocked::new(slots);
        let memory = Memory::new(64 << 20);
        let config = IommuConfig { iotlb_entries: 1 << 12, ..IommuConfig::new(Arc::clone(&memory)) };
        let iommu = Iommu::new(config);
        let writes = Attributes::from(Permissions::WRITE);
        let write_reads = format.kept(writes).permissions.allows(Permissions::READ);
        let table = PageTable::new(Arc::clone(&memory), format).unwrap();
        iommu.attach(DEVICE, Context::Translated { domain: DomainId(1), root: table.root(), format: read });
        let mapper = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
        let eager = Eager::new(&iommu);
        let device = Arc::clone(&eager);
        let mapper = Observed::with_fast_paths(mapper, move |moment| device.at(moment));
        let domain = Domain::new(Arc::clone(&platform), mapper, policy(input)).unwrap();
        let mask = if input.flag() { DmaMask::BITS_64 } else { DmaMask::BITS_32 };
        let front = DmaDomain::<Machine<X>>::over(domain.clone(), None).unwrap();
        let nics = [(); 2].map(|()| front.attach(DeviceId(7), mask).unwrap());
        let (mask, [device, other]) = (mask.last(), nics.each_ref().map(|nic| nic.dma().clone()));
        other.set_policy(Some(policy(input))).unwrap();
        let queue = |device: usize, config| nics[device].queue(config).unwrap();
        let one_by_one = QueueConfig::direct();
        let queues = [queue(0, one_by_one), queue(1, one_by_one), queue(0, QueueConfig::batched(BATCH))];
        let free: Vec<_> = (0..16).map(|n| memory.buffer((1 + n % 3) * PAGE).unwrap()).collect();
        let user = free.iter().map(|buffer| (buffer.phys().get(), buffer.len())).collect();
        let ring_batch = 1 + input.below(5) as usize;
        let ring = StrictRing::new(&device, StrictRingConfig::new(8, 2 * PAGE, ring_batch));
        let pool = PoolConfig { threshold: 16 << 10, class_bytes: 64 << 10, ..PoolConfig::default() };
        let pool: Shared<Pool<X>> = BouncePool::new(domain.clone(), Arc::clone(&memory), pool).unwrap();
        let profile = DeviceProfile { mask, untrusted: input.flag(), ..DeviceProfile::default() };
        let swiotlb = SwiotlbConfig {
            area_bytes: 128 << 10,
            min_bytes: 128 << 10,
            max_bytes: 384 << 10,
            ..SwiotlbConfig::default()
        };
        let limits = RegistrationLimits { entries: 4, bytes: 16 * PAGE };
        let raw = Raw {
            batch: RawBatch::new(&device, 4).unwrap(),
            ring: ring.unwrap(),
            ring_batch,
            ring_untold: 0,
            registrations: RegistrationCache::new(device.clone(), limits).unwrap(),
            singles: Vec::new(),
            lists: Vec::new(),
            ranges: Vec::new(),
            in_ring: Vec::new(),
            held: Vec::new(),
        };
        let bounced = Bounced {
            device: BounceDevice::new(pool.clone(), profile).unwrap(),
            pool,
            swiotlb: Swiotlb::new(Arc::clone(&platform), Arc::clone(&memory), &swiotlb).unwrap(),
            live: Vec::new(),
            slots: Vec::new(),
        };
        let typed = Typed { mapped: Vec::new(), queues, untold: 0 };
        Self {
            flushes: domain.stats().flushes,
            devices: [device, other],
            model: Model::new(write_reads),
            eager,
            weak: false,
            tainted: false,
            memory,
            iommu,
            platform,
            domain,
            user,
            free,
            typed,
            raw,
            bounced,
        }
    }

    /// One call, and what the device makes of it.
    pub fn step(&mut self, input: &mut Input<'_>) {
        let way = input.byte();
        self.platform.be(usize::from(way >> 6));
        self.eager.may_try(!self.weak);
        match way & 0x3f {
            0..=13 => self.typed_step(way & 0x3f, input),
            14..=41 => self.raw_step(way & 0x3f, input),
            42..=51 => self.bounced_step(way & 0x3f, input),
            _ => self.machine_step(way & 0x3f, input),
        }
        self.settle();
        self.model.met(self.eager.met());
        let user = &self.user;
        let is_user =
            |phys| phys >= NOWHERE || user.iter().any(|(first, len)| (*first..first + len).contains(&phys));
        self.model.attack(&self.iommu, is_user);
    }

    /// Takes note of flushes since the last call of this.
    pub fn settle(&mut self) {
        let flushes = self.domain.stats().flushes;
        if flushes != self.flushes {
            self.flushes = flushes;
            self.model.flushed_meanwhile();
        }
    }

    fn machine_step(&mut self, way: u8, input: &mut Input<'_>) {
        match way {
            52 | 53 => {
                if self.domain.flush().is_ok() {
                    self.model.flushed();
                } else {
                    assert!(self.weak);
                }
            }
            54 => assert!(self.domain.reclaim().is_ok() || self.weak),
            55 => {
                let policy = policy(input);
                match self.domain.set_policy(policy) {
                    Ok(()) if policy == Policy::Strict => self.stricter(),
                    Ok(()) => {}
                    Err(error) => assert!(self.weak, "{error}"),
                }
            }
            56 => {
                let policy = input.flag().then(|| policy(input));
                assert!(self.devices[1].set_policy(policy).is_ok() || self.weak);
            }
            57 | 58 => {
                let ns = if input.flag() { 20_000_000 } else { 1_000 * u64::from(input.byte()) };
                let now = Platform::now_ns(&self.platform);
                self.platform.go_to(now + ns);
                self.settle();
                // What waits, waits for a window or for a retry, and both are over.
                if ns == 20_000_000 && !self.weak {
                    self.model.expired();
                }
            }
            59 => {
                self.weak = true;
                self.iommu.queue().fail_next(u64::from(input.byte() % 6), TIMEOUT);
            }
            60 => {
                self.weak = true;
                self.memory.fail_after(u64::from(input.byte() % 16));
            }
            61 => self.heal(),
            62 => {
                let index = usize::from(input.byte() % 5);
                self.domain.cpu_released(index);
                self.bounced.pool.cpu_released(index);
                self.bounced.swiotlb.cpu_released(index);
            }
            _ => {
                let usage = self.domain.stats();
                assert!(
                    usage.cached_iova_bytes <= usage.taken_iova_bytes
                        && usage.taken_iova_bytes <= usage.iova_bytes
                );
                let _ = (self.domain.exposure(), self.bounced.pool.usage(), self.bounced.swiotlb.usage());
            }
        }
    }

    /// A flush has followed a change: nothing is left that was the domain's to defer.
    fn stricter(&mut self) {
        self.settle();
        self.model.flushed();
    }

    pub fn heal(&mut self) {
        self.weak = false;
        self.iommu.queue().fail_next(0, TIMEOUT);
        self.memory.fail_after(0);
    }

    /// The pages from `iova` on were unmapped by number or by type, with such a result; `lazily`, where their policy
    /// says so.
    pub fn unmapped(&mut self, (iova, len): (u64, u64), result: Result<(), UnmapError>, lazily: bool) {
        let waits = if self.domain.stats().flushes == self.flushes { End::Flush } else { End::Unsure };
        match result {
            Ok(()) => self.model.unmap(iova, len, lazily.then_some(State::Until(waits))),
            Err(UnmapError::Unconfirmed { .. }) => {
                assert!(self.weak, "an invalidation failed");
                self.model.unmap(iova, len, Some(State::Until(waits)));
            }
            Err(UnmapError::NotMapped { range, .. }) => {
                let whole = self.model.is_live(iova, len);
                assert!(!whole || self.weak, "{range} is mapped");
                self.model.unmap(iova, len, None);
            }
            Err(UnmapError::NoSuchRange { .. }) => {
                assert!(len == 0 || iova.checked_add(len - 1).is_none_or(|last| last > u64::MAX - PAGE))
            }
            // It says what stays mapped.
            Err(_) => {
                assert!(self.weak);
                self.model.unmap(iova, len, Some(State::Kept));
            }
        }
    }

    /// A segment of memory that was never allocated.
    pub fn nowhere(&self, input: &mut Input<'_>) -> PhysSegment {
        match input.byte() % 8 {
            0 => PhysSegment { phys: PhysAddr::new(input.number()), len: input.number() },
            1 => PhysSegment {
                phys: PhysAddr::new(NOWHERE + input.below(4) * (2 << 20)),
                len: (1 + input.below(3)) * (1 << 20),
            },
            _ => {
                let (page, offset) = (input.below(256), input.below(64) * 64);
                PhysSegment {
                    phys: PhysAddr::new(NOWHERE + page * PAGE + offset),
                    len: 1 + input.below(3 * PAGE),
                }
            }
        }
    }

    /// Whether mappings of this device are unmapped lazily.
    pub fn is_lazy(&self, device: usize) -> bool {
        let policy = if device == 0 { self.domain.policy() } else { self.devices[1].policy() };
        matches!(policy, Policy::Lazy { .. })
    }

    /// Ends everything; nothing is lost, and no device reaches anything.
    pub fn finish(mut self) {
        self.heal();
        self.domain.flush().unwrap();
        self.model.flushed();
        self.eager.may_try(false);
        self.finish_typed();
        self.finish_raw();
        self.finish_bounced();
        let Self { memory, iommu, domain, devices, mut model, free, typed, raw, bounced, .. } = self;
        drop((typed, raw, bounced, devices));
        domain.flush().unwrap();
        domain.reclaim().unwrap();
        model.close();
        model.attack(&iommu, |_| true);
        drop((free, domain));
        assert_eq!((memory.bad_frees(), memory.stray_tables()), (0, 0));
    }
}

/// Strict or lazy.
fn policy(input: &mut Input<'_>) -> Policy {
    if input.flag() { Policy::Strict } else { Policy::Lazy { window_ns: WINDOW_NS } }
}

/// The highest address that a device with `mask` may be given.
pub fn limit(input: &mut Input<'_>) -> Iova {
    Iova::new(if input.flag() { u64::MAX } else { input.number() })
}
