//! QEMU's VT-d, and the software IOMMU with the same registers. QEMU's caches translations and contexts, has one fault record, and drops
//! repeats while that is full.
//!
//! In scalable mode QEMU 10.0 has either stage, and reports a request without PASID with PASID 0. It takes the first stage's address width
//! from AW, which the manual has ignored there.
#![allow(dead_code, reason = "a program that runs a driver behind it uses a part")]

use std::convert::Infallible;
use std::sync::Arc;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::dma::DmaMask;
use portcullis::invalidation::{Gather, Invalidation, InvalidationQueue, Request};
use portcullis::mapper::Mapper;
use portcullis::pgtable::{Format, VtdSecondStage, X86FirstStage};
use portcullis::platform::Frames;
use portcullis::std_platform::StdPlatform;
use portcullis_hw::acpi::{Dmar, Reserved};
use portcullis_hw::vtd::{FirstStage, Mode, Unit};
use portcullis_hw::{
    DomainError, Fault, Host, Iommu, Reason, Registers, UnitDomain, UnitDomainBuilder, UnitError, UnitTables,
};

use super::kind::{Careless, Kind, Tables, kind_with_tables, table};
use super::machine::{EDU, Edu, Machine, Manners, QemuHost, Ram, Result, SoftwareHost};

pub const REGISTERS: u64 = 0xfed9_0000;

/// Parses a reserved memory region structure.
fn reserved_region(device: DeviceId, range: IovaRange) -> Result<Reserved> {
    let (first, last) = (range.start().get().to_le_bytes(), range.last().get().to_le_bytes());
    let scope = [1, 8, 0, 0, 0, 0, (device.0 >> 3) as u8, (device.0 & 7) as u8];
    let parts = [&[47, 0][..], &[0; 10], &[1, 0, 32, 0, 0, 0, 0, 0], &first, &last, &scope];
    let dmar = Dmar::parse(&table(*b"DMAR", &parts))?;
    let region = dmar.reserved_for(0, device.0 as u16, |_| None).next();
    Ok(region.ok_or("no region of this device")?)
}

kind_with_tables!(Unit<QemuHost>, VtdSecondStage, {
    const UNITS: &[&str] = &[
        "intel-iommu,intremap=off,aw-bits=48",
        "intel-iommu,intremap=off,aw-bits=39",
        "intel-iommu,intremap=off,aw-bits=48,caching-mode=on",
        "intel-iommu,intremap=off,aw-bits=48,snoop-control=on",
        "intel-iommu,intremap=off,aw-bits=48,x-scalable-mode=on",
        "intel-iommu,intremap=off,aw-bits=39,x-scalable-mode=on",
        "intel-iommu,intremap=off,aw-bits=48,x-scalable-mode=on,caching-mode=on",
    ];
    const GAPS: &[(&str, &str)] = &[PASID_CACHE];

    fn machine(unit: &str, devices: &[&str]) -> Result<Machine> {
        Machine::pc(&[&[unit], devices].concat())
    }

    fn machine_without() -> Option<Result<Machine>> {
        Some(Machine::pc(&[]))
    }

    fn firmware(device: DeviceId, range: IovaRange) -> Result<Reserved> {
        reserved_region(device, range)
    }

    fn start(machine: &Machine) -> Result<Self> {
        Ok(Self::new(Unit::start(machine.host(REGISTERS))?))
    }

    fn confuse(machine: &Machine) -> bool {
        confuse(machine)
    }
});

kind_with_tables!(FirstStage<QemuHost>, X86FirstStage, {
    const UNITS: &[&str] = &[
        "intel-iommu,intremap=off,x-scalable-mode=on,x-flts=on",
        "intel-iommu,intremap=off,x-scalable-mode=on,x-flts=on,fs1gp=off",
        "intel-iommu,intremap=off,x-scalable-mode=on,x-flts=on,caching-mode=on",
    ];
    const GAPS: &[(&str, &str)] = &[PASID_CACHE];
    const WRITE_ONLY: bool = false;

    fn machine(unit: &str, devices: &[&str]) -> Result<Machine> {
        Machine::pc(&[&[unit], devices].concat())
    }

    fn machine_without() -> Option<Result<Machine>> {
        Some(Machine::pc(&[]))
    }

    fn start(machine: &Machine) -> Result<Self> {
        let unit = Unit::start_in(machine.host(REGISTERS), Mode::Scalable)?;
        Ok(Self::new(FirstStage::of(Arc::new(unit))?))
    }

    fn confuse(machine: &Machine) -> bool {
        confuse(machine)
    }
});

const PASID_CACHE: (&str, &str) =
    ("an invalidation of the PASID cache", "QEMU 10.0 has none, and reads PASID tables each time");

