//! QEMU's virtio-iommu: it has no caches, so an unmap acts at once. It checks neither alignment nor ranges, keeps attachments and mappings
//! over a reset, against the specification, and reports a fault for every 4 bytes.
#![allow(dead_code, unused_imports, reason = "a program that runs a driver behind it uses a part")]

use std::sync::Arc;

use portcullis::addr::{DeviceId, DomainId, IovaRange};
use portcullis::invalidation::Request;
use portcullis::std_platform::StdPlatform;
use portcullis_hw::virtio::{RequestMapper, Structures, Unit};
use portcullis_hw::{Fault, Reason, UnitDomainBuilder};

use super::kind::Kind;
use super::machine::{EDU, Machine, QemuHost, Ram, Result};

/// Its slot, and the base address register of its structures' region, number 4.
const SLOT: u32 = 3;
const REGION: u8 = 4;
const BASE_REGISTER: u32 = 0x20;

/// A configuration with regions of both kinds, which only RISC-V's machine leaves unchanged: a PC has its interrupts there.
const WITH_REGIONS: &str = concat!(
    r#"{"driver":"virtio-iommu-pci","addr":"03.0","disable-legacy":"on","#,
    r#""reserved-regions":["0xc0000000:0xc00fffff:0","0xd0000000:0xd000ffff:1"]}"#
);

/// The unit of a machine, and the devices behind it.
pub struct VirtioIommu(pub Arc<Unit<QemuHost>>, Vec<DeviceId>);

/// The devices of a machine: the two of the cases, and a disk where there is one.
fn devices(machine: &Machine) -> Vec<DeviceId> {
    let there = |slot: &u32| machine.configuration(*slot, 0) != u32::MAX;
    EDU.into_iter().chain([7]).filter(there).map(|slot| DeviceId(slot << 3)).collect()
}

impl Kind for VirtioIommu {
    type Mapper = RequestMapper<QemuHost>;

    const UNITS: &[&str] = &[
        "virtio-iommu-pci,addr=03.0,disable-legacy=on",
        "virtio-iommu-pci,addr=03.0,disable-legacy=on,aw-bits=64,boot-bypass=off",
        "virtio-iommu-pci,addr=03.0,disable-legacy=on,aw-bits=48,granule=4k",
        "virtio-iommu-pci,addr=03.0,disable-legacy=on,iommu_platform=on",
        WITH_REGIONS,
    ];

    // It does so if a mapping forbids an access, and not if there is none.
    const TELLS_ACCESS: bool = false;
    // It drops a detached endpoint, and then gives no reason.
    const NOT_ATTACHED: Reason = Reason::Other;
    // By the specification the reset at a driver's start detaches all devices.
    const KEEPS_UNTIL_ENABLED: bool = false;

    fn machine(unit: &str, devices: &[&str]) -> Result<Machine> {
        let all = [&[unit], devices].concat();
        if unit == WITH_REGIONS { Machine::riscv("", &all) } else { Machine::pc(&all) }
    }

    fn machine_without() -> Option<Result<Machine>> {
        Some(Machine::pc(&[]))
    }

    fn start(machine: &Machine) -> Result<Self> {
        let base = machine.place(SLOT, BASE_REGISTER);
        let structures = Structures::find(
            |register| machine.configuration(SLOT, u32::from(register)),
            |region, offset, _| (region == REGION).then_some(offset as usize),
        )?;
        let devices = devices(machine);
        Ok(Self(Arc::new(Unit::start(machine.host(base), structures, devices.iter().copied())?), devices))
    }

    fn enable(&self) -> Result<()> {
        // With `iommu_platform=on` it translates its own accesses, too, and QEMU exits with the first one that it refuses itself. SAFETY:
        // 1: it reaches what the driver gives it.
        unsafe { self.0.pass_through(DeviceId(SLOT << 3)) }?;
        Ok(self.0.enable()?)
    }

    fn domain(&self, number: DomainId) -> Result<UnitDomainBuilder<Self::Mapper, StdPlatform>> {
        let builder = self.0.domain(number)?;
        Ok(self.1.iter().try_fold(builder, |builder, device| builder.for_device(*device))?)
    }

    fn reserved(&self) -> Result<Vec<IovaRange>> {
        let mut reserved = Vec::new();
        for device in &self.1 {
            reserved.extend(self.0.regions(*device)?.iter().map(|region| region.range));
        }
        Ok(reserved)
    }

