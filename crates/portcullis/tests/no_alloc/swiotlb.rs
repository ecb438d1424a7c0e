//! An unmap of the swiotlb pool asks for no memory, whoever does it and whatever the size; nor do maps in a pool that has
//! room. A pool that cannot have notes for a new area is full, and nothing is lost.

use crate::limited::{granting, held};
use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, PhysSegment};
use portcullis::bounce::swiotlb::{Bounced, Constraints, Swiotlb, SwiotlbConfig};
use portcullis::dma::{DmaMapError, DmaMask, QueueConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents};
use portcullis::std_platform::StdPlatform;
use portcullis_model::{Iommu, IommuConfig, Memory};

const AREA: u64 = 256 << 10;
const LENS: [u64; 5] = [1, 4096, 9000, 65_536, 140_000];

#[test]
fn unmapping_asks_for_no_memory() {
    let memory = Memory::new(32 << 20);
    let config = SwiotlbConfig {
        area_bytes: AREA,
        min_bytes: 24 * AREA,
        max_bytes: 24 * AREA,
        ..SwiotlbConfig::default()
    };
    let platform = StdPlatform::new();
    let pool = Swiotlb::new(platform.clone(), memory.clone(), &config).unwrap();
    let buffer = memory.buffer(140_000).unwrap();
    let map = |len| {
        let original = PhysSegment { phys: buffer.phys(), len };
        // SAFETY: all access to the model's memory is by atomics.
        unsafe { pool.map(original, Direction::Bidirectional, &Constraints::new()) }.unwrap()
    };
    // SAFETY: each mapping is ended once.
    let unmap = |mapped: &Bounced| unsafe { pool.unmap(mapped.phys, mapped.len) }.unwrap();
    // The thread has its CPU, and the model's memory is there.
    let mut live: Vec<Bounced> = LENS.iter().cycle().take(60).map(|len| map(*len)).collect();
    let ((), calls) = granting(0, || live.drain(..).for_each(|mapped| unmap(&mapped)));
    assert_eq!(calls, 0);
    let mut live: Vec<Bounced> = Vec::with_capacity(60);
    let ((), calls) = granting(0, || live.extend(LENS.iter().cycle().take(60).map(|len| map(*len))));
    assert_eq!(calls, 0);
    // Another CPU's list is empty, and nothing was granted to it.
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // It has a CPU.
            platform.with_cpu(|_| ());
            granting(0, || live.iter().for_each(unmap)).1
        });
        assert_eq!(thread.join().unwrap(), 0);
    });
    assert_eq!(pool.usage().mapped, 0);
}

/// Nor does a queue's unmap of a list, which the pool does not know as one.
#[test]
fn unmapping_lists_asks_for_no_memory() {
    let memory = Memory::new(32 << 20);
    let iommu = Iommu::new(IommuConfig::new(memory.clone()));
    let platform = StdPlatform::new();
    let pool = Swiotlb::new(platform.clone(), memory.clone(), &SwiotlbConfig::default()).unwrap();
    let table = PageTable::for_cpus(memory.clone(), VtdSecondStage::four_level(), platform.cpus()).unwrap();
    let builder = Domain::builder(table, iommu.queue(), DomainId(1)).policy(Policy::Passthrough);
    let domain = builder.swiotlb(pool.clone()).build(platform).unwrap();
    let device = domain.attach(DeviceId(7), DmaMask::BITS_64).unwrap();
    let mut queue = device.queue::<std::convert::Infallible>(QueueConfig::bounce()).unwrap();
    let buffer = memory.buffer(1 << 20).unwrap();
    let list = [0_u64, 3 << 16, 9 << 16]
        .map(|offset| PhysSegment { phys: buffer.phys().checked_add(offset).unwrap(), len: 5000 });
    let mut out = [DmaSegment::default(); 3];
    let mut live = Vec::new();
    for _ in 0..20 {
        // SAFETY: all access to the model's memory is by atomics.
        live.push(unsafe { queue.map_raw(&list, Direction::ToDevice, &mut out) }.unwrap().0);
    }
    let ((), calls) = granting(0, || live.drain(..).for_each(|raw| _ = queue.unmap_raw(raw).unwrap()));
    assert_eq!((calls, pool.usage().mapped), (0, 0));
    // Without memory a list is refused, and nothing of it stays.
    let refused = granting(0, || {
        // SAFETY: as above.
        (0..21).map(|_| unsafe { queue.map_raw(&list, Direction::ToDevice, &mut out) }.err()).last()
    });
    assert_eq!(refused.0, Some(Some(DmaMapError::OutOfMemory)));
}

