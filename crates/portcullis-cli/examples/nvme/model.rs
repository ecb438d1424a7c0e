//! A disk of QEMU's behind one of QEMU's IOMMUs, in a machine that has no operating system: what a kernel does around the driver, and
//! what a user sees. The data is verified; then the controller is told to write where a buffer was, as a broken one would.

use clap::ValueEnum;
use portcullis::addr::{DeviceId, DomainId, PhysSegment};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{DmaBuffer, DmaMask};
use portcullis::platform::Frames;
use portcullis::std_platform::StdPlatform;

use crate::driver::{Disk, Nvme, Transfer};
use crate::kind::Kind;
use crate::machine::{Ram, Result};
use crate::{Way, now_ns};

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
        // SAFETY: they came from one `alloc`, and no device uses them: the queue gives a buffer back when its command has ended, and under a
        // policy that is not lazy the controller does not even reach it any more.
        unsafe { self.ram.free(self.segment[0].phys, self.segment[0].len.div_ceil(4096) as usize) };
    }
}

/// Runs behind an IOMMU of a kind.
pub fn run<K: Kind>(way: Way) -> Result<()> {
    let unit = K::UNITS[0];
    let image = tempfile::NamedTempFile::new()?;
    image.as_file().set_len(DISK)?;
    let drive = format!("-drive file={},if=none,id=d,format=raw,cache=writethrough", image.path().display());
    let controller = format!("nvme,addr={SLOT:02x}.0,serial=portcullis,drive=d");
    let machine = K::machine(unit, &[&drive, &controller])?;
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
    let mut nvme = Nvme::start(registers, &device, machine.ram(), 1, now_ns)?;
    let mut disk: Disk<_, _, _, Buffer> = nvme.disk(way.config())?;
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
        disk.run((0..count).map(|index| transfer(index, true, byte(index))).collect::<Result<_>>()?)?;
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
        let mut back = disk.run(vec![transfer(index, false, 0)?])?;
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
    let address = queue.segments(&mapping).next().map(|segment| segment.iova).ok_or("no segment")?;
    disk.read_to(place(1), address, nvme.block_bytes())?;
    let mut back = Vec::new();
    queue.unmap(mapping)?.for_each(|buffer| back.push(buffer));
    back.extend(queue.commit()?);
    let before = machine.ram().read::<1>(at)[0];
    disk.read_to(place(2), address, nvme.block_bytes())?;
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
    nvme.shut_down(vec![disk.into_ring()])?;
    domain.detach(id)?;
    Ok(())
}
