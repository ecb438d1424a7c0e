//! Mappings by number, in each configuration.

use portcullis::addr::{Direction, DmaSegment, Iova, PhysSegment};
use portcullis::dma::{DmaAttributes, DmaMask, DmaOps, OpsConfig};
use portcullis::domain::Policy;

use super::world::{Machine, PAGE, TURNS, World, shown};
use crate::transcript::{FOLDER, REJECTED, TIMED_OUT, Transcript, answer};

const SIZES: [(u64, u64); 8] = [
    (0, PAGE),
    (8, 1),
    (0x1ffc, 8),
    (0x3010, 500),
    (0x800, 2 * PAGE),
    (0x10, 16 * PAGE),
    (0xff0, 17 * PAGE + 0x20),
    (2 << 20, 2 << 20),
];

struct Script {
    said: Transcript,
    world: World,
    ops: DmaOps<Machine>,
    turn: usize,
}

impl Script {
    fn map(
        &mut self,
        name: &str,
        PhysSegment { phys, len }: PhysSegment,
        attributes: DmaAttributes,
    ) -> Option<Iova> {
        self.turn += 1;
        let direction = TURNS[self.turn % 3];
        // SAFETY: the memory is the test's, all of it simulated.
        let map = || unsafe { self.ops.map(phys, len, direction, attributes) };
        self.said.call(format_args!("map {name} {direction:?}"), map).ok()
    }

    fn own(&mut self, (offset, len): (u64, u64)) -> (Iova, u64) {
        let piece = self.world.piece(offset, len);
        (self.map(&format!("{offset:#x}+{len:#x}"), piece, DmaAttributes::default()).unwrap(), len)
    }

    fn list(&mut self, list: &[(u64, u64)], attributes: DmaAttributes) -> Option<(Iova, u64)> {
        let list = self.world.pieces(list);
        let mut out = vec![DmaSegment::default(); list.len()];
        let map = || {
            // SAFETY: the memory is the test's, all of it simulated.
            unsafe { self.ops.map_sg(&list, Direction::Bidirectional, attributes, &mut out) }.map(|used| {
                out.truncate(used);
                out
            })
        };
        let out = self.said.call_as(format_args!("map {} pieces", list.len()), map, |out| shown(out)).ok()?;
        let last = out[out.len() - 1];
        Some((out[0].iova, last.iova.get() + last.len - out[0].iova.get()))
    }

    fn unmap(&mut self, (iova, len): (Iova, u64)) {
        self.unmap_as((iova, len), DmaAttributes::default());
    }

    fn unmap_as(&mut self, (iova, len): (Iova, u64), attributes: DmaAttributes) {
        // SAFETY: the memory is the test's, all of it simulated.
        let unmap = || unsafe { self.ops.unmap(iova, len, attributes) };
        let _ = self.said.call(format_args!("unmap {iova:#x}+{len:#x}"), unmap);
    }

    fn sync(&mut self, iova: Iova, len: u64) {
        // SAFETY: the memory is the test's, all of it simulated.
        let cpu = || unsafe { self.ops.sync_for_cpu(iova, len) };
        let _ = self.said.call(format_args!("sync for cpu {iova:#x}+{len:#x}"), cpu);
        // SAFETY: the memory is the test's, all of it simulated.
        let device = || unsafe { self.ops.sync_for_device(iova, len) };
        let _ = self.said.call(format_args!("sync for device {iova:#x}+{len:#x}"), device);
    }

    fn counts(&mut self) {
        let mut usage = self.ops.usage();
        usage.book_bytes = 0;
        // The pool's own stand with the domain's.
        usage.pool = None;
        self.said.note("handle", usage);
        self.world.counts(&mut self.said);
    }
}

fn at(iova: Iova, bytes: i64) -> Iova {
    Iova::new(iova.get().wrapping_add_signed(bytes))
}

