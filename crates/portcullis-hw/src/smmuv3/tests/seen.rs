//! All that a unit sees of its driver, word by word, after firmware has left all its registers non-zero (IHI 0070, sections 4.1 "Commands
//! overview", 5 "Data structure formats", 6.3 "Register formats").

use portcullis::pgtable::ARM_MAIR;

use super::*;
use crate::fake::{Seen, Uncached, entries, register, word};

const COMMANDS: u64 = Memory::FIRST;
const EVENTS: u64 = Memory::FIRST + 0x1000;
const STREAMS: u64 = Memory::FIRST + 0x2000;
/// The entries and context descriptors of streams 0x100 to 0x1ff.
const ENTRIES: u64 = Memory::FIRST + 0x4000;
const CONTEXTS: u64 = Memory::FIRST + 0x8000;

const CFGI_STE: u64 = 0x03 | 0x128 << 32;
const CFGI_CD: u64 = 0x05 | 0x128 << 32;
const SYNC: [u64; 2] = [0x46, 0];

/// Firmware, or the previous kernel, has left the unit on. Its queue indices are not 0, errors are unacknowledged, and the attribute
/// registers have values that no driver writes.
fn left(state: &mut State) {
    for (register, value) in [
        (reg::CR0, 0x1f),
        (reg::CR0ACK, 0x1f),
        (reg::CR1, 0xaaa),
        (reg::CR2, 1),
        (reg::GBPA, 0x1230),
        (reg::IRQ_CTRL, 7),
        (reg::IRQ_CTRLACK, 7),
        (reg::GERROR, 0x85),
        (reg::GERRORN, 0x02),
        (reg::STRTAB_BASE, 0xdead_0000),
        (reg::STRTAB_BASE_CFG, 0x1_0188),
        (reg::CMDQ_BASE, 0xdead_1005),
        (reg::CMDQ_PROD, 9),
        (reg::CMDQ_CONS, 1 << 24 | 5),
        (reg::EVENTQ_BASE, 0xdead_2005),
    ] {
        state.words[register / 4] = value;
    }
    state.indices = [0x8000_0033, 0x21];
}

/// Commands from the place `first` on, and the doorbell behind them.
fn commands(first: u32, commands: &[[u64; 2]]) -> Vec<Seen> {
    let mut seen = entries((COMMANDS, 16), first.into(), commands);
    seen.push(register(reg::CMDQ_PROD, first + commands.len() as u32));
    seen
}

/// The two index registers of each queue, as a start writes them.
fn queues_at_0(commands: u64, events: u64) -> [Seen; 6] {
    [
        Seen::Register(reg::CMDQ_BASE, 64, COMMANDS | commands),
        register(reg::CMDQ_PROD, 0),
        register(reg::CMDQ_CONS, 0),
        Seen::Register(reg::EVENTQ_BASE, 64, EVENTS | events),
        register(reg::EVENTQ_PROD, 0),
        register(reg::EVENTQ_CONS, 0),
    ]
}

fn uncached(ids: [u32; 4], change: impl FnOnce(&mut State)) -> Unit<FakeHost<Model, Uncached>, 12> {
    Unit::start(host_with(&Memory::new(64), ids, change).uncached()).unwrap()
}