/// So many CPUs, of which one is used, without a timer: nobody else grows the pool meanwhile.
struct NoTimer(usize);

// SAFETY: each of these platforms is used by one thread.
unsafe impl Platform for NoTimer {
    fn cpus(&self) -> usize {
        self.0
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // SAFETY: one thread is the one CPU.
        f(Some(&unsafe { LocalCpu::new(0) }))
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, _: u64) {}
}

#[test]
fn an_area_without_notes_is_none() {
    let memory = Memory::new(16 << 20);
    let config =
        SwiotlbConfig { area_bytes: AREA, min_bytes: AREA, max_bytes: 4 * AREA, ..SwiotlbConfig::default() };
    let pool = Swiotlb::new(NoTimer(1), memory.clone(), &config).unwrap();
    let (original, any) = (PhysSegment { phys: memory.base(), len: AREA }, Constraints::new());
    // SAFETY: all access to the model's memory is by atomics.
    let map = || unsafe { pool.map(original, Direction::ToDevice, &any) };
    let first = map().unwrap();
    let (failed, calls) = granting(0, map);
    let Err(DmaMapError::Pressure { capacity, limit, .. }) = failed else { panic!("{failed:?}") };
    // It was tried twice: before other CPUs' lists were taken back, and after it.
    assert_eq!((capacity, limit, calls), (AREA, 4 * AREA, 2));
    assert_eq!(memory.frames_in_use() * 4096, AREA);
    let second = map().unwrap();
    for mapped in [first, second] {
        // SAFETY: each mapping is ended once.
        unsafe { pool.unmap(mapped.phys, mapped.len) }.unwrap();
    }
    // What an area's notes take is kept for the next one, and given back with the pool.
    assert_eq!(pool.trim(), AREA);
    let before = held();
    map().unwrap();
    assert_eq!(held(), before);
}

#[test]
fn a_pool_says_what_memory_it_uses_beside_its_slots() {
    let memory = Memory::new(16 << 20);
    let config =
        SwiotlbConfig { area_bytes: AREA, min_bytes: AREA, max_bytes: 8 * AREA, ..SwiotlbConfig::default() };
    let original = PhysSegment { phys: memory.base(), len: AREA };
    // By the second time the model's memory is there. What CPUs have is counted.
    let mut of_one_cpu = 0;
    for (is_counted, cpus) in [(false, 1), (true, 1), (true, 17)] {
        let before = held();
        let pool = Swiotlb::new(NoTimer(cpus), memory.clone(), &config).unwrap();
        // But for the pool itself, and what each allocation is rounded up by.
        let beside = || u64::try_from(held() - before).unwrap().checked_sub(pool.usage().overhead);
        let fixed = beside().unwrap();
        of_one_cpu = if cpus == 1 { fixed } else { of_one_cpu };
        if is_counted {
            assert!(fixed <= 1 << 10 && fixed.abs_diff(of_one_cpu) <= 256, "{fixed} with {cpus} CPUs");
        }
        let mut live = Vec::new();
        for areas in 1..=8 {
            // SAFETY: all access to the model's memory is by atomics.
            let map = || unsafe { pool.map(original, Direction::ToDevice, &Constraints::new()) };
            live.push(map().unwrap());
            let usage = pool.usage();
            assert_eq!((usage.mapped, usage.kept, usage.capacity), (areas * AREA, 0, areas * AREA));
            assert_eq!((usage.most, usage.least, usage.limit), (areas * AREA, AREA, 8 * AREA));
            if is_counted {
                assert!(beside().unwrap().abs_diff(fixed) <= 256, "{:?} beside {areas} areas", beside());
            }
        }
        for mapped in live {
            // SAFETY: each mapping is ended once.
            unsafe { pool.unmap(mapped.phys, mapped.len) }.unwrap();
        }
        assert_eq!((pool.usage().mapped, pool.usage().most), (0, 8 * AREA));
    }
}
