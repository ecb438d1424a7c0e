//! Every way by which a mapping of a device ends, against each policy of its domain and of its own: by the device's policy, or
//! strictly. A hostile device keeps every address that it was given, and tries all of them.

use std::sync::Arc;

use portcullis::addr::{Direction, DmaSegment, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{PoolConfig, Way};
use portcullis::dma::{CoherentMemory, Device, DmaDevice, Ended, Queue, QueueConfig, RawBatch};
use portcullis::domain::Policy;
use portcullis_model::open::OpenDevice;

use crate::queue::world::{CARD, Machine, PAGE, World};

/// One that no timer ends.
const LAZY: Policy = Policy::Lazy { window_ns: u64::MAX };
/// What is larger is not copied.
const THRESHOLD: u64 = 4 * PAGE;

/// Addresses that the device has used, and the memory that they led to.
type Seen = Vec<(Iova, PhysAddr)>;
type Handle =
    DmaDevice<<Machine as portcullis::dma::Machine>::Mapper, <Machine as portcullis::dma::Machine>::Platform>;
/// Maps, lets the device use it, calls its last argument, and ends the mapping.
type Course = Box<dyn Fn(&World, &Device<Machine>, &dyn Fn(&Handle)) -> Seen>;

struct Case {
    name: String,
    /// Whether it ends by the policy; else strictly, whatever the policy.
    by_policy: bool,
    course: Course,
}

/// The device writes to all of what it was given.
fn used(world: &World, given: &[DmaSegment]) -> Seen {
    let mut seen = Seen::new();
    for segment in given {
        for offset in (0..segment.len).step_by(PAGE as usize) {
            let iova = Iova::new(segment.iova.get() + offset);
            assert!(world.writes(iova, &[1]), "{iova}");
            seen.extend(world.iommu.probe(CARD, iova, Permissions::WRITE).map(|phys| (iova, phys)));
        }
    }
    seen
}

/// Whether the device still reaches any of it.
fn reached(world: &World, seen: &Seen) -> bool {
    seen.iter().any(|(iova, phys)| world.iommu.probe(CARD, *iova, Permissions::WRITE) == Some(*phys))
}

/// Pieces of memory that do not touch: the offset of each in its first page, and its length.
fn memory(world: &World, pieces: &[(u64, u64)]) -> (Vec<portcullis_model::Buffer>, Vec<PhysSegment>) {
    let mut list = Vec::new();
    let mut buffers = Vec::new();
    for (skip, len) in pieces {
        let buffer = world.memory.buffer(skip + len).unwrap();
        list.push(PhysSegment { phys: PhysAddr::new(buffer.phys().get() + skip), len: *len });
        buffers.extend([buffer, world.memory.buffer(PAGE).unwrap()]);
    }
    (buffers, list)
}

/// By a queue, and if it is of the pool, in which way.
fn by_queue(
    config: QueueConfig,
    pieces: &'static [(u64, u64)],
    coherent: bool,
    trusted: bool,
    way: Option<Way>,
) -> Course {
    Box::new(move |world, device, between| {
        let device = if trusted { device.clone().trusted() } else { device.clone() };
        let device = if coherent { device } else { device.not_coherent().unwrap() };
        let mut queue: Queue<Machine> = device.queue(config).unwrap();
        let (_kept, list) = memory(world, pieces);
        let mut out = vec![DmaSegment::default(); list.len()];
        // SAFETY: the memory is the test's, all of it atomics, and kept until the end.
        let (mapping, count) = unsafe { queue.map_raw(&list, Direction::FromDevice, &mut out) }.unwrap();
        if way.is_some() {
            assert_eq!(mapping.way(), way);
        }
        let mut seen = used(world, &out[..count]);
        // A buffer of the pool's stays mapped; what must not be reached is the original.
        let is_original = |phys: PhysAddr| {
            list.iter().any(|piece| {
                (piece.phys.get() / PAGE..=(piece.phys.get() + piece.len - 1) / PAGE)
                    .contains(&(phys.get() / PAGE))
            })
        };
        seen.retain(|(_, phys)| is_original(*phys));
        between(device.dma());
        if queue.unmap_raw(mapping).unwrap() == Ended::Pending {
            assert_eq!(queue.commit_raw().unwrap(), 1);
        }
        // Memory that may be reached is used by nobody else.
        std::mem::forget(_kept);
        seen
    })
}

fn by_number(end: impl Fn(&Handle, &[DmaSegment]) + 'static, pieces: &'static [(u64, u64)]) -> Course {
    Box::new(move |world, device, between| {
        let (kept, list) = memory(world, pieces);
        let mut out = vec![DmaSegment::default(); list.len()];
        let count = device.dma().open_sg(&list, Direction::FromDevice, &mut out).unwrap();
        let seen = used(world, &out[..count]);
        between(device.dma());
        end(device.dma(), &out[..count]);
        std::mem::forget(kept);
        seen
    })
}

const ONE: &[(u64, u64)] = &[(0, PAGE)];
const LIST: &[(u64, u64)] = &[(0, PAGE), (0, 2 * PAGE)];
const LARGE: &[(u64, u64)] = &[(0, 8 * PAGE)];
const HUGE: &[(u64, u64)] = &[(0, 2 << 20)];
const UNEVEN: &[(u64, u64)] = &[(100, 8 * PAGE)];
/// Its pieces do not touch for the device either.
const GAPS: &[(u64, u64)] = &[(0, 8 * PAGE), (100, PAGE)];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: String, by_policy, course| cases.push(Case { name, by_policy, course });
    for coherent in [true, false] {
        let mut queue = |name: &str, by_policy, config, pieces, trusted, way: Option<Way>| {
            let name = format!("{name} {pieces:?}, coherent: {coherent}");
            let way = way.filter(|_| coherent);
            add(name, by_policy, by_queue(config, pieces, coherent, trusted, way));
        };
        for pieces in [ONE, LIST, LARGE, HUGE] {
            queue("direct", true, QueueConfig::direct(), pieces, false, None);
            queue("batched", false, QueueConfig::batched(4), pieces, false, None);
            queue("ring", false, QueueConfig::ring(4, PAGE).batch(4), pieces, false, None);
            queue("auto", false, QueueConfig::auto(4, PAGE).batch(4), pieces, false, None);
        }
        queue("bounce, slot", false, QueueConfig::bounce(), ONE, false, Some(Way::Slot));
        for pieces in [LARGE, HUGE, &[(0, 8 * PAGE), (0, PAGE)]] {
            queue("bounce, mapped", true, QueueConfig::bounce(), pieces, false, Some(Way::Direct));
        }
        queue("auto, cut", false, QueueConfig::auto(4, PAGE).batch(4), UNEVEN, false, None);
        if coherent {
            queue("bounce, split", false, QueueConfig::bounce(), UNEVEN, false, Some(Way::Split));
            queue("bounce, trusted", true, QueueConfig::bounce(), UNEVEN, true, Some(Way::Direct));
            queue("bounce, gaps", true, QueueConfig::bounce(), GAPS, true, Some(Way::Direct));
        }
    }
    let single = |handle: &Handle, given: &[DmaSegment]| {
        handle.unmap_single(given[0].iova, given[0].len).unwrap();
    };
    let sg = |handle: &Handle, given: &[DmaSegment]| handle.unmap_sg(given).unwrap();
    let batch = |handle: &Handle, given: &[DmaSegment]| {
        let mut batch = RawBatch::new(handle, 4).unwrap();
        let [segment] = given else { panic!("whole pages touch: {given:?}") };
        handle.unmap_single_in(&mut batch, segment.iova, segment.len).unwrap();
        assert_eq!(batch.commit(), Ok(1));
    };
    add("by number".into(), true, by_number(single, ONE));
    add("by number, a large page".into(), true, by_number(single, HUGE));
    add("by number, a list".into(), true, by_number(sg, LIST));
    add("by number, in a batch".into(), false, by_number(batch, LIST));
    let coherent: Course = Box::new(|world, device, between| {
        let shared = CoherentMemory::new(device.dma(), Arc::clone(&world.memory), PAGE as usize).unwrap();
        let seen = used(world, &[DmaSegment { iova: shared.iova(), len: PAGE }]);
        between(device.dma());
        shared.free().unwrap();
        seen
    });
    add("coherent memory".into(), false, coherent);
    cases
}

