//! The ways to map the buffers of a job.

use std::collections::VecDeque;
use std::sync::Arc;

use portcullis::addr::{Direction, DmaSegment, PhysAddr, PhysSegment};
use portcullis::dma::{BufferPool, Device, Mapping, PoolBuffer, Queue, QueueConfig};
use portcullis::std_platform::StdPlatform;
use portcullis_linux::heap::HeapBuffer;
use portcullis_linux::registration::{Keep, Registration, RegistrationCache, RegistrationLimits};
use portcullis_linux::vfio::{KernelMapper, Machine};

use super::Way;
use super::load::{Bytes, Data, Job, Plan};
use crate::machine::Result;

/// What a job maps its buffers by.
pub fn make(way: Way, device: &Device<Machine>, plan: &Plan) -> Result<Box<dyn Job>> {
    let batch = plan.depth.min(32);
    // A ring's places come back in their order, and a disk's reads do not.
    let descriptors = u32::try_from(32 * plan.depth)?;
    let config = match way {
        Way::Direct => QueueConfig::direct(),
        Way::Ring => QueueConfig::ring(descriptors, plan.len).batch(batch),
        Way::Pool => QueueConfig::bounce(),
        Way::Auto => QueueConfig::auto(descriptors, plan.len).batch(batch).measuring(Direction::FromDevice),
        Way::Mempool => {
            return Ok(Box::new(OfThePool { pool: device.buffers()?, len: plan.len as usize, came: None }));
        }
        Way::Cache => return Ok(Box::new(Cached::new(device, plan)?)),
        Way::Advance => return Ok(Box::new(InAdvance::new(device, plan)?)),
    };
    let spare = buffers(plan, batch)?.into();
    Ok(Box::new(Queued { queue: device.queue(config)?, spare }))
}

/// Four times as many buffers as the disk has at once, so that each has been away for a while when it is used again; and those that
/// wait for the end of a batch.
fn buffers(plan: &Plan, batch: usize) -> Result<Vec<HeapBuffer>> {
    let made = (0..4 * plan.depth + batch).map(|_| HeapBuffer::new(plan.len as usize).ok_or("no memory"));
    Ok(made.collect::<std::result::Result<_, _>>()?)
}

/// By a queue.
struct Queued {
    queue: Queue<Machine, HeapBuffer>,
    /// Buffers, the one that came back last at the end.
    spare: VecDeque<HeapBuffer>,
}

impl Data for Queued {
    type Held = Mapping<HeapBuffer>;

    fn map(&mut self) -> Result<(Self::Held, DmaSegment, PhysAddr)> {
        let buffer = self.spare.pop_front().ok_or("no buffer is left")?;
        let phys = buffer.phys();
        let mapping = self.queue.map(buffer, Direction::FromDevice).map_err(|refused| refused.error)?;
        // One piece is one for the device, too.
        let segment = DmaSegment { iova: mapping.iova(), len: mapping.len() };
        Ok((mapping, segment, phys))
    }

    fn unmap(&mut self, held: Self::Held) -> Result<usize> {
        let before = self.spare.len();
        self.queue
            .unmap(held)
            .map_err(|failed| failed.error)?
            .for_each(|buffer| self.spare.push_back(buffer));
        Ok(self.spare.len() - before)
    }

    fn commit(&mut self) -> Result<usize> {
        let before = self.spare.len();
        self.spare.extend(self.queue.commit()?);
        Ok(self.spare.len() - before)
    }

    fn came(&self, before_last: usize) -> Option<&dyn Bytes> {
        Some(self.spare.iter().rev().nth(before_last)?)
    }

    fn close(self) -> Result<()> {
        Ok(())
    }
}

/// By a cache of mappings: a buffer is mapped once, when it is used first.
struct Cached {
    cache: Arc<RegistrationCache<KernelMapper, StdPlatform>>,
    /// Buffers, the one that came back last at the end.
    spare: VecDeque<Registered>,
}

/// A buffer that the cache may have. It is freed when the cache has forgotten it, or not at all.
struct Registered {
    cache: Arc<RegistrationCache<KernelMapper, StdPlatform>>,
    buffer: Option<HeapBuffer>,
}

impl Registered {
    fn memory(&self) -> Option<PhysSegment> {
        let buffer = self.buffer.as_ref()?;
        Some(PhysSegment { phys: buffer.phys(), len: buffer.size() as u64 })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let is_forgotten = self.memory().is_some_and(|memory| self.cache.forget(memory).is_ok());
        if !is_forgotten {
            std::mem::forget(self.buffer.take());
        }
    }
}

