//! Domains of units: their numbers, limits, and devices, and their tables if a unit does not confirm.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use portcullis::addr::{
    DeviceId, Direction, DmaSegment, DomainId, Iova, IovaRange, Permissions, PhysAddr, PhysSegment,
};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{DmaMask, Queue, QueueConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::invalidation::{Invalidation, Request};
use portcullis::mapper::Mapper;
use portcullis::pgtable::Format;
use portcullis::platform::CacheMaintenance;
use portcullis::std_platform::StdPlatform;
use portcullis_hw::acpi::Reserved;
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, Software, VtD};
use portcullis_hw::{DomainError, Iommu, UnitDomainBuilder, UnitError, amdvi, riscv, smmuv3, vtd};
use portcullis_model::Memory;

use crate::{Behind, CPU, CPUS, DEVICE, MEMORY, host};

const OTHER: DeviceId = DeviceId(0x30);

/// A unit that is on, its memory, and the frames taken before it was started.
struct Bench<U> {
    unit: Arc<U>,
    memory: Arc<Memory>,
    before: u64,
}

impl<U> Bench<U> {
    fn new<X: Format, K: Kind>(start: impl Fn(Behind<K>) -> Result<U, UnitError>) -> Self
    where
        U: Iommu<X>,
    {
        let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
        let before = memory.frames_in_use();
        let unit = Arc::new(start(host(&memory)).unwrap());
        unit.enable().unwrap();
        Self { unit, memory, before }
    }

    /// Ends the unit and its domains.
    fn end<X: Format>(self)
    where
        U: Iommu<X>,
    {
        self.unit.shut_down().unwrap();
        assert_eq!(self.memory.frames_in_use(), self.before);
    }
}

fn numbers_and_devices<X, U, K>(start: impl Fn(Behind<K>) -> Result<U, UnitError>)
where
    X: Format,
    U: Iommu<X, Frames = Arc<Memory>>,
    K: Kind,
{
    let bench = Bench::new(start);
    let unit = &bench.unit;
    let domain = |number| unit.domain(DomainId(number)).and_then(|builder| builder.build(StdPlatform::new()));
    let refused = |number| domain(number).map(drop).expect_err("no such domain");
    let (first, last) = unit.domains();
    for beyond in [first.0.checked_sub(1), last.0.checked_add(1)].into_iter().flatten() {
        let none = UnitError::NoSuchDomain { domain: beyond, first: first.0, last: last.0 };
        assert_eq!(refused(beyond), DomainError::Unit(none));
    }
    let in_use = DomainError::Unit(UnitError::DomainInUse { domain: 7 });
    let one = domain(7).unwrap();
    assert_eq!(refused(7), in_use);
    let device = one.attach(DEVICE, DmaMask::BITS_64).unwrap();

    // A device is attached once, and only its domain detaches it.
    let attached = Some(DomainError::Unit(UnitError::Attached { device: DEVICE.0 }));
    assert_eq!(one.attach(DEVICE, DmaMask::BITS_64).err(), attached);
    let two = domain(8).unwrap();
    assert_eq!(two.attach(DEVICE, DmaMask::BITS_64).err(), attached);
    assert_eq!(two.detach(DEVICE), Err(UnitError::NotAttached { device: DEVICE.0 }));
    two.attach(OTHER, DmaMask::BITS_64).unwrap();
    drop(two);
    let two = domain(8).unwrap();
    assert_eq!(two.attach(DEVICE, DmaMask::BITS_64).err(), attached, "the drop has detached its own alone");
    two.attach(OTHER, DmaMask::BITS_64).unwrap();
    one.detach(DEVICE).unwrap();
    assert_eq!(one.detach(DEVICE), Err(UnitError::NotAttached { device: DEVICE.0 }));
    two.attach(DEVICE, DmaMask::BITS_64).unwrap();

    // Its number is in use while its table exists: a device handle keeps that.
    drop(one);
    assert_eq!(refused(7), in_use);
    drop(device);
    let one = domain(7).unwrap();
    // A device that was detached without the domain is gone.
    unit.detach(DEVICE).unwrap();
    one.attach(DEVICE, DmaMask::BITS_64).unwrap();
    assert_eq!(two.detach(DEVICE), Ok(()));
    drop((one, two));
    bench.end();
}

