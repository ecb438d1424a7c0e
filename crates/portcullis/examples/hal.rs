//! An adaptor for virtio drivers: the four calls that `virtio_drivers::Hal` asks for (`dma_alloc`, `dma_dealloc`, `share` and
//! `unshare`), on a queue. The calls deal in numbers and know no context, so a driver is compiled once: the queue is a
//! `dyn AnyQueue`.

use std::collections::BTreeMap;
use std::error::Error;
use std::ptr::NonNull;
use std::sync::Arc;

use portcullis::addr::{DeviceId, Direction, DmaSegment, DomainId, PhysAddr, PhysSegment};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{
    AnyQueue, CoherentMemory, Device, DmaMask, Ended, Machine, Queue, QueueConfig, RawMapping,
};
use portcullis::domain::Domain;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::Frames;
use portcullis::std_platform::StdPlatform;
use portcullis_model::{Context, DeviceId as ModelDevice, Iommu, IommuConfig, Memory};

/// As `virtio_drivers::BufferDirection`.
#[derive(Debug, Clone, Copy)]
enum BufferDirection {
    DriverToDevice,
    DeviceToDriver,
    Both,
}

/// What `Hal` asks for, of one device. (`Hal`'s functions take no `self`: an implementation finds this in a static.)
struct Hal<X: Machine, F: Frames + Clone> {
    device: Device<X>,
    frames: F,
    queue: Box<dyn AnyQueue>,
    shared: BTreeMap<u64, RawMapping>,
    rings: BTreeMap<u64, CoherentMemory<F, X::Mapper, X::Platform>>,
}

impl<X: Machine, F: Frames + Clone> Hal<X, F> {
    fn new(device: Device<X>, frames: F, config: QueueConfig) -> Result<Self, Box<dyn Error>> {
        let queue: Queue<X> = device.queue(config)?;
        let queue = Box::new(queue);
        Ok(Self { device, frames, queue, shared: BTreeMap::new(), rings: BTreeMap::new() })
    }

    /// Memory for a virtqueue: zeroed pages that both sides use for long. The device's address, and the CPU's.
    fn dma_alloc(&mut self, pages: usize) -> Result<(u64, NonNull<u8>), Box<dyn Error>> {
        let memory = CoherentMemory::new(self.device.dma(), self.frames.clone(), pages * 4096)?;
        let (paddr, vaddr) =
            (memory.iova().get(), memory.as_ptr().ok_or("frames that are not side by side")?);
        self.rings.insert(paddr, memory);
        Ok((paddr, vaddr))
    }

    fn dma_dealloc(&mut self, paddr: u64) -> Result<(), Box<dyn Error>> {
        let memory = self.rings.remove(&paddr).ok_or("no such memory")?;
        Ok(memory.free()?)
    }

    /// Shares a buffer with the device. Its address for the device.
    ///
    /// # Safety
    /// The buffer is memory that nothing but the device uses until `unshare` has returned.
    unsafe fn share(
        &mut self,
        buffer: PhysSegment,
        direction: BufferDirection,
    ) -> Result<u64, Box<dyn Error>> {
        let direction = match direction {
            BufferDirection::DriverToDevice => Direction::ToDevice,
            BufferDirection::DeviceToDriver => Direction::FromDevice,
            BufferDirection::Both => Direction::Bidirectional,
        };
        let mut view = [DmaSegment::default()];
        // SAFETY: the caller's promise; `unshare` is the mapping's only end.
        let (mapping, _) = unsafe { self.queue.map_raw(&[buffer], direction, &mut view) }?;
        self.shared.insert(view[0].iova.get(), mapping);
        Ok(view[0].iova.get())
    }

    /// The buffer is the driver's again when this returns: `Hal` has no word for later, so what would wait for a batch is
    /// committed here.
    fn unshare(&mut self, paddr: u64) -> Result<(), Box<dyn Error>> {
        let mapping = self.shared.remove(&paddr).ok_or("nothing is shared there")?;
        if self.queue.unmap_raw(mapping)? == Ended::Pending {
            self.queue.commit_raw()?;
        }
        Ok(())
    }
}

fn run(config: QueueConfig) -> Result<(), Box<dyn Error>> {
    let memory = Memory::new(64 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let (id, card) = (DomainId(1), ModelDevice(5));
    let platform = StdPlatform::new();
    let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level())?;
    iommu.attach(card, Context::SecondStage { domain: id, root: table.root(), levels: 4 });
    let domain = Domain::builder(table, iommu.queue(), id)
        .bounce(Arc::clone(&memory), PoolConfig::default())
        .build(platform)?;
    let device = domain.attach(DeviceId(5), DmaMask::BITS_64)?;
    let mut hal = Hal::new(device, Arc::clone(&memory), config)?;

    let (ring, words) = hal.dma_alloc(2)?;
    iommu.dma_write(card, portcullis::addr::Iova::new(ring + 4096), b"used")?;
    // SAFETY: inside the ring's two pages.
    let used = [0, 1, 2, 3].map(|at| unsafe { words.add(4096 + at).read_volatile() });
    assert_eq!(&used, b"used");
    let original = memory.buffer(4096).ok_or("no memory")?;
    for direction in [BufferDirection::DeviceToDriver, BufferDirection::Both, BufferDirection::DriverToDevice]
    {
        let buffer = PhysSegment { phys: PhysAddr::new(original.phys().get() + 64), len: 512 };
        original.write(64, b"question")?;
        // SAFETY: the memory is simulated, all of it atomics.
        let paddr = unsafe { hal.share(buffer, direction) }?;
        let iova = portcullis::addr::Iova::new(paddr);
        let writes = !matches!(direction, BufferDirection::DriverToDevice);
        assert_eq!(iommu.dma_write(card, iova, b"answered").is_ok(), writes);
        hal.unshare(paddr)?;
        let _ = iommu.dma_write(card, iova, b"too late");
        let mut bytes = [0; 8];
        original.read(64, &mut bytes)?;
        assert_eq!(&bytes, if writes { b"answered" } else { b"question" });
    }
    hal.dma_dealloc(ring)
}

/// The same by each strategy.
///
/// # Errors
/// What did not work.
pub fn main() -> Result<(), Box<dyn Error>> {
    for config in [
        QueueConfig::direct(),
        QueueConfig::ring(64, 4096).batch(1),
        QueueConfig::bounce(),
        QueueConfig::auto(64, 4096).batch(1),
    ] {
        run(config)?;
    }
    println!("shared and taken back by each strategy");
    Ok(())
}
