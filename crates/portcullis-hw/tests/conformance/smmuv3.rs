//! QEMU's SMMUv3: it caches leaves, stream table entries and context descriptors, neither non-leaf entries nor non-present ones. It records
//! an event for every four refused bytes.
//!
//! It has more features than most units, so these tests hide some of them from the driver. `virt` before 10.0 has only the first stage.
#![allow(dead_code, unused_imports, reason = "a program that runs a driver behind it uses a part")]

use std::sync::Arc;

use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, Iova, IovaRange, PhysAddr, PhysSegment};
use portcullis::dma::{DmaMask, DomainBuilder, Ended, Queue, QueueConfig};
use portcullis::domain::Policy;
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{Arm, PageTable};
use portcullis::platform::Frames;
use portcullis::std_platform::StdPlatform;
use portcullis_hw::acpi::{Iort, Reserved};
use portcullis_hw::smmuv3::{Stage, Unit};
use portcullis_hw::{
    Access, Attachment, Fault, Host, Iommu, Reason, Registers, UnitDomainBuilder, UnitTables,
};

use super::kind::{Careless, Kind, Tables, kind_with_tables, table};
use super::machine::{EDU, Edu, Machine, QemuHost, Ram, Result, Window};

pub const REGISTERS: u64 = 0x0905_0000;

/// Hidden features. The first stage, so that domains get second-stage tables.
pub const FIRST_STAGE: u32 = 1;
/// Physical addresses beyond 42 bits. With 44, the second-stage root with 64 KiB pages is four concatenated tables, and QEMU 10.0 finds
/// only the first (`hw/arm/smmu-common.c`, `smmu_ptw_64_s2`).
pub const WIDTH: u32 = 2;
/// Two-level stream tables, stream IDs beyond 8 bits, and range invalidations.
pub const COMFORT: u32 = 4;
/// And a feature that it claims and lacks: the second stage of `virt` before 10.0.
const BOAST: u32 = 8;

/// A host that hides features.
#[derive(Debug)]
pub struct Less<const HIDDEN: u32> {
    host: QemuHost,
    registers: Hiding<HIDDEN>,
}

#[derive(Debug, Clone)]
pub struct Hiding<const HIDDEN: u32>(Window);

// SAFETY: the window's clauses; four identification registers read less.
unsafe impl<const HIDDEN: u32> Registers for Hiding<HIDDEN> {
    fn read32(&self, offset: usize) -> u32 {
        let value = self.0.read32(offset);
        match offset {
            0x00 if HIDDEN & FIRST_STAGE != 0 => value & !(1 << 1),
            0x00 if HIDDEN & BOAST != 0 => value | 1,
            0x00 if HIDDEN & COMFORT != 0 => value & !(3 << 27),
            0x04 if HIDDEN & COMFORT != 0 => value & !0x3f | 8,
            0x0c if HIDDEN & COMFORT != 0 => value & !(1 << 10),
            0x14 if HIDDEN & WIDTH != 0 => value & !7 | 3,
            _ => value,
        }
    }

    fn write32(&self, offset: usize, value: u32) {
        self.0.write32(offset, value);
    }

    fn read64(&self, offset: usize) -> u64 {
        self.0.read64(offset)
    }

    fn write64(&self, offset: usize, value: u64) {
        self.0.write64(offset, value);
    }
}

impl<const HIDDEN: u32> Host for Less<HIDDEN> {
    type Registers = Hiding<HIDDEN>;
    type Frames = Ram;

    fn registers(&self) -> &Hiding<HIDDEN> {
        &self.registers
    }

    fn frames(&self) -> &Ram {
        self.host.frames()
    }

    fn now_ns(&self) -> u64 {
        self.host.now_ns()
    }

    fn relax(&self) {
        self.host.relax();
    }

    fn patience_ns(&self) -> u64 {
        self.host.patience_ns()
    }
}

/// An SMMUv3 with pages of 2^`GRANULE` bytes and hidden features.
pub type Smmu<const GRANULE: u32, const HIDDEN: u32> = Unit<Less<HIDDEN>, GRANULE>;

const GAPS: [(&str, &str); 2] = [
    (
        "a root of the second stage that is several tables side by side",
        "QEMU 10.0 finds none of them but the first",
    ),
    ("an invalidation that leaves entries of tables above the leaves", "QEMU does not cache them"),
];

/// Moves the tail of the command queue over zeros, which are no command.
fn confuse(machine: &Machine) {
    const BASE: usize = 0x90;
    const TAIL: usize = 0x98;
    let registers = machine.window(REGISTERS);
    let (base, tail) = (registers.read64(BASE), registers.read32(TAIL));
    let places = 1 << (base & 0x1f);
    let command = (base & 0x000f_ffff_ffff_ffe0) + u64::from(tail & (places - 1)) * 16;
    machine.ram().write(PhysAddr::new(command), &[0; 16]);
    registers.write32(TAIL, (tail + 1) & (2 * places - 1));
}