fn limits_and_regions<X, U, K>(start: impl Fn(Behind<K>) -> Result<U, UnitError>)
where
    X: Format,
    U: Iommu<X, Frames = Arc<Memory>>,
    K: Kind,
{
    let bench = Bench::new(start);
    let unit = &bench.unit;
    let builder = || unit.domain(DomainId(7)).unwrap();
    let last = unit.last_iova();
    let pages = |first: u64| IovaRange::new(Iova::new(first), 0x1800).unwrap();
    let region = |range| Reserved { range, permissions: Permissions::READ };

    // Reserved regions are mapped before a device is attached, and never allocated; addresses that the unit does not translate are an
    // error.
    let reserved = [region(pages(0x9000_0800)), region(pages(0x9000_1000))];
    // SAFETY: the unit walks no tables.
    let domain = unsafe { builder().regions(reserved) }.build(StdPlatform::new()).unwrap();
    let table = domain.dma().space().mapper().table();
    for (at, mapped) in [(0x8fff_ffff, false), (0x9000_0000, true), (0x9000_2fff, true), (0x9000_3000, false)]
    {
        let found = table.iova_to_phys(domain.dma().space().platform(), Iova::new(at));
        assert_eq!(found.map(PhysAddr::get), mapped.then_some(at), "{at:#x}");
    }
    drop(domain);
    // Every page around it is allocated, up to the builder's limit, and nothing of it.
    let low = IovaRange::new(Iova::new(0), 0x8fff_c000).unwrap();
    let free = builder().reserve(low).last_iova(Iova::new(0x9000_4fff));
    // SAFETY: as above.
    let domain = unsafe { free.regions(reserved) }.build(StdPlatform::new()).unwrap();
    assert_eq!(
        pages_of(domain.dma().space()),
        [0x8fff_c000, 0x8fff_d000, 0x8fff_e000, 0x8fff_f000, 0x9000_3000, 0x9000_4000]
    );
    drop(domain);
    // A region may end at the last address, and touch a window, but not overlap either.
    let built = |builder: UnitDomainBuilder<_, StdPlatform>, range: IovaRange| {
        // SAFETY: as above.
        unsafe { builder.regions([region(range)]) }.build(StdPlatform::new()).map(drop)
    };
    let exact = |first: u64, last: u64| IovaRange::from_bounds(Iova::new(first), Iova::new(last)).unwrap();
    assert_eq!(built(builder().last_iova(Iova::new(0x9000_27ff)), pages(0x9000_1000)), Ok(()));
    assert_eq!(
        built(builder().last_iova(Iova::new(u64::MAX)), exact(last.get() - 0xfff, last.get())),
        Ok(())
    );
    for window in unit.reserved() {
        let (first, end) = (window.start().get(), window.last().get());
        for beside in [exact(first - 0x1000, first - 1), exact(end + 1, end + 0x1000)] {
            assert_eq!(built(builder(), beside), Ok(()), "{beside}");
        }
        for range in [exact(first - 0x1000, first), exact(end, end + 0x1000), exact(first + 1, first + 2)] {
            assert_eq!(built(builder(), range), Err(DomainError::Untranslated { range, last }), "{range}");
        }
    }
    let behind = (last.get() + 1) & !0xfff;
    let range = pages(behind);
    let wide = built(builder().last_iova(Iova::new(u64::MAX)), range);
    assert_eq!(wide, Err(DomainError::Untranslated { range, last }), "no call makes it translate more");
    let windows = unit
        .reserved()
        .iter()
        .flat_map(|window| [window.start().get() - 0x1000, window.last().get() & !0xfff]);
    for at in [behind - 0x1000, behind].into_iter().chain(windows) {
        // SAFETY: as above.
        let built = unsafe { builder().regions([region(pages(at))]) }.build(StdPlatform::new());
        assert_eq!(built.err(), Some(DomainError::Untranslated { range: pages(at), last }), "{at:#x}");
    }
    let low = Iova::new(0x9000_0fff);
    // SAFETY: as above.
    let built = unsafe { builder().last_iova(low).regions(reserved) }.build(StdPlatform::new());
    assert_eq!(built.err(), Some(DomainError::Untranslated { range: reserved[0].range, last: low }));
    let passes = builder().policy(Policy::Passthrough).build(StdPlatform::new());
    assert_eq!(passes.err(), Some(DomainError::PassThrough));

    // A 64-bit device gets the highest addresses that the unit translates, and none in its windows.
    let domain = builder().last_iova(Iova::new(u64::MAX)).build(StdPlatform::new()).unwrap();
    let device = domain.attach(DEVICE, DmaMask::BITS_64).unwrap();
    let (mut queue, mut view): (Queue<_>, _) =
        (device.queue(QueueConfig::direct()).unwrap(), [DmaSegment::default()]);
    let page = [PhysSegment { phys: PhysAddr::new(0x5000), len: 4096 }];
    // SAFETY: the unit walks no tables.
    let (mapping, _) = unsafe { queue.map_raw(&page, Direction::FromDevice, &mut view) }.unwrap();
    let top = domain.dma().space().mapper().table().last_iova().min(last);
    assert!(view[0].iova.get() + 4095 <= top.get() && view[0].iova.get() > top.get() / 2, "{:?}", view[0]);
    let _ = queue.unmap_raw(mapping).unwrap();
    drop((queue, device));
    let all = all_of_32_bits(domain, unit);
    assert!(unit.reserved().iter().all(|window| {
        all.iter().all(|range| range.last() < window.start() || range.start() > window.last())
    }));
    bench.end();

    /// All 32-bit addresses that a domain allocates, in pieces of 1 MiB.
    fn all_of_32_bits<X, U>(
        domain: portcullis_hw::UnitDomain<(
            portcullis_hw::UnitTables<X, U>,
            StdPlatform,
            core::convert::Infallible,
        )>,
        unit: &Arc<U>,
    ) -> Vec<IovaRange>
    where
        X: Format,
        U: Iommu<X, Frames = Arc<Memory>>,
    {
        let space = domain.dma().space();
        let (limit, mut all) = (Iova::new(u32::MAX.into()), Vec::new());
        while let Ok(reserved) = space.reserve(1 << 20, limit) {
            all.push(reserved.range());
            std::mem::forget(reserved);
        }
        assert!(all.len() > 4000, "{} of {:?}", all.len(), unit.reserved());
        all
    }
}

