//! A queue of each strategy.

use portcullis::addr::{Direction, DmaSegment, PhysAddr, PhysSegment};
use portcullis::dma::{
    AnyQueue, Device, DmaMask, DmaUnmapError, NotUnmapped, Queue, QueueConfig, RawMapping,
};
use portcullis::domain::Policy;
use portcullis::invalidation::InvalidationError;

use super::world::{DEAR, Machine, PAGE, TURNS, World, shown};
use crate::transcript::{Asked, FOLDER, REJECTED, TIMED_OUT, Transcript, answer};

/// Offsets in the driver's memory, and bytes.
const SIZES: [(u64, u64); 10] = [
    (0, PAGE),
    (8, 1),
    (0x1ffc, 8),
    (0x3010, 500),
    (0x800, 2 * PAGE),
    (0, 16 * PAGE),
    (0x10, 32 * PAGE),
    (0xff0, 33 * PAGE + 0x20),
    (2 << 20, 2 << 20),
    ((2 << 20) - PAGE, (2 << 20) + PAGE),
];
const LISTS: [&[(u64, u64)]; 4] = [
    &[(0, PAGE), (PAGE, PAGE), (4 * PAGE, 100)],
    &[(0x100, 100), (0x5000, 3 * PAGE), (0x9000, 0x800)],
    &[(0x800, 0x800), (0x1000, 0x1000), (0x2000, 1)],
    &[(0, 200 * PAGE), (0x40_0010, 100)],
];

struct Script {
    said: Transcript,
    world: World,
    queue: Queue<Machine>,
    turn: usize,
}

impl Script {
    fn map(&mut self, name: &str, list: &[PhysSegment], direction: Direction) -> Option<(RawMapping, u64)> {
        let mut out = vec![DmaSegment::default(); list.len()];
        let queue: &mut dyn AnyQueue = &mut self.queue;
        let map = || {
            // SAFETY: the memory is the test's, all of it simulated.
            unsafe { queue.map_raw(list, direction, &mut out) }.map(|(mapping, used)| {
                out.truncate(used);
                (mapping, out)
            })
        };
        let show = |(mapping, out): &(RawMapping, Vec<_>)| match mapping.way() {
            Some(way) => format!("{way:?} {}", shown(out)),
            None => shown(out),
        };
        let mapped = self.said.call_as(format_args!("map {name} {direction:?}"), map, show);
        mapped.ok().map(|(mapping, _)| (mapping, list.iter().map(|piece| piece.len).sum()))
    }

    /// In the next direction.
    fn own(&mut self, list: &[(u64, u64)]) -> Option<(RawMapping, u64)> {
        self.turn += 1;
        let name: Vec<_> = list.iter().map(|(offset, len)| format!("{offset:#x}+{len:#x}")).collect();
        self.map(&name.join(" "), &self.world.pieces(list), TURNS[self.turn % 3])
    }

    fn sync(&mut self, mapping: &RawMapping, (offset, len): (u64, u64)) {
        let part = format!("{offset:#x}+{len:#x}");
        let queue = &mut self.queue;
        let _ = self
            .said
            .call(format_args!("sync for cpu {part}"), || queue.sync_raw_for_cpu(mapping, offset, len));
        let sync = || queue.sync_raw_for_device(mapping, offset, len);
        let _ = self.said.call(format_args!("sync for device {part}"), sync);
    }

    /// The mapping where it is to be ended again.
    fn unmap(&mut self, mapping: RawMapping) -> Option<RawMapping> {
        let mut again = None;
        let unmap = || {
            self.queue.unmap_raw(mapping).map_err(|NotUnmapped { mapping, waits, error }| {
                let comes_back = mapping.is_some();
                again = mapping;
                format!("{error} (waits: {waits}, comes back: {comes_back})")
            })
        };
        let _ = self.said.call("unmap", unmap);
        again
    }

    fn commit(&mut self) {
        let _ = self.said.call("commit", || self.queue.commit_raw());
        let waiting = self.queue.waiting();
        self.said.note("waiting", waiting);
    }