    fn caches_absent(&self) -> bool {
        false
    }

    fn table_bytes(_: &Self::Mapper) -> Option<usize> {
        None
    }

    fn pass_through(&self, device: DeviceId) -> Result<()> {
        // SAFETY: 1: this process accesses QEMU's memory only by atomics.
        Ok(unsafe { self.0.pass_through(device) }?)
    }

    fn detach(&self, device: DeviceId) -> Result<()> {
        Ok(self.0.detach(device)?)
    }

    fn faults(&self) -> Vec<Fault> {
        std::iter::from_fn(|| self.0.next_fault()).collect()
    }

    fn neglect(&self, _: bool) -> bool {
        false
    }

    fn submit(&self, _: &[Request]) -> Result<()> {
        Ok(())
    }

    fn shut_down(self) -> Result<()> {
        let unit = Arc::into_inner(self.0).ok_or("a domain still has the unit")?;
        Ok(unit.shut_down()?)
    }
}

pub use own::*;

/// Tests of this IOMMU only.
mod own {
    use portcullis::addr::{Iova, PageSize, Permissions, PhysAddr};
    use portcullis::invalidation::Gather;
    use portcullis::mapper::Mapper;
    use portcullis::platform::Frames;
    use portcullis_hw::UnitError;

    use super::super::machine::Edu;
    use super::*;

    /// The first of the two devices.
    const FIRST: DeviceId = DeviceId(EDU[0] << 3);

    /// The mapper of a domain to which all devices may be attached.
    fn mapper(kind: &VirtioIommu, number: u16) -> Result<RequestMapper<QemuHost>> {
        Ok(kind.0.mapper(DomainId(number), kind.reserved()?)?)
    }

    fn rig(unit: &str) -> Result<(Machine, VirtioIommu, [Edu; 2])> {
        let [first, second] = EDU.map(|slot| format!("edu,addr={slot:02x}.0,dma_mask=0xffffffffffffffff"));
        let machine = VirtioIommu::machine(unit, &[&first, &second])?;
        let devices = EDU.map(|slot| machine.edu(slot));
        let kind = VirtioIommu::start(&machine)?;
        kind.enable()?;
        Ok((machine, kind, devices))
    }

    fn map(
        mapper: &RequestMapper<QemuHost>,
        (at, page): (u64, u64),
        memory: &[PhysAddr],
    ) -> Result<IovaRange> {
        let range = IovaRange::new(Iova::new(at), memory.len() as u64 * page)?;
        let list = memory.iter().map(|phys| (*phys, page));
        let mut gather = Gather::new();
        // SAFETY: this process accesses QEMU's memory only by atomics.
        unsafe { mapper.map(&StdPlatform::new(), range, list, Permissions::READ_WRITE.into(), &mut gather) }?;
        Ok(range)
    }

    fn unmap(mapper: &RequestMapper<QemuHost>, range: IovaRange) -> Result<()> {
        let mut gather = Gather::new();
        assert_eq!(mapper.unmap(&StdPlatform::new(), range, &mut gather).bytes, range.len());
        Ok(mapper.sync(&gather)?)
    }

    pub fn the_interrupt_window_is_a_region_that_domains_keep_free() {
        let (_machine, kind, _) = rig(VirtioIommu::UNITS[0]).unwrap();
        let regions = kind.0.regions(FIRST).unwrap();
        let window = IovaRange::from_bounds(Iova::new(0xfee0_0000), Iova::new(0xfeef_ffff)).unwrap();
        assert_eq!((regions.len(), regions[0].range, regions[0].is_msi), (1, window, true));
        let careless = kind.0.mapper(DomainId(9), Vec::new()).unwrap();
        let refused = careless.attach(FIRST).unwrap_err();
        assert_eq!(refused, UnitError::Reserved { device: FIRST.0, range: window });
        let absent = kind.0.regions(DeviceId(0x99)).unwrap_err();
        assert!(matches!(absent, UnitError::NoSuchDevice { device: 0x99, .. }), "{absent}");
    }