/// Parses a reserved memory node behind a unit's.
fn reserved_node(device: DeviceId, range: IovaRange) -> Result<Reserved> {
    // Offset of the first node.
    const FIRST: u32 = 48;
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    let wide = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    // Type, length, revision; identifier; ID mappings, and their offset.
    let unit = [&[4, 68, 0, 0][..], &words(&[0, 0, 0]), &wide(&[REGISTERS]), &[0; 44]].concat();
    let memory = [
        &[6, 68, 0, 0][..],
        &words(&[1, 1, 48, 0, 1, 28]),
        &wide(&[range.start().get(), range.len()]),
        &words(&[0]),
        // One ID: count minus one, stream ID, the unit's node.
        &words(&[0, 0, device.0, FIRST, 1]),
    ]
    .concat();
    let iort = Iort::parse(&table(*b"IORT", &[&words(&[2, FIRST, 0]), &unit, &memory]))?;
    let unit = iort.units.iter().find(|unit| unit.registers == REGISTERS).ok_or("no unit")?;
    Ok(iort.reserved_for(unit, device.0).next().ok_or("no region of this device")?)
}

macro_rules! smmu {
    ($granule:literal, $hidden:expr, $units:expr) => {
        kind_with_tables!(Smmu<$granule, { $hidden }>, Arm<$granule>, {
            const UNITS: &[&str] = &$units;
            const GAPS: &[(&str, &str)] = &GAPS;
            /// C_BAD_STE and C_BAD_STREAMID have no access.
            const UNATTACHED_WRITE: Option<Access> = None;
            const GRANULE: u64 = 1 << $granule;
            /// Pages that are writable in the first stage are readable.
            const WRITE_ONLY: bool = $hidden & FIRST_STAGE != 0;

            fn machine(unit: &str, devices: &[&str]) -> Result<Machine> {
                Machine::arm(unit, devices)
            }

            fn machine_without() -> Option<Result<Machine>> {
                Some(Machine::arm("", &[]))
            }

            fn start(machine: &Machine) -> Result<Self> {
                let host = machine.host(REGISTERS);
                let registers = Hiding(machine.window(REGISTERS));
                Ok(Self::new(Unit::start(Less { host, registers })?))
            }

            fn firmware(device: DeviceId, range: IovaRange) -> Result<Reserved> {
                reserved_node(device, range)
            }

            fn confuse(machine: &Machine) -> bool {
                confuse(machine);
                true
            }
        });
    };
}

smmu!(12, 0, [",iommu=smmuv3", ",iommu=smmuv3,type=virt-9.1"]);
smmu!(14, 0, [",iommu=smmuv3"]);
smmu!(16, 0, [",iommu=smmuv3"]);
smmu!(12, FIRST_STAGE, [",iommu=smmuv3"]);
smmu!(14, FIRST_STAGE, [",iommu=smmuv3"]);
smmu!(16, FIRST_STAGE | WIDTH, [",iommu=smmuv3"]);
smmu!(12, COMFORT, [",iommu=smmuv3"]);

const EDUS: [&str; 2] =
    ["edu,addr=05.0,dma_mask=0xffffffffffffffff", "edu,addr=06.0,dma_mask=0xffffffffffffffff"];

fn id(device: usize) -> DeviceId {
    DeviceId(EDU[device] << 3)
}

fn unit<const HIDDEN: u32>(machine: &Machine) -> Result<Smmu<12, HIDDEN>> {
    let host = machine.host(REGISTERS);
    let unit = Unit::start(Less { host, registers: Hiding(machine.window(REGISTERS)) })?;
    unit.enable()?;
    Ok(unit)
}

fn copy(edu: &Edu, from: Iova, to: Iova) {
    edu.fetch(from, 0, 8);
    edu.store(0, to, 8);
}

