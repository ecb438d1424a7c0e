//! The registers of software units after any writes, and the commands in their rings.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::addr::PhysAddr;
use portcullis::platform::Frames;
use portcullis_hw::Registers;
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, Software, VtD};
use portcullis_model::Memory;

use super::text::{Transcript, sum};
use super::{FOLDER, Unit};

const RING: u64 = 0x10_0000;
const STATUS: u64 = 0x10_2000;
const REFUSED: u64 = 0x13_0000;

/// How to drive a kind of unit.
struct Play {
    name: &'static str,
    /// 64-bit writes that set the base of a ring of 256 places; bytes of a place.
    ring: (usize, u64, usize),
    /// Registers that are written at random, with their possible bits; 64-bit ones more often.
    written: &'static [(usize, u64)],
    /// The first register that is written individually.
    first: usize,
    /// A command that stores this number at the address.
    wait: fn(u64, u64) -> [u64; 2],
}

/// Offsets of the registers of a kind: two pages, and the ECMDQs'. Otherwise the second page repeats.
fn offsets<K: Kind>() -> impl Iterator<Item = usize> {
    let all = (0..0x400).chain(0x1000..0x1400).chain(0x4000..0x4040).chain(0x2_0000..0x2_0210).step_by(4);
    all.filter(|offset| *offset < 0x1400 || K::word(*offset) != K::word(0x1000 + offset % 0x1000))
}

fn all<K: Kind>(unit: &Unit<K>) -> Vec<(usize, u32)> {
    offsets::<K>().map(|offset| (offset, unit.get(offset))).filter(|(_, value)| *value != 0).collect()
}

fn changes(before: &[(usize, u32)], after: &[(usize, u32)]) -> Vec<String> {
    let mut offsets: Vec<usize> = before.iter().chain(after).map(|(offset, _)| *offset).collect();
    offsets.sort_unstable();
    offsets.dedup();
    let of = |all: &[(usize, u32)], offset| {
        all.binary_search_by_key(&offset, |(offset, _)| *offset).map_or(0, |at| all[at].1)
    };
    let changed = offsets.into_iter().filter(|offset| of(before, *offset) != of(after, *offset));
    changed.map(|offset| format!("{offset:#x}={:x}", of(after, offset))).collect()
}

/// Writes each register of a unit after reset, from `first` on: records deviations from plain storage.
fn each_alone<K: Kind>(said: &mut Transcript, first: usize, unit: impl Fn() -> Unit<K>) {
    let reset: Vec<String> =
        all(&unit()).iter().map(|(offset, value)| format!("{offset:#x}={value:x}")).collect();
    said.line(format_args!("reset: {}", reset.join(" ")));
    let mut alike: Vec<(usize, usize, String)> = Vec::new();
    for offset in offsets::<K>().filter(|offset| *offset >= first) {
        let unit = unit();
        let (mut line, mut is_plain, mut before) = (String::new(), true, all(&unit));
        for value in [u32::MAX, 0x5555_5555, 0xaaaa_aaaa, 0] {
            let was = unit.get(offset);
            unit.write32(offset, value);
            let after = all(&unit);
            let changed = changes(&before, &after);
            let wanted = if was == value { vec![] } else { vec![format!("{offset:#x}={value:x}")] };
            is_plain &= changed == wanted;
            let _ = write!(line, " {value:x}: {};", changed.join(" "));
            before = after;
        }
        let line = if is_plain { " plain".into() } else { line };
        match alike.last_mut().filter(|(_, last, of)| last + 4 == offset && *of == line) {
            Some((_, last, _)) => *last = offset,
            None => alike.push((offset, offset, line)),
        }
    }
    for (first, last, line) in alike {
        said.line(format_args!("{first:#x} to {last:#x}:{line}"));
    }
}

