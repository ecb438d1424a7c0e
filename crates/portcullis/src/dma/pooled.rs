//! Buffers of a domain's pool that stay mapped: I/O without map, unmap or, if the CPU does not look at the data, a copy.

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

/// Lends I/O buffers of the domain's pool, which stay mapped, to drivers that can choose their buffers: as DPDK's mempool, SPDK's `iobuf` and Linux's
/// `page_pool`. [`Device::buffers`](super::Device::buffers) makes it. The CPU copies only data that it looks at ([`PoolBuffer::read`],
/// [`PoolBuffer::write`]).
///
/// Taking and dropping a buffer of any size costs a few loads and stores in the CPU's own cache lines, and no system call or wait for hardware. Only
/// without an idle buffer of the size and direction does the pool allocate and map one. Devices can reach a dropped buffer until the pool is trimmed,
/// as with [`QueueConfig::bounce`](super::QueueConfig::bounce); no driver has its bytes then.
///
/// Each buffer counts as an owner of its handle, and CPUs that share a handle contend for that count: give each CPU [`another`](Self::another).
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

    /// Another handle on the pool, for another CPU. Allocates.
    pub fn another(&self) -> Result<Self, OutOfMemory> {
        Self::new((*self.device).clone())
    }

    /// Bytes of the longest buffer.
    pub fn longest(&self) -> u64 {
        self.device.pool().threshold()
    }

    /// Takes a buffer of `len` bytes for data that goes in `direction`. It is one piece, and begins at a granule, for the device and in memory.
    ///
    /// A buffer for both directions is zeroed. In any other, the device finds only zeros or bytes of its [trust group](super::Device::in_group); in
    /// one that the device writes, a CPU finds only zeros or bytes that the group's devices wrote.
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
        // Last: if anything failed after it, the slot would stay lent.
        let (iova, phys) = device.lend(len as u64, direction)?;
        Ok(PoolBuffer { device, iova, phys, len, direction })
    }
}

/// A buffer of a [`BufferPool`], for the driver and its device at the same time. Its drop returns it to the pool.
///
/// **All devices of the domain can reach it until then, and afterwards**, as it stays mapped: they may read or write it, as the direction says, even
/// after another driver has taken it. So drop it after the device is done with it, or is reset. Its address leads to no other memory.
///
/// The direction says what the CPU may do: [write](Self::write) data for the device, [read](Self::read) data from it, or both. So no driver finds
/// another CPU's bytes in a buffer.
///
/// Dropping it is O(1), or O(length) in a pool that [wipes](crate::bounce::PoolConfig::wipe). A leaked buffer keeps its pool alive for ever.
///
/// Context: the caller holds no lock and no CPU. The last owner's drop ends the pool, which unmaps, may wait for hardware, and frees.
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
    /// A driver that avoids copies may access the memory in unsafe code of its own, through a kernel's direct map for example: until the buffer is
    /// dropped, by [words](crate::platform::words), and as far as the direction allows the CPU.
    #[inline]
    pub fn phys(&self) -> PhysAddr {
        self.phys
    }

    /// The requested number of bytes. Never 0.
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

    /// Copies the bytes from `offset` on to `out`, by words. `None`, with nothing copied, if some do not exist or the device does not write the
    /// buffer.
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

    /// Copies `bytes` to the buffer from `offset` on, by words, and changes no other byte. `None`, with nothing copied, if some do not fit or only the device writes the buffer.
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

    /// Calls `f` for each frame that holds bytes of `range`. The arguments are the frame's words, the offset of the first of these bytes in the frame,
    /// and their positions counted from the start of `range`.
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
            // SAFETY: the frame is one of the slot's `alloc`, as `range` lies in the buffer. The slot is lent until `self` is dropped, which is
            // borrowed while the reference lives: so no trim frees the memory, and the pool does not copy or zero it. `device` keeps the pool and its
            // memory. Other references come from this method, and the words are atomics.
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
        // the memory, and they borrow it; a driver's accesses by `phys` end before, as `phys` requires.
        unsafe { self.device.pool().take_lent_back(self.iova) };
    }
}
