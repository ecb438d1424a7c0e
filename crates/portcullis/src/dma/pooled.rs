//! Buffers from a domain's pool, which stay mapped: an I/O needs no map and no unmap, and no copy of data that the CPU does not look at.

use core::fmt;
use core::ops::Range;

use super::Machine;
use super::machine::CopyingOf;
use crate::addr::{Direction, Iova, PhysAddr};
use crate::bounce::error::DmaMapError;
use crate::heap::{OutOfMemory, Shared};
use crate::platform::words::{self, WORD};
use crate::platform::{FRAME_SIZE, Frames, TABLE_ENTRIES, Table};
use crate::sync::{Ordering, fence};

/// A source of I/O buffers, for drivers that can choose them: memory of the domain's pool that stays mapped. (DPDK's mempool, SPDK's `iobuf`,
/// Linux's `page_pool`.) [`Device::buffers`](super::Device::buffers) makes it.
///
/// Data that the CPU does not look at is not copied, such as data that one device writes and another reads. Data that it looks at, the CPU copies
/// to and from memory of its own ([`PoolBuffer::read`], [`PoolBuffer::write`]).
///
/// Taking and dropping a buffer costs a few loads and stores in the CPU's own cache lines, and no system call and no wait for hardware, however
/// large the buffer is. Only if the pool has no free buffer of its size and direction does it allocate memory and map it. A dropped buffer stays
/// open to devices until the pool is trimmed, as with [`QueueConfig::bounce`](super::QueueConfig::bounce); no driver has its bytes then.
///
/// Each buffer counts as an owner of its handle, and CPUs that share a handle contend for the cache line of that count: give each CPU
/// [`another`](Self::another) handle on the same pool.
///
/// ```
/// # #[cfg(feature = "std")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::sync::Arc;
/// # use portcullis::prelude::*;
/// # use portcullis_model::{Context, Iommu, IommuConfig, Memory};
/// # let memory = Memory::new(16 << 20);
/// # let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
/// # let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level())?;
/// # let (id, card) = (DomainId(1), portcullis_model::DeviceId(0));
/// # iommu.attach(card, Context::SecondStage { domain: id, root: table.root(), levels: 4 });
/// # let domain = Domain::builder(table, iommu.queue(), id)
/// #     .bounce(Arc::clone(&memory), PoolConfig::default())
/// #     .build(StdPlatform::new())?;
/// # let disk = domain.attach(DeviceId(0), DmaMask::BITS_64)?;
/// let pool = disk.buffers()?;
/// let block = pool.take(4096, Direction::FromDevice)?;
/// // Where the disk puts its data.
/// let iova = block.iova();
/// # iommu.dma_write(card, iova, b"a block")?;
/// let mut bytes = [0; 7];
/// block.read(0, &mut bytes).ok_or("too long")?;
/// assert_eq!(&bytes, b"a block");
/// // It goes back, and is taken next.
/// drop(block);
/// # assert_eq!(pool.take(4096, Direction::FromDevice)?.iova(), iova);
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "std"))]
/// # fn main() {}
/// ```
pub struct BufferPool<X: Machine> {
    device: Shared<CopyingOf<X>>,
}

impl<X: Machine> fmt::Debug for BufferPool<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool").field("most", &self.longest()).finish_non_exhaustive()
    }
}

impl<X: Machine> BufferPool<X> {
    pub(super) fn new(device: CopyingOf<X>) -> Result<Self, OutOfMemory> {
        Ok(Self { device: Shared::new(device)? })
    }

    /// Another handle on the pool, for another CPU, with a count of owners of its own. Allocates.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn another(&self) -> Result<Self, OutOfMemory> {
        Self::new((*self.device).clone())
    }

    /// Bytes of the longest buffer.
    pub fn longest(&self) -> u64 {
        self.device.pool().threshold()
    }

    /// Takes a buffer of `len` bytes for data that goes in `direction`. It is one piece, and begins at a granule, for the device and in memory.
    ///
    /// A buffer for both directions is zeroed. In any other the device finds zeros, or bytes of its group; and if the device writes, a CPU
    /// finds zeros, or bytes that devices of the group wrote.
    ///
    /// O(1) if one is idle, without a lock or an allocation; a buffer for both directions takes O(`len`) for zeroing.
    ///
    /// Context: otherwise it allocates and maps, and may wait for hardware and for other CPUs' exclusive sections. The caller holds no lock
    /// and no CPU.
    ///
    /// # Errors
    /// [`DmaMapError`]: [`TooLong`](DmaMapError::TooLong), also for no bytes; [`AllTaken`](DmaMapError::AllTaken); or why memory cannot be allocated
    /// and mapped.
    #[inline]
    pub fn take(&self, len: usize, direction: Direction) -> Result<PoolBuffer<X>, DmaMapError> {
        let device = self.device.clone();
        // From here on nothing fails; otherwise the slot would stay lent.
        let (iova, phys) = device.lend(len as u64, direction)?;
        Ok(PoolBuffer { device, iova, phys, len, direction })
    }
}

