//! The drivers' effects on software units and their results, call by call, against the files beside this: register writes, memory words,
//! frames. Reads are counted.
#![cfg(not(watched))]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Invalidation, Request};
use portcullis::pgtable::Format;
use portcullis_hw::software::{AmdVi, RiscV, SmmuV3, Software, VtD};
use portcullis_hw::{Attachment, Fault, Host, Iommu, Registers, UnitError, amdvi, riscv, smmuv3, vtd};
use portcullis_model::Memory;

mod domains;
#[path = "../../../portcullis/tests/transcript/heard.rs"]
mod heard;
mod registers;
#[path = "../../../portcullis/tests/transcript/text.rs"]
mod text;
mod units;

use heard::{Tables, below, count, hear};
use text::Transcript;
use units::Told;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/portcullis-hw/tests/transcripts");

type Unit<K> = Software<K, Arc<Memory>>;

/// Host and registers.
struct Board<K> {
    unit: Unit<K>,
    frames: Tables<false>,
    now: AtomicU64,
    is_deaf: AtomicBool,
    /// It reads all ones.
    is_absent: AtomicBool,
}

impl<K: Told> Board<K> {
    /// With a changed capability register.
    fn new(memory: &Arc<Memory>, change: (usize, u32)) -> Self {
        heard::begin(memory, None);
        // SAFETY: 1: the driver's host has the same frames.
        let unit = unsafe { Software::<K, _>::new(Arc::clone(memory)) };
        unit.set(change.0, unit.get(change.0) ^ change.1);
        Self {
            unit,
            frames: Tables(Arc::clone(memory)),
            now: AtomicU64::new(0),
            is_deaf: AtomicBool::new(false),
            is_absent: AtomicBool::new(false),
        }
    }

    fn write(&self, offset: usize, bits: u32, value: u64, write: impl FnOnce()) {
        hear(format!("{offset:#x}:{bits}={value:#x}"), 0);
        if offset != K::DOORBELL || !self.is_deaf.load(Ordering::Relaxed) {
            write();
        }
    }
}

// SAFETY: the unit's clauses; some doorbells do not reach it.
unsafe impl<K: Told> Registers for Board<K> {
    fn read32(&self, offset: usize) -> u32 {
        count("read");
        if self.is_absent.load(Ordering::Relaxed) { u32::MAX } else { self.unit.read32(offset) }
    }

    fn write32(&self, offset: usize, value: u32) {
        self.write(offset, 32, value.into(), || self.unit.write32(offset, value));
    }

    fn read64(&self, offset: usize) -> u64 {
        count("read");
        if self.is_absent.load(Ordering::Relaxed) { u64::MAX } else { self.unit.read64(offset) }
    }

    fn write64(&self, offset: usize, value: u64) {
        self.write(offset, 64, value, || self.unit.write64(offset, value));
    }
}

impl<K: Told> Host for Board<K> {
    type Registers = Self;
    type Frames = Tables<false>;

    fn registers(&self) -> &Self {
        self
    }

    fn frames(&self) -> &Tables<false> {
        &self.frames
    }

    fn now_ns(&self) -> u64 {
        count("clock");
        self.now.fetch_add(1000, Ordering::Relaxed)
    }

    fn relax(&self) {
        count("relax");
    }

    fn patience_ns(&self) -> u64 {
        20_000
    }
}

/// Ranges, in pages: first, and count.
const RANGES: [(u64, u64); 14] = [
    (0, 1),
    (1, 1),
    (1, 2),
    (2, 2),
    (3, 5),
    (8, 8),
    (7, 9),
    (0x200, 0x200),
    (0x1ff, 0x202),
    (0x201, 0x3ff),
    (0x4_0000, 0x4_0000),
    (0x3_ffff, 0x4_0001),
    (0, 0x10_0000),
    (5, 0x1234_5678),
];

struct Script<U> {
    said: Transcript,
    unit: U,
}

impl<U> Script<U> {
    fn attach<X: Format>(&mut self, name: &str, device: u32, to: Attachment<X>)
    where
        U: Iommu<X>,
    {
        // SAFETY: the unit walks no tables.
        let attach = || unsafe { self.unit.attach(DeviceId(device), to) };
        let _ = self.said.call(format_args!("attach {device:#x} {name}"), attach);
    }

