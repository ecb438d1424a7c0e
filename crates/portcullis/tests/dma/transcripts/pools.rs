//! A pool of bounce buffers by itself: classes, depots, trims, groups, and what happens where all is taken.

use portcullis::addr::{Direction, Iova, PhysSegment};
use portcullis::bounce::pool::{Attributes, BounceDevice, BouncePool, DeviceProfile, PoolConfig};
use portcullis::domain::Policy;
use portcullis::heap::Shared;
use portcullis::platform::PlatformEvents;
use portcullis_model::open::OpenPool;

use super::world::{Mapper, PAGE, TURNS, World, shown};
use crate::transcript::{Copies, Cpus, FOLDER, REJECTED, TIMED_OUT, Transcript, answer};

type Pool = Shared<BouncePool<Mapper, Cpus, Copies>>;

/// Four classes, each with 32 slots of 4 KiB or as many bytes in larger ones.
const SMALL: PoolConfig = PoolConfig {
    threshold: 8 * PAGE,
    class_bytes: 32 * PAGE,
    limit: Iova::new(0xffff_ffff),
    split: true,
    wipe: false,
    idle_ns: 1_000_000,
    keep_bytes: 16 * PAGE,
};

struct Script {
    said: Transcript,
    world: World,
    pool: Pool,
    turn: usize,
}

impl Script {
    fn new(about: &str, config: PoolConfig) -> Self {
        let (world, mut said) = World::new(about, Policy::Strict, |builder| builder);
        let make = || BouncePool::new(world.domain.space().clone(), Copies(world.memory.clone()), config);
        let pool = said.call_as("make", make, |pool| format!("{:#x}", pool.threshold())).unwrap();
        Self { said, world, pool, turn: 0 }
    }

    fn device(&mut self, profile: DeviceProfile) -> Option<BounceDevice<Mapper, Cpus, Copies>> {
        let make = || BounceDevice::new(self.pool.clone(), profile);
        self.said.call_as(format_args!("{profile:x?}"), make, |_| String::new()).ok()
    }

    /// In the next direction.
    fn map(
        &mut self,
        device: &BounceDevice<Mapper, Cpus, Copies>,
        list: &[(u64, u64)],
        attributes: Attributes,
    ) -> Option<(Iova, u64)> {
        self.turn += 1;
        self.map_toward(device, list, attributes, TURNS[self.turn % 3])
    }

    fn map_toward(
        &mut self,
        device: &BounceDevice<Mapper, Cpus, Copies>,
        list: &[(u64, u64)],
        attributes: Attributes,
        direction: Direction,
    ) -> Option<(Iova, u64)> {
        let list: Vec<PhysSegment> = self.world.pieces(list);
        // SAFETY: the memory is the test's, all of it simulated.
        let map = || unsafe { device.map(&list, direction, attributes) };
        let call = format!("map {:x?} {direction:?}", list.iter().map(|piece| piece.len).collect::<Vec<_>>());
        let show = |mapping: &portcullis::bounce::pool::PoolMapping<'_>| {
            format!("{:?} {}", mapping.way(), shown(&mapping.segments().collect::<Vec<_>>()))
        };
        let mapping = self.said.call_as(call, map, show).ok()?;
        Some((mapping.iova(), mapping.len()))
    }

    fn unmap(&mut self, (iova, len): (Iova, u64)) {
        let _ = self.said.call(format_args!("unmap {iova:#x}+{len:#x}"), || self.pool.close(iova, len));
    }

    fn trim(&mut self, keep: u64) {
        let _ = self.said.call(format_args!("trim to {keep:#x}"), || self.pool.trim(keep));
    }

    fn usage(&mut self) {
        let mut usage = self.pool.usage();
        usage.bookkeeping_bytes = 0;
        self.said.note("usage", usage);
    }

    fn end(self, name: &str) {
        let Self { mut said, world, pool, .. } = self;
        drop(pool);
        said.note("the pool is dropped", ());
        world.counts(&mut said);
        drop(world);
        said.assert_is(FOLDER, &format!("pool-{name}"));
    }
}

const PLAIN: Attributes = Attributes { copy_in: false };