/// Two domains of one number, with tables of different stages.
pub fn both_stages_at_once() {
    let case = || -> Result<()> {
        let machine = Machine::arm(",iommu=smmuv3", &EDUS)?;
        let (ram, unit) = (machine.ram(), Arc::new(unit::<0>(&machine)?));
        let mut live = Vec::new();
        for (device, stage) in [Stage::One, Stage::Two].into_iter().enumerate() {
            let table = PageTable::new(ram.clone(), unit.capabilities().layout::<12>(stage)?)?;
            let mapper = TableMapper::new(table, Arc::clone(&unit), DomainId(7), Vec::new());
            let domain = DomainBuilder::new(mapper).policy(Policy::Strict).build(StdPlatform::new())?;
            let to = Attachment::table(DomainId(7), domain.space().mapper().table());
            // SAFETY: the table exists until the machine has ended.
            unsafe { unit.attach(id(device), to) }?;
            let mut queue: Queue<_> =
                domain.attach(id(device), DmaMask::bits(32))?.queue(QueueConfig::direct())?;
            let phys = ram.alloc(1).ok_or("memory")?;
            let mut view = [DmaSegment::default()];
            let page = [PhysSegment { phys, len: 4096 }];
            // SAFETY: this process accesses QEMU's memory only by atomics.
            let (mapping, _) = unsafe { queue.map_raw(&page, Direction::Bidirectional, &mut view) }?;
            live.push((machine.edu(EDU[device]), domain, queue, mapping, phys, view[0].iova));
        }
        assert_eq!(live[0].5, live[1].5, "the same address in both, or this shows little");
        for (index, (edu, _, _, _, phys, iova)) in live.iter().enumerate() {
            ram.write(*phys, &[index as u8 + 1; 8]);
            copy(edu, *iova, Iova::new(iova.get() + 64));
            assert_eq!(ram.read(PhysAddr::new(phys.get() + 64)), [index as u8 + 1; 8]);
        }
        let mut gone = Vec::new();
        for (edu, domain, mut queue, mapping, phys, iova) in live {
            assert_eq!(queue.unmap_raw(mapping)?, Ended::Done(()));
            // Its buffer has what it read.
            edu.store(0, Iova::new(iova.get() + 128), 8);
            assert_eq!(ram.read(PhysAddr::new(phys.get() + 128)), [0; 8], "unmapped");
            gone.push((domain, queue));
        }
        let faults: Vec<_> = std::iter::from_fn(|| unit.next_fault()).collect();
        assert_eq!(faults.iter().map(|fault| fault.device).collect::<Vec<_>>(), [id(0), id(0), id(1), id(1)]);
        assert!(faults.iter().all(|fault| fault.reason == Reason::NotMapped), "{faults:?}");
        Ok(())
    };
    case().unwrap();
}

/// A unit that refuses a command stops. It resumes behind it, and outstanding submissions fail.
pub fn a_refused_command_is_reported_and_the_queue_goes_on() {
    let case = || -> Result<()> {
        let machine = Machine::arm(",iommu=smmuv3,type=virt-9.1", &EDUS)?;
        let (ram, edu) = (machine.ram(), machine.edu(EDU[1]));
        let unit = unit::<BOAST>(&machine)?;
        let table = PageTable::new(ram.clone(), unit.capabilities().layout::<12>(Stage::Two)?)?;
        // SAFETY: the table exists until the machine has ended.
        unsafe { unit.attach(id(0), Attachment::table(DomainId(7), &table)) }?;
        for _ in 0..300 {
            let refused = unit.invalidate(DomainId(7), Invalidation::Domain);
            assert_eq!(refused, Err(InvalidationError::Rejected { code: 1 }));
        }
        assert!(unit.detach(id(0)).is_err());
        // SAFETY: 3: this process accesses QEMU's memory only by atomics.
        unsafe { unit.attach(id(1), Attachment::PassThrough) }?;
        let page = ram.alloc(1).ok_or("memory")?;
        ram.write(page, b"as it is");
        copy(&edu, Iova::new(page.get()), Iova::new(page.get() + 64));
        assert_eq!(&ram.read(PhysAddr::new(page.get() + 64)), b"as it is");
        Ok(())
    };
    case().unwrap();
}

/// More accesses are refused than there is room for events: the rest is lost, and later ones are recorded again.
pub fn records_go_on_after_some_were_lost() {
    let case = || -> Result<()> {
        let machine = Machine::arm(",iommu=smmuv3", &EDUS)?;
        let (unit, edus) = (unit::<0>(&machine)?, EDU.map(|slot| machine.edu(slot)));
        for _ in 0..3 {
            edus[0].store(0, Iova::new(0x1_0000), 4096);
            let faults: Vec<_> = std::iter::from_fn(|| unit.next_fault()).collect();
            assert_eq!(faults.len(), 128, "one for each 4 bytes, as long as there is room");
            assert!(faults.iter().all(|fault| fault.device == id(0)), "{faults:?}");
            edus[1].store(0, Iova::new(0x1_0000), 4);
            assert_eq!(unit.next_fault().map(|fault| fault.device), Some(id(1)));
            assert_eq!(unit.next_fault(), None);
        }
        Ok(())
    };
    case().unwrap();
}
