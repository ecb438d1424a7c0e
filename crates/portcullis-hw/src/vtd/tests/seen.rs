//! All that a unit sees of its driver, word by word, after firmware has left all its registers non-zero (Rev. 4.1, sections 6.5.2 "Queued
//! Invalidation Interface", 9 "Translation Structure Formats", 11.4 "Register Descriptions").

use super::left::{LeftState, host, state};
use super::*;
use crate::fake::{Seen, entries, register, word};
use crate::fault::Reason;
use crate::queue::Port;
use crate::vtd::layout::ecap;
use crate::vtd::queue::Bell;
use crate::vtd::{FirstStage, Mode};
use portcullis::invalidation::InvalidationError;

const ROOT: u64 = Memory::FIRST;

/// 16 bits of domains, four levels of 48 bits, drains; four fault records at 0x200.
const CAP: u64 = 6 | 1 << 10 | 47 << 16 | 0x20 << 24 | 3 << 40 | cap::DWD | cap::DRD;
const FORGET_CONTEXTS: [u64; 2] = [0x11, 0];
const FORGET_TRANSLATIONS: [u64; 2] = [0xd2, 0];
const FORGET_DOMAIN: [u64; 2] = [0xe2 | 7 << 16, 0];

/// A queue of places of `size` bytes.
struct Commands {
    at: u64,
    size: u64,
    answers: u64,
}

impl Commands {
    /// Descriptors from the place `first` on, the wait behind them, which stores `number`, and the doorbell.
    fn submission(&self, first: u64, commands: &[[u64; 2]], number: u64) -> Vec<Seen> {
        let wait = [5 | 1 << 5 | number << 32, self.answers];
        let mut seen = entries((self.at, self.size), first, commands.iter().chain([&wait]));
        seen.push(Seen::Register(reg::IQT, 64, (first + commands.len() as u64 + 1) * self.size));
        seen
    }
}

fn second(domain: u16) -> Attachment<VtdSecondStage> {
    let format = VtdSecondStage::four_level();
    Attachment::Table { domain: DomainId(domain), root: PhysAddr::new(0x7000), format }
}

/// A record of a refused read by `device`.
fn fault(device: u64) -> [u64; 2] {
    [0x12_3000, 1 << 63 | 1 << 62 | 6 << 32 | device]
}

#[test]
fn a_unit_in_legacy_mode_sees_each_word_in_this_order() {
    let queue = Commands { at: ROOT + 0x1000, size: 16, answers: ROOT + 0x2000 };
    // It translates, remaps interrupts, logs faults in memory, and has a queue with descriptors; all errors are pending, and all records
    // full. Memory is protected, both low and high.
    let host = host(|left| {
        (left.cap, left.ecap) = (CAP | cap::PLMR, 2);
        (left.status, left.fsts) = (0xd700_0000, 0x71);
        (left.head, left.tail, left.pmen) = (0x40, 0x120, 0x8000_0006);
        left.records = (1..=4).map(fault).collect();
    });
    let unit = Unit::start(host.uncached()).unwrap();
    let mut wanted = [ROOT, queue.at, queue.answers].map(Seen::Frame).to_vec();
    // The queue's errors are cleared, it goes off, and the log goes off. Commands repeat exactly the states that are on.
    wanted.extend([
        register(reg::FSTS, 0x70),
        register(reg::GCMD, 0x9200_0000),
        register(reg::GCMD, 0x8200_0000),
    ]);
    wanted.extend([register(reg::FECTL, 1 << 31), register(reg::FSTS, 0x71)]);
    // All records; clearing each clears an overflow.
    wanted.extend(
        [0x20c, 0x21c, 0x22c, 0x23c]
            .into_iter()
            .flat_map(|at| [register(at, 1 << 31), register(reg::FSTS, 1)]),
    );
    wanted.extend([Seen::Register(reg::IQT, 64, 0), Seen::Register(reg::IQA, 64, queue.at)]);
    wanted.push(register(reg::GCMD, 0x8600_0000));
    assert_eq!(unit.host().seen(), wanted);

    unit.enable().unwrap();
    let mut wanted = alloc::vec![Seen::Register(reg::RTADDR, 64, ROOT), register(reg::GCMD, 0xc600_0000)];
    wanted.extend(queue.submission(0, &[FORGET_CONTEXTS, FORGET_TRANSLATIONS], 1));
    wanted.extend([register(reg::GCMD, 0x8600_0000), register(reg::PMEN, 7)]);
    assert_eq!(unit.host().seen(), wanted);

    // SAFETY: this unit reads no page tables.
    unsafe { unit.attach(DEVICE, second(7)) }.unwrap();
    let (contexts, entry) = (ROOT + 0x3000, ROOT + 0x3000 + 0x28 * 16);
    // The table before the entry that points to it; the entry's domain before its present bit.
    let wanted =
        [Seen::Frame(contexts), word(ROOT, contexts | 1), word(entry + 8, 2 | 7 << 8), word(entry, 0x7001)];
    assert_eq!(unit.host().seen(), wanted);

    unit.detach(DEVICE).unwrap();
    let mut wanted = alloc::vec![word(entry, 0)];
    wanted.extend(queue.submission(3, &[[0x31 | 7 << 16 | 0x28 << 32, 0], FORGET_DOMAIN], 2));
    wanted.push(word(entry + 8, 0));
    assert_eq!(unit.host().seen(), wanted);

    let log = Arc::clone(unit.host().log());
    unit.shut_down().unwrap();
    let mut wanted = alloc::vec![register(reg::GCMD, 0x0600_0000)];
    wanted.extend(queue.submission(6, &[], 3));
    wanted.push(register(reg::GCMD, 0x0200_0000));
    assert_eq!(log.lock()[..], wanted);
}