fn world(policy: Policy) -> World {
    World::with_pool(policy, PoolConfig { threshold: THRESHOLD, ..PoolConfig::default() })
}

/// Runs all cases; `before` and `between` change policies, and `effective` is what holds when the mappings end.
fn walk(domain: Policy, before: impl Fn(&Handle), between: impl Fn(&Handle), effective: Policy, what: &str) {
    for case in cases() {
        let world = world(domain);
        before(world.nic.dma());
        let seen = (case.course)(&world, &world.nic, &between);
        let name = &case.name;
        assert!(!seen.is_empty() || name.contains("slot") || name.contains("auto"), "{name}");
        let open = case.by_policy && effective == LAZY;
        assert_eq!(reached(&world, &seen), open, "{what}; {name}");
        world.nic.domain().space().flush().unwrap();
        assert!(!reached(&world, &seen), "{what}; {name}");
    }
}

const POLICIES: [Option<Policy>; 3] = [None, Some(Policy::Strict), Some(LAZY)];

#[test]
fn every_mapping_ends_by_the_policy_of_its_device() {
    for domain in [Policy::Strict, LAZY] {
        for own in POLICIES {
            let set = |handle: &Handle| handle.set_policy(own).unwrap();
            let what = format!("domain {domain:?}, device {own:?}");
            walk(domain, set, |_| (), own.unwrap_or(domain), &what);
        }
    }
}

