//! Drivers over units whose registers and logs say anything. Whatever they say, a driver's calls
//! return, and use no memory but the driver's; a shutdown that is confirmed gives all of it back.

use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, Iova, IovaRange, PhysAddr, PhysSegment};
use portcullis::dma::{DmaMask, Queue, QueueConfig};
use portcullis::invalidation::{Invalidation, Request};
use portcullis::pgtable::Format;
use portcullis::std_platform::StdPlatform;
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, VtD};
use portcullis_hw::{Attachment, Host, Iommu, UnitError, amdvi, riscv, smmuv3, vtd};
use portcullis_model::Memory;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::lying::{Lie, Lying, LyingHost};
use super::{is_sound, memory, told, virtio};
use crate::input::Input;
use crate::reached::noted;

type Behind<K> = LyingHost<Lying<K>>;

/// The most calls of a driver that one input makes.
const MOST_STEPS: usize = 64;

/// Plays `bytes`.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 5 {
        0 => play::<VtD, _, _>(&mut input, &VTD, |host, _| vtd::Unit::start(host), vtd::Unit::host),
        1 => {
            let config = |byte| amdvi::Config {
                last_device: if byte & 1 == 0 { 0xff } else { u16::MAX },
                // As of an IOMMU, with and without an Extended Feature register and caches of what
                // is absent.
                capability: (byte & 2 != 0).then_some(3 << 16 | 0xf | u32::from(byte & 12) << 24),
            };
            play::<AmdVi, _, _>(
                &mut input,
                &AMDVI,
                |host, byte| amdvi::Unit::start(host, config(byte)),
                amdvi::Unit::host,
            )
        }
        2 => {
            let stage = |byte| if byte & 1 == 0 { riscv::Stage::First } else { riscv::Stage::Second };
            play::<RiscV, _, _>(
                &mut input,
                &RISCV,
                |host, byte| riscv::Unit::start_in(host, stage(byte)),
                riscv::Unit::host,
            )
        }
        3 => {
            let start = |host, _| smmuv3::Unit::<Behind<SmmuV3>, 12>::start(host);
            play::<SmmuV3, _, _>(&mut input, &SMMUV3, start, smmuv3::Unit::host)
        }
        _ => virtio::play(&mut input),
    }
}

/// What the input needs to know of a kind of unit.
struct Known {
    /// Registers that are worth to lie about, or to change.
    registers: &'static [usize],
    /// Registers from here on may be lied about, but not changed: there the unit has addresses.
    fixed: &'static [usize],
    /// The register that has the address of the log of faults, how far it is shifted there, and
    /// which bits are the address; or where records are registers.
    log: Option<(usize, u32, u64)>,
    /// Of a record: the word that has its code, how many bits that is, and how far it is shifted.
    code: (usize, u32, u32),
    /// The register of the unit's index in the log, by how much it counts, and how many records
    /// there are; and whether it counts one lap more.
    tail: (usize, u32, u32),
    wraps: bool,
}

const VTD: Known = Known {
    registers: &[
        0x00, 0x08, 0x0c, 0x10, 0x18, 0x1c, 0x20, 0x34, 0x38, 0x64, 0x80, 0x88, 0xb0, 0xb4, 0x220, 0x224,
        0x228, 0x22c,
    ],
    fixed: &[0x90, 0x94],
    log: None,
    code: (1, 8, 32),
    tail: (0, 1, 1),
    wraps: false,
};
const AMDVI: Known = Known {
    registers: &[0x18, 0x20, 0x30, 0x34, 0x2000, 0x2008, 0x2010, 0x2018, 0x201c, 0x2020, 0x2024],
    fixed: &[0x00, 0x04, 0x08, 0x0c, 0x10, 0x14],
    log: Some((0x10, 0, 0x000f_ffff_ffff_f000)),
    code: (0, 4, 60),
    tail: (0x2018, 16, 256),
    wraps: false,
};
const RISCV: Known = Known {
    registers: &[0x00, 0x04, 0x08, 0x10, 0x20, 0x24, 0x30, 0x34, 0x48, 0x4c, 0x50],
    fixed: &[0x14, 0x18, 0x1c, 0x28, 0x2c],
    log: Some((0x28, 2, 0x003f_ffff_ffff_fc00)),
    code: (0, 12, 0),
    tail: (0x34, 1, 128),
    wraps: false,
};
const SMMUV3: Known = Known {
    registers: &[
        0x00, 0x04, 0x0c, 0x14, 0x20, 0x24, 0x28, 0x2c, 0x44, 0x50, 0x54, 0x60, 0x64, 0x88, 0x98, 0x9c,
        0x1_00a8, 0x1_00ac,
    ],
    fixed: &[0x80, 0x84, 0x90, 0x94, 0xa0, 0xa4],
    log: Some((0xa0, 0, 0x000f_ffff_ffff_ffe0)),
    code: (0, 8, 0),
    tail: (0x1_00a8, 1, 128),
    wraps: true,
};