#[test]
fn a_unit_that_is_not_coherent_sees_each_word_in_this_order() {
    let unit = uncached([IDR0 & !idr0::COHACC | idr0::ATS, IDR1, IDR3, IDR5], left);
    let fake = unit.host().unit();
    // Interrupts off; queues off, all else in CR0 stays; CR1 for uncached queues, with tables unchanged.
    let mut wanted = [COMMANDS, EVENTS, STREAMS].map(Seen::Frame).to_vec();
    wanted.extend([register(reg::IRQ_CTRL, 0), register(reg::CR0, 0x11), register(reg::CR1, 0xaa0)]);
    wanted.extend(queues_at_0(8, 7));
    // Earlier errors are acknowledged.
    wanted.extend([register(reg::GERRORN, 0x85), register(reg::CR0, 0x1d)]);
    assert_eq!(unit.host().seen(), wanted);
    assert_eq!(fake.state.lock().done, [], "no command is firmware's");

    unit.enable().unwrap();
    // Firmware's translation goes off while accesses abort. Table walks are uncached and outer shareable. Events of streams beyond the
    // table are recorded, broadcasts ignored.
    let mut wanted = alloc::vec![
        register(reg::GBPA, 0x8010_1230),
        register(reg::CR0, 0xc),
        register(reg::CR1, 0x820),
        register(reg::CR2, 6),
        Seen::Register(reg::STRTAB_BASE, 64, STREAMS),
        register(reg::STRTAB_BASE_CFG, 1 << 16 | 8 << 6 | 16),
    ];
    wanted.extend(commands(0, &[[0x04, 31], SYNC]));
    wanted.extend(commands(2, &[[0x30, 0], SYNC]));
    wanted.push(register(reg::CR0, 0x1d));
    assert_eq!(unit.host().seen(), wanted);

    // SAFETY: the unit walks no tables.
    unsafe { unit.attach(DeviceId(0x128), table(Stage::One, 7, 0x12_3456_7000)) }.unwrap();
    let frames = (0..8).map(|frame| Seen::Frame(ENTRIES + frame * 0x1000));
    let mut wanted: Vec<Seen> = frames.collect();
    // 2^8 entries are zeroed before the word that leads to them.
    wanted.push(word(STREAMS + 8, ENTRIES | 9));
    let flags = 1 << 30 | 1 << 31 | 1 << 41 | 1 << 45 | 1 << 46 | 1 << 47;
    let how = 24 | 2 << 12 | 2 << 32 | flags | 7 << 48;
    let (context, entry) = (CONTEXTS + 0x28 * 64, ENTRIES + 0x28 * 64);
    let descriptor = [how, 0x12_3456_7000, 0, ARM_MAIR, 0, 0, 0, 0];
    wanted.extend((context..).step_by(8).zip(descriptor).map(|(at, value)| word(at, value)));
    let rest = [2 << 6 | 1 << 44, 0, 0, 0, 0, 0, 0];
    wanted.extend((entry + 8..).step_by(8).zip(rest).map(|(at, value)| word(at, value)));
    wanted.extend(commands(4, &[[CFGI_STE, 0], [CFGI_CD, 1], SYNC]));
    wanted.push(word(entry, 0xb | context));
    wanted.extend(commands(7, &[[CFGI_STE, 0], SYNC]));
    assert_eq!(unit.host().seen(), wanted);

    unit.detach(DeviceId(0x128)).unwrap();
    let mut wanted = alloc::vec![word(entry, 0)];
    wanted.extend(commands(9, &[[CFGI_STE, 0], [CFGI_CD, 1], SYNC]));
    wanted.extend(commands(12, &[[0x11 | 7 << 48, 0], SYNC]));
    assert_eq!(unit.host().seen(), wanted);

    // A stage that is read uncached, too.
    // SAFETY: as above.
    unsafe { unit.attach(DeviceId(0x128), table(Stage::Two, 7, 0x12_3456_6000)) }.unwrap();
    let how = 24 << 32 | 1 << 38 | 2 << 44 | 2 << 48 | 1 << 51 | 1 << 58 | 7;
    let mut wanted = alloc::vec![];
    let rest = [1 << 44, how, 0x12_3456_6000, 0, 0, 0, 0];
    wanted.extend((entry + 8..).step_by(8).zip(rest).map(|(at, value)| word(at, value)));
    wanted.extend(commands(14, &[[CFGI_STE, 0], [CFGI_CD, 1], SYNC]));
    wanted.push(word(entry, 0xd));
    wanted.extend(commands(17, &[[CFGI_STE, 0], SYNC]));
    assert_eq!(unit.host().seen(), wanted);

    let log = Arc::clone(unit.host().log());
    unit.shut_down().unwrap();
    // All accesses pass, with the earlier attributes; then the queues go off.
    let end = [register(reg::CR0, 0x1c), register(reg::GBPA, 0x8000_1230), register(reg::CR0, 0)];
    assert_eq!(log.lock()[..], end);
}

