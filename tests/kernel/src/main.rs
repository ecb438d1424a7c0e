//! A kernel for x86-64 whose devices reach memory through Portcullis alone.
//!
//! QEMU loads it (`-kernel`). It finds the IOMMU in firmware's tables, Intel's or AMD's, brings up
//! two CPUs, maps on both and in interrupts, reads and writes an NVMe disk and asks a question over
//! a virtio network card. Then the disk is told to write where a buffer was, and is refused. It is
//! a test (`cargo xtask conformance`), and what another kernel can start from: `docs/porting.md`
//! goes through it.
#![no_std]
#![no_main]

extern crate alloc;

mod boot;
mod console;
mod firmware;
mod host;
mod interrupts;
#[path = "../../no-std/src/mem.rs"]
mod mem;
mod memory;
mod net;
#[path = "../../../crates/portcullis-cli/examples/nvme/driver/mod.rs"]
#[allow(dead_code, reason = "another program uses the rest")]
mod nvme;

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use portcullis::addr::{DeviceId, Direction, DomainId};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{Device, DmaMask, Machine, Queue, QueueConfig};
use portcullis::pgtable::Format;
use portcullis_hw::acpi::{Dmar, Ivrs, Reserved};
use portcullis_hw::{Iommu, UnitDomain, UnitTables, amdvi, vtd};
use spin::Mutex;

use boot::now_ns;
use console::println;
use firmware::Pci;
use host::{Kernel, Mmio, UnitHost};
use memory::{Buffer, Memory};
use nvme::{Disk, Nvme, Transfer};

/// What fails is told in words.
type Result<T> = core::result::Result<T, String>;

fn said(error: impl core::fmt::Display) -> String {
    format!("{error}")
}

/// Mappings that each CPU has made and ended.
static DONE: [AtomicU64; host::CPUS] = [const { AtomicU64::new(0) }; host::CPUS];
const MAPPINGS: u64 = 2000;
/// Whether the first CPU's task is in a call of the library, how many interrupts have mapped
/// meanwhile, and whether one failed to.
static IN_CALL: AtomicBool = AtomicBool::new(false);
static MET: AtomicU64 = AtomicU64::new(0);
static FAILED: AtomicBool = AtomicBool::new(false);
const MEETINGS: u64 = 1000;

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

/// Brings up the unit that firmware's tables name, and everything behind it.
fn run(rsdp: u64) -> Result<()> {
    println!("kernel: {} frames are free", memory::free_frames());
    // SAFETY: a unit's registers, as firmware names them, and this is its only driver.
    let host = |registers: u64| UnitHost(unsafe { Mmio::new(registers) });
    if let Some(table) = firmware::table(rsdp, *b"DMAR") {
        let dmar = Dmar::parse(table).map_err(said)?;
        dmar.flaws.iter().for_each(|flaw| println!("kernel: DMAR: {flaw}"));
        // This kernel's devices are on bus 0, behind no bridge.
        let unit = only(devices()?.map(|pci| dmar.unit_of(0, pci.0.into(), |_| None)))?;
        println!("kernel: DMAR names a VT-d unit at {:#x}", unit.registers);
        let reserved = |device| dmar.reserved_for(0, device, |_| None).collect();
        return drive(vtd::Unit::start(host(unit.registers)).map_err(said)?, reserved);
    }
    if let Some(table) = firmware::table(rsdp, *b"IVRS") {
        let ivrs = Ivrs::parse(table).map_err(said)?;
        ivrs.flaws.iter().for_each(|flaw| println!("kernel: IVRS: {flaw}"));
        let unit = only(devices()?.map(|pci| ivrs.unit_of(0, pci.0.into())))?;
        println!("kernel: IVRS names an AMD-Vi unit at {:#x}", unit.registers);
        let last_device = unit.devices.iter().map(|(_, last)| *last).max().unwrap_or(u16::MAX);
        // On bus 0.
        let capability = Some(Pci(unit.device as u8).read(unit.capability as u8));
        let config = amdvi::Config { last_device, capability };
        let reserved = |device| ivrs.reserved_for(0, device).collect();
        return drive(amdvi::Unit::start(host(unit.registers), config).map_err(said)?, reserved);
    }
    Err("firmware's tables name no IOMMU that this kernel knows".into())
}