/// A buffer of a [`BufferPool`], for the driver and its device at the same time. Dropped, it goes back to the pool.
///
/// **All devices of the domain can reach it until then, and afterwards**, as it stays mapped: they may still read or write it, as the direction says,
/// although it may be another driver's buffer by then. So drop it after the device is done with it, or is reset. By its address they reach nothing
/// else.
///
/// The direction says who writes: the CPU [writes](Self::write) data for the device, [reads](Self::read) data from it, and does both where data goes
/// both ways. So no driver finds another CPU's bytes in a buffer.
///
/// Dropping it is O(1), or O(length) in a pool that [wipes](crate::bounce::PoolConfig::wipe). A leaked buffer keeps the pool for ever.
///
/// Context: the caller holds no lock and no CPU. The last owner of a pool drops the pool, too, which unmaps, may wait for hardware, and frees.
pub struct PoolBuffer<X: Machine> {
    device: Shared<CopyingOf<X>>,
    iova: Iova,
    phys: PhysAddr,
    len: usize,
    direction: Direction,
}

impl<X: Machine> fmt::Debug for PoolBuffer<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBuffer")
            .field("iova", &self.iova)
            .field("len", &self.len)
            .field("direction", &self.direction)
            .finish_non_exhaustive()
    }
}

impl<X: Machine> PoolBuffer<X> {
    /// The address of the first byte for the device.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// The address of the first byte in memory; the rest follows in one piece.
    ///
    /// It is for a driver that avoids copies, and reaches memory by such addresses in unsafe code of its own, by a kernel's direct map for
    /// example. Until the buffer is dropped, that code may access it by [words](crate::platform::words), as far as the direction allows the
    /// CPU.
    #[inline]
    pub fn phys(&self) -> PhysAddr {
        self.phys
    }

    /// The number of bytes that were requested. Never 0.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The direction of its data.
    #[inline]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Copies the bytes from `offset` on to `out`, by words. `None`, with nothing copied, if some of them do not exist, and for a buffer
    /// that the device does not write.
    ///
    /// Orders this after the load by which the CPU learnt that the device is done. While the device writes, each word is an old or a new one.
    /// O(`out.len()`); never waits.
    #[must_use = "`None` says that nothing was copied"]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        if self.direction == Direction::ToDevice {
            return None;
        }
        let range = self.range(offset, out.len())?;
        fence(Ordering::Acquire);
        self.each_frame(range, |frame, skip, part| words::read(frame, skip, out.get_mut(part)?))
    }

    /// Copies `bytes` to the buffer from `offset` on, by words, and changes no other byte. `None`, with nothing copied, if some of them do
    /// not fit, and for a buffer that only the device writes.
    ///
    /// Orders this before the store by which the CPU tells the device. O(`bytes.len()`); never waits.
    #[must_use = "`None` says that nothing was copied"]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        if self.direction == Direction::FromDevice {
            return None;
        }
        let range = self.range(offset, bytes.len())?;
        self.each_frame(range, |frame, skip, part| words::write(frame, skip, bytes.get(part)?))?;
        fence(Ordering::Release);
        Some(())
    }

    fn range(&self, offset: usize, len: usize) -> Option<Range<usize>> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len)?;
        Some(offset..end)
    }

    /// Calls `f` for each frame that has bytes of `range`: with its words, where the bytes begin there, and which part of the range they are.
    fn each_frame(
        &self,
        range: Range<usize>,
        mut f: impl FnMut(&Table, usize, Range<usize>) -> Option<()>,
    ) -> Option<()> {
        const FRAME: usize = TABLE_ENTRIES * WORD;
        let mut at = range.start;
        while at < range.end {
            let (skip, end) = (at % FRAME, range.end.min((at / FRAME + 1) * FRAME));
            let frame = self.phys.checked_add((at / FRAME) as u64 * FRAME_SIZE)?;
            // SAFETY: a slot's memory is whole frames of one `alloc`, of which this is one, as `range` lies in the buffer. The slot is lent
            // until `self` is dropped, which is borrowed while the reference lives: so no trim frees the memory, and no copy or zeroing of
            // the pool touches it. `device` keeps the pool and its memory. Other references to it come from this method, and its words are
            // atomics.
            let words = unsafe { self.device.pool().memory().table(frame) };
            f(words, skip, at - range.start..end - range.start)?;
            at = end;
        }
        Some(())
    }
}

impl<X: Machine> Drop for PoolBuffer<X> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: clause 1: only `take` makes the value, with the slot that it was lent, and it is dropped once. Clause 2: only its methods access
        // the memory, and they borrow it; a driver's accesses by `phys` end before, as is said there.
        unsafe { self.device.pool().take_lent_back(self.iova) };
    }
}