impl Cached {
    fn new(device: &Device<Machine>, plan: &Plan) -> Result<Self> {
        let buffers = buffers(plan, 0)?;
        let granule = device.dma().domain().granule().bytes();
        let bytes = plan.len.next_multiple_of(granule) * buffers.len() as u64;
        let limits = RegistrationLimits { entries: buffers.len(), bytes };
        let cache = Arc::new(RegistrationCache::new(device.dma().clone(), limits)?);
        let registered = |buffer| Registered { cache: Arc::clone(&cache), buffer: Some(buffer) };
        let spare = buffers.into_iter().map(registered).collect();
        Ok(Self { cache, spare })
    }
}

impl Data for Cached {
    type Held = (Registration, Registered);

    fn map(&mut self) -> Result<(Self::Held, DmaSegment, PhysAddr)> {
        let buffer = self.spare.pop_front().ok_or("no buffer is left")?;
        let memory = buffer.memory().ok_or("no buffer")?;
        // SAFETY: the memory is the buffer's, of the process, and used by words; it is freed after a `forget` of it that succeeded.
        let registration =
            unsafe { self.cache.acquire(memory, Direction::FromDevice, Keep::UntilForgotten) }?;
        let segment = DmaSegment { iova: registration.iova(), len: registration.len() };
        Ok(((registration, buffer), segment, memory.phys))
    }

    fn unmap(&mut self, (registration, buffer): Self::Held) -> Result<usize> {
        self.cache.release(registration)?;
        self.spare.push_back(buffer);
        Ok(1)
    }

    fn commit(&mut self) -> Result<usize> {
        Ok(0)
    }

    fn came(&self, before_last: usize) -> Option<&dyn Bytes> {
        Some(self.spare.iter().rev().nth(before_last)?.buffer.as_ref()?)
    }

    fn close(self) -> Result<()> {
        Ok(())
    }
}

/// Buffers of the pool's own, each of which is taken for one read.
struct OfThePool {
    pool: BufferPool<Machine>,
    len: usize,
    /// The one that was read last: the job looks at it, and then it goes back.
    came: Option<PoolBuffer<Machine>>,
}

impl Data for OfThePool {
    type Held = PoolBuffer<Machine>;

    fn map(&mut self) -> Result<(Self::Held, DmaSegment, PhysAddr)> {
        self.came = None;
        let buffer = self.pool.take(self.len, Direction::FromDevice)?;
        let segment = DmaSegment { iova: buffer.iova(), len: self.len as u64 };
        let phys = buffer.phys();
        Ok((buffer, segment, phys))
    }

    fn unmap(&mut self, held: Self::Held) -> Result<usize> {
        self.came = Some(held);
        Ok(1)
    }

    fn commit(&mut self) -> Result<usize> {
        Ok(0)
    }

    fn came(&self, before_last: usize) -> Option<&dyn Bytes> {
        Some(self.came.as_ref().filter(|_| before_last == 0)?)
    }

    fn close(self) -> Result<()> {
        Ok(())
    }
}

/// Mapped in advance.
struct InAdvance {
    queue: Queue<Machine, HeapBuffer>,
    /// Mappings, the one that came back last at the end.
    spare: VecDeque<Mapping<HeapBuffer>>,
}

impl InAdvance {
    fn new(device: &Device<Machine>, plan: &Plan) -> Result<Self> {
        let mut queue = device.queue(QueueConfig::direct())?;
        let mapped = buffers(plan, 0)?
            .into_iter()
            .map(|buffer| queue.map(buffer, Direction::FromDevice).map_err(|refused| refused.error));
        let spare = mapped.collect::<std::result::Result<_, _>>()?;
        Ok(Self { queue, spare })
    }
}

impl Data for InAdvance {
    type Held = Mapping<HeapBuffer>;

    fn map(&mut self) -> Result<(Self::Held, DmaSegment, PhysAddr)> {
        let mapping = self.spare.pop_front().ok_or("no buffer is left")?;
        let segment = DmaSegment { iova: mapping.iova(), len: mapping.len() };
        let phys = mapping.buffer().phys();
        Ok((mapping, segment, phys))
    }

    fn unmap(&mut self, held: Self::Held) -> Result<usize> {
        self.spare.push_back(held);
        Ok(1)
    }

    fn commit(&mut self) -> Result<usize> {
        Ok(0)
    }

    fn came(&self, before_last: usize) -> Option<&dyn Bytes> {
        Some(self.spare.iter().rev().nth(before_last)?.buffer())
    }

    fn close(mut self) -> Result<()> {
        for mapping in self.spare {
            self.queue.unmap(mapping).map_err(|failed| failed.error)?.for_each(drop);
        }
        Ok(())
    }
}