    pub fn granules_of_64_kib_are_mapped_by_their_size() {
        let (machine, kind, [edu, _]) =
            rig("virtio-iommu-pci,addr=03.0,disable-legacy=on,granule=64k").unwrap();
        let mapper = mapper(&kind, 1).unwrap();
        assert_eq!(mapper.geometry().page_sizes.smallest(), PageSize::from_shift(16));
        mapper.attach(FIRST).unwrap();
        let mut memory: Vec<_> = (0..3).map(|_| machine.ram().alloc(16).unwrap()).collect();
        memory.reverse();
        let range = map(&mapper, (0x10_0000, 0x1_0000), &memory).unwrap();
        machine.ram().write(memory[0], b"the text");
        edu.fetch(range.start(), 0, 8);
        for (index, at) in memory.iter().enumerate() {
            edu.store(0, Iova::new(0x10_fff8 + index as u64 * 0x1_0000), 8);
            assert_eq!(&machine.ram().read(PhysAddr::new(at.get() + 0xfff8)), b"the text");
        }
        unmap(&mapper, range).unwrap();
        machine.ram().write(memory[0], b"unmapped");
        edu.store(0, range.start(), 8);
        assert_eq!(&machine.ram().read(memory[0]), b"unmapped");
    }

    pub fn what_is_mapped_before_a_device_comes_is_there_when_it_comes_again() {
        let (machine, kind, [edu, _]) = rig(VirtioIommu::UNITS[0]).unwrap();
        let mapper = mapper(&kind, 1).unwrap();
        let memory: Vec<_> = (0..200).map(|_| machine.ram().alloc(1).unwrap()).step_by(2).collect();
        let range = map(&mapper, (0x10_0000, 4096), &memory).unwrap();
        for round in 1..3_u8 {
            mapper.attach(FIRST).unwrap();
            machine.ram().write(memory[0], &[round; 8]);
            edu.fetch(range.start(), 0, 8);
            edu.store(0, Iova::new(range.last().get() - 7), 8);
            let last = PhysAddr::new(memory[99].get() + 4088);
            assert_eq!(machine.ram().read::<8>(last), [round; 8]);
            kind.detach(FIRST).unwrap();
            machine.ram().write(last, b"detached");
            edu.store(0, Iova::new(range.last().get() - 7), 8);
            assert_eq!(&machine.ram().read(last), b"detached");
        }
        unmap(&mapper, range).unwrap();
    }

    /// More requests than a ring index counts to, of domains with a device and of others that are only recorded.
    pub fn many_cpus_share_the_queue_until_its_index_wraps() {
        let (machine, kind, edus) = rig(VirtioIommu::UNITS[0]).unwrap();
        let mappers = [1, 2].map(|number| mapper(&kind, number).unwrap());
        for (mapper, device) in mappers.iter().zip(EDU.map(|slot| DeviceId(slot << 3))) {
            mapper.attach(device).unwrap();
        }
        // Every other frame: each is a request.
        let frames: Vec<_> = (0..128).map(|_| machine.ram().alloc(1).unwrap()).step_by(2).collect();
        std::thread::scope(|scope| {
            let work = |number: u64| {
                let (mapper, frames) = (&mappers[number as usize % 2], &frames);
                move || {
                    for round in 0..480 {
                        let at = (number + 1) << 32 | round << 20;
                        let range = map(mapper, (at, 4096), frames)?;
                        if round % 8 == 0 {
                            // Piece by piece, from the end.
                            let mut gather = Gather::new();
                            for page in (0..frames.len() as u64).rev() {
                                let page = IovaRange::new(Iova::new(at + page * 4096), 4096)?;
                                let _ = mapper.unmap(&StdPlatform::new(), page, &mut gather);
                            }
                            mapper.sync(&gather)?;
                        } else {
                            unmap(mapper, range)?;
                        }
                    }
                    Ok(())
                }
            };
            let threads: Vec<std::thread::ScopedJoinHandle<'_, Result<()>>> =
                (0..4).map(|number| scope.spawn(work(number))).collect();
            threads.into_iter().for_each(|thread| thread.join().expect("no panic").unwrap());
        });
        for (number, (mapper, edu)) in (1..).zip(mappers.iter().zip(&edus)) {
            let range = map(mapper, (0x10_0000, 4096), &frames[number..number + 1]).unwrap();
            machine.ram().write(frames[number], &[number as u8; 8]);
            edu.fetch(range.start(), 0, 8);
            edu.store(0, Iova::new(0x10_0008), 8);
            assert_eq!(machine.ram().read::<16>(frames[number]), [number as u8; 16]);
            // Unmapped addresses are refused.
            edu.store(0, Iova::new(1 << 32), 8);
        }
        let faults = kind.faults();
        assert!(!faults.is_empty());
        assert!(faults.iter().all(|fault| fault.address.is_some_and(|at| at.get() >= 1 << 32)));
    }
}
