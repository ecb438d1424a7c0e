//! The software IOMMU: devices on one side, memory on the other, a driver's queue in between.
//!
//! Give devices a [`Context`] with [`attach`](Iommu::attach), let them access memory, and invalidate through [`queue`](Iommu::queue).
//! [`probe`](Iommu::probe) returns what a hostile device would reach, without a trace. [`stats`](Iommu::stats) has the counts; the
//! [exposure ledger](crate::exposure), which the caller tells of live mappings, says which device could reach what for how long.
//!
//! One lock serialises everything, as a bus does. Callbacks run under it and must not call back.
//!
//! Cost: a lock, a hash lookup, and the IOTLB; a walk on a miss.

mod driver;
mod observe;

use std::fmt;
use std::sync::Arc;

pub use portcullis::addr::DeviceId;
use portcullis::addr::{DomainId, Iova, PageSize, Permissions, PhysAddr};
use portcullis::invalidation::InvalidationError;
use portcullis::sync::Mutex;
use rustc_hash::FxHashMap;

use crate::absent::AbsentCache;
use crate::device_tlbs::DeviceTlbs;
use crate::exposure::Exposure;
use crate::fault::{Fault, FaultLog, FaultReason};
use crate::iotlb::{Iotlb, IotlbConfig};
use crate::memory::Memory;
use crate::queue::{Misbehaviour, Ring};
use crate::stats::Stats;
use crate::unit::Unit;
use crate::walk_cache::WalkCache;
use crate::walker::TableFormat;

/// The treatment of a device's accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Context {
    /// Refuses all of them.
    Blocked,
    /// Lets all of them through as they are.
    Passthrough,
    /// Translates them through VT-d second-stage tables: [`Translated`](Self::Translated) with
    /// [`TableFormat::VtdSecondStage`].
    SecondStage {
        /// The domain number, the tag of the caches.
        domain: DomainId,
        /// The root table.
        root: PhysAddr,
        /// Levels of tables, 3 to 5.
        levels: u32,
    },
    /// Translates them through tables of any format.
    Translated {
        /// The domain number, the tag of the caches.
        domain: DomainId,
        /// The root table, aligned to its size.
        root: PhysAddr,
        /// How the tables are laid out.
        format: TableFormat,
    },
}

impl Context {
    /// Its domain number, if it translates.
    pub fn domain(&self) -> Option<DomainId> {
        match *self {
            Self::Blocked | Self::Passthrough => None,
            Self::SecondStage { domain, .. } | Self::Translated { domain, .. } => Some(domain),
        }
    }
}

/// The dimensions and behaviour of an [`Iommu`].
#[derive(Debug, Clone)]
pub struct IommuConfig {
    /// The memory of tables and buffers.
    pub memory: Arc<Memory>,
    /// Entries of the IOTLB.
    pub iotlb_entries: usize,
    /// Ways of the IOTLB.
    pub iotlb_ways: usize,
    /// Entries of the paging-structure cache of each level.
    pub walk_cache_entries: usize,
    /// Whether an invalidation with the leaf-only hint keeps the paging-structure caches, and one without it drops only the tables of its
    /// range. Otherwise each drops all of the domain's, as much hardware does.
    pub honours_leaf_only: bool,
    /// Caching mode: whether non-present entries are cached until they are invalidated, as VT-d allows with CAP.CM, and AMD-Vi with
    /// NpCache. [`InvalidationQueue::caches_absent`](portcullis::invalidation::InvalidationQueue::caches_absent) has the driver's duties
    /// then.
    pub caches_absent: bool,
    /// The largest block of a page-selective invalidation, as the binary logarithm of its pages.
    pub max_address_mask: u32,
    /// A device's time limit to answer an invalidation of its TLB, in nanoseconds. No time passes here: the error of a
    /// [silent](Iommu::set_silent) device has it.
    pub device_tlb_timeout_ns: u64,
    /// The pages in which the [exposure ledger](crate::exposure) counts neighbours, at most 64 KiB: the granule of the tables. Pass-through
    /// devices have no neighbours, and are counted in the same pages.
    pub exposure_page: PageSize,
    /// Entries of the fault log.
    pub fault_log_entries: usize,
}

impl IommuConfig {
    /// The figures of a recent server's VT-d unit: an IOTLB of 128 in 8 ways, 64 tables per level, the leaf-only hint honoured, no caching
    /// mode, blocks of up to 2 MiB, exposure in pages of 4 KiB, and a log of 256 faults. Device TLBs have a minute to answer, as by PCIe's
    /// Address Translation Services.
    pub fn new(memory: Arc<Memory>) -> Self {
        Self {
            memory,
            iotlb_entries: 128,
            iotlb_ways: 8,
            walk_cache_entries: 64,
            honours_leaf_only: true,
            caches_absent: false,
            max_address_mask: 9,
            device_tlb_timeout_ns: 60_000_000_000,
            exposure_page: PageSize::SIZE_4K,
            fault_log_entries: 256,
        }
    }
}