#[test]
fn a_unit_in_scalable_mode_sees_each_word_in_this_order() {
    let queue = Commands { at: ROOT + 0x2000, size: 32, answers: ROOT + 0x1000 };
    let host = host(|left| (left.cap, left.ecap) = (CAP, 2 | ecap::SMTS | ecap::SSTS | ecap::SMPWC));
    let unit = Unit::start(host.uncached()).unwrap();
    let mut wanted = [ROOT, queue.at, queue.at + 0x1000, queue.answers].map(Seen::Frame).to_vec();
    wanted.extend([
        register(reg::FECTL, 1 << 31),
        register(reg::FSTS, 0x71),
        Seen::Register(reg::IQT, 64, 0),
    ]);
    // 2^8 descriptors of 256 bits.
    wanted.extend([Seen::Register(reg::IQA, 64, queue.at | 0x801), register(reg::GCMD, 0x0400_0000)]);
    assert_eq!(unit.host().seen(), wanted);

    unit.enable().unwrap();
    let mut wanted =
        alloc::vec![Seen::Register(reg::RTADDR, 64, ROOT | 0x400), register(reg::GCMD, 0x4400_0000)];
    wanted.extend(queue.submission(0, &[FORGET_CONTEXTS, [0x37, 0], FORGET_TRANSLATIONS], 1));
    wanted.push(register(reg::GCMD, 0x8400_0000));
    assert_eq!(unit.host().seen(), wanted);

    // SAFETY: this unit reads no page tables.
    unsafe { unit.attach(DEVICE, second(7)) }.unwrap();
    let [contexts, directory, table] = [0x4000, 0x5000, 0x6000].map(|at| ROOT + at);
    let entry = contexts + 0x28 * 32;
    let mut wanted = alloc::vec![Seen::Frame(contexts), word(ROOT, contexts | 1)];
    wanted.extend([Seen::Frame(directory), Seen::Frame(table), word(directory, table | 1)]);
    // Four levels, the second stage, snooping walks: present last.
    wanted.extend([
        word(table + 16, 0),
        word(table + 8, 7 | 1 << 23),
        word(table, 0x7000 | 2 << 2 | 2 << 6 | 1),
    ]);
    wanted.extend([word(entry + 8, 0), word(entry, directory | 1)]);
    assert_eq!(unit.host().seen(), wanted);

    unit.detach(DEVICE).unwrap();
    let mut wanted = alloc::vec![word(entry, 0), word(table, 0x7000 | 2 << 2 | 2 << 6)];
    let forgotten = [[0x31 | 0x28 << 32, 0], [0x17 | 7 << 16, 0], FORGET_DOMAIN];
    wanted.extend(queue.submission(4, &forgotten, 2));
    wanted.extend([0, 8, 16].map(|at| word(table + at, 0)));
    assert_eq!(unit.host().seen(), wanted);
}

