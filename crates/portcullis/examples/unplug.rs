//! A device that goes: its driver ends all that is mapped, has each buffer back, and knows which memory it must never use again. On the
//! way the hardware fails to confirm some unmaps, so that each case of an error is met.

use std::error::Error;
use std::sync::Arc;

use portcullis::dma::{NotMapped, NotUnmapped};
use portcullis::invalidation::InvalidationError;
use portcullis::prelude::*;
use portcullis_model::{Buffer, Context, Iommu, IommuConfig, Memory};

const FRAME: u64 = 2048;
const POSTED: usize = 40;
const BUFFERS: usize = 48;

/// A driver, and where each of its buffers is: free, posted, in the queue, or lost.
struct Driver<X: Machine, B: DmaBuffer> {
    queue: Queue<X, B>,
    free: Vec<B>,
    posted: Vec<Mapping<B>>,
    /// Buffers that come back with the next commit that succeeds.
    waiting: usize,
    /// Buffers whose memory the device may reach for ever. The library has leaked them.
    lost: usize,
}

impl<X: Machine, B: DmaBuffer> Driver<X, B> {
    /// Posts buffers until enough are posted, or the queue has no room for more.
    fn refill(&mut self) -> Result<(), DmaMapError> {
        while self.posted.len() < POSTED {
            let Some(buffer) = self.free.pop() else { break };
            match self.queue.map(buffer, Direction::FromDevice) {
                Ok(mapping) => self.posted.push(mapping),
                // The buffer comes back, unless the device may reach it.
                Err(NotMapped { buffer, error }) => {
                    match buffer {
                        Some(buffer) => self.free.push(buffer),
                        None => self.lost += 1,
                    }
                    // A full queue, or addresses that are all taken, have room again when mappings have ended: no error.
                    return if error.is_full() { Ok(()) } else { Err(error) };
                }
            }
        }
        Ok(())
    }

    /// Ends the oldest mapping. Whatever the hardware says, the buffer is somewhere afterwards.
    fn end_oldest(&mut self) -> Result<(), DmaUnmapError> {
        if self.posted.is_empty() {
            return Ok(());
        }
        match self.queue.unmap(self.posted.remove(0)) {
            Ok(Ended::Pending) => self.waiting += 1,
            Ok(Ended::Done(buffer)) => self.free.push(buffer),
            Ok(Ended::Flushed(buffers)) => {
                self.waiting = 0;
                self.free.extend(buffers);
            }
            // 1. The mapping is as it was: it can be unmapped again.
            Err(NotUnmapped { mapping: Some(mapping), error, .. }) => {
                self.posted.push(mapping);
                return Err(error);
            }
            // 2. It is unmapped, and not confirmed: the queue keeps the buffer until a commit succeeds.
            Err(NotUnmapped { waits: true, error, .. }) => {
                self.waiting += 1;
                return Err(error);
            }
            // 3. Nothing will ever confirm it: the buffer is leaked.
            Err(NotUnmapped { error, .. }) => {
                self.lost += 1;
                return Err(error);
            }
        }
        Ok(())
    }

    /// The device is gone or was reset, or its driver stops: one call ends all, and gets back what waits. After an error another call goes
    /// on.
    fn end_all(&mut self) -> Result<(), DmaUnmapError> {
        let posted = std::mem::take(&mut self.posted);
        let ended = self.queue.unmap_all(posted, |ended| match ended {
            Ok(buffer) => self.free.push(buffer),
            Err(NotUnmapped { mapping: Some(mapping), .. }) => self.posted.push(mapping),
            Err(NotUnmapped { .. }) => self.lost += 1,
        });
        self.waiting = self.queue.waiting();
        ended
    }

    fn total(&self) -> usize {
        self.free.len() + self.posted.len() + self.waiting + self.lost
    }
}

fn run(name: &str, config: QueueConfig) -> Result<(), Box<dyn Error>> {
    let memory = Memory::new(64 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let (id, card) = (DomainId(1), DeviceId(3));
    let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level())?;
    iommu.attach(card, Context::SecondStage { domain: id, root: table.root(), levels: 4 });
    let domain = Domain::builder(table, iommu.queue(), id)
        .bounce(Arc::clone(&memory), PoolConfig::default())
        .build(StdPlatform::new())?;
    let device = domain.attach(card, DmaMask::BITS_64)?;
    let free: Vec<Buffer> = (0..BUFFERS).filter_map(|_| memory.buffer(FRAME)).collect();
    let mut driver = Driver { queue: device.queue(config)?, free, posted: Vec::new(), waiting: 0, lost: 0 };
    driver.refill()?;
    // The hardware does not answer for a while. Each buffer is accounted for all the same.
    iommu.queue().fail_next(3, InvalidationError::TimedOut { waited_ns: 1_000_000 });
    let mut errors = 0;
    for _ in 0..POSTED / 2 {
        errors += usize::from(driver.end_oldest().is_err());
        assert_eq!(driver.total(), BUFFERS);
    }
    driver.refill()?;
    // The device is unplugged. The owner of the unit detaches it, so that it reaches nothing; then its driver ends all.
    let reached = driver.posted.first().map(Mapping::iova).ok_or("nothing is posted")?;
    iommu.detach(card);
    assert!(iommu.dma_write(card, reached, b"too late").is_err());
    // Now the hardware fails for longer. A copy ends without it; of the other buffers none is lost, and a later call has them.
    iommu.queue().fail_next(u64::MAX, InvalidationError::TimedOut { waited_ns: 1_000_000 });
    errors += usize::from(driver.end_all().is_err());
    assert_eq!((driver.total(), driver.lost), (BUFFERS, 0));
    iommu.queue().fail_next(0, InvalidationError::TimedOut { waited_ns: 0 });
    driver.end_all()?;
    assert_eq!((driver.free.len(), driver.posted.len(), driver.waiting, driver.lost), (BUFFERS, 0, 0, 0));
    println!("{name:<8} {errors:>20} {:>20}", driver.free.len());
    Ok(())
}

/// The same by each strategy.
///
/// # Errors
/// What did not work.
pub fn main() -> Result<(), Box<dyn Error>> {
    println!(
        "A device is unplugged under its driver, after three invalidations had failed, and while all fail."
    );
    println!("         errors of unmaps       buffers that are back");
    run("direct", QueueConfig::direct())?;
    run("batched", QueueConfig::batched(16))?;
    run("ring", QueueConfig::ring(64, 4096).batch(16))?;
    run("bounce", QueueConfig::bounce())?;
    run("auto", QueueConfig::auto(64, 4096).batch(16))
}