/// The result of a well-behaved access, in pieces of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AccessOutcome {
    /// Refused pieces.
    pub faults: u64,
    /// Pieces that reached other memory than the buffer's.
    pub wrong: u64,
}

/// A software IOMMU.
pub struct Iommu {
    state: Mutex<State>,
    memory: Arc<Memory>,
    max_address_mask: u32,
    honours_leaf_only: bool,
    caches_absent: bool,
    device_tlb_timeout_ns: u64,
}

/// Omits the memory: its bytes would be pages of text, and its counts would take its lock.
impl fmt::Debug for Iommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Iommu").field("memory", &self.memory).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    devices: Devices,
    unit: Unit,
    faults: FaultLog,
    ring: Ring,
    misbehaviour: Misbehaviour,
    /// A device that did not answer, not reported to a driver yet.
    unanswered: Option<InvalidationError>,
    exposure: Exposure,
    /// Domains of the descriptors just executed.
    touched: Vec<DomainId>,
}

/// The devices ever named, in order.
#[derive(Debug, Default)]
struct Devices {
    index: FxHashMap<DeviceId, usize>,
    contexts: Vec<Option<Context>>,
}

impl Devices {
    /// A device's index and its context; `usize::MAX` if it was never named.
    fn find(&self, device: DeviceId) -> (usize, Option<Context>) {
        self.index.get(&device).map_or((usize::MAX, None), |&index| (index, self.contexts[index]))
    }

    fn index(&mut self, device: DeviceId) -> usize {
        let Self { index, contexts } = self;
        *index.entry(device).or_insert_with(|| {
            contexts.push(None);
            contexts.len() - 1
        })
    }
}

impl Iommu {
    /// A unit with empty caches and no devices.
    pub fn new(config: IommuConfig) -> Arc<Self> {
        let iotlb = IotlbConfig { entries: config.iotlb_entries, ways: config.iotlb_ways };
        let unit = Unit {
            memory: Arc::clone(&config.memory),
            device_tlbs: DeviceTlbs::default(),
            iotlb: Iotlb::new(iotlb),
            walk_cache: WalkCache::new(config.walk_cache_entries),
            absent: config.caches_absent.then(|| AbsentCache::new(iotlb)),
            stats: Stats::default(),
            released: Vec::new(),
        };
        Arc::new(Self {
            state: Mutex::new(State {
                devices: Devices::default(),
                unit,
                faults: FaultLog::new(config.fault_log_entries),
                ring: Ring::default(),
                misbehaviour: Misbehaviour::default(),
                unanswered: None,
                exposure: Exposure::new(config.exposure_page),
                touched: Vec::new(),
            }),
            memory: config.memory,
            max_address_mask: config.max_address_mask,
            honours_leaf_only: config.honours_leaf_only,
            caches_absent: config.caches_absent,
            device_tlb_timeout_ns: config.device_tlb_timeout_ns,
        })
    }

