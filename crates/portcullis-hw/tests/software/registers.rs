//! The software VT-d unit by its registers only: the test writes tables word by word, by the specification, and compares each fault record
//! with it.

use std::sync::Arc;

use portcullis::addr::{Iova, PhysAddr};
use portcullis::platform::Frames;
use portcullis_hw::Registers;
use portcullis_hw::model::{Manners, SoftwareVtd};
use portcullis_model::Memory;

const DEVICE: u16 = 0x0128;
const DOMAIN: u64 = 0x1234;

const BASE: u64 = 1 << 20;
const ROOT: u64 = BASE;
const CONTEXTS: u64 = BASE + 0x1000;
const DIRECTORY: u64 = BASE + 0x2000;
const PASIDS: u64 = BASE + 0x3000;
/// The tables of a walk, the highest first.
const LEVELS: [u64; 4] = [BASE + 0x4000, BASE + 0x5000, BASE + 0x6000, BASE + 0x7000];
const PAGE: u64 = BASE + 0x8000;
/// Two frames, if its descriptors are wide.
const RING: u64 = BASE + 0x1_0000;
const STATUS: u64 = BASE + 0xa000;

/// The address that the tables map, by entry 1 of each.
const MAPPED: u64 = 1 << 39 | 1 << 30 | 1 << 21 | 1 << 12;

const TAKE_ROOT: u32 = 1 << 30;
const QUEUE: u32 = 1 << 26;
const ON: u32 = 1 << 31;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    Legacy,
    Second,
    First,
}
use Stage::{First, Legacy, Second};

/// A unit that is on, and its tail.
struct Rig {
    unit: Arc<SoftwareVtd>,
    memory: Arc<Memory>,
    stage: Stage,
    tail: u64,
}

impl Rig {
    fn new(stage: Stage) -> Self {
        Self::with(stage, Manners { scalable: stage != Legacy, ..Manners::default() })
    }

    fn with(stage: Stage, manners: Manners) -> Self {
        let memory = Memory::with_base(PhysAddr::new(BASE), 1 << 20);
        // The status word is in the driver's memory.
        assert_eq!(memory.alloc(16), Some(PhysAddr::new(BASE)));
        let unit = SoftwareVtd::new(Arc::clone(&memory), manners);
        let rig = Self { unit, memory, stage, tail: 0 };
        rig.set(PAGE, 0xfeed);
        // Read and write; for the first stage also user, accessed and dirty.
        let entry = if stage == First { 0x67 } else { 3 };
        for (table, next) in LEVELS.into_iter().zip([LEVELS[1], LEVELS[2], LEVELS[3], PAGE]) {
            rig.set(table + 8, next | entry);
        }
        if stage == Legacy {
            rig.set(ROOT + 16, CONTEXTS | 1);
            rig.set(CONTEXTS + 0x28 * 16, LEVELS[0] | 1);
            rig.set(CONTEXTS + 0x28 * 16 + 8, DOMAIN << 8 | 2);
        } else {
            // The lower half of bus 1.
            rig.set(ROOT + 16, CONTEXTS | 1);
            rig.set(CONTEXTS + 0x28 * 32, DIRECTORY | 1);
            rig.set(DIRECTORY, PASIDS | 1);
            if stage == First {
                rig.set(PASIDS, 1 << 6 | 1);
                rig.set(PASIDS + 16, LEVELS[0] | 1 << 5);
            } else {
                rig.set(PASIDS, LEVELS[0] | 2 << 6 | 2 << 2 | 1);
            }
            rig.set(PASIDS + 8, DOMAIN);
        }
        rig.unit.write64(0x20, ROOT | if stage == Legacy { 0 } else { 1 << 10 });
        rig.unit.write64(0x90, RING | if stage == Legacy { 0 } else { 1 << 11 });
        for command in [TAKE_ROOT, QUEUE, QUEUE | ON] {
            rig.unit.write32(0x18, command);
        }
        rig
    }

    fn set(&self, at: u64, word: u64) {
        self.memory.write(PhysAddr::new(at), &word.to_le_bytes()).unwrap();
    }

    fn get(&self, at: u64) -> u64 {
        self.memory.read_u64(PhysAddr::new(at)).unwrap()
    }

    fn reads(&self, at: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.unit.read(DEVICE, Iova::new(at), &mut bytes).then(|| u64::from_le_bytes(bytes))
    }

