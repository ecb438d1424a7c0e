//! A kernel for x86-64 whose devices reach memory through Portcullis alone.
//!
//! QEMU loads it (`-kernel`). It finds the IOMMU in firmware's tables, brings up two CPUs, reads and writes an NVMe disk and
//! asks a question over a virtio network card. Then the disk is told to write where a buffer was, and is refused. It is a test
//! (`cargo xtask conformance`), and what another kernel can start from: `docs/porting.md` goes through it.
#![no_std]
#![no_main]

extern crate alloc;

mod boot;
mod console;
mod firmware;
mod host;
#[path = "../../no-std/src/mem.rs"]
mod mem;
mod memory;
mod net;
#[path = "../../../crates/portcullis-cli/examples/nvme/driver.rs"]
#[allow(dead_code, reason = "another program uses the rest")]
mod nvme;

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{DeviceId, Direction, DomainId};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{Device, DmaDomain, DmaMask, Machine, QueueConfig};
use portcullis::domain::Domain;
use portcullis::invalidation::InvalidationQueue;
use portcullis::pgtable::{Format, PageTable};
use portcullis_hw::acpi::Dmar;
use portcullis_hw::{Attachment, Iommu, vtd};
use spin::Once;

use boot::now_ns;
use console::println;
use firmware::Pci;
use host::{Kernel, Mmio, UnitHost};
use memory::{Buffer, Memory};
use nvme::{Nvme, Transfer};

/// What fails is told in words.
type Result<T> = core::result::Result<T, String>;

fn said(error: impl core::fmt::Display) -> String {
    format!("{error}")
}

/// What the second CPU does, once it is there.
static WORK: Once<alloc::boxed::Box<dyn Fn() + Send + Sync>> = Once::new();
/// Mappings that each CPU has made and ended.
static DONE: [AtomicU64; host::CPUS] = [const { AtomicU64::new(0) }; host::CPUS];
const MAPPINGS: u64 = 2000;