#[test]
fn or_by_the_policy_that_the_device_has_got_while_they_were_mapped() {
    for domain in [Policy::Strict, LAZY] {
        for (first, then) in [(Policy::Strict, LAZY), (LAZY, Policy::Strict)] {
            let set = |policy| move |handle: &Handle| handle.set_policy(Some(policy)).unwrap();
            let what = format!("domain {domain:?}, device {first:?}, then {then:?}");
            walk(domain, set(first), set(then), then, &what);
        }
    }
}

/// A device that is made strict reaches nothing of what it had before, however that ended.
#[test]
fn a_device_made_strict_reaches_nothing_of_what_was_unmapped() {
    for domain in [Policy::Strict, LAZY] {
        for case in cases() {
            let world = world(domain);
            world.nic.dma().set_policy(Some(LAZY)).unwrap();
            let seen = (case.course)(&world, &world.nic, &|_| ());
            assert_eq!(reached(&world, &seen), case.by_policy, "{}", case.name);
            world.nic.dma().set_policy(Some(Policy::Strict)).unwrap();
            assert!(!reached(&world, &seen), "{}", case.name);
        }
    }
}

/// A device with a policy ends by that, whatever another device and the domain have.
#[test]
fn a_device_with_a_policy_keeps_to_it() {
    for domain in [Policy::Strict, LAZY] {
        for (own, handle) in POLICIES.into_iter().flat_map(|own| [(own, Policy::Strict), (own, LAZY)]) {
            let world = world(domain);
            world.nic.dma().set_policy(own).unwrap();
            let by_handle = DmaDevice::new(world.nic.domain().space().clone(), u64::MAX).unwrap();
            by_handle.set_policy(Some(handle)).unwrap();
            let (kept, list) = memory(&world, ONE);
            let iova = by_handle.open_single(list[0].phys, PAGE, Direction::FromDevice).unwrap();
            let seen = used(&world, &[DmaSegment { iova, len: PAGE }]);
            by_handle.unmap_single(iova, PAGE).unwrap();
            assert_eq!(reached(&world, &seen), handle == LAZY, "{domain:?}, {own:?}, {handle:?}");
            std::mem::forget(kept);
        }
    }
}