impl Known {
    fn lie(&self, input: &mut Input<'_>) -> Lie {
        let all = self.registers.len() + self.fixed.len();
        let offset = self.registers.iter().chain(self.fixed).nth(input.below(all as u64) as usize);
        let (kept, set, times) = (input.number(), input.number(), input.byte());
        Lie { offset: offset.copied().unwrap_or(0), kept, set, times }
    }
}

/// Starts a driver, and calls it as the input says.
fn play<K: Kind, X: Format, U: Iommu<X, Frames = Arc<Memory>>>(
    input: &mut Input<'_>,
    known: &Known,
    start: impl FnOnce(Behind<K>, u8) -> Result<U, UnitError>,
    host: fn(&U) -> &Behind<K>,
) {
    let memory = memory();
    let registers = Lying::new(&memory);
    let how = input.byte();
    if how & 0x80 != 0 {
        memory.fail_after(u64::from(input.byte() % 16) + 1);
    }
    for _ in 0..input.below(6) {
        registers.lie(known.lie(input));
    }
    for _ in 0..input.below(4) {
        change(input, known, &registers);
    }
    let unit = match noted("start", start(LyingHost::new(registers, &memory), how)) {
        Ok(unit) => Arc::new(unit),
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return is_sound(&memory);
        }
    };
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        let registers = host(&unit).registers();
        registers.called();
        step(input, known, &unit, registers, &memory);
        is_sound(&memory);
    }
    host(&unit).registers().called();
    // A domain that a device may still be led to keeps the unit: `Shared`.
    if noted("shut_down", unit.shut_down()).is_ok() {
        assert_eq!(memory.frames_in_use(), 0, "a unit that is off keeps memory");
    }
    is_sound(&memory);
}

/// Has a register that holds no address say something else from now on.
fn change<K: Kind>(input: &mut Input<'_>, known: &Known, registers: &Lying<K>) {
    if let Some(index) = input.which(known.registers.len()) {
        registers.unit.set(known.registers[index], input.number() as u32);
    }
}

fn step<K: Kind, X: Format, U: Iommu<X, Frames = Arc<Memory>>>(
    input: &mut Input<'_>,
    known: &Known,
    unit: &Arc<U>,
    registers: &Lying<K>,
    memory: &Memory,
) {
    let device = |input: &mut Input<'_>| DeviceId(input.number() as u32);
    match input.below(12) {
        0 => drop(noted("enable", unit.enable())),
        1 => {
            let (device, domain) = (device(input), DomainId(input.number() as u16));
            let root = PhysAddr::new(input.number());
            let to = match unit.layout() {
                Ok(format) if input.flag() => Attachment::Table { domain, root, format },
                _ => Attachment::PassThrough,
            };
            // SAFETY: the unit walks no tables.
            let _ = noted("attach", unsafe { unit.attach(device, to) });
        }
        2 => drop(noted("detach", unit.detach(device(input)))),
        3 => {
            let requests: Vec<Request> = (0..input.below(160)).map(|_| request(input)).collect();
            let _ = noted("submit", unit.submit(&requests));
        }
        4 => {
            let number = DomainId(input.byte().into());
            let _ = noted("invalidate", unit.invalidate(number, Invalidation::Domain));
        }
        5 => change(input, known, registers),
        6 => registers.lie(known.lie(input)),
        7 => {
            let (index, value) = (input.below(512) as usize, input.number());
            write(known, registers, memory, index, value);
        }
        8 => {
            // A record of every kind: its first byte, and the rest.
            let (index, words) =
                (input.below(128) as usize * 4, [input.number(), input.number(), input.number()]);
            words
                .into_iter()
                .enumerate()
                .for_each(|(at, word)| write(known, registers, memory, index + at, word));
        }
        9 => report(input, known, registers, memory),
        10 => {
            let (device, number) = (device(input), DomainId(input.number() as u16));
            in_a_domain(unit, device, number, input.flag());
        }
        _ => {
            let most = input.byte();
            (0..most).take_while(|_| told(unit.next_fault())).for_each(drop);
            let (first, last) = unit.domains();
            assert!(first <= last && unit.last_iova() > Iova::new(0));
        }
    }
}

