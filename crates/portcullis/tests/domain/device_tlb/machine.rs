//! Domains that share a queue, devices that cache for themselves, and hardware that gives them every chance.

use std::fmt;
use std::sync::{Arc, Mutex};

use portcullis::addr::{DeviceId, Direction, DomainId, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::DmaDevice;
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request, SharedQueue};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::OpenDomain;
use portcullis_model::{Context, Iommu, IommuConfig, Memory, Queue};

use crate::played::Played;
use crate::rig::{Device, Dom, Mapper};

pub const DEVICE: DeviceId = DeviceId(7);
pub const OTHER: DeviceId = DeviceId(8);
pub const PAGE: u64 = 4096;
pub const TIMEOUT_NS: u64 = 5_000;
pub const SILENT: InvalidationError =
    InvalidationError::DeviceTimedOut { device: DEVICE.0, waited_ns: TIMEOUT_NS };
/// Translations that a device holds.
pub const TLB: usize = 64;
/// Lazy protection whose window no test outlives.
pub const LAZY_FOREVER: Policy = Policy::Lazy { window_ns: u64::MAX };

type Hook = Box<dyn FnOnce() + Send>;

/// The model's queue, as slow as it may be: between any two requests [`DEVICE`] tries all that it ever had, so what
/// it forgot too early it fetches again.
pub struct Hostile {
    queue: Queue,
    iommu: Arc<Iommu>,
    tried: Mutex<Vec<Iova>>,
    log: Mutex<Vec<Vec<Request>>>,
    hook: Mutex<Option<Hook>>,
}

impl Hostile {
    /// The submissions since the last call.
    pub fn log(&self) -> Vec<Vec<Request>> {
        std::mem::take(&mut self.log.lock().unwrap())
    }

    /// Runs `hook` when the next submission arrives, before anything of it is carried out.
    pub fn before_next(&self, hook: impl FnOnce() + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }
}

impl fmt::Debug for Hostile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hostile").finish_non_exhaustive()
    }
}

// SAFETY: `Ok` is the model's, of each request.
unsafe impl InvalidationQueue for Hostile {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let hook = self.hook.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
        self.log.lock().unwrap().push(requests.to_vec());
        let mut result = Ok(());
        for Request { domain, invalidation } in requests {
            result = result.and(self.queue.invalidate(*domain, *invalidation));
            for iova in self.tried.lock().unwrap().iter() {
                let _ = self.iommu.access(DEVICE, *iova, 1, Permissions::WRITE);
            }
        }
        result
    }
}

pub struct Machine {
    pub memory: Arc<Memory>,
    pub iommu: Arc<Iommu>,
    pub hostile: Arc<Hostile>,
    pub queue: Arc<SharedQueue<Arc<Hostile>>>,
    pub platform: StdPlatform,
}

/// A domain, and what a device needs to be attached to it.
pub struct Side {
    pub domain: Shared<Dom>,
    pub device: Device,
    pub context: Context,
}

impl Machine {
    pub fn new() -> Self {
        let memory = Memory::new(64 << 20);
        let device_tlb_timeout_ns = TIMEOUT_NS;
        let iommu =
            Iommu::new(IommuConfig { device_tlb_timeout_ns, ..IommuConfig::new(Arc::clone(&memory)) });
        let hostile = Arc::new(Hostile {
            queue: iommu.queue(),
            iommu: Arc::clone(&iommu),
            tried: Mutex::default(),
            log: Mutex::default(),
            hook: Mutex::default(),
        });
        let queue = Arc::new(SharedQueue::new(Arc::clone(&hostile)));
        Self { memory, iommu, hostile, queue, platform: StdPlatform::new() }
    }

    /// Tables of their own for the domain of this number, and what attaches a device to it.
    pub fn mapper(&self, id: u16, queue: Arc<dyn InvalidationQueue>) -> (Mapper, Context) {
        let format = VtdSecondStage::new(4, 3, 52).unwrap();
        let table = PageTable::for_cpus(Arc::clone(&self.memory), format, self.platform.cpus()).unwrap();
        let context = Context::SecondStage { domain: DomainId(id), root: table.root(), levels: 4 };
        (TableMapper::new(table, queue, DomainId(id), Vec::new()), context)
    }

    /// A domain of this number with no device.
    pub fn side(&self, id: u16, policy: Policy) -> Side {
        let (mapper, context) = self.mapper(id, Arc::clone(&self.queue) as _);
        let domain = Domain::new(Played::new(self.platform.clone()), mapper, policy).unwrap();
        let device = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
        Side { domain, device, context }
    }

    /// The same with [`DEVICE`], which caches for itself.
    pub fn caching(&self, policy: Policy) -> Side {
        let side = self.side(1, policy);
        side.domain.mapper().add_device_tlb(DEVICE).unwrap();
        self.iommu.attach_with_tlb(DEVICE, side.context, TLB);
        self.hostile.log();
        side
    }

    /// Whether `device` is let through. If so, it has the translation from now on; [`DEVICE`] tries it for ever.
    pub fn reaches(&self, device: DeviceId, iova: Iova) -> bool {
        if device == DEVICE {
            self.hostile.tried.lock().unwrap().push(iova);
        }
        self.iommu.access(device, iova, 1, Permissions::WRITE).is_ok()
    }

    /// How often devices were told to forget.
    pub fn told(&self) -> u64 {
        self.iommu.stats().device_invalidations
    }
}

impl Side {
    /// A page of memory that nobody reads or writes, mapped. No two of these are neighbours.
    pub fn map(&self, number: u64) -> portcullis::addr::IovaRange {
        let list = [page(number)];
        self.domain.open(&list, Direction::Bidirectional.permissions(), Iova::new(u64::MAX)).unwrap()
    }
}

pub fn page(number: u64) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(0x9_0000_0000 + 2 * number * PAGE), len: PAGE }
}