fn plays(name: &str, config: OpsConfig, mask: DmaMask, trusted: bool) {
    let (world, said) = World::new(name, Policy::Strict, |builder| builder);
    let device = world.device(mask);
    let device = if trusted { device.trusted() } else { device };
    let ops = device.ops(config).unwrap();
    let mut script = Script { said, world, ops, turn: 0 };
    script.said.note("configuration", (script.ops.config(), script.ops.limits()));
    script.said.part("one after the other, each unmapped by its address, and once more");
    for size in SIZES {
        let (iova, len) = script.own(size);
        script.sync(at(iova, len as i64 / 2), len - len / 2);
        script.unmap((iova, len));
        script.unmap((iova, len));
    }
    script.said.part("lists");
    for list in [
        &[(0, PAGE), (PAGE, PAGE), (4 * PAGE, 100)][..],
        &[(0x100, 100), (0x5000, 3 * PAGE), (0x9000, 0x800)],
        &[(0, 200 * PAGE), (0x40_0010, 100)],
    ] {
        let whole = script.list(list, DmaAttributes::default()).unwrap();
        script.sync(whole.0, whole.1);
        script.unmap(whole);
    }
    script.said.part("what is special");
    let usual = DmaAttributes::default();
    for attributes in [
        DmaAttributes { mmio: true, ..usual },
        DmaAttributes { lasting: true, ..usual },
        DmaAttributes { uncached: true, ..usual },
        DmaAttributes { privileged: true, ..usual },
        DmaAttributes { skip_copy: true, ..usual },
    ] {
        script.said.note("attributes", attributes);
        let piece = script.world.piece(0x1010, 2 * PAGE);
        let iova = script.map("0x1010+0x2000", piece, attributes).unwrap();
        script.unmap_as(
            (iova, 2 * PAGE),
            DmaAttributes { skip_copy: attributes.lasting, ..DmaAttributes::default() },
        );
    }
    script.said.part("mistakes");
    for size in [(0x3010, 500), (0, 4 * PAGE)] {
        let (iova, len) = script.own(size);
        for wrong in
            [(iova, len - 1), (iova, len + PAGE), (at(iova, 1), len), (at(iova, len as i64), len), (iova, 0)]
        {
            script.unmap(wrong);
        }
        script.sync(at(iova, -1), 2);
        script.sync(at(iova, len as i64 - 1), 2);
        script.unmap((iova, len));
    }
    let piece = script.world.piece(0, PAGE);
    script.map("no bytes", PhysSegment { len: 0, ..piece }, usual);
    script.map("beyond the end", PhysSegment { len: u64::MAX, ..piece }, usual);
    script.map("too much", PhysSegment { len: 1 << 49, ..piece }, usual);
    script.list(&[], usual);
    script.said.part("the hardware does not answer");
    for answers in [vec![Some(TIMED_OUT)], vec![Some(REJECTED), Some(TIMED_OUT)]] {
        let live = [(0x3010, 500), (0, 40 * PAGE), (8, 3 * PAGE)].map(|size| script.own(size));
        answer(answers);
        live.into_iter().for_each(|whole| script.unmap(whole));
        let _ = script.said.call("maintain", || script.ops.maintain());
        let _ = script.said.call("flush", || script.ops.domain().flush());
    }
    script.said.part("no memory");
    for fails in [1, 2] {
        script.world.memory.fail_after(fails);
        if let Some(whole) = script.list(&[(0x20_0800, 30 * PAGE), (0x60_0000, 0x900)], usual) {
            script.unmap(whole);
        }
        script.world.memory.fail_after(0);
    }
    script.said.part("from another CPU, and none");
    for cpu in [1, 2, 0] {
        script.world.clock.be(cpu);
        for size in [(0x3010, 500), (0, 40 * PAGE)] {
            let whole = script.own(size);
            script.unmap(whole);
        }
    }
    script.said.part("other limits, other configurations");
    for (mask, offset) in [(u64::from(u32::MAX), 0xfff), (PAGE - 1, 0), (u64::MAX, 0xff0), (u64::MAX, 0x7ff)]
    {
        let _ = script
            .said
            .call(format_args!("limits {mask:#x} {offset:#x}"), || script.ops.set_limits(mask, offset));
        let whole = script.own((0x3a10, 500));
        script.unmap(whole);
    }
    let live = [(0x3010, 500), (0, 40 * PAGE)].map(|size| script.own(size));
    for config in [
        OpsConfig::Lazy { window_ns: 50_000 },
        OpsConfig::Bounce { threshold: 1 << 30 },
        OpsConfig::Bounce { threshold: PAGE },
        OpsConfig::Strict,
    ] {
        let _ = script.said.call(format_args!("configuration {config:?}"), || script.ops.set_config(config));
        let whole = script.own((0x800, 2 * PAGE));
        script.unmap(whole);
    }
    live.into_iter().for_each(|whole| script.unmap(whole));
    let _ = script.said.call("configuration", || script.ops.set_config(config));
    script.counts();
    script.said.part("later, and what is left");
    for time in [1_000_000, 20_000_000, 3_000_000_000] {
        script.world.clock.go_to(time);
        script.said.note("at", time);
    }
    let _ = [(0x3010, 500), (0, 40 * PAGE), (8, 3 * PAGE)].map(|size| script.own(size));
    script.list(&[(0x100, 100), (0x5000, 3 * PAGE)], usual);
    // SAFETY: nothing else runs.
    let _ = script.said.call("unmap all", || unsafe { script.ops.unmap_all() });
    script.counts();
    let Script { world, mut said, ops, .. } = script;
    drop((ops, device));
    said.note("the handle is gone", ());
    drop(world);
    said.note("all is gone", ());
    said.assert_is(FOLDER, &format!("ops-{name}"));
}