    fn submit<X: Format>(&mut self, name: &str, invalidations: &[Invalidation])
    where
        U: Iommu<X>,
    {
        let domain = DomainId(7);
        let requests: Vec<_> =
            invalidations.iter().map(|&invalidation| Request { domain, invalidation }).collect();
        let _ = self.said.call(format_args!("forget {name}"), || self.unit.submit(&requests));
    }
}

/// A fault without its code.
fn shown(fault: Option<Fault>) -> String {
    let Some(Fault { device, pasid, address, access, reason, .. }) = fault else { return "nothing".into() };
    let address = address.map_or("-".into(), |address| format!("{address:#x}"));
    let access = access.map_or("-".into(), |access| format!("{access:?}"));
    let pasid = pasid.map_or(String::new(), |pasid| format!(" pasid {pasid:#x}"));
    format!("{reason:?} {access} {address} device {:#x}{pasid}", device.0)
}

/// A unit's life. It may support `formats`, or not.
fn plays<K: Told, X: Format, U: Iommu<X, Frames = Tables<false>>>(
    name: &str,
    start: impl Fn(Board<K>) -> Result<U, UnitError>,
    of: fn(&U) -> &Board<K>,
    formats: &[X],
) {
    let memory = Memory::with_base(PhysAddr::new(1 << 20), 8 << 20);
    let mut said = Transcript::new(name, below);
    let board = Board::new(&memory, (0, 0));
    let unit = said.call_as("start", || start(board), |_| String::new()).ok().unwrap();
    let mut script = Script { said, unit };
    let layout = script.unit.layout();
    script.said.note("layout", layout);
    let (first, last) = script.unit.domains();
    script.said.note("domains", (first, last));
    script.said.note("last address", script.unit.last_iova());
    script.said.note("reserved", script.unit.reserved());
    script.said.note(
        "costs, and whether what is absent is cached",
        (script.unit.costs(), script.unit.caches_absent()),
    );
    let _ = script.said.call("enable", || script.unit.enable());
    let format = layout.unwrap();
    let granule = 1 << X::GRANULE_SHIFT;
    let table =
        |domain, root| Attachment::Table { domain: DomainId(domain), root: PhysAddr::new(root), format };
    script.said.part("devices");
    for (name, device, to) in [
        ("to domain 7", 0x28, table(7, 0x40_0000)),
        ("once more", 0x28, table(8, 0x40_0000)),
        ("to the same domain", 0x29, table(7, 0x40_0000)),
        ("far away", 0xfe, table(9, 0x7_6543_0000)),
        ("directly", 0x30, Attachment::PassThrough),
        ("to the first domain", 0x1, table(first.0, 0x40_0000)),
        ("to the last domain", 0x2, table(last.0, 0x40_0000)),
        ("to domain 0", 0x3, table(0, 0x40_0000)),
        ("to the last number", 0x3, table(u16::MAX, 0x40_0000)),
        ("at no table", 0x4, table(7, 0x40_0010)),
        ("beyond memory", 0x4, table(7, 1 << 60)),
        ("far beyond", 0x1234_5678, table(7, 0x40_0000)),
    ] {
        script.attach(name, device, to);
    }
    for (at, &format) in formats.iter().enumerate() {
        let (device, name) = (0x40 + at as u32, format!("with {format:?}"));
        script.attach(
            &name,
            device,
            Attachment::Table { domain: DomainId(11), root: PhysAddr::new(0x40_0000), format },
        );
        let _ = script.said.call(format_args!("detach {device:#x}"), || script.unit.detach(DeviceId(device)));
    }
    for device in [0x29, 0x29, 0x28, 0x30, 0x77, 0x1234_5678] {
        let _ = script.said.call(format_args!("detach {device:#x}"), || script.unit.detach(DeviceId(device)));
    }
    script.attach("again", 0x28, table(7, 0x50_0000));
    script.said.part("ranges");
    let range = |(start, pages)| IovaRange::new(Iova::new(start * granule), pages * granule).unwrap();
    for pages in RANGES {
        let name = format!("{:#x} pages from {:#x} on", pages.1, pages.0);
        script.submit(&name, &[Invalidation::Range { range: range(pages), leaf_only: true }]);
    }
    for leaf_only in [false, true] {
        let parts =
            [(1, 1), (0x2_0000, 3)].map(|pages| Invalidation::Range { range: range(pages), leaf_only });
        script.submit(&format!("two ranges, {leaf_only}"), &parts);
    }
    script.submit("the domain", &[Invalidation::Domain]);
    for tlb in [None, Some((0, 1)), Some((3, 5)), Some((0x200, 0x200)), Some((0, 1 << 24))] {
        let tlb = Invalidation::DeviceTlb { device: DeviceId(0x28), range: tlb.map(range) };
        script.submit(&format!("{tlb:x?}"), &[tlb]);
    }
    script.said.part("what goes wrong");
    K::stop(&of(&script.unit).unit);
    let page = Invalidation::Range { range: range((5, 1)), leaf_only: true };
    script.submit("while it stops", &[page, Invalidation::Domain]);
    script.submit("afterwards", &[page]);
    of(&script.unit).is_deaf.store(true, Ordering::Relaxed);
    script.submit("while it does not hear", &[Invalidation::Domain]);
    let _ = script.said.call("detach 0xfe", || script.unit.detach(DeviceId(0xfe)));
    of(&script.unit).is_deaf.store(false, Ordering::Relaxed);
    script.submit("afterwards", &[Invalidation::Domain]);
    let _ = script.said.call("detach 0xfe", || script.unit.detach(DeviceId(0xfe)));
    of(&script.unit).is_absent.store(true, Ordering::Relaxed);
    for round in 0..3 {
        script.submit(&format!("while it is absent, {round}"), &[Invalidation::Domain; 90]);
    }
    let _ = script.said.call("next fault", || Ok::<_, String>(script.unit.next_fault()));
    let _ = script.said.call("detach 0x1", || script.unit.detach(DeviceId(1)));
    of(&script.unit).is_absent.store(false, Ordering::Relaxed);
    script.submit("afterwards", &[Invalidation::Domain]);
    let _ = script.said.call("detach 0x1", || script.unit.detach(DeviceId(1)));
    script.said.part("faults");
    let (mut faults, mut codes) = (BTreeMap::<String, Vec<u64>>::new(), K::records());
    let (code, words) = codes.swap_remove(codes.len() / 3);
    K::report(&of(&script.unit).unit, words);
    below();
    for _ in 0..2 {
        let next = || Ok::<_, String>(script.unit.next_fault());
        let _ = script
            .said
            .call_as(format_args!("next fault, of code {code:#x}"), next, |fault| format!("{fault:?}"));
    }
    for (code, words) in codes {
        K::report(&of(&script.unit).unit, words);
        let fault = script.unit.next_fault();
        faults.entry(shown(fault)).or_default().push(fault.map_or(code, |fault| fault.code.into()));
    }
    below();
    for (fault, mut codes) in faults {
        codes.sort_unstable();
        codes.dedup();
        let runs = codes.chunk_by(|code, next| code + 1 == *next);
        let runs: Vec<String> = runs.map(|run| format!("{:x}-{:x}", run[0], run[run.len() - 1])).collect();
        script.said.line(format_args!("{fault}: {}", runs.join(" ")));
    }
    script.said.part("the end");
    let _ = script.said.call("enable once more", || script.unit.enable());
    let Script { mut said, unit } = script;
    let _ = said.call("shut down", || unit.shut_down());
    said.note("frames", memory.frames_in_use());
    said.assert_is(FOLDER, name);
    capabilities(name, &start);
    domains::plays(name, start);
}