    /// The memory of the unit and its devices.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(crate) fn caches_absent(&self) -> bool {
        self.caches_absent
    }

    /// Calls `each` with the result for every piece of `len` bytes at `iova` (address, physical address, length), in order, up to the first
    /// that is refused. A piece never crosses a 4 KiB page.
    ///
    /// # Errors
    /// The fault, which is in the log too. `each` has got the pieces before it.
    pub fn translate_each(
        &self,
        device: DeviceId,
        iova: Iova,
        len: u64,
        access: Permissions,
        mut each: impl FnMut(Iova, PhysAddr, u64),
    ) -> Result<(), Fault> {
        self.state.lock().access(device, iova, len, access, |at, phys, len| {
            each(at, phys, len);
            Ok(())
        })
    }

    /// An access to `len` bytes at `iova` that moves no data.
    ///
    /// # Errors
    /// The first fault, which is in the log too.
    pub fn access(&self, device: DeviceId, iova: Iova, len: u64, access: Permissions) -> Result<(), Fault> {
        self.translate_each(device, iova, len, access, |_, _, _| ())
    }

    /// The device reads `bytes` from `iova` on.
    ///
    /// # Errors
    /// The first fault; the bytes before it have been read.
    pub fn dma_read(&self, device: DeviceId, iova: Iova, bytes: &mut [u8]) -> Result<(), Fault> {
        let (len, mut rest) = (bytes.len() as u64, bytes);
        self.state.lock().access(device, iova, len, Permissions::READ, |_, phys, len| {
            let (piece, after) = std::mem::take(&mut rest).split_at_mut(len as usize);
            rest = after;
            self.memory.read(phys, piece).map_err(|_| FaultReason::NoMemory(phys))
        })
    }

    /// The device writes `bytes` from `iova` on.
    ///
    /// # Errors
    /// The first fault; the bytes before it have been written.
    pub fn dma_write(&self, device: DeviceId, iova: Iova, bytes: &[u8]) -> Result<(), Fault> {
        let mut rest = bytes;
        self.state.lock().access(device, iova, bytes.len() as u64, Permissions::WRITE, |_, phys, len| {
            let (piece, after) = rest.split_at(len as usize);
            rest = after;
            self.memory.write(phys, piece).map_err(|_| FaultReason::NoMemory(phys))
        })
    }

    /// An access by a well-behaved device to all of a mapping, compared with its buffer: `len` bytes at `phys`, mapped at `iova`. Goes on
    /// after a fault.
    pub fn access_checked(
        &self,
        device: DeviceId,
        iova: Iova,
        phys: PhysAddr,
        len: u64,
        access: Permissions,
    ) -> AccessOutcome {
        let mut outcome = AccessOutcome::default();
        let mut state = self.state.lock();
        let attached = state.devices.find(device);
        let mut done = 0;
        while done < len {
            let Some(at) = iova.checked_add(done) else {
                outcome.faults += 1;
                break;
            };
            let piece = in_page(at).min(len - done);
            let expected = phys.checked_add(done);
            let right = |reached: PhysAddr| Some(reached) == expected;
            match state.access_piece(device, attached, at, access) {
                Ok(reached) if right(reached) => {}
                Ok(_) => outcome.wrong += 1,
                Err(_) => outcome.faults += 1,
            }
            done += piece;
        }
        state.settle_released();
        outcome
    }

    /// What a hostile device would reach at `iova` now, through caches, however stale, and tables. Changes no state, counts nothing, and
    /// logs no fault.
    pub fn probe(&self, device: DeviceId, iova: Iova, access: Permissions) -> Option<PhysAddr> {
        let state = self.state.lock();
        let (index, context) = state.devices.find(device);
        let (phys, allowed) = state.unit.peek(index, context, iova)?;
        allowed.allows(access).then_some(phys)
    }

    /// The counts so far.
    pub fn stats(&self) -> Stats {
        self.state.lock().unit.stats
    }

    /// The faults in the log, oldest first.
    pub fn faults(&self) -> Vec<Fault> {
        self.state.lock().faults.iter().copied().collect()
    }

    /// Empties the log.
    pub fn take_faults(&self) -> Vec<Fault> {
        self.state.lock().faults.take()
    }

    /// Faults so far.
    pub fn fault_count(&self) -> u64 {
        self.state.lock().faults.total()
    }

    /// Faults that found the log full.
    pub fn faults_lost(&self) -> u64 {
        self.state.lock().faults.lost()
    }
}

impl State {
    fn access(
        &mut self,
        device: DeviceId,
        iova: Iova,
        len: u64,
        access: Permissions,
        mut each: impl FnMut(Iova, PhysAddr, u64) -> Result<(), FaultReason>,
    ) -> Result<(), Fault> {
        let attached = self.devices.find(device);
        let mut done = 0;
        let mut result = Ok(());
        while done < len && result.is_ok() {
            let Some(at) = iova.checked_add(done) else {
                // There is no address to refuse: the access ran past the last one.
                result = Err(self.fault(device, Iova::new(u64::MAX), access, FaultReason::BeyondWidth));
                break;
            };
            let piece = in_page(at).min(len - done);
            result = self.access_piece(device, attached, at, access).and_then(|phys| {
                each(at, phys, piece).map_err(|reason| self.fault(device, at, access, reason))
            });
            done += piece;
        }
        self.settle_released();
        result
    }

    /// One piece, by the device's index and context. The caller settles evicted stale entries.
    fn access_piece(
        &mut self,
        device: DeviceId,
        (index, context): (usize, Option<Context>),
        iova: Iova,
        access: Permissions,
    ) -> Result<PhysAddr, Fault> {
        let reached = self.unit.translate(index, context, iova, access);
        reached.map_err(|reason| self.fault(device, iova, access, reason))
    }

    fn fault(&mut self, device: DeviceId, iova: Iova, access: Permissions, reason: FaultReason) -> Fault {
        let fault = Fault { device, iova, access, reason };
        self.faults.record(fault);
        fault
    }

    /// Ends the exposures of stale entries that have left a cache.
    fn settle_released(&mut self) {
        if !self.unit.released.is_empty() {
            self.exposure.entries_released(&mut self.unit, &self.devices.contexts);
        }
    }
}

fn in_page(iova: Iova) -> u64 {
    PageSize::SIZE_4K.bytes() - iova.page_offset(PageSize::SIZE_4K)
}
