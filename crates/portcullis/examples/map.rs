//! The smallest program: it maps a buffer for a network card and unmaps it, and the card can write to it only in between.
//!
//! The machine is made of software (`portcullis-model`): memory, a card, and an IOMMU between them that walks the library's
//! real page table.

use std::error::Error;
use std::sync::Arc;

use portcullis::prelude::*;
use portcullis_model::{Context, Iommu, IommuConfig, Memory};

/// # Errors
/// What did not work.
pub fn main() -> Result<(), Box<dyn Error>> {
    // The machine. Its IOMMU is told which table translates for the card.
    let memory = Memory::new(64 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level())?;
    let (card, id) = (DeviceId(0), DomainId(1));
    iommu.attach(card, Context::SecondStage { domain: id, root: table.root(), levels: table.levels() });

    // The driver's side: a domain, which is what the card may reach; a device in it; and a queue of the device.
    let domain = Domain::builder(table, iommu.queue(), id).policy(Policy::Strict).build(StdPlatform::new())?;
    let mut queue = domain.attach(card, DmaMask::BITS_64)?.queue(QueueConfig::direct())?;

    let buffer = memory.buffer(2048).ok_or("out of memory")?;
    println!("The buffer's address in memory is {}.", buffer.phys());
    let early = iommu.dma_write(card, Iova::new(buffer.phys().get()), b"too soon").is_err();
    println!("There the card is refused: {early}.");

    let mapping = queue.map(buffer, Direction::FromDevice)?;
    let iova = mapping.iova();
    println!("Mapped, the buffer is at {iova} for the card.");
    iommu.dma_write(card, iova, b"a packet")?;

    // A direct queue waits for the IOMMU, and gives the buffer back at once.
    let Ended::Done(buffer) = queue.unmap(mapping)? else { return Err("no buffer came back".into()) };
    let mut packet = [0; 8];
    buffer.read(0, &mut packet)?;
    println!("Unmapped, the buffer holds what the card wrote: {:?}.", str::from_utf8(&packet)?);
    let late = iommu.dma_write(card, iova, b"too late").err().ok_or("the card still reaches the buffer")?;
    println!("The card tries again: {late}");
    assert!(early && &packet == b"a packet");
    Ok(())
}