    fn writes(&self, at: u64, word: u64) -> bool {
        self.unit.write(DEVICE, Iova::new(at), &word.to_le_bytes())
    }

    /// The fault's reason, if there is one. Checks its device and address, and clears it.
    fn reason(&self, at: u64, reads: bool) -> Option<u64> {
        assert_eq!(self.unit.read32(0x34) & 0x73, if self.unit.read64(0x228) == 0 { 0 } else { 2 });
        let (low, high) = (self.unit.read64(0x220), self.unit.read64(0x228));
        if high >> 63 == 0 {
            assert_eq!((low, high), (0, 0));
            return None;
        }
        assert_eq!((low, high & 0xffff), (at & !0xfff, DEVICE.into()));
        assert_eq!(high >> 62 & 1, u64::from(reads));
        // No other bit clears the record.
        self.unit.write32(0x22c, 0x7fff_ffff);
        assert_eq!(self.unit.read64(0x228), high);
        self.unit.write32(0x22c, 1 << 31);
        assert_eq!((self.unit.read64(0x220), self.unit.read64(0x228), self.unit.read32(0x34)), (0, 0, 0));
        assert_eq!(high & !(3 << 62 | 0xff << 32 | 0xffff), 0);
        Some(high >> 32 & 0xff)
    }

    /// The reasons of a refused read and a refused write.
    fn refused(&self, at: u64) -> [Option<u64>; 2] {
        let read = self.reads(at).is_none();
        let reads = self.reason(at, true);
        assert_eq!(reads.is_some(), read);
        let written = !self.writes(at, 0xfeed);
        let writes = self.reason(at, false);
        assert_eq!(writes.is_some(), written);
        [reads, writes]
    }

    /// The unit executes one descriptor, and a wait.
    fn tell_and_wait(&mut self, low: u64, high: u64) {
        self.tell(low, high);
        self.tell(5, 0);
    }

    /// The unit executes one descriptor.
    fn tell(&mut self, low: u64, high: u64) {
        let width = if self.stage == Legacy { 16 } else { 32 };
        self.set(RING + self.tail, low);
        self.set(RING + self.tail + 8, high);
        self.tail = (self.tail + width) % (256 * width);
        self.unit.write64(0x88, self.tail);
        assert_eq!([self.unit.read64(0x80), self.unit.read64(0x88)], [self.tail; 2]);
    }
}

