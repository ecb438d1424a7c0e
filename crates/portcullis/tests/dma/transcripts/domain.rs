//! A domain by itself: ranges and parts of them, step by step, policies, devices with TLBs, coherent memory, batches by number.

use portcullis::addr::{DeviceId, Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{CoherentMemory, DmaDevice, DmaMask, RawBatch};
use portcullis::domain::{Domain, Policy, Refused};
use portcullis::heap::Shared;
use portcullis::invalidation::Gather;
use portcullis_model::open::{OpenDevice, OpenDomain, OpenReserved};

use super::world::{DEAR, Mapper, PAGE, TURNS, World, shown};
use crate::transcript::{Asked, Copies, Cpus, FOLDER, REJECTED, TIMED_OUT, Transcript, answer};

const ANYWHERE: Iova = Iova::new(u64::MAX);
const LARGE: u64 = 2 << 20;
const LAZY: Policy = Policy::Lazy { window_ns: 100_000 };

type Space = Shared<Domain<Mapper, Cpus>>;

struct Script {
    said: Transcript,
    world: World,
    space: Space,
}

impl Script {
    fn new(about: &str, policy: Policy, queue: Asked) -> Self {
        let (world, said) = World::asking(about, policy, queue, |builder| builder);
        let space = world.domain.space().clone();
        Self { said, world, space }
    }

    fn map(&mut self, list: &[(u64, u64)], limit: u64) -> Option<IovaRange> {
        let pieces = self.world.pieces(list);
        let name: Vec<_> = list.iter().map(|(offset, len)| format!("{offset:#x}+{len:#x}")).collect();
        let map = || self.space.open(&pieces, Permissions::READ_WRITE, Iova::new(limit));
        let call = format!("map {} up to {limit:#x}", name.join(" "));
        self.said.call_as(call, map, IovaRange::to_string).ok()
    }

    fn unmap(&mut self, range: IovaRange) {
        let _ = self.said.call(format_args!("unmap {range}"), || self.space.unmap(range));
    }

    fn flush(&mut self) {
        let _ = self.said.call("flush", || self.space.flush());
    }

    fn end(self, name: &str) {
        let Self { mut said, world, space } = self;
        world.counts(&mut said);
        drop((space, world));
        said.note("all is gone", ());
        said.assert_is(FOLDER, &format!("domain-{name}"));
    }
}

/// Bytes from an offset in a range.
fn part(range: IovaRange, offset: u64, len: u64) -> IovaRange {
    IovaRange::new(Iova::new(range.start().get() + offset), len).unwrap()
}

fn ranges(name: &str, policy: Policy, queue: Asked) {
    let mut script = Script::new(name, policy, queue);
    script.said.part("whole ranges");
    for list in [&[(0, 1)][..], &[(0x10, PAGE)], &[(0, PAGE), (0x3000, 2 * PAGE)], &[(LARGE, LARGE)]] {
        let range = script.map(list, u64::MAX).unwrap();
        script.unmap(range);
        script.unmap(range);
    }
    script.said.part("limits");
    for limit in [u64::from(u32::MAX), (1 << 31) + 5, 3 * PAGE - 1, PAGE, 0] {
        if let Some(range) = script.map(&[(0, 2 * PAGE)], limit) {
            script.unmap(range);
        }
    }
    script.said.part("parts");
    let range = script.map(&[(0, 16 * PAGE)], u64::MAX).unwrap();
    for (offset, len) in
        [(0, PAGE), (4 * PAGE, 2 * PAGE), (5 * PAGE, PAGE), (8 * PAGE, 8 * PAGE), (0, 16 * PAGE)]
    {
        script.unmap(part(range, offset, len));
    }
    script.world.counts(&mut script.said);
    script.said.part("parts of a large page");
    let range = script.map(&[(LARGE, LARGE)], u64::MAX).unwrap();
    script.unmap(part(range, PAGE * 7, PAGE));
    script.unmap(part(range, 0, LARGE / 2));
    script.world.memory.fail_after(1);
    let another = script.map(&[(2 * LARGE, LARGE)], u64::MAX);
    script.world.memory.fail_after(0);
    another.into_iter().for_each(|range| script.unmap(range));
    script.unmap(range);
    let range = script.map(&[(LARGE, LARGE)], u64::MAX).unwrap();
    script.world.memory.fail_after(1);
    script.unmap(part(range, PAGE * 7, PAGE));
    script.world.memory.fail_after(0);
    script.unmap(range);
    script.world.counts(&mut script.said);
    script.said.part("mistakes");
    script.unmap(part(range, 0, PAGE));
    script.unmap(IovaRange::new(Iova::new(0), PAGE).unwrap());
    script.unmap(IovaRange::new(Iova::new(5), 10).unwrap());
    script.unmap(IovaRange::new(Iova::new(1 << 60), PAGE).unwrap());
    script.said.part("the hardware does not answer");
    let live: Vec<_> = (1..5).map(|pages| script.map(&[(0, pages * PAGE)], u64::MAX).unwrap()).collect();
    answer([Some(TIMED_OUT), None, Some(REJECTED)]);
    script.unmap(part(live[3], PAGE, PAGE));
    live.iter().for_each(|range| script.unmap(*range));
    answer([Some(TIMED_OUT)]);
    script.flush();
    script.flush();
    script.flush();
    let range = script.map(&[(0, PAGE)], u64::MAX).unwrap();
    script.unmap(range);
    script.said.part("timers");
    for time in [200_000, 1_000_000, 50_000_000] {
        script.world.clock.go_to(time);
        script.said.note("at", time);
    }
    script.said.part("tables that are empty");
    answer([Some(TIMED_OUT)]);
    for _ in 0..2 {
        let _ = script.said.call("reclaim", || script.space.reclaim());
    }
    script.end(name);
}

#[test]
fn ranges_and_parts() {
    ranges("strict", Policy::Strict, Asked::default());
    ranges("lazy", LAZY, Asked::default());
    ranges("dear", LAZY, Asked { costs: DEAR, caches_absent: true });
}

#[test]
fn what_exceeds_the_costs_of_ranges_is_forgotten_as_a_whole() {
    let mut script = Script::new("gathered", Policy::Strict, Asked::default());
    let device = DmaDevice::new(script.space.clone(), u64::MAX).unwrap();
    for (count, pages, gap) in [(2, 1, 1), (7, 1, 1), (9, 1, 3), (20, 1, 1), (5, 600, 1)] {
        let mut batch = RawBatch::new(&device, 32).unwrap();
        let mut live = Vec::new();
        for _ in 0..count {
            live.push(
                device.open_single(script.world.piece(0, PAGE * pages).phys, PAGE * pages, TURNS[1]).unwrap(),
            );
            // What stays mapped between them.
            let _ = device.open_single(script.world.own, PAGE * gap, TURNS[1]).unwrap();
        }
        script.said.part(format_args!("{count} of {pages} pages"));
        script.said.note("mapped", live.len());
        for iova in live {
            device.unmap_single_in(&mut batch, iova, PAGE * pages).unwrap();
        }
        let _ = script.said.call("commit", || batch.commit());
    }
    drop(device);
    script.end("gathered");
}

#[test]
fn batches_by_number() {
    let mut script = Script::new("batches", Policy::Strict, Asked::default());
    let device = DmaDevice::new(script.space.clone(), u64::MAX).unwrap();
    let mut batch = RawBatch::new(&device, 3).unwrap();
    let PhysSegment { phys, len } = script.world.piece(0x10, PAGE + 0x20);
    for round in 0..5 {
        let iova = script.said.call("map", || device.open_single(phys, len, TURNS[round % 3])).unwrap();
        if round == 2 {
            answer([Some(TIMED_OUT), None, Some(REJECTED)]);
        }
        let _ = script.said.call("unmap", || device.unmap_single_in(&mut batch, iova, len));
        let _ = script.said.call("unmap", || device.unmap_single_in(&mut batch, iova, len));
        script.said.note("in the batch", (batch.len(), batch.is_full(), batch.is_empty()));
        let _ =
            script.said.call("unmap too much", || device.unmap_single_in(&mut batch, Iova::new(5), u64::MAX));
        if batch.is_full() || round == 3 {
            let _ = script.said.call("commit", || batch.commit());
        }
    }
    let _ = script.said.call("commit", || batch.commit());
    let waiting = device.open_single(script.world.own, 2 * PAGE, TURNS[2]).unwrap();
    device.unmap_single_in(&mut batch, waiting, 2 * PAGE).unwrap();
    drop(batch);
    script.said.note("the batch is dropped", ());
    drop(device);
    script.end("batches");
}

#[test]
fn step_by_step() {
    let mut script = Script::new("steps", Policy::Strict, Asked::default());
    let space = script.space.clone();
    let mut gather = Gather::new();
    let said = &mut script.said;
    let world = &script.world;
    for (name, list, answers) in [
        ("all is well", &[(0, PAGE), (0x5000, 3 * PAGE)][..], vec![]),
        ("not confirmed", &[(0, 4 * PAGE)], vec![Some(TIMED_OUT)]),
        ("too short", &[(0, PAGE)], vec![]),
        ("too long", &[(0, 5 * PAGE)], vec![]),
        ("not confirmed when it fails", &[(0, 5 * PAGE)], vec![Some(REJECTED)]),
    ] {
        said.part(name);
        answer(answers);
        let reserve = || space.reserve(4 * PAGE, ANYWHERE);
        let reserved =
            said.call_as("reserve 4 pages", reserve, |reserved| reserved.range().to_string()).unwrap();
        let pieces = world.pieces(list);
        let link = || reserved.open(&pieces, Permissions::READ, &mut gather);
        match said.call_as("link", link, |linked| linked.range().to_string()) {
            Ok(linked) => {
                let unlink =
                    || linked.unlink(&mut gather).map_err(|linked| format!("keeps {:#x}", linked.kept()));
                let unlinked =
                    said.call_as("unlink", unlink, |unlinked| unlinked.range().to_string()).unwrap();
                said.note("gathered", gather.only().map(|range| range.to_string()));
                match said.call("confirm", || space.confirm(&gather)) {
                    Ok(()) => unlinked.free(),
                    Err(_) => unlinked.quarantine(),
                }
            }
            Err(refused) => {
                let Refused { is_confirmed, .. } = refused;
                said.note("confirmed", is_confirmed);
                said.note("ended", refused.end().to_string());
            }
        }
        gather.clear();
        said.note(
            "stats",
            (space.stats().taken_iova_bytes, space.stats().lost_iova_bytes, space.stats().unmaps),
        );
    }
    said.part("pieces");
    let reserved = space.reserve(8 * PAGE, ANYWHERE).unwrap();
    let mut pieces = reserved.pieces();
    for (offset, at, len) in [
        (4 * PAGE, 0, 4 * PAGE),
        (0, 0x9000, PAGE),
        (PAGE, 0xa000, PAGE),
        (8, 0, PAGE),
        (0, 8, PAGE),
        (0, 0, 0),
        (7 * PAGE, 0, 2 * PAGE),
        (u64::MAX - PAGE + 1, 0, PAGE),
    ] {
        let add = || pieces.add(offset, world.piece(at, len));
        let _ = said.call(format_args!("add {at:#x}+{len:#x} at {offset:#x}"), add);
    }
    let _ = said.call("list", || pieces.list());
    pieces.add(2 * PAGE, world.piece(0x20_0000, 2 * PAGE)).unwrap();
    let list = said.call("list", || pieces.list()).unwrap();
    let link = || reserved.open(&list, Permissions::WRITE, &mut gather);
    let linked = said.call_as("link", link, |linked| linked.range().to_string()).unwrap();
    pieces.add(3 * PAGE, world.piece(0, PAGE)).unwrap();
    let _ = said.call("list, with one more", || pieces.list());
    drop(linked);
    said.note("dropped while mapped", space.stats().lost_iova_bytes);
    drop(space);
    script.end("steps");
}

#[test]
fn policies_that_change() {
    let mut script = Script::new("policies", LAZY, Asked::default());
    let device = DmaDevice::new(script.space.clone(), u64::MAX).unwrap();
    let strict = DmaDevice::new(script.space.clone(), u64::MAX).unwrap();
    strict.set_policy(Some(Policy::Strict)).unwrap();
    let turn = |said: &mut Transcript, world: &World, handle: &DmaDevice<Mapper, Cpus>| {
        let iova = handle.open_single(world.own, 100, TURNS[0]).unwrap();
        let _ = said.call(format_args!("unmap by {:?}", handle.policy()), || handle.unmap_single(iova, 100));
    };
    for handle in [&device, &strict, &device] {
        turn(&mut script.said, &script.world, handle);
    }
    for (of_device, policy) in [
        (false, Some(Policy::Lazy { window_ns: 5_000 })),
        (true, Some(Policy::Strict)),
        (true, Some(Policy::Passthrough)),
        (true, None),
        (false, Some(Policy::Strict)),
        (false, Some(Policy::Passthrough)),
        (false, Some(Policy::LAZY)),
    ] {
        turn(&mut script.said, &script.world, &device);
        answer([Some(TIMED_OUT)].into_iter().filter(|_| policy == Some(Policy::Strict)));
        let space = &script.space;
        let change = || match (of_device, policy) {
            (false, Some(policy)) => space.set_policy(policy),
            (_, policy) => device.set_policy(policy),
        };
        let _ = script.said.call(
            format_args!("policy of {} {policy:?}", if of_device { "device" } else { "domain" }),
            change,
        );
        answer([]);
        turn(&mut script.said, &script.world, &device);
        script.world.clock.take(20_000);
    }
    drop((device, strict));
    script.end("policies");
}

#[test]
fn devices_with_tlbs() {
    let mut script = Script::new("device TLBs", Policy::Strict, Asked::default());
    let space = script.space.clone();
    let mapper = space.mapper();
    let add = |said: &mut Transcript, device: u32| {
        let _ = said.call(format_args!("add {device}"), || mapper.add_device_tlb(DeviceId(device)));
    };
    add(&mut script.said, 3);
    add(&mut script.said, 3);
    answer([Some(TIMED_OUT)]);
    add(&mut script.said, 4);
    add(&mut script.said, 5);
    for list in [&[(0, PAGE)][..], &[(0, 3 * PAGE)], &[(LARGE, LARGE)], &[(0, LARGE + PAGE)]] {
        let range = script.map(list, u64::MAX).unwrap();
        script.unmap(range);
    }
    let range = script.map(&[(0, PAGE)], u64::MAX).unwrap();
    answer([None, Some(REJECTED)]);
    script.unmap(range);
    script.flush();
    answer([Some(TIMED_OUT)]);
    for device in [3, 3, 3, 9] {
        // SAFETY: no device is there.
        let remove = || unsafe { mapper.remove_device_tlb(DeviceId(device)) };
        let _ = script.said.call(format_args!("remove {device}"), remove);
    }
    // SAFETY: no device is there.
    unsafe { mapper.forget_device_tlb(DeviceId(5)) };
    script.flush();
    (10..27).for_each(|device| add(&mut script.said, device));
    let range = script.map(&[(0, PAGE)], u64::MAX).unwrap();
    script.unmap(range);
    drop(space);
    script.end("device-tlbs");
}

#[test]
fn memory_that_both_sides_share() {
    for policy in [Policy::Strict, LAZY, Policy::Passthrough] {
        let mut script = Script::new("coherent memory", policy, Asked::default());
        let device = DmaDevice::new(script.space.clone(), (1 << 40) - 1).unwrap();
        let frames = Copies(std::sync::Arc::clone(&script.world.memory));
        for (len, answers) in [
            (1, vec![]),
            (PAGE as usize, vec![]),
            (5000, vec![Some(TIMED_OUT)]),
            (0, vec![]),
            (usize::MAX, vec![]),
            (3 * PAGE as usize, vec![Some(REJECTED)]),
        ] {
            script.said.part(format_args!("{len} bytes"));
            let make = || CoherentMemory::new(&device, frames.clone(), len);
            let show = |made: &CoherentMemory<Copies, Mapper, Cpus>| {
                format!(
                    "{:#x} at {:#x}, {:#x} bytes, {:#x} words",
                    made.iova(),
                    made.phys(),
                    made.size(),
                    made.words()
                )
            };
            let Ok(made) = script.said.call_as("make", make, show) else { continue };
            for (at, bytes) in
                [(0, &b"a"[..]), (3, b"some more"), (made.size() - 2, b"xy"), (made.size() - 1, b"xy")]
            {
                let mut read = vec![0; bytes.len() + 2];
                let written = made.write(at, bytes);
                script.said.note(at, (written, made.read(at.saturating_sub(2), &mut read), read));
            }
            script
                .said
                .note("a word", (made.word(0), made.word(made.words()).is_some(), made.as_slice().is_some()));
            answer(answers);
            if len == 1 {
                drop(made);
                script.said.note("dropped", ());
            } else {
                let _ = script.said.call("free", || made.free());
            }
            script.flush();
        }
        script.world.memory.fail_after(1);
        let none = || CoherentMemory::new(&device, frames.clone(), 1);
        let _ = script.said.call_as("no memory", none, |_| "made".into());
        script.world.memory.fail_after(0);
        drop((device, frames));
        script.end(&format!("coherent-{}", policy.name()));
    }
}

/// Devices with addresses of their own, and lists that no device is given.
#[test]
fn without_translation() {
    let mut script = Script::new("passthrough", Policy::Passthrough, Asked::default());
    let device = script.world.device(DmaMask::bits(33));
    let device = device.dma();
    let mut out = [Default::default(); 4];
    let far = PhysSegment { phys: PhysAddr::new((1 << 33) - PAGE), len: 2 * PAGE };
    for list in [
        script.world.pieces(&[(0, PAGE)]),
        script.world.pieces(&[(0, PAGE), (PAGE, 5), (0x5000, 7), (0x9000, 1)]),
        vec![],
        vec![script.world.piece(0, 0)],
        vec![PhysSegment { len: PAGE, ..far }],
        vec![far],
        vec![PhysSegment { phys: PhysAddr::new(u64::MAX - 5), len: 10 }],
        script.world.pieces(&[(0, 1); 5]),
    ] {
        let map = || device.open_sg(&list, TURNS[2], &mut out).map(|used| out[..used].to_vec());
        if let Ok(out) = script.said.call_as(format_args!("map {} pieces", list.len()), map, |out| shown(out))
        {
            let _ = script.said.call("unmap", || device.unmap_sg(&out));
        }
        if let [PhysSegment { phys, len }] = list[..] {
            let map = || device.open_single(phys, len, TURNS[0]);
            let _ = script.said.call(format_args!("map {phys:#x}+{len:#x}"), map);
            let _ = script.said.call("unmap", || device.unmap_single(Iova::new(phys.get()), len));
        }
    }
    script.flush();
    script.end("passthrough");
}