    /// What an unmap does where the queue answers so, and how it goes on.
    fn fails(&mut self, answers: &[Option<InvalidationError>]) {
        let live: Vec<_> = [(0x3010, 500), (0, 40 * PAGE), (8, 3 * PAGE)]
            .map(|at| self.own(&[at]))
            .into_iter()
            .flatten()
            .map(|(mapping, _)| mapping)
            .collect();
        answer(answers.iter().copied());
        let again: Vec<_> = live.into_iter().filter_map(|mapping| self.unmap(mapping)).collect();
        self.commit();
        again.into_iter().for_each(|mapping| _ = self.unmap(mapping));
        self.commit();
        let domain = self.world.domain.clone();
        let _ = self.said.call("flush", || domain.space().flush());
        self.commit();
    }
}

fn plays(
    name: &str,
    about: &str,
    (world, said): (World, Transcript),
    device: Device<Machine>,
    config: QueueConfig,
) {
    let queue = device.queue(config).unwrap();
    let mut script = Script { said, world, queue, turn: 0 };
    let strategy = script.queue.strategy();
    script.said.note(about, strategy);
    script.said.part("one after the other");
    for at in SIZES {
        let Some((mapping, len)) = script.own(&[at]) else { continue };
        script.sync(&mapping, (0, len));
        script.unmap(mapping);
    }
    script.said.part("lists");
    for list in LISTS {
        let Some((mapping, len)) = script.own(list) else { continue };
        script.sync(&mapping, (len / 2, len / 4));
        script.sync(&mapping, (len - 1, 2));
        script.unmap(mapping);
    }
    script.commit();
    script.said.part("mistakes");
    let (piece, empty) = (script.world.piece(0, PAGE), script.world.piece(PAGE, 0));
    script.map("nothing", &[], TURNS[0]);
    script.map("no bytes", &[piece, empty], TURNS[0]);
    script.map("beyond the end", &[PhysSegment { len: u64::MAX, ..piece }], TURNS[0]);
    let far = PhysSegment { phys: PhysAddr::new(1 << 50), len: PAGE };
    script.map("beyond memory", &[piece, far], TURNS[1]);
    script.map("too much", &[PhysSegment { len: 1 << 49, ..piece }], TURNS[1]);
    // SAFETY: the memory is the test's, all of it simulated.
    let short = || unsafe { script.queue.map_raw(&[piece, piece], TURNS[2], &mut [DmaSegment::default()]) };
    let _ = script.said.call_as("map two with room for one", short, |_| "mapped".into());
    let mut other = device.queue::<std::convert::Infallible>(config).unwrap();
    let (mapping, _) = script.own(&[(0, 100)]).unwrap();
    let _ = script.said.call("sync in another queue", || other.sync_raw_for_cpu(&mapping, 0, 1));
    let mapping = match other.unmap_raw(mapping) {
        Err(NotUnmapped { mapping: Some(mapping), error, .. }) => {
            let foreign: Result<(), DmaUnmapError> = Err(error);
            let _ = script.said.call("unmap in another queue", || foreign);
            mapping
        }
        ended => panic!("{ended:?}"),
    };
    script.unmap(mapping);
    script.commit();
    script.said.part("the hardware does not answer");
    script.fails(&[Some(TIMED_OUT)]);
    script.fails(&[None, Some(REJECTED), Some(TIMED_OUT)]);
    script.said.part("no memory");
    for fails in [1, 2] {
        script.world.memory.fail_after(fails);
        let list = script.world.pieces(&[(0x20_0800, 30 * PAGE), (0x60_0000, 0x900)]);
        if let Some((mapping, _)) = script.map("two pieces", &list, TURNS[0]) {
            script.unmap(mapping);
        }
        script.world.memory.fail_after(0);
    }
    script.commit();
    script.said.part("from another CPU, and none");
    for cpu in [1, 2, 0] {
        script.world.clock.be(cpu);
        for at in [(0x3010, 500), (0, 40 * PAGE)] {
            script.own(&[at]).into_iter().for_each(|(mapping, _)| _ = script.unmap(mapping));
        }
    }
    script.said.part("later");
    script.world.clock.go_to(20_000_000);
    script.said.note("timers", ());
    script.world.clock.go_to(2_000_000_000);
    script.said.note("timers", ());
    script.world.counts(&mut script.said);
    for explained in script.queue.explain().filter(|one| one.copied + one.mapped > 0) {
        script.said.note("explained", explained);
    }
    script.said.part("the queue is dropped, with one mapped and one that has ended");
    let open = script.own(&[(0x3010, 500)]);
    let ended = script.own(&[(0, 34 * PAGE)]);
    ended.into_iter().for_each(|(mapping, _)| _ = script.unmap(mapping));
    let Script { world, mut said, queue, .. } = script;
    drop((queue, open, other));
    said.note("dropped", ());
    world.counts(&mut said);
    drop((world, device));
    said.note("all is gone", ());
    said.assert_is(FOLDER, &format!("queue-{name}"));
}

