//! The first and the last of all numbers: devices at the ends of buses, functions and tables, and domains with the lowest and the highest
//! number. The unit finds each one's table from its registers on; the next number is refused.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use portcullis::addr::{DeviceId, DomainId, PhysAddr};
use portcullis::pgtable::Format;
use portcullis_hw::software::{AmdVi, Kind, RiscV, SmmuV3, Software, VtD};
use portcullis_hw::{Attachment, Iommu, UnitError, amdvi, riscv, smmuv3, vtd};
use portcullis_model::Memory;

use crate::{Behind, MEMORY, host};

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

struct Seen<'a, K>(&'a Software<K, Arc<Memory>>);

impl<K: Kind> Seen<'_, K> {
    fn word(&self, at: u64) -> u64 {
        self.0.frames().table_at(PhysAddr::new(at & ADDRESS))[at as usize % 4096 / 8].load(Ordering::Acquire)
    }

    /// The word, if its lowest bit says that it is present.
    fn present(&self, at: u64) -> Option<u64> {
        Some(self.word(at)).filter(|word| word & 1 != 0)
    }
}

/// A root and a domain number, if a device is attached.
type Led = Option<(u64, u64)>;

/// VT-d 9.1, 9.3.
fn by_legacy_tables(unit: &Seen<'_, VtD>, device: u64) -> Led {
    let context = unit.present((unit.0.get64(0x20) & ADDRESS) + (device >> 8) * 16)? & ADDRESS;
    let entry = context + (device & 0xff) * 16;
    Some((unit.present(entry)? & ADDRESS, unit.word(entry + 8) >> 8 & 0xffff))
}

/// VT-d 9.2, 9.4 to 9.6: a root entry names the table of devices 0 to 15 of the bus, then that of the others.
fn by_scalable_tables(unit: &Seen<'_, VtD>, device: u64) -> Led {
    let context = unit.present((unit.0.get64(0x20) & ADDRESS) + (device >> 7) * 8)? & ADDRESS;
    let directory = unit.present(context + (device & 0x7f) * 32)? & ADDRESS;
    let entry = unit.present(directory)? & ADDRESS;
    Some((unit.present(entry)? & ADDRESS, unit.word(entry + 8) & 0xffff))
}

/// AMD 2.2.2.1. A blocked device has no root.
fn by_device_table(unit: &Seen<'_, AmdVi>, device: u64) -> Led {
    let (table, frames) = (unit.0.get64(0) & ADDRESS, (unit.0.get64(0) & 0x1ff) + 1);
    assert!(device < frames * 128, "the unit is told of fewer");
    let root = unit.present(table + device * 32)? & ADDRESS;
    (root != 0).then(|| (root, unit.word(table + device * 32 + 8) & 0xffff))
}

/// RISC-V IOMMU 2.1: contexts of 32 bytes, and a directory of three levels.
fn by_directory(unit: &Seen<'_, RiscV>, device: u64) -> Led {
    let pointer = unit.0.get64(0x10);
    assert_eq!(pointer & 0xf, 4, "three levels");
    let next = |word: u64| word << 2 & ADDRESS;
    let middle = next(unit.present(next(pointer) + (device >> 16) * 8)?);
    let context = next(unit.present(middle + (device >> 7 & 0x1ff) * 8)?) + (device & 0x7f) * 32;
    unit.present(context)?;
    Some((unit.word(context + 24) << 12 & ADDRESS, unit.word(context + 16) >> 12 & 0xf_ffff))
}

/// SMMUv3 5.1 to 5.4: a stream table of two levels, split at 8 bits, and the first stage's context descriptors.
fn by_streams(unit: &Seen<'_, SmmuV3>, device: u64) -> Led {
    let second = unit.word((unit.0.get64(0x80) & ADDRESS) + (device >> 8) * 8);
    assert!(second == 0 || second & 0x1f == 9, "256 entries");
    let entry = (second != 0).then(|| (second & ADDRESS) + (device & 0xff) * 64)?;
    let context = unit.present(entry)? & (ADDRESS | 0xfc0);
    Some((unit.word(context + 8) & ADDRESS, unit.word(context) >> 48))
}

