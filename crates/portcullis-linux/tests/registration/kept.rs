//! Memory that could not be unmapped is still reached: the error says so, and its memory counts until it is gone.

use std::sync::Arc;

use portcullis::addr::{DomainId, Iova, Permissions};
use portcullis::dma::DmaDevice;
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::invalidation::InvalidationError;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis_linux::registration::{RegistrationCache, RegistrationLimits, Released};
use portcullis_model::{Context, Iommu, IommuConfig, Memory};

use crate::open::OpenCache;
use crate::rig::{Clocked, DEVICE, PAGE};
use crate::stuck::Stuck;
use crate::support::{BOTH, HELD, KEPT, pages};

struct Bench {
    iommu: Arc<Iommu>,
    domain: Shared<Domain<Stuck, Arc<Clocked>>>,
    cache: RegistrationCache<Stuck, Arc<Clocked>>,
}

impl Bench {
    fn new() -> Self {
        let memory = Memory::new(64 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let table = PageTable::for_cpus(memory, VtdSecondStage::new(4, 3, 48).unwrap(), 2).unwrap();
        iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
        let inner = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
        let domain = Domain::new(Clocked::new(2), Stuck::new(inner), Policy::Strict).unwrap();
        let device = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
        let limits = RegistrationLimits { entries: 8, bytes: 8 * PAGE };
        let cache = RegistrationCache::new(device, limits).unwrap();
        Self { iommu, domain, cache }
    }

    fn stick(&self, stuck: bool) {
        self.domain.mapper().stick(stuck);
    }

    fn writes(&self, iova: Iova) -> bool {
        self.iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok()
    }
}

#[test]
fn a_registration_is_not_forgotten_before_it_is_gone() {
    let bench = Bench::new();
    let cache = &bench.cache;
    let held = [0, 1].map(|number| cache.open(pages(number, 1), BOTH, KEPT).unwrap());
    let iovas = held.each_ref().map(|held| held.iova());
    held.into_iter().for_each(|held| _ = cache.release(held).unwrap());
    bench.stick(true);
    for _ in 0..2 {
        let error = cache.forget(pages(0, 1)).unwrap_err();
        assert_eq!((error.entries, error.error), (1, InvalidationError::StillMapped { bytes: PAGE }));
        assert_eq!(cache.trim(0), Err(InvalidationError::StillMapped { bytes: 2 * PAGE }));
        assert!(iovas.iter().all(|iova| bench.writes(*iova)));
    }
    bench.stick(false);
    cache.forget(pages(0, 1)).unwrap();
    assert!(!bench.writes(iovas[0]));
    cache.trim(0).unwrap();
    assert!(!bench.writes(iovas[1]));
    // All of it was mapped until it was removed: no other caller had the addresses, and they are free.
    let stats = bench.domain.stats();
    assert_eq!((stats.lost_iova_bytes, stats.maps, stats.unmaps), (0, 2, 2));
    assert_eq!(stats.taken_iova_bytes, stats.cached_iova_bytes);
}

/// A dropped cache cannot retry for what it leaves.
#[test]
fn what_the_end_of_a_cache_leaves_mapped_is_lost_and_counted() {
    let bench = Bench::new();
    let held = bench.cache.open(pages(0, 1), BOTH, HELD).unwrap();
    let iova = held.iova();
    bench.stick(true);
    assert!(bench.cache.release(held).is_err());
    let Bench { iommu, domain, cache } = bench;
    drop(cache);
    assert!(iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok(), "or the test means nothing");
    let usage = domain.stats();
    assert_eq!((usage.taken_iova_bytes - usage.cached_iova_bytes, usage.lost_iova_bytes), (PAGE, PAGE));
    domain.mapper().stick(false);
    let device = DmaDevice::new(domain, u64::MAX).unwrap();
    let limits = RegistrationLimits { entries: 8, bytes: 8 * PAGE };
    let other = RegistrationCache::new(device, limits).unwrap();
    let others = [1, 2, 3].map(|number| other.open(pages(number, 1), BOTH, HELD).unwrap());
    assert!(others.iter().all(|other| other.iova() != iova));
    others.into_iter().for_each(|held| assert_eq!(other.release(held), Ok(Released::Unmapped)));
}
