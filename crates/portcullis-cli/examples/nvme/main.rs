//! An NVMe disk behind an IOMMU, both of QEMU's: written, read back and verified, by the policy that is asked for. Then the
//! controller is told to write where a buffer was, as a broken one would.
//!
//! `cargo run --release --example nvme -- --iommu vtd --policy strict`
//!
//! `driver.rs` is what a driver's author writes; this file is what a kernel and a user do around it.
#![allow(
    unsafe_code,
    reason = "memory is opened by its number; it is QEMU's, and this process reaches it as atomics only"
)]

#[path = "../../../portcullis-hw/tests/conformance/amdvi.rs"]
mod amdvi;
mod driver;
#[path = "../../../portcullis-hw/tests/conformance/kind.rs"]
mod kind;
#[path = "../../../portcullis-hw/tests/machine/mod.rs"]
mod machine;
#[path = "../../../portcullis-hw/tests/conformance/riscv.rs"]
mod riscv;
#[path = "../../../portcullis-hw/tests/conformance/smmuv3.rs"]
mod smmuv3;
#[path = "../../../portcullis-hw/tests/conformance/virtio.rs"]
mod virtio;
#[path = "../../../portcullis-hw/tests/conformance/vtd.rs"]
mod vtd;

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use portcullis::addr::{DeviceId, DomainId, PhysSegment};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{DmaBuffer, DmaMask, QueueConfig};
use portcullis::domain::Policy;
use portcullis::platform::Frames;
use portcullis::std_platform::StdPlatform;

use driver::{Nvme, Transfer};
use kind::{Kind, Tables};
use machine::{QemuHost, Ram, Result};