/// Each strategy of a device that is coherent.
fn of(name: &str, policy: Policy, config: QueueConfig) {
    let (world, said) = World::new(name, policy, |builder| builder);
    let device = world.device(DmaMask::BITS_64);
    plays(name, "strategy", (world, said), device, config);
}

fn not_coherent(name: &str, config: QueueConfig) {
    not_coherent_in(World::new(name, Policy::Strict, |builder| builder), name, config);
}

fn not_coherent_in((world, said): (World, Transcript), name: &str, config: QueueConfig) {
    let device = world.device(DmaMask::BITS_64).not_coherent().unwrap();
    plays(&format!("{name}-not-coherent"), "strategy, not coherent", (world, said), device, config);
}

const LAZY: Policy = Policy::Lazy { window_ns: 100_000 };

#[test]
fn direct() {
    of("direct", Policy::Strict, QueueConfig::direct());
    of("direct-lazy", LAZY, QueueConfig::direct());
    not_coherent("direct", QueueConfig::direct());
}

#[test]
fn direct_where_waits_are_dear_and_what_is_absent_is_cached() {
    let queue = Asked { costs: DEAR, caches_absent: true };
    let (world, said) = World::asking("dear", LAZY, queue, |builder| builder);
    let device = world.device(DmaMask::BITS_32);
    plays("direct-dear", "strategy", (world, said), device, QueueConfig::direct());
}

#[test]
fn batched() {
    of("batched", Policy::Strict, QueueConfig::batched(3));
    not_coherent("batched", QueueConfig::batched(3));
}

#[test]
fn ring() {
    of("ring", Policy::Strict, QueueConfig::ring(64, 2 * PAGE).batch(3));
    not_coherent("ring", QueueConfig::ring(16, PAGE).batch(2).colour(3));
}

#[test]
fn bounce() {
    of("bounce", Policy::Strict, QueueConfig::bounce());
    not_coherent_in(World::wiping("bounce"), "bounce", QueueConfig::bounce());
    let (world, said) = World::new("bounce", LAZY, |builder| builder);
    let device = world.device(DmaMask::BITS_32).trusted().keeping_offsets(0xfff).in_group(3);
    let config = QueueConfig::bounce().copying_in();
    plays("bounce-trusted", "strategy, trusted, keeps offsets", (world, said), device, config);
}

#[test]
fn auto() {
    of("auto", Policy::Strict, QueueConfig::auto(64, 2 * PAGE).batch(3));
    not_coherent("auto", QueueConfig::auto(64, PAGE).batch(3));
}

#[test]
fn without_translation() {
    of("passthrough", Policy::Passthrough, QueueConfig::direct());
    of("swiotlb", Policy::Passthrough, QueueConfig::bounce());
    let (world, said) = World::new("swiotlb", Policy::Passthrough, |builder| builder);
    let device = world.device(DmaMask::BITS_64).keeping_offsets(0x1ff).not_coherent().unwrap();
    plays(
        "swiotlb-not-coherent",
        "strategy, not coherent, keeps offsets",
        (world, said),
        device,
        QueueConfig::bounce(),
    );
}