/// The disk and the network card.
fn devices() -> Result<[Pci; 2]> {
    let disk = Pci::find(8, 0xffff_ff00, 0x0108_0200).ok_or("there is no NVMe disk")?;
    let card = Pci::find(0, 0xffff_ffff, 0x1041_1af4).ok_or("there is no virtio network card")?;
    Ok([disk, card])
}

/// The unit that both devices are behind.
fn only<T>(units: [Option<&T>; 2]) -> Result<&T> {
    match units {
        [Some(unit), Some(other)] if core::ptr::eq(unit, other) => Ok(unit),
        [Some(_), Some(_)] => Err("the disk and the network card are behind two units".into()),
        _ => Err("firmware's table names no unit for the disk, or for the network card".into()),
    }
}

/// Everything that is the same for each IOMMU. `reserved` has what firmware reserves for a device.
fn drive<X: Format, U: Iommu<X, Frames = Memory>>(
    unit: U,
    reserved: impl Fn(u16) -> Vec<Reserved>,
) -> Result<()> {
    let unit = Arc::new(unit);
    let [disk, card] = devices()?;
    // Before the unit is on, so that what firmware reserves is always reached.
    let regions = [disk, card].map(|pci| reserved(pci.0.into()));
    let (disk_domain, disk_device) = domain(&unit, DomainId(1), disk, &regions[0])?;
    let (card_domain, card_device) = domain(&unit, DomainId(2), card, &regions[1])?;
    unit.enable().map_err(said)?;
    println!("kernel: the IOMMU is on; {} reserved regions are mapped one to one", regions.concat().len());

    let disk_device = disk_device.keeping_offsets(4095);
    both_cpus_map(&disk_device)?;
    let config = QueueConfig::ring(252, 4096).batch(16);
    let mut nvme = use_disk(disk, &disk_device, config)?;
    let router = net::ask_router(card, card_device, QueueConfig::direct());
    let router = router.ok_or("the network card brings no answer")?;
    println!("kernel: the router is {router:02x?}, says the network card");
    hostile(&mut nvme, &disk_device, config, || unit.next_fault())?;
    host::run_timers();
    drop(nvme);
    // Their tables go when the unit has confirmed that nothing is led to them.
    disk_domain.detach(DeviceId(disk.0.into())).map_err(said)?;
    card_domain.detach(DeviceId(card.0.into())).map_err(said)
}

type Own<X, U> = (UnitTables<X, U>, Kernel, Memory);
type WithDevice<X> = (UnitDomain<X>, Device<X>);

/// A domain of a device's own, with what firmware reserves for it; and the device, which is attached to it.
fn domain<X: Format, U: Iommu<X, Frames = Memory>>(
    unit: &Arc<U>,
    number: DomainId,
    pci: Pci,
    regions: &[Reserved],
) -> Result<WithDevice<Own<X, U>>> {
    let builder = unit.domain(number).map_err(said)?.bounce(Memory, PoolConfig::default());
    // SAFETY: the device's memory, as firmware says; nothing else here uses it.
    let builder = unsafe { builder.regions(regions.iter().copied()) };
    let domain = builder.build(Kernel).map_err(said)?;
    let device = domain.attach(DeviceId(pci.0.into()), DmaMask::BITS_64).map_err(said)?;
    Ok((domain, device))
}

/// Maps a buffer and unmaps it, strictly.
fn map_once<X: Machine>(queue: &mut Queue<X, Buffer>) -> Option<()> {
    let mapping = queue.map(Buffer::new(4096, 0)?, Direction::FromDevice).ok()?;
    queue.unmap(mapping).ok()?.for_each(drop);
    Some(())
}