fn pages_of<M: Mapper>(space: &Domain<M, StdPlatform>) -> Vec<u64> {
    let mut pages = Vec::new();
    while let Ok(page) = space.reserve(4096, Iova::new(u64::MAX)) {
        pages.push(page.range().start().get());
        std::mem::forget(page);
    }
    pages.sort_unstable();
    pages
}

/// The builder's other options reach the domain.
fn told<X, U, K>(start: impl Fn(Behind<K>) -> Result<U, UnitError>)
where
    X: Format,
    U: Iommu<X, Frames = Arc<Memory>>,
    K: Kind,
{
    struct Lines;

    // SAFETY: there is no cache.
    unsafe impl CacheMaintenance for Lines {
        fn line_bytes(&self) -> u64 {
            64
        }

        unsafe fn clean(&self, _: PhysAddr, _: u64) {}

        unsafe fn invalidate(&self, _: PhysAddr, _: u64) {}
    }

    let bench = Bench::new(start);
    let lazy = Policy::Lazy { window_ns: 12_345 };
    let looks = Arc::new(AtomicU64::new(0));
    let clock = Arc::clone(&looks);
    let builder = bench.unit.domain(DomainId(7)).unwrap();
    let builder = builder.policy(lazy).clock(move || clock.fetch_add(1_000, Ordering::Relaxed));
    let builder =
        builder.cache_maintenance(Arc::new(Lines)).bounce(Arc::clone(&bench.memory), PoolConfig::default());
    // The unit translates addresses that the caller reserves.
    let range = IovaRange::new(Iova::new(0x9000_0000), 0x1000).unwrap();
    let region = Reserved { range, permissions: Permissions::READ };
    let kept = bench.unit.domain(DomainId(8)).unwrap().reserve(range);
    let kept = kept.bounce(Arc::clone(&bench.memory), PoolConfig::default());
    // SAFETY: the unit walks no tables.
    assert_eq!(unsafe { kept.regions([region]) }.build(StdPlatform::new()).map(drop), Ok(()));
    let domain = builder.build(StdPlatform::new()).unwrap();
    assert_eq!(domain.dma().space().policy(), lazy);
    let device = domain.attach(DEVICE, DmaMask::BITS_64).unwrap();
    assert!(device.clone().not_coherent().is_ok(), "it has what maintains caches");
    let before = looks.load(Ordering::Relaxed);
    let queue: Queue<_> = device.queue(QueueConfig::auto(16, 1 << 16)).unwrap();
    assert_ne!(looks.load(Ordering::Relaxed), before, "by which `auto` measures");
    drop((queue, device, domain));
    bench.end();
}