/// Puts an invalid descriptor at the tail of the unit's queue.
fn confuse(machine: &Machine) -> bool {
    const TAIL: usize = 0x88;
    const BASE: usize = 0x90;
    let registers = machine.window(REGISTERS);
    let (tail, base) = (registers.read64(TAIL), registers.read64(BASE));
    // Zeros are no descriptor. The queue has 256.
    let (bytes, size) = if base >> 11 & 1 == 0 { (16, 4096) } else { (32, 8192) };
    machine.ram().write(PhysAddr::new((base & !0xfff) + tail), &vec![0; bytes]);
    registers.write64(TAIL, (tail + bytes as u64) % size);
    true
}

kind_with_tables!(Unit<SoftwareHost>, VtdSecondStage, {
    const UNITS: &[&str] = &[
        "software",
        "software, 39 bits, caching mode",
        "software, 46 bits, scalable mode",
        "software, 39 bits, scalable mode, caching mode",
    ];
    const CACHES_ABSENT: std::result::Result<(), &str> = Ok(());

    fn machine(unit: &str, _: &[&str]) -> Result<Machine> {
        software(unit)
    }

    fn machine_without() -> Option<Result<Machine>> {
        None
    }

    fn firmware(device: DeviceId, range: IovaRange) -> Result<Reserved> {
        reserved_region(device, range)
    }

    fn start(machine: &Machine) -> Result<Self> {
        Ok(Self::new(Unit::start(SoftwareHost(machine.host(REGISTERS)))?))
    }
});

kind_with_tables!(FirstStage<SoftwareHost>, X86FirstStage, {
    const UNITS: &[&str] =
        &["software, 39 bits, scalable mode", "software, 46 bits, scalable mode, caching mode"];
    const CACHES_ABSENT: std::result::Result<(), &str> = Ok(());
    const WRITE_ONLY: bool = false;

    fn machine(unit: &str, _: &[&str]) -> Result<Machine> {
        software(unit)
    }

    fn machine_without() -> Option<Result<Machine>> {
        None
    }

    fn start(machine: &Machine) -> Result<Self> {
        let unit = Unit::start_in(SoftwareHost(machine.host(REGISTERS)), Mode::Scalable)?;
        Ok(Self::new(FirstStage::of(Arc::new(unit))?))
    }
});

fn software(unit: &str) -> Result<Machine> {
    Machine::software(Manners {
        caches_absent: unit.contains("caching mode"),
        scalable: unit.contains("scalable mode"),
        bits: [39, 46].into_iter().find(|bits| unit.contains(&format!("{bits} bits"))).unwrap_or(48),
    })
}

/// A page that a device reaches at [`AT`], by a domain of its own.
fn page_of<U, X>(unit: &Arc<U>, ram: &Ram, number: u16, device: usize) -> Result<(Own<U, X>, PhysAddr)>
where
    U: Iommu<X, Frames = Ram>,
    X: Format,
{
    let domain = unit.domain(DomainId(number))?.build(StdPlatform::new())?;
    let page = ram.alloc(1).ok_or("memory")?;
    let (range, space) = (IovaRange::new(AT, 4096)?, domain.dma().space());
    let (list, mut gather) = ([(page, 4096)], Gather::new());
    // SAFETY: this process accesses the machine's memory only by atomics.
    unsafe {
        space.mapper().map(space.platform(), range, list, Permissions::READ_WRITE.into(), &mut gather)
    }?;
    domain.attach(id(device), DmaMask::BITS_64)?;
    Ok((domain, page))
}

type Own<U, X> = UnitDomain<(UnitTables<X, U>, StdPlatform, Infallible)>;

const AT: Iova = Iova::new(0x123_4000);

fn id(device: usize) -> DeviceId {
    DeviceId(EDU[device] << 3)
}

/// A device writes `bytes` to memory at `page`, which is its `AT`.
fn brings(device: &Edu, ram: &Ram, page: PhysAddr, bytes: [u8; 8]) -> bool {
    ram.write(page, &bytes);
    device.fetch(AT, 0, 8);
    device.store(0, Iova::new(AT.get() + 64), 8);
    ram.read::<8>(PhysAddr::new(page.get() + 64)) == bytes
}