#[test]
fn mappings_by_number() {
    plays("strict", OpsConfig::Strict, DmaMask::BITS_64, false);
    plays("lazy", OpsConfig::Lazy { window_ns: 100_000 }, DmaMask::BITS_64, false);
    plays("bounce", OpsConfig::Bounce { threshold: 16 * PAGE }, DmaMask::BITS_64, false);
    plays("bounce-trusted", OpsConfig::Bounce { threshold: 2 * PAGE }, DmaMask::BITS_32, true);
    plays("auto", OpsConfig::Auto { threshold: 16 * PAGE }, DmaMask::BITS_64, false);
}

/// One mapping in 61 is timed. Which ways are taken, and how often the clock is read, in hundreds of them.
#[test]
fn what_is_measured() {
    let (world, said) = World::new("what is measured", Policy::Strict, |builder| builder);
    let ops = world.device(DmaMask::BITS_64).trusted().ops(OpsConfig::Auto { threshold: 16 * PAGE }).unwrap();
    let mut script = Script { said, world, ops, turn: 0 };
    for (size, times) in [((0, 16 * PAGE), 2000), ((0x10, 200), 300), ((0, 15 * PAGE), 500)] {
        let mut before = String::new();
        let mut same = 0;
        for _ in 0..times {
            let PhysSegment { phys, len } = script.world.piece(size.0, size.1);
            // SAFETY: the memory is the test's, all of it simulated.
            let iova = unsafe { script.ops.map(phys, len, Direction::FromDevice, DmaAttributes::default()) }
                .unwrap();
            let made = kinds();
            // SAFETY: the memory is the test's, all of it simulated.
            unsafe { script.ops.unmap(iova, len, DmaAttributes::default()) }.unwrap();
            let now = format!("map: {made}; unmap: {}", kinds());
            if now != before {
                script.said.note(format_args!("{len:#x} bytes, after {same} more"), &now);
                (before, same) = (now, 0);
            } else {
                same += 1;
            }
        }
    }
    script.counts();
    script.said.assert_is(FOLDER, "ops-measured");
}

/// What happened, without addresses.
fn kinds() -> String {
    let kind = |event: String| match event.split_once(' ') {
        _ if event.starts_with('[') => None,
        Some(("clock", rest)) => Some(format!("clock {rest}")),
        Some((first, _)) => Some(first.to_owned()),
        None => Some(event),
    };
    let kinds: Vec<String> = crate::transcript::below().into_iter().filter_map(kind).collect();
    kinds.join(", ")
}