/// A unit that was built for 39 bits, with tables of 48, and one in caching mode.
#[test]
fn a_domain_takes_what_its_unit_says_of_itself() {
    let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
    let host = host::<VtD>(&memory);
    let cap = host.unit.get64(0x08);
    host.unit.set64(0x08, cap & !(0x3f << 16) | 38 << 16 | 1 << 7);
    let unit = Arc::new(vtd::Unit::start(host).unwrap());
    unit.enable().unwrap();
    let domain = unit.domain(DomainId(7)).unwrap().build(StdPlatform::new()).unwrap();
    let device = domain.attach(DEVICE, DmaMask::BITS_64).unwrap();
    let mut queue: Queue<_> = device.queue(QueueConfig::direct()).unwrap();
    let (page, mut view) =
        ([PhysSegment { phys: PhysAddr::new(0x5000), len: 4096 }], [DmaSegment::default()]);
    let tail = || unit.host().unit.get(0x88);
    let before = tail();
    // SAFETY: the unit walks no tables.
    let _ = unsafe { queue.map_raw(&page, Direction::FromDevice, &mut view) }.unwrap();
    let at = view[0].iova.get();
    assert!(at >> 38 == 1, "{at:#x}: the highest addresses of 39 bits");
    assert_ne!(tail(), before, "the unit forgets that nothing was there");
}

/// A unit that does not confirm leaks what it may still walk.
fn unconfirmed<X, U, K>(
    start: impl Fn(Behind<K>) -> Result<U, UnitError>,
    stop: impl Fn(&Software<K, Arc<Memory>>),
    of: fn(&U) -> &Behind<K>,
) where
    X: Format,
    U: Iommu<X, Frames = Arc<Memory>>,
    K: Kind,
{
    let bench = Bench::new(start);
    let (unit, memory) = (&bench.unit, &bench.memory);
    let domain = unit.domain(DomainId(7)).unwrap().build(StdPlatform::new()).unwrap();
    // A device after an unconfirmed attach is attached to nothing, or another call detaches it.
    stop(&of(unit).unit);
    if let Err(error) = domain.attach(DEVICE, DmaMask::BITS_64) {
        assert!(matches!(error, DomainError::Unit(UnitError::Unconfirmed(_))), "{error}");
        assert_eq!(domain.detach(DEVICE), Err(UnitError::NotAttached { device: DEVICE.0 }));
        domain.attach(DEVICE, DmaMask::BITS_64).unwrap();
    }
    // Another submission may have been the one that met the stop.
    while unit.submit(&[]).is_err() {}
    stop(&of(unit).unit);
    assert!(matches!(domain.detach(DEVICE), Err(UnitError::Unconfirmed(_))));
    assert!(matches!(
        domain.attach(DEVICE, DmaMask::BITS_64),
        Err(DomainError::Unit(UnitError::Attached { .. }))
    ));
    domain.detach(DEVICE).unwrap();

    domain.attach(DEVICE, DmaMask::BITS_64).unwrap();
    let taken = memory.frames_in_use();
    stop(&of(unit).unit);
    drop(domain);
    assert_eq!(memory.frames_in_use(), taken, "the unit may walk the table");
    let in_use = DomainError::Unit(UnitError::DomainInUse { domain: 7 });
    assert_eq!(unit.domain::<StdPlatform>(DomainId(7)).map(drop), Err(in_use));
    assert_eq!(bench.unit.shut_down(), Err(UnitError::Shared), "the domain has it");
}

