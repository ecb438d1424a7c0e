//! A published driver of a virtio disk, by [`VfioHal`].

use std::sync::Arc;

use portcullis::addr::DeviceId;
use portcullis::dma::{DmaMask, DomainBuilder, QueueConfig};
use portcullis::prelude::PoolConfig;
use portcullis::std_platform::StdPlatform;
use portcullis_linux::heap::Heap;
use portcullis_linux::virtio::{Config, Translated, VfioHal};
use virtio_drivers::device::blk::{SECTOR_SIZE, VirtIOBlk};
use virtio_drivers::transport::pci::PciTransport;
use virtio_drivers::transport::pci::bus::PciRoot;

use crate::{Result, Way, check};

/// The disk.
enum Disk {}

/// It is written and read by each strategy, and what it was given is not mapped any more.
pub fn disk(way: Way, name: &str) -> Result<()> {
    let pci = Arc::new(way.open(name)?);
    let mask = DmaMask::BITS_64;
    for (strategy, config) in [
        ("direct", QueueConfig::direct()),
        ("ring", QueueConfig::ring(64, 4096)),
        ("bounce", QueueConfig::bounce()),
    ] {
        // SAFETY: all memory is the process's, and the rest of its pages is nobody's secret.
        let mapper = unsafe { pci.space().mapper() };
        let domain = DomainBuilder::new(mapper).bounce(Heap, PoolConfig::default().reached_by(mask.last()));
        let device = domain.build(StdPlatform::new())?.attach(DeviceId(pci.id().0), mask)?;
        VfioHal::<Disk>::connect(&pci, &device, config)?;
        pci.set_bus_master(true)?;
        let held = transfers(&pci, strategy)?;
        pci.set_bus_master(false)?;
        // SAFETY: no driver is left.
        unsafe { VfioHal::<Disk>::disconnect() };
        drop(device);
        let left = pci.space().usage().mappings;
        check(
            &format!("virtio, {strategy}: nothing is left of {held} mappings"),
            held > 0 && left == 0,
            left,
        );
    }
    Ok(())
}

/// Writes and reads; how many mappings there were then.
fn transfers(pci: &Arc<portcullis_linux::vfio::Device>, strategy: &str) -> Result<u64> {
    let transport = PciTransport::new::<VfioHal<Disk>, _>(&mut PciRoot::new(Config::new(pci)), Config::PLACE);
    let transport = transport.map_err(|error| error.to_string())?;
    let mut disk =
        VirtIOBlk::<VfioHal<Disk>, _>::new(Translated::new(transport)?).map_err(|error| error.to_string())?;
    let mut wrong = 0;
    // One sector, more than a page, and more than a slot of the pool has; none begins with a page.
    for sectors in [1, 9, 100] {
        let mut bytes: Vec<u8> = (0..1 + sectors * SECTOR_SIZE).map(|at| (at * 7 % 251) as u8).collect();
        let written = bytes.clone();
        disk.write_blocks(3, &bytes[1..]).map_err(|error| error.to_string())?;
        bytes[1..].fill(0);
        disk.read_blocks(3, &mut bytes[1..]).map_err(|error| error.to_string())?;
        wrong += bytes.iter().zip(&written).filter(|(found, wanted)| found != wanted).count();
    }
    check(&format!("virtio, {strategy}: a published driver writes and reads a disk"), wrong == 0, wrong);
    Ok(pci.space().usage().mappings)
}