#[test]
fn records_are_read_in_the_order_in_which_the_unit_writes_them() {
    let unit = Unit::start(host(|left| left.cap = CAP)).unwrap();
    let records = |taken: [u64; 4]| {
        let record = |device: u64| if device > 0 { fault(device) } else { [0; 2] };
        state(&unit, |left: &mut LeftState| left.records = taken.map(record).to_vec());
        core::iter::from_fn(|| unit.next_fault())
            .take(8)
            .map(|fault| (fault.device.0, fault.reason))
            .collect::<Vec<_>>()
    };
    let read =
        |devices: &[u32]| devices.iter().map(|device| (*device, Reason::NotMapped)).collect::<Vec<_>>();
    assert_eq!(records([0, 0, 5, 0]), read(&[5]));
    // A ring: behind the last one read, and then from the beginning.
    assert_eq!(records([2, 0, 0, 1]), read(&[1, 2]));
    assert_eq!(records([4, 1, 2, 3]), read(&[1, 2, 3, 4]));
    // The last one read is record 0, and so is the next.
    assert_eq!(records([5, 0, 0, 0]), read(&[5]));
    assert_eq!(records([0; 4]), read(&[]));
}

/// FSTS and IQERCD (section 11.4.7): why a descriptor was refused, and which device did not answer.
#[test]
fn why_a_queue_has_stopped_is_told() {
    let host = host(|left| (left.iqercd, left.head) = (0xbeef_0028_ffff_fff3, 0x70));
    let failure = |status: u32| {
        host.unit().state.lock().fsts = status.into();
        Bell::new(&host, false)
            .failure(&|_| 0)
            .map(|said| (said.error, said.bad, said.drops_waits, said.status))
    };
    for status in [0, 1, 2, 0x20, u32::MAX] {
        assert_eq!(failure(status), None, "{status:#x}");
    }
    let rejected = Some(InvalidationError::Rejected { code: 3 });
    let waited_ns = crate::host::Host::patience_ns(&host);
    let late = Some(InvalidationError::DeviceTimedOut { device: 0x28, waited_ns });
    assert_eq!(failure(0x10), Some((rejected, Some(7), false, 0x10)));
    assert_eq!(failure(0x42), Some((late, None, true, 0x42)));
    assert_eq!(failure(0x50), Some((rejected, Some(7), true, 0x50)));
    // The stop's reason, and an unexpected completion, are cleared: no fault, and no bit set meanwhile.
    for (status, cleared) in [(0x10_u32, 0x10), (0x73, 0x70), (0x32, 0x30), (0x40, 0x40)] {
        host.unit().state.lock().fsts = status.into();
        let bell = Bell::new(&host, false);
        let failure = bell.failure(&|_| 0).unwrap();
        host.seen();
        bell.go_on(&failure);
        assert_eq!(host.seen(), [register(reg::FSTS, cleared)], "{status:#x}");
    }
}

#[test]
fn the_first_stage_is_its_unit_s_in_all_but_the_tables() {
    let extended = ecap::QI | ecap::C | ecap::PT | ecap::SMTS | ecap::SSTS | ecap::FSTS | ecap::SMPWC;
    let host =
        host(|left| (left.cap, left.ecap, left.records) = (CAP | cap::CM, extended, alloc::vec![[0; 2]; 4]));
    let unit = Arc::new(Unit::start_in(host, Mode::Scalable).unwrap());
    let stage = FirstStage::of(Arc::clone(&unit)).unwrap();
    assert_eq!((stage.domains(), stage.caches_absent()), ((DomainId(1), DomainId(u16::MAX - 1)), true));
    let said = |range: &portcullis::addr::IovaRange| (range.start().get(), range.last().get());
    assert_eq!(stage.reserved().iter().map(said).collect::<Vec<_>>(), [(0xfee0_0000, 0xfeef_ffff)]);
    assert!(core::ptr::eq(stage.numbers(), unit.numbers()), "a number is one domain's of either stage");
    state(&unit, |left| left.records[2] = fault(9));
    assert_eq!(stage.next_fault().map(|fault| fault.device), Some(DeviceId(9)));
    // Pass-through, under the highest number.
    // SAFETY: this unit reads no page tables.
    unsafe { stage.attach(DEVICE, Attachment::PassThrough) }.unwrap();
    // SAFETY: as above.
    let none = unsafe {
        stage.attach(
            DeviceId(9),
            Attachment::Table {
                domain: DomainId(u16::MAX),
                root: PhysAddr::new(0x7000),
                format: stage.layout().unwrap(),
            },
        )
    };
    assert!(matches!(
        none,
        Err(crate::host::UnitError::NoSuchDomain { domain: u16::MAX, first: 1, last: 0xfffe })
    ));
}