/// CPUs that wait at the same time share one submission; one without a number submits by itself. `tail` returns the fill level of the ring.
fn shared<X, U, K>(
    start: impl Fn(Behind<K>) -> Result<U, UnitError>,
    of: fn(&U) -> &Behind<K>,
    tail: fn(&Software<K, Arc<Memory>>) -> u32,
) where
    X: Format,
    U: Iommu<X, Frames = Arc<Memory>>,
    K: Kind,
{
    let bench = Bench::new(start);
    let domain = bench.unit.domain(DomainId(7)).unwrap().build(StdPlatform::new()).unwrap();
    domain.attach(DEVICE, DmaMask::BITS_64).unwrap();
    let unit = &bench.unit;
    let filled = |work: &dyn Fn()| {
        let before = tail(&of(unit).unit);
        work();
        tail(&of(unit).unit).wrapping_sub(before) % RING
    };
    let unmap = |page: u64| {
        let range = IovaRange::new(Iova::new(page << 12), 4096).unwrap();
        let invalidation = Invalidation::Range { range, leaf_only: true };
        unit.submit(&[Request { domain: DomainId(7), invalidation }]).unwrap();
    };
    let together = |names: bool| {
        let barrier = Barrier::new(CPUS);
        std::thread::scope(|scope| {
            for cpu in 0..CPUS {
                let (barrier, unmap) = (&barrier, &unmap);
                scope.spawn(move || {
                    CPU.set(names.then_some(cpu));
                    barrier.wait();
                    unmap(cpu as u64);
                });
            }
        });
    };
    let alone = CPUS as u32 * filled(&|| unmap(1));
    assert!((0..100).all(|_| filled(&|| together(false)) == alone), "each by itself");
    let shares = (0..1_000).any(|_| filled(&|| together(true)) < alone);
    assert!(shares, "no two of {CPUS} CPUs were in one submission");
    drop(domain);
    bench.end();
}

/// Commands of a ring.
const RING: u32 = 256;

/// The five tests for each unit with tables, with its ring's tail.
macro_rules! of_each {
    ($($unit:ident: $kind:ty, $start:expr, $stop:expr, $of:expr, $tail:expr;)*) => {
        $(mod $unit {
            use super::*;

            #[test]
            fn a_number_is_one_domains_and_a_device_is_in_one_domain() {
                numbers_and_devices::<_, _, $kind>($start);
            }

            #[test]
            fn a_domain_has_the_units_addresses_and_firmwares_regions() {
                limits_and_regions::<_, _, $kind>($start);
            }

            #[test]
            fn what_a_builder_is_told_is_the_domains() {
                told::<_, _, $kind>($start);
            }

            #[test]
            fn a_table_stays_where_the_unit_may_walk_it() {
                unconfirmed::<_, _, $kind>($start, $stop, $of);
            }

            #[test]
            fn cpus_share_their_waits_for_a_unit() {
                shared::<_, _, $kind>($start, $of, $tail);
            }
        })*
    };
}

const AMDVI: amdvi::Config = amdvi::Config { last_device: 0xff, capability: None };

of_each! {
    of_vtd: VtD, vtd::Unit::start, |unit| unit.set(0x34, 1 << 4), vtd::Unit::host,
        |unit| unit.get(0x88) >> 4;
    of_amdvi: AmdVi, |host| amdvi::Unit::start(host, AMDVI), |unit| unit.set(0x2020, 1 << 3), amdvi::Unit::host,
        |unit| unit.get(0x2008) >> 4;
    of_riscv: RiscV, riscv::Unit::start, |unit| unit.set(0x48, unit.get(0x48) | 1 << 10), riscv::Unit::host,
        |unit| unit.get(0x24);
    of_smmuv3: SmmuV3, smmuv3::Unit::<_, 12>::start, |unit| unit.set(0x60, unit.get(0x60) ^ 1), smmuv3::Unit::host,
        |unit| unit.get(0x98);
}