/// Both CPUs map and unmap in one domain, each by a queue of its own, and so does the first one's
/// timer interrupt by a third, which often comes while its task maps or unmaps.
fn both_cpus_map<X: Machine>(device: &Device<X>) -> Result<()>
where
    Device<X>: Clone + Send + Sync,
    Queue<X, Buffer>: Send,
{
    let own = device.clone();
    boot::start_second(alloc::boxed::Box::new(move || {
        let Ok(mut queue) = own.queue::<Buffer>(QueueConfig::direct()) else { return };
        while DONE[1].load(Ordering::Relaxed) < MAPPINGS && map_once(&mut queue).is_some() {
            DONE[1].fetch_add(1, Ordering::Relaxed);
        }
    }));
    let queue = Mutex::new(device.queue::<Buffer>(QueueConfig::direct()).map_err(said)?);
    let handler = move || match map_once(&mut queue.lock()) {
        Some(()) if IN_CALL.load(Ordering::Relaxed) => drop(MET.fetch_add(1, Ordering::Relaxed)),
        Some(()) => {}
        None => FAILED.store(true, Ordering::Relaxed),
    };
    interrupts::start(50_000, alloc::boxed::Box::new(handler));
    let mut queue = device.queue::<Buffer>(QueueConfig::direct()).map_err(said)?;
    let began = now_ns();
    let counts = loop {
        IN_CALL.store(true, Ordering::Relaxed);
        map_once(&mut queue).ok_or("the first CPU could not map")?;
        IN_CALL.store(false, Ordering::Relaxed);
        DONE[0].fetch_add(1, Ordering::Relaxed);
        let counts = [&DONE[0], &DONE[1], &MET].map(|count| count.load(Ordering::Relaxed));
        if counts[0].min(counts[1]) >= MAPPINGS && counts[2] >= MEETINGS {
            break counts;
        }
        if FAILED.load(Ordering::Relaxed) || now_ns() - began > 60_000_000_000 {
            return Err(format!("not all mappings and meetings came about: {counts:?}"));
        }
    };
    interrupts::stop();
    println!("kernel: CPUs have mapped and unmapped {:?} buffers", &counts[..2]);
    println!("kernel: {} interrupts mapped and unmapped while their task did", counts[2]);
    Ok(())
}

/// The disk's controller, and what transfers its data.
type Driver<X> = (Nvme<X, Memory, Mmio>, Disk<X, Memory, Mmio, Buffer>);

/// Writes the disk, reads it back, and compares.
fn use_disk<X: Machine>(pci: Pci, device: &Device<X>, config: QueueConfig) -> Result<Driver<X>> {
    // SAFETY: the disk's registers, and this is its only driver.
    let registers = unsafe { Mmio::new(pci.registers()) };
    let mut nvme = Nvme::start(registers, device, &Memory, 1, now_ns).map_err(said)?;
    let mut disk = nvme.disk(config).map_err(said)?;
    let byte = |index: u64| 0x80 | index as u8;
    let transfer = |index: u64, writes, byte| {
        let buffer = Buffer::new(8192, byte).ok_or("no memory")?;
        Ok(Transfer { block: index * 16, writes, buffer })
    };
    let writes = (0..64).map(|index| transfer(index, true, byte(index))).collect::<Result<Vec<_>>>()?;
    drop(disk.run(writes).map_err(said)?);
    for index in 0..64 {
        let mut back = disk.run(alloc::vec![transfer(index, false, 0)?]).map_err(said)?;
        if !back.iter_mut().all(|buffer| buffer.is_all(byte(index))) || back.len() != 1 {
            return Err(format!("block {} does not read as it was written", index * 16));
        }
    }
    println!("kernel: the disk of {} blocks reads as it was written", nvme.blocks());
    Ok((nvme, disk))
}

/// The disk is told to write where a buffer was.
fn hostile<X: Machine>(
    (nvme, disk): &mut Driver<X>,
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
    let (address, block) = (mapping.iova(), nvme.block_bytes());
    disk.read_to(16, address, block).map_err(said)?;
    let mut back = Vec::new();
    queue.unmap(mapping).map_err(|failed| said(failed.error))?.for_each(|buffer| back.push(buffer));
    back.extend(queue.commit().map_err(said)?);
    let before = memory::peek(at);
    if before != 0x81 {
        return Err("the disk did not reach a buffer that was mapped".into());
    }
    disk.read_to(32, address, block).map_err(said)?;
    if memory::peek(at) != before {
        return Err("the disk reached a buffer that was unmapped".into());
    }
    match fault() {
        Some(fault) => println!("kernel: refused, as it should be: {fault}"),
        None => println!("kernel: refused, and the IOMMU has recorded nothing"),
    }
    Ok(())
}
