//! Memory that a mapping owns.

use alloc::vec::Vec;

use crate::addr::PhysSegment;
use crate::bounce::error::DmaMapError;

/// Memory that a device may access. `portcullis_model::Buffer` is such memory of the software machine; a kernel has its own type:
///
/// ```
/// use portcullis::addr::PhysSegment;
/// use portcullis::dma::DmaBuffer;
/// use portcullis::platform::{FRAME_SIZE, Frames};
///
/// /// A page of the kernel's, whose bytes only its owner reaches, by atomic words.
/// struct Page<F: Frames> {
///     frames: F,
///     piece: [PhysSegment; 1],
/// }
///
/// impl<F: Frames> Page<F> {
///     fn new(frames: F) -> Option<Self> {
///         let phys = frames.alloc(1)?;
///         Some(Self { frames, piece: [PhysSegment { phys, len: FRAME_SIZE }] })
///     }
/// }
///
/// // SAFETY, by clause. 1: it is one of the machine's frames, and the domain copies by the same memory, if at all. 2: the frame is this
/// // value's until it is dropped, and does not move with the value. 3 and 4: no safe code reaches the bytes. If you add accessors, let
/// // them use the atomic words of `frames`.
/// unsafe impl<F: Frames + 'static> DmaBuffer for Page<F> {
///     fn segments(&self) -> &[PhysSegment] {
///         &self.piece
///     }
/// }
///
/// impl<F: Frames> Drop for Page<F> {
///     fn drop(&mut self) {
///         // SAFETY: of one `alloc`. A queue gives a buffer back when no device reaches it, and leaks it otherwise. Under a lazy policy a
///         // device may reach it for some milliseconds more: this kernel's devices do not write to what their drivers have unmapped.
///         unsafe { self.frames.free(self.piece[0].phys, 1) };
///     }
/// }
/// # let memory = portcullis_model::Memory::new(1 << 20);
/// # let page = Page::new(std::sync::Arc::clone(&memory)).unwrap();
/// # assert_eq!((page.segments()[0].len, memory.frames_in_use()), (4096, 1));
/// # drop(page);
/// # assert_eq!(memory.frames_in_use(), 0);
/// ```
///
/// # Safety
/// 1. It is the machine's memory, or the process's where the domain's mapper takes a process's addresses. The domain's
///    [`CopyMemory`](crate::platform::CopyMemory), if any, reaches it by the same physical addresses, and so does its
///    [`CacheMaintenance`](crate::platform::CacheMaintenance) for a non-coherent device.
/// 2. [`segments`](Self::segments) names memory that belongs to this value only, and always the same until the value is dropped, wherever the
///    value itself is moved; for ever, if it is leaked.
/// 3. Safe code that has the value stays sound while a device reads and writes that memory at any time: its accesses are atomic or volatile, or there
///    are none. Under every policy except strict this includes the value that an unmap gives back: under these the device may still access it for a
///    while. If a CPU stores while a non-coherent device may write, all or part of the store may be lost, as if the device had written the old bytes
///    again.
/// 4. Safe code that has a reference to the value (from [`Mapping::buffer`](crate::dma::Mapping::buffer)) stays sound while the domain's memory
///    copies these bytes on another thread, for a sync: either there are no such accesses, or they go by [words](crate::platform::words) and the
///    bytes lie in frames that the `CopyMemory` allocated.
pub unsafe trait DmaBuffer: 'static {
    /// The pieces of the memory, in the device's order, of any alignment. A map refuses a piece without bytes.
    fn segments(&self) -> &[PhysSegment];
}

/// Several buffers that one mapping owns: a packet in pieces, or the pages of a read. The device gets them in order, as a list
/// ([`Queue::segments`](super::Queue::segments)).
///
/// ```
/// use portcullis::dma::{BufferList, DmaBuffer};
///
/// let memory = portcullis_model::Memory::new(1 << 20);
/// let pages = (0..3).filter_map(|_| memory.buffer(4096)).collect();
/// let packet = BufferList::new(pages)?;
/// assert_eq!(packet.segments().len(), 3);
/// // A queue maps it, and an unmap gives it back. Then:
/// let pages = packet.into_inner();
/// # assert_eq!(pages.len(), 3);
/// # Ok::<(), portcullis::dma::NotMapped<_>>(())
/// ```
#[derive(Debug)]
pub struct BufferList<B: DmaBuffer> {
    buffers: Vec<B>,
    segments: Vec<PhysSegment>,
}