/// Attaches all `devices`, to tables of their own, alternating between the domains of the lowest and the highest number.
fn ends<X, U, K>(
    start: impl Fn(Behind<K>) -> Result<U, UnitError>,
    of: fn(&U) -> &Behind<K>,
    led: fn(&Seen<'_, K>, u64) -> Led,
    devices: &[u32],
    beyond: u32,
) where
    X: Format + Copy,
    U: Iommu<X>,
    K: Kind,
{
    let memory = Memory::with_base(PhysAddr::new(1 << 20), MEMORY);
    let before = memory.frames_in_use();
    let unit = start(host(&memory)).unwrap();
    unit.enable().unwrap();
    let seen = Seen(&of(&unit).unit);
    let (first, last) = unit.domains();
    let of_device = |index: usize| {
        let domain = if index.is_multiple_of(2) { first } else { last };
        (domain, PhysAddr::new(0x10_0000 * (index as u64 + 1)))
    };
    let attach = |device: u32, (domain, root): (DomainId, PhysAddr)| {
        let to = Attachment::Table { domain, root, format: unit.layout().unwrap() };
        // SAFETY: the unit walks no tables.
        unsafe { unit.attach(DeviceId(device), to) }
    };
    let all = || devices.iter().map(|device| led(&seen, u64::from(*device))).collect::<Vec<_>>();
    let mut expected = vec![None; devices.len()];
    for (index, device) in devices.iter().enumerate() {
        attach(*device, of_device(index)).unwrap();
        let (domain, root) = of_device(index);
        expected[index] = Some((root.get(), u64::from(domain.0)));
        assert_eq!(all(), expected, "{device:#x}");
    }
    for (device, last) in [(beyond, beyond - 1), (u32::MAX, beyond - 1)] {
        let none = Err(UnitError::NoSuchDevice { device, last });
        assert_eq!((attach(device, of_device(0)), unit.detach(DeviceId(device)).map(drop)), (none, none));
    }
    for number in [first.0.checked_sub(1), last.0.checked_add(1)].into_iter().flatten() {
        unit.detach(DeviceId(devices[0])).unwrap();
        let none = UnitError::NoSuchDomain { domain: number, first: first.0, last: last.0 };
        let (_, root) = of_device(0);
        assert_eq!(attach(devices[0], (DomainId(number), root)), Err(none));
        attach(devices[0], of_device(0)).unwrap();
    }
    for (index, device) in devices.iter().enumerate() {
        unit.detach(DeviceId(*device)).unwrap();
        expected[index] = None;
        assert_eq!(all(), expected, "{device:#x}");
        assert_eq!(unit.detach(DeviceId(*device)), Err(UnitError::NotAttached { device: *device }));
    }
    unit.shut_down().unwrap();
    assert_eq!(memory.frames_in_use(), before);
}

/// The ends of a function's 3 bits, a device's 5 and a bus's 8, and the middle of the last two, where half-bus tables meet.
const PCI: [u32; 12] = [0, 7, 8, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0x8000, 0xff00, 0xff80, 0xffff];

#[test]
fn vtd_in_legacy_mode() {
    ends::<_, _, VtD>(vtd::Unit::start, vtd::Unit::host, by_legacy_tables, &PCI, 0x1_0000);
}

#[test]
fn vtd_in_scalable_mode() {
    let start = |host: Behind<VtD>| {
        // Scalable mode, the second stage and coherent walks.
        host.unit.set(0x14, host.unit.get(0x14) | 1 << 11 | 1 << 14 | 1 << 16);
        vtd::Unit::start_in(host, vtd::Mode::Scalable)
    };
    ends::<_, _, VtD>(start, vtd::Unit::host, by_scalable_tables, &PCI, 0x1_0000);
}

#[test]
fn amdvi_with_as_many_devices_as_it_is_told() {
    for last in [0_u32, 0x7f, 0x80, 0xff, 0x7fff, 0xffff] {
        let start =
            |host| amdvi::Unit::start(host, amdvi::Config { last_device: last as u16, capability: None });
        let mut devices: Vec<u32> = PCI.into_iter().filter(|device| *device < last).collect();
        devices.push(last);
        ends::<_, _, AmdVi>(start, amdvi::Unit::host, by_device_table, &devices, last + 1);
    }
}

#[test]
fn riscv_with_segments() {
    // PCI's numbers with a segment above.
    let devices: Vec<u32> =
        PCI.into_iter().chain([0x1_0000, 0x7f_ffff, 0x80_0000, 0xff_0000, 0xff_ffff]).collect();
    ends::<_, _, RiscV>(riscv::Unit::start, riscv::Unit::host, by_directory, &devices, 0x100_0000);
}

#[test]
fn smmuv3() {
    let start = smmuv3::Unit::<Behind<SmmuV3>, 12>::start;
    ends::<_, _, SmmuV3>(start, smmuv3::Unit::host, by_streams, &PCI, 0x1_0000);
}
