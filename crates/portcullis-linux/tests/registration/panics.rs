//! A mapper that panics: its caller unwinds, and no other caller waits for it, or shares its entries.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::addr::{DomainId, Iova, IovaRange, Permissions};
use portcullis::dma::DmaDevice;
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::invalidation::Gather;
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis_linux::registration::{RegistrationCache, RegistrationLimits};
use portcullis_model::open::{OpenDevice, OpenMapper};
use portcullis_model::{Context, Iommu, IommuConfig, Memory, Queue};

use crate::open::OpenCache;
use crate::rig::{Clocked, DEVICE, Moment, Observed, PAGE};
use crate::support::{self, BOTH, HELD, KEPT, TIMEOUT, pages};

type Tables = Observed<TableMapper<Arc<Memory>, Queue>>;

struct Bench {
    iommu: Arc<Iommu>,
    domain: Shared<Domain<Tables, Arc<Clocked>>>,
    cache: RegistrationCache<Tables, Arc<Clocked>>,
    /// Where the mapper panics, once.
    panics: Arc<Mutex<Option<Moment>>>,
}

impl Bench {
    /// Room for two entries, and for three pages.
    fn new() -> Self {
        let memory = Memory::new(64 << 20);
        let iommu =
            Iommu::new(IommuConfig { iotlb_entries: 1 << 14, ..IommuConfig::new(Arc::clone(&memory)) });
        let platform = Clocked::new(2);
        let table = PageTable::for_cpus(memory, VtdSecondStage::new(4, 3, 48).unwrap(), 2).unwrap();
        iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
        let inner = TableMapper::new(table, iommu.queue(), DomainId(1), Vec::new());
        let panics = Arc::new(Mutex::new(None));
        let at = Arc::clone(&panics);
        let mapper = Observed::new(inner, move |moment| {
            let meets = at.lock().unwrap().take_if(|at| *at == moment).is_some();
            assert!(!meets, "a driver's bug");
        });
        let domain = Domain::new(platform, mapper, Policy::Strict).unwrap();
        let device = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
        let limits = RegistrationLimits { entries: 2, bytes: 3 * PAGE };
        let cache = RegistrationCache::new(device, limits).unwrap();
        Self { iommu, domain, cache, panics }
    }

    fn reaches(&self, iova: Iova) -> bool {
        self.iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_ok()
    }

    /// A persistent entry that the device has used: its IOVA.
    fn touch(&self, number: u64) -> Iova {
        let held = self.cache.open(pages(number, 1), BOTH, KEPT).unwrap();
        let iova = held.iova();
        assert!(self.reaches(iova));
        self.cache.release(held).unwrap();
        iova
    }

    /// Runs `f` into the panic.
    fn unwinds<R>(&self, at: Moment, f: impl FnOnce() -> R) {
        *self.panics.lock().unwrap() = Some(at);
        assert!(catch_unwind(AssertUnwindSafe(f)).is_err(), "{at:?}");
    }

    /// All room is free, the affected entries are gone, and their addresses are leaked.
    fn check(self, gone: &[Iova]) {
        self.cache.trim(0).unwrap();
        assert!(!gone.iter().any(|iova| self.reaches(*iova)));
        let usage = self.cache.usage();
        assert_eq!((usage.entries, usage.bytes, usage.unconfirmed_entries), (0, 0, 0));
        let all = self.cache.open(pages(20, 3), BOTH, HELD).unwrap();
        self.cache.release(all).unwrap();
        let iovas = [10, 11].map(|number| self.touch(number));
        assert!(gone.iter().all(|iova| !iovas.contains(iova)));
        let Self { iommu, domain, cache, .. } = self;
        drop(cache);
        let reaches = |iova: &Iova| iommu.access(DEVICE, *iova, 1, Permissions::WRITE).is_ok();
        assert!(!iovas.iter().any(reaches));
        let lost = gone.len() as u64 * PAGE;
        assert_eq!(
            (
                domain.stats().taken_iova_bytes - domain.stats().cached_iova_bytes,
                domain.stats().lost_iova_bytes
            ),
            (lost, lost)
        );
    }
}

const UNMAPPING: [Moment; 3] = [Moment::Unmap, Moment::Unmapped, Moment::Sync];

#[test]
fn what_was_being_unmapped_is_unmapped_by_the_next() {
    for at in UNMAPPING {
        let bench = Bench::new();
        let iova = bench.touch(0);
        bench.unwinds(at, || bench.cache.forget(pages(0, 1)));
        assert_eq!(bench.cache.usage().unconfirmed_entries, 1);
        // The entry is not shared, and a forget does not wait for ever.
        let other = bench.touch(0);
        assert_ne!(other, iova);
        assert_eq!(bench.cache.forget(pages(0, 1)).unwrap().entries, 2);
        assert!(!bench.reaches(iova) && !bench.reaches(other), "{at:?}");
        bench.check(&[iova]);
    }
}

#[test]
fn a_release_that_unwinds_leaves_nothing_held() {
    for at in UNMAPPING {
        let bench = Bench::new();
        let held = bench.cache.open(pages(0, 1), BOTH, HELD).unwrap();
        let iova = held.iova();
        assert!(bench.reaches(iova));
        bench.unwinds(at, || bench.cache.release(held));
        bench.check(&[iova]);
    }
}

#[test]
fn room_that_was_being_made_is_there_for_others() {
    for at in UNMAPPING {
        let bench = Bench::new();
        let iovas = [0, 1].map(|number| bench.touch(number));
        bench.unwinds(at, || bench.cache.open(pages(2, 1), BOTH, KEPT));
        bench.touch(2);
        bench.touch(3);
        bench.check(&iovas[..1]);
    }
}