/// Runs an NVMe driver behind one of QEMU's IOMMUs. Needs QEMU 10 or later.
#[derive(Debug, Parser)]
struct Options {
    /// The IOMMU.
    #[arg(long, value_enum, default_value_t = Unit::Vtd)]
    iommu: Unit,
    /// How long the disk may reach what it was given, and how.
    #[arg(long, value_enum, default_value_t = Way::Strict)]
    policy: Way,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Unit {
    /// Intel VT-d.
    Vtd,
    /// AMD-Vi.
    Amdvi,
    /// Arm SMMUv3, first stage.
    Smmuv3,
    /// The RISC-V IOMMU.
    Riscv,
    /// virtio-iommu.
    Virtio,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Way {
    /// Each unmap waits for its invalidation.
    Strict,
    /// Unmaps wait together.
    StrictBatch,
    /// The same out of a ring of addresses.
    StrictRing,
    /// Data is copied through buffers that stay mapped.
    Bounce,
    /// Copied, or mapped in a ring, whatever is cheaper.
    Adaptive,
    /// Invalidations are put off.
    Lazy,
}

impl Way {
    fn config(self) -> QueueConfig {
        match self {
            Self::Strict | Self::Lazy => QueueConfig::direct(),
            Self::StrictBatch => QueueConfig::batched(32),
            Self::StrictRing => QueueConfig::ring(4032, 4096).batch(64),
            Self::Bounce => QueueConfig::bounce(),
            Self::Adaptive => QueueConfig::auto(4032, 4096).batch(64),
        }
    }

    fn policy(self) -> Policy {
        if self == Self::Lazy { Policy::LAZY } else { Policy::Strict }
    }
}

/// Where the disk is on bus 0.
const SLOT: u32 = 7;
/// Bytes of the disk.
const DISK: u64 = 16 << 20;

/// Memory of the emulated machine. The owner of this value alone uses it.
struct Buffer {
    ram: Ram,
    segment: [PhysSegment; 1],
}

// SAFETY: the frames are this value's alone until it is dropped, and a reference to it reaches no byte of them: `bytes` is for its owner.
unsafe impl DmaBuffer for Buffer {
    fn segments(&self) -> &[PhysSegment] {
        &self.segment
    }
}

impl Buffer {
    fn new(ram: &Ram, len: u64, byte: u8) -> Result<Self> {
        let phys = ram.alloc(len.div_ceil(4096) as usize).ok_or("no memory")?;
        ram.write(phys, &vec![byte; len as usize]);
        Ok(Self { ram: ram.clone(), segment: [PhysSegment { phys, len }] })
    }

    fn bytes(&mut self) -> Vec<u8> {
        self.ram.read_all(self.segment[0].phys, self.segment[0].len)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: they came from one `alloc`, and no device reaches them: the queue gives a buffer back only then.
        unsafe { self.ram.free(self.segment[0].phys, self.segment[0].len.div_ceil(4096) as usize) };
    }
}

/// A clock.
fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

fn run<K: Kind>(way: Way) -> Result<()> {
    let unit = K::UNITS[0];
    let image = tempfile::NamedTempFile::new()?;
    image.as_file().set_len(DISK)?;
    let drive = format!("-drive file={},if=none,id=d,format=raw,cache=writethrough", image.path().display());
    let disk = format!("nvme,addr={SLOT:02x}.0,serial=portcullis,drive=d");
    let machine = K::machine(unit, &[&drive, &disk])?;
    println!(
        "IOMMU: {unit}; policy: {}",
        way.to_possible_value().map_or(String::new(), |way| way.get_name().into())
    );

    // The kernel's part: the unit, a domain, the device in it.
    let kind = K::start(&machine)?;
    kind.enable()?;
    let id = DeviceId(SLOT << 3);
    let builder = kind.domain(DomainId(1))?.policy(way.policy());
    let domain = builder.bounce(machine.ram().clone(), PoolConfig::default()).build(StdPlatform::new())?;
    // The controller counts on offsets in pages.
    let device = domain.attach(id, DmaMask::BITS_64)?.keeping_offsets(4095);

    // The driver's part.
    let registers = machine.window(machine.place(SLOT, 0x10));
    let mut nvme: Nvme<_, _, _, Buffer> =
        Nvme::start(registers, &device, machine.ram(), way.config(), now_ns)?;
    println!("disk: {} blocks of {} bytes", nvme.blocks(), nvme.block_bytes());

    let sizes = [512, 4096, 8192, 12 << 10, 64 << 10, 128 << 10, 1536];
    let place = |index: u64| index * 256;
    let transfer = |index: u64, writes, byte| {
        let buffer = Buffer::new(machine.ram(), sizes[index as usize % sizes.len()], byte)?;
        Ok(Transfer { block: place(index), writes, buffer })
    };
    let count = nvme.blocks() / 256;
    let byte = |index: u64| index as u8 | 0x80;
    let written =
        nvme.run((0..count).map(|index| transfer(index, true, byte(index))).collect::<Result<_>>()?)?;
    let bytes: u64 = written.iter().map(|buffer| buffer.segment[0].len).sum();
    println!("written: {bytes} bytes by {count} commands");
    drop(written);
    let on_disk = std::fs::read(image.path())?;
    for index in 0..count {
        let at = (place(index) * nvme.block_bytes()) as usize;
        let len = sizes[index as usize % sizes.len()] as usize;
        if on_disk[at..at + len].iter().any(|found| *found != byte(index)) {
            return Err(format!("block {} of the image does not hold what was written", place(index)).into());
        }
    }
    println!("the image holds them");
    for index in 0..count {
        let mut back = nvme.run(vec![transfer(index, false, 0)?])?;
        let [buffer] = back.as_mut_slice() else { return Err("a buffer did not come back".into()) };
        if buffer.bytes().iter().any(|found| *found != byte(index)) {
            return Err(format!("block {} does not read as it was written", place(index)).into());
        }
    }
    println!("read back: all {count} as they were written");

    // A buffer that was read to is the driver's again: may the disk still write there?
    let taken = kind.faults();
    if let Some(fault) = taken.first() {
        return Err(format!("a transfer was refused: {fault}").into());
    }
    let page = Buffer::new(machine.ram(), 4096, 0x11)?;
    let (mut queue, at) = (device.queue::<Buffer>(way.config())?, page.segment[0].phys);
    let mapping = queue.map(page, portcullis::addr::Direction::FromDevice)?;
    let address = queue.segments(&mapping).next().map(|segment| segment.iova.get()).ok_or("no segment")?;
    nvme.read_to(place(1), address)?;
    let mut back = Vec::new();
    queue.unmap(mapping)?.for_each(|buffer| back.push(buffer));
    back.extend(queue.commit()?);
    let before = machine.ram().read::<1>(at)[0];
    nvme.read_to(place(2), address)?;
    let after = machine.ram().read::<1>(at)[0];
    if before != byte(1) {
        return Err("the disk did not reach a buffer that was mapped".into());
    }
    let faults = kind.faults();
    match (after == before, way == Way::Lazy) {
        (true, _) => {
            println!("after the unmap the disk wrote to {address:#x} again: the buffer is as it was")
        }
        (false, true) => {
            println!("after the unmap the disk wrote to the buffer again: lazy protection's window was open")
        }
        (false, false) => return Err("the disk reached a buffer that was unmapped".into()),
    }
    match faults.first() {
        Some(fault) => println!("the IOMMU says: {fault}"),
        None => {
            let why = match (way, K::RECORDS) {
                (Way::Bounce | Way::Adaptive, _) => "it reached the buffer between, which stays mapped",
                (Way::Lazy, _) => "the window was open",
                (_, Err(why)) => why,
                (_, Ok(())) => return Err("the disk was refused, and the IOMMU recorded no fault".into()),
            };
            println!("the IOMMU recorded no fault: {why}");
        }
    }
    drop(back);
    nvme.shut_down()?;
    domain.detach(id)?;
    Ok(())
}

fn main() -> ExitCode {
    let options = Options::parse();
    let done = match options.iommu {
        Unit::Vtd => run::<Tables<portcullis_hw::vtd::Unit<QemuHost>>>(options.policy),
        Unit::Amdvi => run::<Tables<portcullis_hw::amdvi::Unit<QemuHost>>>(options.policy),
        Unit::Smmuv3 => run::<Tables<smmuv3::Smmu<12, 0>>>(options.policy),
        Unit::Riscv => run::<Tables<portcullis_hw::riscv::Unit<QemuHost>>>(options.policy),
        Unit::Virtio => run::<virtio::VirtioIommu>(options.policy),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvme: {error}");
            ExitCode::FAILURE
        }
    }
}