/// The flaw, and its reasons in legacy mode, second stage and first stage: of a read, and of a write.
type Row = (&'static str, fn(&Rig), u64, [[u64; 2]; 3]);

#[test]
fn each_refusal_has_the_reason_of_its_mode() {
    let rows: [Row; 11] = [
        (
            "no context",
            |rig| rig.set(CONTEXTS + 0x28 * if rig.stage == Legacy { 16 } else { 32 }, 0),
            MAPPED,
            [[2; 2], [0x41; 2], [0x41; 2]],
        ),
        ("no root", |rig| rig.set(ROOT + 16, 0), MAPPED, [[2; 2], [0x41; 2], [0x41; 2]]),
        ("not present", |rig| rig.set(LEVELS[3] + 8, 0), MAPPED, [[6, 5], [0x79; 2], [0x71; 2]]),
        ("not present above", |rig| rig.set(LEVELS[1] + 8, 0), MAPPED, [[6, 5], [0x79; 2], [0x71; 2]]),
        ("a neighbour", |_| (), MAPPED + 0x1000, [[6, 5], [0x79; 2], [0x71; 2]]),
        (
            "reserved",
            |rig| rig.set(LEVELS[0] + 8, rig.get(LEVELS[0] + 8) | 1 << 7),
            MAPPED,
            [[0xc; 2], [0x7a; 2], [0x72; 2]],
        ),
        (
            "no such table",
            |rig| rig.set(LEVELS[1] + 8, 1 << 40 | rig.get(LEVELS[1] + 8) & 0xfff),
            MAPPED,
            [[7; 2], [0x78; 2], [0x70; 2]],
        ),
        (
            "no such page",
            |rig| rig.set(LEVELS[3] + 8, 1 << 40 | rig.get(LEVELS[3] + 8) & 0xfff),
            MAPPED,
            [[6, 5], [0x79; 2], [0x71; 2]],
        ),
        ("too wide", |_| (), 1 << 48 | MAPPED, [[4; 2], [0x83; 2], [0x80; 2]]),
        ("too wide for the unit", |_| (), 1 << 63, [[4; 2], [0x83; 2], [0x80; 2]]),
        (
            "no such depth",
            |rig| match rig.stage {
                Legacy => rig.set(CONTEXTS + 0x28 * 16 + 8, DOMAIN << 8 | 5),
                Second => rig.set(PASIDS, LEVELS[0] | 2 << 6 | 5 << 2 | 1),
                First => rig.set(PASIDS + 16, LEVELS[0] | 1 << 5 | 2 << 2),
            },
            MAPPED,
            [[3; 2], [0x5b; 2], [0x5b; 2]],
        ),
    ];
    for (what, wrong, at, wanted) in rows {
        for (stage, wanted) in [Legacy, Second, First].into_iter().zip(wanted) {
            let rig = Rig::new(stage);
            wrong(&rig);
            assert_eq!(rig.refused(at), wanted.map(Some), "{what}, {stage:?}");
        }
    }
}

#[test]
fn permissions_are_looked_at() {
    for (stage, read_only, write_only) in [(Legacy, 1, Some(2)), (Second, 1, Some(2)), (First, 0x65, None)] {
        let rig = Rig::new(stage);
        assert_eq!(rig.refused(MAPPED), [None; 2], "{stage:?}");
        let rig = Rig::new(stage);
        rig.set(LEVELS[3] + 8, PAGE | read_only);
        let wanted = if stage == Legacy { 5 } else { 0x85 };
        assert_eq!(rig.refused(MAPPED), [None, Some(wanted)], "{stage:?}");
        if let Some(write_only) = write_only {
            let rig = Rig::new(stage);
            rig.set(LEVELS[3] + 8, PAGE | write_only);
            let wanted = if stage == Legacy { 6 } else { 0x86 };
            assert_eq!(rig.refused(MAPPED), [Some(wanted), None], "{stage:?}");
        }
    }
}

#[test]
fn contexts_pass_or_block() {
    // Pass-through, and a type that no mode has.
    for (stage, passes) in [(Legacy, 2 << 2 | 1), (Second, 4 << 6 | 2 << 2 | 1)] {
        let context = if stage == Legacy { CONTEXTS + 0x28 * 16 } else { PASIDS };
        let rig = Rig::new(stage);
        rig.set(context, passes);
        assert_eq!(rig.reads(PAGE), Some(0xfeed), "{stage:?}");
        assert!(rig.writes(PAGE, 0xbeef));
        assert_eq!((rig.get(PAGE), rig.reason(0, true)), (0xbeef, None));
    }
    for (stage, blocked) in
        [(Legacy, 3 << 2 | 1), (Legacy, 1 << 2 | 1), (Second, 4 << 6 | 1 << 2 | 1), (Second, 5 << 6 | 1)]
    {
        let context = if stage == Legacy { CONTEXTS + 0x28 * 16 } else { PASIDS };
        let rig = Rig::new(stage);
        rig.set(context, blocked);
        assert_eq!(
            rig.refused(PAGE),
            [Some(if stage == Legacy { 2 } else { 0x41 }); 2],
            "{stage:?} {blocked:#x}"
        );
    }
    // First-stage tables without NXE; non-present directory, table and entry; PASIDs of the device.
    type Wrong = (&'static str, fn(&Rig));
    let rows: [Wrong; 5] = [
        ("no execution", |rig| rig.set(PASIDS + 16, LEVELS[0])),
        ("no table", |rig| rig.set(DIRECTORY, PASIDS)),
        ("no entry", |rig| rig.set(PASIDS, 1 << 6)),
        ("a directory of more", |rig| rig.set(CONTEXTS + 0x28 * 32, DIRECTORY | 1 << 9 | 1)),
        ("a PASID of its own", |rig| rig.set(CONTEXTS + 0x28 * 32 + 8, 1)),
    ];
    for (what, wrong) in rows {
        let rig = Rig::new(First);
        wrong(&rig);
        assert_eq!(rig.refused(MAPPED), [Some(0x41); 2], "{what}");
    }
}

#[test]
fn the_unit_keeps_what_it_read_until_it_is_told() {
    /// Descriptors, and whether the unit has then invalidated a page, a PASID entry, and a context.
    type Told = (u64, u64, [bool; 3]);
    let (of, other) = (DOMAIN << 16, 7 << 16);
    let legacy: [Told; 12] = [
        (1 | 1 << 4, 0, [false, true, true]),
        (1 | 2 << 4 | of, 0, [false, true, true]),
        (1 | 3 << 4 | of | u64::from(DEVICE) << 32, 0, [false, true, true]),
        (1 | 3 << 4 | of | 0x129 << 32, 0, [false; 3]),
        (2 | 1 << 4, 0, [true, false, false]),
        (2 | 2 << 4 | of, 0, [true, false, false]),
        (2 | 2 << 4 | other, 0, [false; 3]),
        (2 | 3 << 4 | of, MAPPED, [true, false, false]),
        (2 | 3 << 4 | of, MAPPED | 1 << 6, [true, false, false]),
        (2 | 3 << 4 | of, (MAPPED - 0x1000) | 1, [true, false, false]),
        (2 | 3 << 4 | of, MAPPED + 0x1000, [false; 3]),
        (2 | 3 << 4 | other, MAPPED, [false; 3]),
    ];
    let second: [Told; 10] = [
        (2 | 2 << 4 | of, 0, [true, false, false]),
        (2 | 3 << 4 | of, MAPPED, [true, false, false]),
        (2 | 3 << 4 | other, MAPPED, [false; 3]),
        // First-stage descriptors in a mode without it.
        (6 | 2 << 4 | of, 0, [false; 3]),
        (6 | 3 << 4 | of, MAPPED, [false; 3]),
        (7 | of, 0, [false, true, false]),
        (7 | 1 << 4 | of, 0, [false, true, false]),
        (7 | other, 0, [false; 3]),
        (7 | 3 << 4, 0, [false, true, false]),
        (1 | 3 << 4 | of | u64::from(DEVICE) << 32, 0, [false, false, true]),
    ];
    let first: [Told; 8] = [
        (6 | 2 << 4 | of, 0, [true, false, false]),
        (6 | 3 << 4 | of, MAPPED, [true, false, false]),
        (6 | 3 << 4 | of, MAPPED + 0x1000, [false; 3]),
        (6 | 3 << 4 | other, MAPPED, [false; 3]),
        (2 | 2 << 4 | of, 0, [true, false, false]),
        (2 | 3 << 4 | of, MAPPED + 0x1000, [true, false, false]),
        (7 | of, 0, [false, true, false]),
        (7 | other, 0, [false; 3]),
    ];
    let all = [(Legacy, &legacy[..]), (Second, &second), (First, &first)];
    for (stage, low, high, forgotten) in all.into_iter().flat_map(|(stage, told)| {
        told.iter().map(move |&(low, high, forgotten)| (stage, low, high, forgotten))
    }) {
        let changes: [fn(&Rig); 3] = [
            |rig| rig.set(LEVELS[3] + 8, 0),
            |rig| if rig.stage == Legacy { rig.set(CONTEXTS + 0x28 * 16, 0) } else { rig.set(PASIDS, 0) },
            |rig| rig.set(CONTEXTS + 0x28 * if rig.stage == Legacy { 16 } else { 32 }, 0),
        ];
        for (change, forgotten) in changes.into_iter().zip(forgotten) {
            let mut rig = Rig::new(stage);
            assert_eq!(rig.reads(MAPPED), Some(0xfeed));
            change(&rig);
            assert_eq!(rig.reads(MAPPED), Some(0xfeed), "{stage:?}: nobody told it");
            rig.tell_and_wait(low, high);
            assert_eq!(rig.reads(MAPPED).is_none(), forgotten, "{stage:?} {low:#x} {high:#x}");
        }
    }
}

#[test]
fn waits_are_confirmed_around_the_ring() {
    for stage in [Legacy, Second] {
        let mut rig = Rig::new(stage);
        for number in 1..=300 {
            rig.tell(5 | 1 << 5 | number << 32, STATUS + number % 5 * 8);
            assert_eq!(rig.get(STATUS + number % 5 * 8), number, "{stage:?}");
        }
        // A wait without a status write.
        rig.tell(5 | 1 << 4 | 7 << 32, STATUS + 0x100);
        assert_eq!(rig.get(STATUS + 0x100), 0);
        // While off, the queue stops; on again, it starts anew.
        rig.unit.write32(0x18, ON);
        assert_eq!(rig.unit.read32(0x1c), ON | TAKE_ROOT);
        rig.set(RING, 5 | 1 << 5 | 9 << 32);
        rig.set(RING + 8, STATUS + 0x100);
        rig.unit.write64(0x88, 32);
        assert_eq!(rig.get(STATUS + 0x100), 0);
        rig.unit.write32(0x18, ON | QUEUE);
        assert_eq!((rig.unit.read64(0x80), rig.unit.read32(0x1c)), (0, ON | TAKE_ROOT | QUEUE));
        // No status of missing features.
        for (command, status) in
            [(u32::MAX, ON | TAKE_ROOT | QUEUE), (!ON, TAKE_ROOT | QUEUE), (0, TAKE_ROOT)]
        {
            rig.unit.write32(0x18, command);
            assert_eq!(rig.unit.read32(0x1c), status, "{command:#x}");
        }
    }
}

/// RTADDR (section 11.4.5) takes effect with GCMD.SRTP, and with no other command.
#[test]
fn the_root_is_taken_with_the_command_for_it() {
    for stage in [Legacy, Second] {
        let mut rig = Rig::new(stage);
        // No root there.
        rig.unit.write64(0x20, STATUS | if stage == Legacy { 0 } else { 1 << 10 });
        for (command, is_taken) in [(ON | QUEUE, false), (QUEUE, false), (QUEUE | TAKE_ROOT, true)] {
            rig.unit.write32(0x18, command);
            rig.unit.write32(0x18, ON | QUEUE);
            // Contexts, PASIDs if there are any, translations.
            rig.tell_and_wait(1 | 1 << 4, 0);
            if stage != Legacy {
                rig.tell_and_wait(7 | 3 << 4, 0);
            }
            rig.tell_and_wait(2 | 1 << 4, 0);
            assert_eq!(rig.reads(MAPPED).is_none(), is_taken, "{stage:?} {command:#x}");
        }
    }
}

#[test]
fn the_registers_say_what_the_unit_has() {
    for (manners, cap, ecap) in [
        (Manners::default(), 0x00c9_008c_222f_0406, 0x43),
        (Manners { caches_absent: true, bits: 39, ..Manners::default() }, 0x00c9_008c_2226_0486, 0x43),
        (Manners { scalable: true, ..Manners::default() }, 0x01c9_008c_222f_0406, 0x0001_c800_0000_0043),
    ] {
        let unit = SoftwareVtd::new(Memory::with_base(PhysAddr::new(BASE), 1 << 20), manners);
        assert_eq!((unit.read64(8), unit.read64(0x10)), (cap, ecap), "{manners:?}");
        // Other offsets read zero, and ignore writes.
        for at in (0..0x400).step_by(4) {
            if at != 0x20 && at != 0x90 && at != 0x88 && at != 0x18 {
                unit.write32(at, u32::MAX);
                unit.write64(at, u64::MAX);
            }
            let wanted = if at == 0 { 0x10 } else { 0 };
            assert_eq!(unit.read32(at), wanted, "{at:#x}");
            if at != 8 && at != 0x10 {
                assert_eq!(unit.read64(at), 0, "{at:#x}");
            }
        }
        unit.write64(0x20, ROOT | 1 << 10);
        assert_eq!(unit.read64(0x20), ROOT | 1 << 10);
    }
}

#[test]
fn a_unit_of_fewer_bits_refuses_what_is_beyond_them() {
    let rig = Rig::with(Legacy, Manners { bits: 39, ..Manners::default() });
    assert_eq!(rig.refused(MAPPED), [Some(4); 2]);
    let rig = Rig::with(Legacy, Manners { bits: 40, ..Manners::default() });
    assert_eq!(rig.refused(MAPPED), [None; 2]);
    // The last byte counts.
    assert!(!rig.unit.read(DEVICE, Iova::new((1 << 40) - 1), &mut [0; 2]));
    assert_eq!(rig.reason((1 << 40) - 1, true), Some(4));
    assert!(!rig.unit.read(DEVICE, Iova::new((1 << 40) - 1), &mut [0; 1]));
    assert_eq!(rig.reason((1 << 40) - 1, true), Some(6));
}