/// As many entries as the unit supports, but at most a frame of each.
#[test]
fn queues_are_as_long_as_the_unit_takes_them() {
    for (commands, events) in [(1, 0), (6, 5), (8, 7), (19, 19)] {
        let idr1 = 16 | events << 16 | commands << 21;
        let unit = started([IDR0, idr1, IDR3, IDR5], left).unwrap();
        let wanted = queues_at_0(commands.min(8).into(), events.min(7).into());
        assert_eq!(unit.host().seen()[3..9], wanted, "{commands} {events}");
    }
}

#[test]
fn a_unit_acknowledges_each_state_before_it_is_believed() {
    for bit in [cr0::EVENTQEN, cr0::CMDQEN] {
        let deaf = started(ALL, |state| state.acknowledged = !bit);
        assert!(matches!(deaf, Err(UnitError::TimedOut { .. })), "{bit:#x}");
    }
    // Firmware's queues that do not stop, including that of page requests.
    for bit in [cr0::PRIQEN, cr0::EVENTQEN, cr0::CMDQEN] {
        let stuck = started(ALL, |state| {
            left(state);
            state.stuck = bit;
        });
        let said = stuck.map(drop).unwrap_err();
        assert!(matches!(said, UnitError::TimedOut { what: "turn its queues off", .. }), "{bit:#x}: {said}");
    }
    let unit = started(ALL, |state| state.acknowledged = !cr0::SMMUEN).unwrap();
    assert!(matches!(unit.enable(), Err(UnitError::TimedOut { what: "turn translation on", .. })));
    // It frees no memory that the unit may still access.
    for (bit, what) in [
        (cr0::SMMUEN, "turn translation off"),
        (cr0::EVENTQEN, "turn its queues off"),
        (cr0::CMDQEN, "turn its queues off"),
    ] {
        let memory = Memory::new(64);
        let unit = Fake::<12>::start(host_with(&memory, ALL, |_| {})).unwrap();
        unit.enable().unwrap();
        change(&unit, |state| state.stuck = bit);
        let taken = memory.taken();
        let said = unit.shut_down().unwrap_err();
        assert!(matches!(said, UnitError::TimedOut { what: found, .. } if found == what), "{bit:#x}: {said}");
        assert_eq!(memory.taken(), taken, "{bit:#x}");
    }
}

/// Section 6.3.15: software must not write GBPA while Update is 1.
#[test]
fn what_becomes_of_accesses_is_changed_when_the_change_before_is_taken() {
    let unit = started(ALL, |state| {
        left(state);
        (state.words[reg::GBPA / 4], state.updating) = (gbpa::UPDATE | 0x1230, 5);
    });
    let unit = unit.unwrap();
    unit.enable().unwrap();
    assert_eq!(change(&unit, |state| (state.word(reg::GBPA), state.updating)), (gbpa::ABORT | 0x1230, 0));
}

/// The driver's table has its largest size if the unit supports more stream IDs.
#[test]
fn a_table_of_streams_has_its_bounds() {
    let linear = IDR0 & !(3 << 27 | idr0::S1P);
    for (idr0, bits, frames, shape, last) in [
        (IDR0, 32, 1 << 7, 1 << 16 | 8 << 6 | 24, 0xff_ffff),
        (IDR0, 24, 1 << 7, 1 << 16 | 8 << 6 | 24, 0xff_ffff),
        (IDR0, 9, 1, 1 << 16 | 8 << 6 | 9, 0x1ff),
        (IDR0, 8, 8, 8, 0xff),
        (linear, 32, 1 << 10, 16, 0xffff),
        (linear, 16, 1 << 10, 16, 0xffff),
        (linear, 6, 1, 6, 0x3f),
    ] {
        let memory = Memory::new(2 * frames + 4);
        let unit = Fake::<12>::start(host_with(&memory, [idr0, IDR1 & !0x3f | bits, IDR3, IDR5], |_| {}));
        let unit = unit.unwrap();
        assert_eq!(memory.taken(), frames + 2, "{bits}: and the queues");
        unit.enable().unwrap();
        assert_eq!(change(&unit, |state| state.word(reg::STRTAB_BASE_CFG)), shape, "{bits}");
        let none = UnitError::NoSuchDevice { device: last + 1, last };
        assert_eq!(attach(&unit, last + 1, Attachment::PassThrough), Err(none));
    }
}