#[unsafe(no_mangle)]
extern "C" fn kernel_main(info: usize) -> ! {
    boot::calibrate();
    let word = |at: usize| {
        // SAFETY: the loader's structure (`hvm_start_info`), one to one.
        unsafe { ((info + at) as *const u64).read_unaligned() }
    };
    memory::start(word(40), word(48) as u32);
    match run(word(32)) {
        Ok(()) => {
            println!("kernel: all is well");
            boot::exit(true)
        }
        Err(why) => {
            println!("kernel: {why}");
            boot::exit(false)
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn second_main() -> ! {
    loop {
        if let Some(work) = WORK.get() {
            work();
            break;
        }
        core::hint::spin_loop();
    }
    loop {
        core::hint::spin_loop();
    }
}

/// Brings up the unit that firmware's tables name, and everything behind it.
fn run(rsdp: u64) -> Result<()> {
    println!("kernel: {} frames are free", memory::free_frames());
    if let Some(table) = firmware::table(rsdp, *b"DMAR") {
        let dmar = Dmar::parse(table).map_err(said)?;
        let unit = dmar.units.first().ok_or("DMAR names no unit")?;
        println!(
            "kernel: DMAR names a VT-d unit at {:#x}, and {} reserved regions",
            unit.registers,
            dmar.reserved.len()
        );
        // SAFETY: the unit's registers, and this is its only driver.
        let host = UnitHost(unsafe { Mmio::new(unit.registers) });
        return drive(vtd::Unit::start(host).map_err(said)?);
    }
    Err("firmware's tables name no IOMMU that this kernel knows".into())
}

/// Everything that is the same for each IOMMU.
fn drive<X: Format + Copy, U: Iommu<X>>(unit: U) -> Result<()> {
    let unit = Arc::new(unit);
    unit.enable().map_err(said)?;
    println!("kernel: the IOMMU is on, and no device reaches anything");
    let disk = Pci::find(8, 0xffff_ff00, 0x0108_0200).ok_or("there is no NVMe disk")?;
    let card = Pci::find(0, 0xffff_ffff, 0x1041_1af4).ok_or("there is no virtio network card")?;

    let disk_domain = domain(&unit, DomainId(1), disk)?;
    let card_domain = domain(&unit, DomainId(2), card)?;
    let disk_device = attach(&disk_domain, disk)?.keeping_offsets(4095);
    both_cpus_map(&disk_device)?;
    let config = QueueConfig::ring(252, 4096).batch(16);
    let mut nvme = use_disk(disk, &disk_device, config)?;
    let router = net::ask_router(card, attach(&card_domain, card)?, QueueConfig::direct());
    let router = router.ok_or("the network card brings no answer")?;
    println!("kernel: the router is {router:02x?}, says the network card");
    hostile(&mut nvme, &disk_device, config, || unit.next_fault())?;
    host::run_timers();
    Ok(())
}

type Own<X, U> = (portcullis::mapper::TableMapper<Memory, Arc<U>, X>, Kernel, Memory);

/// A domain of a device's own, which the unit leads it to.
fn domain<X: Format + Copy, U: Iommu<X> + InvalidationQueue>(
    unit: &Arc<U>,
    number: DomainId,
    pci: Pci,
) -> Result<DmaDomain<Own<X, U>>> {
    let table = PageTable::new(Memory, unit.layout().map_err(said)?).map_err(said)?;
    let builder = Domain::builder(table, Arc::clone(unit), number).bounce(Memory, PoolConfig::default());
    let domain = builder.build(Kernel).map_err(said)?;
    let to = Attachment::table(number, domain.space().mapper().table());
    // SAFETY: the domain's own table; neither ends before the machine does.
    unsafe { unit.attach(DeviceId(pci.0.into()), to) }.map_err(said)?;
    Ok(domain)
}

fn attach<X: Machine>(domain: &DmaDomain<X>, pci: Pci) -> Result<Device<X>> {
    domain.attach(DeviceId(pci.0.into()), DmaMask::BITS_64).map_err(said)
}

/// Both CPUs map and unmap in one domain, each by a queue of its own, strictly.
fn both_cpus_map<X: Machine>(device: &Device<X>) -> Result<()>
where
    Device<X>: Clone + Send + Sync,
{
    let own = device.clone();
    let work = move || {
        let Ok(mut queue) = own.queue::<Buffer>(QueueConfig::direct()) else { return };
        for _ in 0..MAPPINGS {
            let Some(buffer) = Buffer::new(4096, 0) else { return };
            let Ok(mapping) = queue.map(buffer, Direction::FromDevice) else { return };
            let Ok(ended) = queue.unmap(mapping) else { return };
            ended.for_each(drop);
            DONE[boot::cpu()].fetch_add(1, Ordering::Relaxed);
        }
    };
    let second = work.clone();
    WORK.call_once(|| alloc::boxed::Box::new(second));
    boot::start_second();
    work();
    let began = now_ns();
    while DONE[1].load(Ordering::Relaxed) < MAPPINGS {
        if now_ns() - began > 60_000_000_000 {
            return Err("the second CPU did not come to its end".into());
        }
        core::hint::spin_loop();
    }
    let counts = DONE.each_ref().map(|done| done.load(Ordering::Relaxed));
    println!("kernel: CPUs have mapped and unmapped {counts:?} buffers");
    if counts == [MAPPINGS; 2] { Ok(()) } else { Err("a CPU stopped early".into()) }
}

type Disk<X> = Nvme<X, Memory, Mmio, Buffer>;

/// Writes the disk, reads it back, and compares.
fn use_disk<X: Machine>(pci: Pci, device: &Device<X>, config: QueueConfig) -> Result<Disk<X>> {
    // SAFETY: the disk's registers, and this is its only driver.
    let registers = unsafe { Mmio::new(pci.registers()) };
    let mut nvme = Disk::start(registers, device, &Memory, config, now_ns).map_err(said)?;
    let byte = |index: u64| 0x80 | index as u8;
    let transfer = |index: u64, writes, byte| {
        let buffer = Buffer::new(8192, byte).ok_or("no memory")?;
        Ok(Transfer { block: index * 16, writes, buffer })
    };
    let writes = (0..64).map(|index| transfer(index, true, byte(index))).collect::<Result<Vec<_>>>()?;
    drop(nvme.run(writes).map_err(said)?);
    for index in 0..64 {
        let back = nvme.run(alloc::vec![transfer(index, false, 0)?]).map_err(said)?;
        if !back.iter().all(|buffer| buffer.is_all(byte(index))) || back.len() != 1 {
            return Err(format!("block {} does not read as it was written", index * 16));
        }
    }
    println!("kernel: the disk of {} blocks reads as it was written", nvme.blocks());
    Ok(nvme)
}

/// The disk is told to write where a buffer was.
fn hostile<X: Machine>(
    nvme: &mut Disk<X>,
    device: &Device<X>,
    config: QueueConfig,
    mut fault: impl FnMut() -> Option<portcullis_hw::Fault>,
) -> Result<()> {
    if let Some(fault) = fault() {
        return Err(format!("a transfer was refused: {fault}"));
    }
    let buffer = Buffer::new(4096, 0x11).ok_or("no memory")?;
    let (at, mut queue) = (buffer.phys().get(), device.queue::<Buffer>(config).map_err(said)?);
    let mapping = queue.map(buffer, Direction::FromDevice).map_err(|refused| said(refused.error))?;
    let address = mapping.iova().get();
    nvme.read_to(16, address).map_err(said)?;
    let mut back = Vec::new();
    queue.unmap(mapping).map_err(|failed| said(failed.error))?.for_each(|buffer| back.push(buffer));
    back.extend(queue.commit().map_err(said)?);
    let before = memory::peek(at);
    if before != 0x81 {
        return Err("the disk did not reach a buffer that was mapped".into());
    }
    nvme.read_to(32, address).map_err(said)?;
    if memory::peek(at) != before {
        return Err("the disk reached a buffer that was unmapped".into());
    }
    match fault() {
        Some(fault) => println!("kernel: refused, as it should be: {fault}"),
        None => println!("kernel: refused, and the IOMMU has recorded nothing"),
    }
    Ok(())
}