/// One device has first-stage tables, another second-stage ones, with the same address in both. Invalidating one's domain does not affect
/// the other's, and each ends access.
pub fn both_stages_at_once() {
    let case = || -> Result<()> {
        let machine = software("software, scalable mode")?;
        let (ram, devices) = (machine.ram(), EDU.map(|slot| machine.edu(slot)));
        let unit = Arc::new(Unit::start(SoftwareHost(machine.host(REGISTERS)))?);
        let first = Arc::new(FirstStage::of(Arc::clone(&unit))?);
        unit.enable()?;
        let (one, page) = page_of(&first, ram, 1, 0)?;
        let (two, other) = page_of(&unit, ram, 2, 1)?;
        assert!(brings(&devices[0], ram, page, *b"of first"));
        assert!(brings(&devices[1], ram, other, *b"secondly"));
        let range = IovaRange::new(AT, 4096)?;
        let (platform, mut gather) = (StdPlatform::new(), Gather::new());
        let _ = one.dma().space().mapper().unmap(&platform, range, &mut gather);
        let _ = two.dma().space().mapper().unmap(&platform, range, &mut gather);
        // First-stage descriptors do not invalidate second-stage translations.
        first.invalidate(DomainId(2), Invalidation::Range { range, leaf_only: true })?;
        assert!(brings(&devices[0], ram, page, *b"untold.."));
        assert!(brings(&devices[1], ram, other, *b"untold.."));
        one.dma().space().mapper().sync(&gather)?;
        assert!(!brings(&devices[0], ram, page, *b"too late"));
        assert!(brings(&devices[1], ram, other, *b"untold.."));
        assert_eq!(
            unit.next_fault().map(|fault| (fault.device, fault.reason)),
            Some((id(0), Reason::NotMapped))
        );
        two.dma().space().mapper().sync(&gather)?;
        assert!(!brings(&devices[1], ram, other, *b"too late"));
        assert_eq!(
            unit.next_fault().map(|fault| (fault.device, fault.reason)),
            Some((id(1), Reason::NotMapped))
        );
        assert!(
            matches!(
                unit.domain::<StdPlatform>(DomainId(1)),
                Err(DomainError::Unit(UnitError::DomainInUse { domain: 1 }))
            ),
            "both stages have the same numbers"
        );
        one.detach(id(0))?;
        drop((one, two));
        let first = Arc::into_inner(first).ok_or("a domain has it")?;
        assert_eq!(first.shut_down(), Err(UnitError::Shared));
        Arc::into_inner(unit).ok_or("a domain has it")?.shut_down()?;
        // Both freed their tables; the pages stay.
        assert_eq!(ram.taken(), 2);
        Ok(())
    };
    case().unwrap_or_else(|error| panic!("{error}"));
}

/// QEMU's unit with scalable mode: explicitly in legacy mode, then by default in its current mode, then in scalable mode again. No first
/// stage if there is none.
pub fn a_mode_is_asked_for_or_found() {
    let case = || -> Result<()> {
        let edu = |slot: u32| format!("edu,addr={slot:02x}.0,dma_mask=0xffffffffffffffff");
        let unit = "intel-iommu,intremap=off,aw-bits=48,x-scalable-mode=on";
        let machine = Machine::pc(&[unit, &edu(EDU[0]), &edu(EDU[1])])?;
        let (ram, devices) = (machine.ram(), EDU.map(|slot| machine.edu(slot)));
        let host = || machine.host(REGISTERS);
        let mode_of = |unit: &Unit<QemuHost>| host().registers().read64(0x20) >> 10 & 3 == unit.mode() as u64;
        let legacy = Arc::new(Unit::start_in(host(), Mode::Legacy)?);
        legacy.enable()?;
        assert!(mode_of(&legacy), "legacy mode");
        let (one, page) = page_of(&legacy, ram, 1, 0)?;
        // This driver does not use the unit again: the next takes it over as it is.
        std::mem::forget(one);
        assert!(brings(&devices[0], ram, page, *b"legacy.."));
        assert!(FirstStage::of(legacy).is_err(), "it is in legacy mode");

        let found = Unit::start(host())?;
        assert_eq!(found.mode(), Mode::Legacy, "as it was left");
        assert!(brings(&devices[0], ram, page, *b"meantime"));

        let scalable = Arc::new(Unit::start_in(host(), Mode::Scalable)?);
        let (two, page) = page_of(&scalable, ram, 1, 0)?;
        std::mem::forget(two);
        scalable.enable()?;
        assert!(mode_of(&scalable), "scalable mode");
        assert!(brings(&devices[0], ram, page, *b"scalable"));
        assert!(FirstStage::of(scalable).is_err(), "it has none");

        let found = Unit::start(host())?;
        assert_eq!(found.mode(), Mode::Scalable, "as it was left");
        assert!(brings(&devices[0], ram, page, *b"meantime"));
        found.enable()?;
        assert!(!brings(&devices[0], ram, page, *b"too late"));
        assert_eq!(found.next_fault().map(|fault| fault.reason), Some(Reason::NotAttached));
        assert!(matches!(
            Unit::start_in(Machine::pc(&["intel-iommu"])?.host(REGISTERS), Mode::Scalable),
            Err(UnitError::Lacks { .. })
        ));
        Ok(found.shut_down()?)
    };
    case().unwrap_or_else(|error| panic!("{error}"));
}