impl<B: DmaBuffer> BufferList<B> {
    /// Makes a list of buffers, each of which may have several pieces. A map refuses an empty list. O(pieces). Allocates.
    ///
    /// # Errors
    /// [`DmaMapError::OutOfMemory`], with the buffers.
    pub fn new(buffers: Vec<B>) -> Result<Self, NotMapped<Vec<B>>> {
        let mut segments = Vec::new();
        for buffer in &buffers {
            if segments.try_reserve(buffer.segments().len()).is_err() {
                return Err(NotMapped { buffer: Some(buffers), error: DmaMapError::OutOfMemory });
            }
            segments.extend_from_slice(buffer.segments());
        }
        Ok(Self { buffers, segments })
    }

    /// The buffers, in order.
    pub fn buffers(&self) -> &[B] {
        &self.buffers
    }

    /// The buffers, in order.
    pub fn into_inner(self) -> Vec<B> {
        self.buffers
    }
}

// SAFETY: by clause of the trait:
// 1. As its buffers.
// 2. The buffers name the same memory until they are dropped, with this value or after it was taken apart; nothing changes them before. The
//    list of their pieces is this value's own.
// 3., 4. Safe code reaches only the buffers, by value or by shared reference, and they keep these clauses.
unsafe impl<B: DmaBuffer> DmaBuffer for BufferList<B> {
    fn segments(&self) -> &[PhysSegment] {
        &self.segments
    }
}

/// A buffer that was not mapped, or buffers of which no [`BufferList`] was made, and why.
pub struct NotMapped<B> {
    /// The unchanged buffer; `None` if the device [may reach it](DmaMapError::may_be_reached): it is leaked.
    pub buffer: Option<B>,
    /// Why.
    pub error: DmaMapError,
}

error_by_its_reason!([B] NotMapped<B>);

/// A buffer with a *cookie*: a value of the driver's that comes back with the buffer, also from a batch, such as the index of a descriptor, or the
/// request to complete. [`Mapping::cookie_mut`](super::Mapping::cookie_mut) changes it while the buffer is mapped.
///
/// ```
/// # #[cfg(feature = "std")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::sync::Arc;
/// use portcullis::prelude::*;
/// # let memory = portcullis_model::Memory::new(16 << 20);
/// # let iommu = portcullis_model::Iommu::new(portcullis_model::IommuConfig::new(Arc::clone(&memory)));
/// # let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level())?;
/// # let domain = Domain::builder(table, iommu.queue(), DomainId(1)).policy(Policy::Strict).build(StdPlatform::new())?;
/// # let nic = domain.attach(DeviceId(0), DmaMask::BITS_64)?;
///
/// let mut rx = nic.queue(QueueConfig::batched(64))?;
/// let buffer = memory.buffer(2048).ok_or("out of memory")?;
/// let (descriptor, len) = (17, 0);
/// let mut mapping = rx.map((buffer, (descriptor, len)), Direction::FromDevice)?;
/// // The card has written a packet of 60 bytes.
/// mapping.cookie_mut().1 = 60;
/// # let mut back = Vec::new();
/// rx.unmap(mapping)?.for_each(|ended| back.push(ended));
/// back.extend(rx.commit()?);
/// for (buffer, (descriptor, len)) in back {
/// #   assert_eq!((buffer.len(), descriptor, len), (2048, 17, 60));
///     // .. the buffer of this descriptor is the driver's again, and has a packet of this length ..
/// }
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "std"))]
/// # fn main() {}
/// ```
// SAFETY: clauses 1 to 4 are the buffer's, and no device reaches the cookie. Clause 2: a mapping and a list lend the pair by shared reference, so
// safe code replaces its buffer only while no device reaches it; the buffer that was replaced is dropped by itself.
unsafe impl<B: DmaBuffer, T: 'static> DmaBuffer for (B, T) {
    #[inline]
    fn segments(&self) -> &[PhysSegment] {
        self.0.segments()
    }
}