/// The same with each capability bit flipped.
fn capabilities<K: Told, X: Format, U: Iommu<X>>(
    name: &str,
    start: impl Fn(Board<K>) -> Result<U, UnitError>,
) {
    let lines = |change| -> Vec<String> {
        let memory = Memory::with_base(PhysAddr::new(1 << 20), 8 << 20);
        let board = Board::<K>::new(&memory, change);
        let shown =
            |what: &str, result: &dyn Debug| format!("{what}: {result:x?} | {}", text::joined(below()));
        let unit = match start(board) {
            Ok(unit) => unit,
            Err(error) => return vec![error.to_string()],
        };
        let mut lines = vec![shown("start", &())];
        let layout = unit.layout();
        lines.push(shown("layout", &layout));
        lines.push(shown("limits", &(unit.domains(), unit.last_iova(), unit.caches_absent())));
        lines.push(shown("enable", &unit.enable()));
        let Ok(format) = layout else { return lines };
        let to = Attachment::Table { domain: DomainId(7), root: PhysAddr::new(0x40_0000), format };
        // SAFETY: the unit walks no tables.
        lines.push(shown("attach", &unsafe { unit.attach(DeviceId(0x28), to) }));
        // SAFETY: the unit walks no tables.
        lines
            .push(shown("attach directly", &unsafe { unit.attach(DeviceId(0x29), Attachment::PassThrough) }));
        let range = IovaRange::new(Iova::new(0x20_0000 - 0x1_0000), 0x1_0000 * 35).unwrap();
        let tlb = Invalidation::DeviceTlb { device: DeviceId(0x28), range: Some(range) };
        for invalidation in [Invalidation::Range { range, leaf_only: true }, tlb] {
            lines.push(shown("forget", &unit.invalidate(DomainId(7), invalidation)));
        }
        lines.push(shown("detach", &unit.detach(DeviceId(0x28))));
        lines.push(shown("shut down", &unit.shut_down()));
        lines
    };
    let mut said = Transcript::new(&format!("{name}, where one bit of its capabilities is another"), below);
    let usual = lines((0, 0));
    usual.iter().for_each(|line| said.note("usual", line));
    for &register in K::CAPABILITIES {
        for bit in 0..32 {
            let changed = lines((register, 1 << bit));
            for line in changed.iter().filter(|line| !usual.contains(line)) {
                said.note(format_args!("{register:#x} bit {bit}"), line);
            }
        }
    }
    said.assert_is(FOLDER, &format!("{name}-capabilities"));
}