#[test]
fn classes_and_trims() {
    let mut script = Script::new("a pool of four classes", SMALL);
    let device = script.device(DeviceProfile::default()).unwrap();
    script.said.part("each size, and what is left of it");
    for len in [1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE, 4 * PAGE, 5 * PAGE, 8 * PAGE, 8 * PAGE + 1] {
        let mapping = script.map(&device, &[(0x30, len)], PLAIN).unwrap();
        let _ = script.said.call("sync for cpu", || script.pool.sync_cpu(mapping.0, len / 2, len - len / 2));
        let _ = script.said.call("sync for device", || script.pool.sync_device(mapping.0, 0, len));
        let _ = script.said.call("sync too much", || script.pool.sync_device(mapping.0, 1, len));
        script.unmap((mapping.0, mapping.1 + 1));
        script.unmap(mapping);
        script.unmap(mapping);
    }
    script.usage();
    for keep in [1 << 30, 30 * PAGE, 20 * PAGE, 3 * PAGE, 0] {
        script.trim(keep);
        script.usage();
    }
    script.said.part("many of a size");
    for (len, times) in [(PAGE, 20), (8 * PAGE, 6)] {
        for keep in [5 * PAGE, 0] {
            let all: Vec<_> = (0..times)
                .filter_map(|_| script.map_toward(&device, &[(0, len)], PLAIN, Direction::ToDevice))
                .collect();
            script.usage();
            all.into_iter().rev().for_each(|mapping| script.unmap(mapping));
            script.trim(keep);
            script.usage();
        }
    }
    script.said.part("the hardware does not answer a trim");
    let all: Vec<_> = (0..3).filter_map(|_| script.map(&device, &[(0, PAGE)], PLAIN)).collect();
    all.into_iter().for_each(|mapping| script.unmap(mapping));
    answer([Some(TIMED_OUT), Some(REJECTED)]);
    for _ in 0..3 {
        script.trim(0);
        script.usage();
    }
    drop(device);
    script.end("classes");
}

#[test]
fn what_is_special() {
    let mut script = Script::new(
        "a pool that wipes, and does not split",
        PoolConfig { wipe: true, split: false, ..SMALL },
    );
    let profiles = [
        DeviceProfile { group: 1, ..DeviceProfile::default() },
        DeviceProfile { group: 2, untrusted: true, ..DeviceProfile::default() },
        DeviceProfile { offset_mask: 0xfff, ..DeviceProfile::default() },
        DeviceProfile { mask: 0x7fff_ffff, untrusted: true, ..DeviceProfile::default() },
        DeviceProfile { offset_mask: 0x1fff, ..DeviceProfile::default() },
        DeviceProfile { mask: 0xff, ..DeviceProfile::default() },
    ];
    for profile in profiles {
        script.said.part("a device");
        let Some(device) = script.device(profile) else { continue };
        for attributes in [PLAIN, Attributes { copy_in: true }] {
            script.said.line(format_args!("{attributes:?}"));
            for list in [
                &[(0x123, 500)][..],
                &[(0x230, 10 * PAGE)],
                &[(0x100, 50), (0x3000, PAGE)],
                &[(0, 9 * PAGE), (0xf000, 10)],
            ] {
                if let Some(mapping) = script.map(&device, list, attributes) {
                    let _ = script.said.call("sync for cpu", || script.pool.sync_cpu(mapping.0, 40, 20));
                    let _ =
                        script.said.call("sync for device", || script.pool.sync_device(mapping.0, 40, 20));
                    script.unmap(mapping);
                }
            }
        }
    }
    script.usage();
    script.end("special");
}

#[test]
fn from_cpus_in_time_and_where_all_is_taken() {
    let mut script = Script::new("a pool of many CPUs", SMALL);
    let device = script.device(DeviceProfile { untrusted: true, ..DeviceProfile::default() }).unwrap();
    for cpu in [1, 2, 0] {
        script.said.part(format_args!("CPU {cpu}"));
        script.world.clock.be(cpu);
        let all: Vec<_> = (0..4).filter_map(|_| script.map(&device, &[(0x80, PAGE)], PLAIN)).collect();
        script.usage();
        all.into_iter().for_each(|mapping| script.unmap(mapping));
        script.usage();
    }
    script.pool.cpu_released(1);
    script.said.note("CPU 1 is gone", ());
    script.usage();
    script.said.part("time");
    for time in [500_000, 1_500_000, 3_000_000, 20_000_000, 50_000_000] {
        script.world.clock.go_to(time);
        script.said.note("at", time);
        script.usage();
    }
    script.said.part("all is taken");
    let mut all: Vec<_> = (0..36).filter_map(|_| script.map(&device, &[(0, 8 * PAGE)], PLAIN)).collect();
    script.usage();
    script.unmap(all.remove(0));
    all.extend(script.map(&device, &[(0, 5 * PAGE)], PLAIN));
    all.into_iter().for_each(|mapping| script.unmap(mapping));
    script.usage();
    script.said.part("no memory");
    for fails in [1, 2, 3] {
        script.world.memory.fail_after(fails);
        let mapping = script.map(&device, &[(0x30, 6 * PAGE)], PLAIN);
        let another = script.map(&device, &[(0x30, 11 * PAGE)], PLAIN);
        script.world.memory.fail_after(0);
        mapping.into_iter().chain(another).for_each(|mapping| script.unmap(mapping));
    }
    script.said.part("the hardware does not answer");
    for list in [&[(0x30, 11 * PAGE)][..], &[(0, 10 * PAGE)], &[(0x30, 2 * PAGE), (0x9000, 20 * PAGE)]] {
        answer([Some(TIMED_OUT)]);
        if let Some(mapping) = script.map(&device, list, PLAIN) {
            script.unmap(mapping);
            script.unmap(mapping);
        }
        script.usage();
    }
    answer([]);
    script.trim(0);
    script.usage();
    drop(device);
    script.end("cpus");
}