#[test]
fn what_was_being_mapped_is_unmapped_by_the_next() {
    let bench = Bench::new();
    bench.unwinds(Moment::Mapped, || bench.cache.open(pages(0, 1), BOTH, KEPT));
    let usage = bench.cache.usage();
    assert_eq!((usage.entries, usage.unconfirmed_entries), (1, 1));
    assert_eq!(bench.cache.forget(pages(0, 1)).unwrap().entries, 1);
    assert_eq!(bench.domain.stats().lost_iova_bytes, PAGE);
    assert_eq!(bench.cache.usage().entries, 0);
    let usage = bench.domain.stats();
    assert_eq!(usage.taken_iova_bytes - usage.cached_iova_bytes, PAGE, "never used again");
    bench.touch(0);
}

/// Another CPU forgets the range of a hit, whose caller then unwinds.
#[test]
fn a_hit_that_unwinds_after_its_range_was_forgotten_gives_the_addresses_up() {
    let bench = support::Bench::new(4, 64);
    bench.touch(pages(0, 1), KEPT);
    let (cache, first) = (Arc::downgrade(&bench.cache), AtomicBool::new(true));
    bench.rig.platform.after_each_turn(move || {
        if first.swap(false, Ordering::Relaxed) {
            assert_eq!(cache.upgrade().unwrap().forget(pages(0, 1)).unwrap().held, 1);
            panic!("a driver's bug");
        }
    });
    assert!(catch_unwind(AssertUnwindSafe(|| bench.acquire(pages(0, 1), KEPT))).is_err());
    assert_eq!(bench.cache.usage().entries, 0);
    assert_eq!(bench.rig.gone(), (PAGE, PAGE));
}

/// Dropping the cache unmaps abandoned entries.
#[test]
fn a_cache_that_ends_unmaps_what_was_left() {
    for at in UNMAPPING {
        let bench = Bench::new();
        let iova = bench.touch(0);
        bench.unwinds(at, || bench.cache.trim(0));
        let Bench { iommu, domain, cache, .. } = bench;
        drop(cache);
        assert!(iommu.access(DEVICE, iova, 1, Permissions::WRITE).is_err(), "{at:?}");
        assert_eq!(domain.stats().lost_iova_bytes, PAGE);
    }
}

/// A later call must not touch what was removed before a panic: another mapping may be there.
#[test]
fn what_was_unlinked_is_not_unlinked_again() {
    for panics in [false, true] {
        let bench = Bench::new();
        let iova = bench.touch(0);
        bench.iommu.queue().fail_next(1, TIMEOUT);
        bench.cache.forget(pages(0, 1)).unwrap_err();
        let (range, list) = (IovaRange::new(iova, PAGE).unwrap(), [(pages(5, 1).phys, PAGE)]);
        let mapper = bench.domain.mapper();
        mapper.open(&Clocked::new(2), range, list, Permissions::READ_WRITE, &mut Gather::new()).unwrap();
        if panics {
            bench.unwinds(Moment::Sync, || bench.cache.forget(pages(0, 1)));
        }
        bench.cache.forget(pages(0, 1)).unwrap();
        assert!(bench.reaches(iova), "{panics}: somebody else's is left alone");
    }
}

/// A search for addresses confirms deferred unmaps, if no addresses are free.
#[test]
fn a_panic_while_addresses_are_looked_for_leaves_nothing() {
    let Bench { domain, panics, .. } = Bench::new();
    domain.set_policy(Policy::Lazy { window_ns: 1_000_000_000 }).unwrap();
    let device = DmaDevice::new(domain, 16 * PAGE - 1).unwrap();
    let limits = RegistrationLimits { entries: 2, bytes: 3 * PAGE };
    let cache = RegistrationCache::new(device.clone(), limits).unwrap();
    let all: Vec<_> = core::iter::from_fn(|| device.open_single(pages(9, 1).phys, PAGE, BOTH).ok()).collect();
    assert!(all.len() > 2);
    all.into_iter().for_each(|iova| device.unmap_single(iova, PAGE).unwrap());
    *panics.lock().unwrap() = Some(Moment::Sync);
    let acquire = || cache.open(pages(0, 1), BOTH, KEPT);
    assert!(catch_unwind(AssertUnwindSafe(acquire)).is_err());
    assert_eq!((cache.usage().entries, cache.usage().bytes), (0, 0));
    assert_eq!(cache.forget(pages(0, 1)).unwrap().entries, 0);
    cache.release(acquire().unwrap()).unwrap();
}

/// Addresses that the drop of a cache has not reached are leaked, and counted.
#[test]
fn a_cache_whose_end_panics_gives_its_addresses_up() {
    for at in UNMAPPING {
        let bench = Bench::new();
        let iovas = [0, 1].map(|number| bench.touch(number));
        *bench.panics.lock().unwrap() = Some(at);
        let Bench { domain, cache, .. } = bench;
        assert!(catch_unwind(AssertUnwindSafe(|| drop(cache))).is_err(), "{at:?}");
        let usage = domain.stats();
        assert_eq!(
            (usage.taken_iova_bytes - usage.cached_iova_bytes, domain.stats().lost_iova_bytes),
            (2 * PAGE, 2 * PAGE),
            "{at:?}"
        );
        let device = DmaDevice::new(domain, u64::MAX).unwrap();
        let others =
            [10, 11, 12].map(|number| device.open_single(pages(number, 1).phys, PAGE, BOTH).unwrap());
        assert!(!others.iter().any(|iova| iovas.contains(iova)), "{at:?}");
    }
}