#[test]
fn vtd_units() {
    use portcullis::pgtable::VtdSecondStage as Layout;
    let formats =
        [Layout::three_level(), Layout::four_level().with_snoop_control(true), Layout::five_level()];
    plays::<VtD, _, _>("vtd", vtd::Unit::start, vtd::Unit::host, &formats);
    let scalable = |board: Board<VtD>| {
        // Scalable mode, both stages, a walker that snoops.
        board.unit.set(0x14, board.unit.get(0x14) | 1 << 11 | 1 << 14 | 1 << 15 | 1 << 16);
        vtd::Unit::start_in(board, vtd::Mode::Scalable)
    };
    plays::<VtD, _, _>("vtd-scalable", scalable, vtd::Unit::host, &formats);
}

#[test]
fn amdvi_units() {
    use portcullis::pgtable::AmdV1;
    let start =
        |capability| move |board| amdvi::Unit::start(board, amdvi::Config { last_device: 0xff, capability });
    let formats = [3, 5, 6].map(|levels| AmdV1::new(levels, 3, 52).unwrap());
    plays::<AmdVi, _, _>("amdvi", start(None), amdvi::Unit::host, &formats);
}

#[test]
fn riscv_units() {
    use portcullis::pgtable::Riscv;
    let formats = [Riscv::sv39(), Riscv::sv57(), Riscv::sv39x4(), Riscv::sv48x4()];
    for (name, stage) in [("riscv-1", riscv::Stage::First), ("riscv-2", riscv::Stage::Second)] {
        plays::<RiscV, _, _>(name, |board| riscv::Unit::start_in(board, stage), riscv::Unit::host, &formats);
    }
}

#[test]
fn smmuv3_units() {
    fn of<const GRANULE: u32>(name: &str) {
        use portcullis::pgtable::Arm;
        let formats = [
            Arm::<GRANULE>::stage_1(48, 48).unwrap(),
            Arm::stage_2(48, 48).unwrap(),
            Arm::stage_1(39, 40).unwrap(),
            Arm::stage_2(40, 40).unwrap(),
        ];
        let start = smmuv3::Unit::<Board<SmmuV3>, GRANULE>::start;
        plays::<SmmuV3, _, _>(name, start, smmuv3::Unit::host, &formats);
    }
    of::<12>("smmuv3-4k");
    of::<14>("smmuv3-16k");
    of::<16>("smmuv3-64k");
}