/// A random walk over a driver's writes, with valid and invalid commands.
fn walk<K: Kind>(said: &mut Transcript, play: &Play, unit: impl FnOnce(Unit<K>) -> Unit<K>) {
    let memory = Memory::with_base(PhysAddr::new(RING), 1 << 20);
    assert_eq!(memory.alloc(4), Some(PhysAddr::new(RING)));
    let shown = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&shown);
    let refused = AtomicBool::new(false);
    let watcher = move |command: [u64; 2]| {
        let mut seen = seen.lock().unwrap();
        seen.push(command);
        assert!(seen.len() < 2000, "it never gets there");
        // Every 19th is refused the first time.
        command[0] != REFUSED || refused.fetch_xor(true, Ordering::Relaxed)
    };
    // SAFETY: 1: the ring and the targets of its commands are allocated memory, and stay.
    let unit = unit(unsafe { Software::watched(Arc::clone(&memory), Box::new(watcher)) });
    let (register, base, bytes) = play.ring;
    for place in 0..256 {
        let command = match place % 19 {
            18 => [REFUSED, 0],
            4 | 9 | 16 => (play.wait)(place, STATUS + place % 5 * 8 + place % 2 * 4),
            _ => [place << 32, place],
        };
        let at = RING + place * bytes as u64;
        for (word, value) in command.into_iter().enumerate() {
            memory.write(PhysAddr::new(at + word as u64 * 8), &value.to_le_bytes()).unwrap();
        }
    }
    unit.write64(register, base);
    let stored = || [0, 8, 16, 24, 32].map(|at| memory.read_u64(PhysAddr::new(STATUS + at)).unwrap());
    let mut lot = 0x1234_5678_9abc_def0_u64;
    let mut draw = |end: usize| {
        lot ^= lot << 13;
        lot ^= lot >> 7;
        lot ^= lot << 17;
        (lot >> 33) as usize % end
    };
    let mut before = (all(&unit), stored());
    for _ in 0..250 {
        let (offset, mask) = play.written[draw(play.written.len())];
        let value = ((draw(1 << 30) as u64) << 16 ^ draw(1 << 30) as u64
            | if draw(3) > 0 { mask & 0xc401_5009 } else { 0 })
            & mask;
        let is_wide = draw(2) == 0 && play.written.iter().all(|(other, _)| *other != offset + 4);
        if is_wide {
            unit.write64(offset, value | u64::from(unit.get(offset + 4)) << 32);
        } else {
            unit.write32(offset, value as u32);
        }
        let after = (all(&unit), stored());
        let commands = std::mem::take(&mut *shown.lock().unwrap());
        let mut line = changes(&before.0, &after.0).join(" ");
        if !commands.is_empty() {
            let bytes = commands.iter().flatten().flat_map(|word| word.to_le_bytes());
            let _ = write!(line, ", {} commands ({:x})", commands.len(), sum(bytes));
        }
        if before.1 != after.1 {
            let _ = write!(line, ", stored {:x?}", after.1);
        }
        said.line(format_args!("{offset:#x}={value:x}: {line}"));
        before = after;
    }
}

fn plays<K: Kind>(play: &Play, change: impl Fn(Unit<K>) -> Unit<K>) {
    let mut said = Transcript::new(&format!("registers of the unit of software: {}", play.name), Vec::new);
    let alone = || {
        let memory = Memory::with_base(PhysAddr::new(RING), 1 << 20);
        // SAFETY: 1: no single register makes the unit read memory.
        change(unsafe { Software::<K, _>::new(memory) })
    };
    each_alone(&mut said, play.first, alone);
    said.part("commands");
    walk(&mut said, play, &change);
    said.assert_is(FOLDER, &format!("registers-{}", play.name));
}

#[test]
fn registers_of_software() {
    let wait_of_vtd = |number: u64, at| [5 | 1 << 5 | number << 32, at];
    // GCMD, IQT, FSTS.
    let of_vtd = &[(0x18, 0xc400_0000), (0x88, 0x3fff), (0x88, 0x0ff0), (0x34, 0x73)];
    for (name, base, bytes, first) in [("vtd", RING, 16, 0), ("vtd-wide", RING | 1 << 11 | 1, 32, usize::MAX)]
    {
        plays::<VtD>(
            &Play { name, ring: (0x90, base, bytes), written: of_vtd, first, wait: wait_of_vtd },
            |unit| unit,
        );
    }
    let amdvi = Play {
        name: "amdvi",
        ring: (8, RING | 8 << 56, 16),
        // The control register; tail, head, and the status.
        written: &[(0x18, 0x1405), (0x2008, 0x1ff0), (0x2008, 0x0ff0), (0x2000, 0x0ff0), (0x2020, 0xffff)],
        first: 0,
        wait: |number, at| [1 << 60 | at | 1, number],
    };
    plays::<AmdVi>(&amdvi, |unit| unit);
    let riscv = Play {
        name: "riscv",
        ring: (0x18, RING >> 2 | 7, 16),
        // CQCSR, CQT, CQH, FQCSR, FQH.
        written: &[
            (0x48, 0x1_0f03),
            (0x48, 1),
            (0x24, 0x1ff),
            (0x24, 0xff),
            (0x20, 0xff),
            (0x4c, 0x1_0f03),
            (0x30, 0xff),
        ],
        first: 0,
        wait: |number, at| [0x3402 | number << 32, at >> 2],
    };
    plays::<RiscV>(&riscv, |unit| unit);
    // CR0, CMDQ_PROD, CMDQ_CONS, GERRORN.
    let main = &[(0x20, 0x1f), (0x98, 0x1ff), (0x98, 0x3ff), (0x9c, 0x0700_01ff), (0x64, 0x1ff)];
    let smmuv3 =
        Play { name: "smmuv3", ring: (0x90, RING | 8, 16), written: main, first: 0, wait: |_, _| [0x46, 0] };
    plays::<SmmuV3>(&smmuv3, |unit| unit);
    // Those of two CPUs: PROD and CONS.
    let own = Play {
        name: "smmuv3-own",
        ring: (0x2_0000, RING | 8, 16),
        written: &[
            (0x2_0008, 0x8080_01ff),
            (0x2_0008, 0x8000_00ff),
            (0x2_000c, 0x8780_01ff),
            (0x64, 0x200),
            (0x2_0108, 0x8080_0000),
        ],
        first: 0x1000,
        wait: |_, _| [0x46, 0],
    };
    plays::<SmmuV3>(&own, |unit| unit.with_own_queues(1, 8));
}