/// A domain of the unit's own, whose device has 64 bits, and gets what the unit says that it translates. What then becomes of the
/// domain is the unit's word: its table goes, or stays for ever.
fn in_a_domain<X: Format, U: Iommu<X, Frames = Arc<Memory>>>(
    unit: &Arc<U>,
    device: DeviceId,
    number: DomainId,
    detaches: bool,
) {
    let Ok(builder) = noted("domain", unit.domain(number)) else { return };
    assert!(unit.domain::<StdPlatform>(number).is_err(), "one number is two domains");
    let Ok(domain) = builder.build(StdPlatform::with_cpus(1)) else { return };
    let attached = noted("attach to a domain", domain.attach(device, DmaMask::BITS_64));
    let Ok(attached) = attached else { return };
    assert!(domain.attach(device, DmaMask::BITS_64).is_err(), "a device is attached twice");
    let Ok(mut queue): Result<Queue<_>, _> = attached.queue(QueueConfig::direct()) else { return };
    for page in 0..3 {
        let (list, mut view) =
            ([PhysSegment { phys: PhysAddr::new(page << 12), len: 4096 }], [DmaSegment::default()]);
        // SAFETY: the unit walks no tables.
        let Ok((mapping, _)) = (unsafe { queue.map_raw(&list, Direction::FromDevice, &mut view) }) else {
            return;
        };
        let used = IovaRange::new(view[0].iova, 4096).expect("a page has addresses");
        assert!(used.last() <= unit.last_iova(), "{used} is beyond the unit's addresses");
        let is_apart = |window: &IovaRange| used.last() < window.start() || used.start() > window.last();
        assert!(unit.reserved().iter().all(is_apart), "{used} is in the unit's window");
        let _ = noted("unmap", queue.unmap_raw(mapping));
    }
    drop(queue);
    if detaches {
        let _ = domain.detach(device);
    }
}

/// Has the unit report a fault, as it does: a record in the next place, and then its index.
fn report<K: Kind>(input: &mut Input<'_>, known: &Known, registers: &Lying<K>, memory: &Memory) {
    let unit = &registers.unit;
    let code = input.below(1 << 12);
    let mut words = [input.number(), input.number(), input.number()];
    let (word, bits, shift) = known.code;
    let mask = ((1_u64 << bits) - 1) << shift;
    words[word] = words[word] & !mask | code << shift & mask;
    let (tail, step, size) = known.tail;
    if tail == 0 {
        // Fault records are registers: the last bit says that there is one.
        unit.set64(0x220, words[0]);
        unit.set64(0x228, words[1] | 1 << 63);
        return unit.set(0x34, unit.get(0x34) | 2);
    }
    let at = unit.get(tail) / step;
    let place = (at % size) as usize * (512 / size as usize);
    for (index, word) in words.into_iter().enumerate().take(512 / size as usize) {
        write(known, registers, memory, (place + index) % 512, word);
    }
    let both = if known.wraps { size * 2 } else { size };
    unit.set(tail, (at + 1) % both * step);
}

/// Writes a word of the log.
fn write<K: Kind>(known: &Known, registers: &Lying<K>, memory: &Memory, index: usize, value: u64) {
    let Some((register, shift, bits)) = known.log else {
        let at = 0x220 + index % 2 * 8;
        registers.unit.set64(at, value);
        return;
    };
    let address = (registers.unit.get64(register) & bits) << shift;
    if memory.is_allocated(PhysAddr::new(address)) {
        memory.table_at(PhysAddr::new(address & !0xfff))[index].store(value, Ordering::Release);
    }
}

fn request(input: &mut Input<'_>) -> Request {
    let invalidation = match input.byte() % 4 {
        0 => Invalidation::Domain,
        1 => Invalidation::DeviceTlb { device: DeviceId(input.number() as u32), range: range(input) },
        kind => match range(input) {
            Some(range) => Invalidation::Range { range, leaf_only: kind == 2 },
            None => Invalidation::Domain,
        },
    };
    Request { domain: DomainId(input.byte().into()), invalidation }
}

/// Any range; or one of few pages on both sides of a multiple of a power of two.
fn range(input: &mut Input<'_>) -> Option<IovaRange> {
    if input.flag() {
        return IovaRange::new(Iova::new(input.number()), input.number()).ok();
    }
    let (border, before, pages) = (1 << (12 + input.below(52)), u64::from(input.byte()), input.byte());
    let start = Iova::new(u64::wrapping_sub(border, before << 12));
    IovaRange::new(start, (before + u64::from(pages)) << 12).ok()
}
