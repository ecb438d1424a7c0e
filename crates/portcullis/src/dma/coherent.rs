//! Coherent memory: long-lived pages that CPU and device share, for rings and descriptors. Under every policy but passthrough they are freed only
//! after the hardware has confirmed that no device reaches them, and leaked otherwise.

use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::Range;
use core::ptr::NonNull;

use super::DmaDevice;
use crate::addr::{Direction, Iova, IovaRange, PhysAddr};
use crate::domain::{MapListError, Rule, UnmapError};
use crate::mapper::Mapper;
use crate::platform::words::{WORD, load_part, store_part, with_part};
use crate::platform::{FRAME_SIZE, Frames, Platform, TABLE_ENTRIES};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// The most bytes written under the lock at a time.
const SLICE: usize = 64 * WORD;

/// Zeroed whole granules that the CPU and one device share until this value is freed or dropped.
///
/// The device may read and write them at any time, so the CPU uses atomic words ([`word`](Self::word), [`as_slice`](Self::as_slice));
/// [`read`](Self::read) and [`write`](Self::write) copy bytes by [words](crate::platform::words), too. The user of a [pointer](Self::as_ptr) is
/// responsible for its accesses.
pub struct CoherentMemory<F: Frames, M: Mapper, P: Platform> {
    // Dropped in `release` only, after the device is known not to reach them.
    device: ManuallyDrop<DmaDevice<M, P>>,
    frames: ManuallyDrop<F>,
    phys: PhysAddr,
    count: usize,
    iova: Iova,
    /// Held while a CPU writes to uncached frames: a part of a word takes a load and a store there.
    writing: Mutex<()>,
}

/// Shows where the memory is, not its bytes.
impl<F: Frames, M: Mapper, P: Platform> fmt::Debug for CoherentMemory<F, M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoherentMemory")
            .field("iova", &self.iova)
            .field("phys", &self.phys)
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

impl<F: Frames, M: Mapper, P: Platform> CoherentMemory<F, M, P> {
    /// Allocates `len` bytes, rounded up to whole granules, all zero, in one piece for the CPU and for the device, and maps them for both
    /// directions. Cost and context as for [`Domain::map`](crate::domain::Domain::map) and for the frames' allocation.
    ///
    /// # Errors
    /// [`MapListError`], with nothing kept: [`NoFrames`](MapListError::NoFrames) without consecutive frames;
    /// [`NotCoherent`](MapListError::NotCoherent) for a non-coherent device, unless the frames are [uncached](Frames::UNCACHED). After
    /// [`Unconfirmed`](MapListError::Unconfirmed) the frames are leaked, as the device may reach them.
    pub fn new(device: &DmaDevice<M, P>, frames: F, len: usize) -> Result<Self, MapListError> {
        let device = if F::UNCACHED {
            // No cache ever holds any of it: there is nothing to maintain.
            &device.maintained()
        } else {
            device.maps()?;
            device
        };
        // Whole granules, as the device reaches all of each.
        let granule = if device.is_translated() { device.domain().granule().bytes() } else { FRAME_SIZE };
        let rounded = (len as u64).checked_next_multiple_of(granule).unwrap_or(u64::MAX);
        let count = usize::try_from(rounded / FRAME_SIZE).unwrap_or(usize::MAX);
        let phys = frames.alloc(count).ok_or(MapListError::NoFrames { frames: count })?;
        let len = count as u64 * FRAME_SIZE;
        // If a call below panics, or the result is `Unconfirmed`, the device may reach the frames: they are never freed.
        let frames = ManuallyDrop::new(frames);
        // SAFETY: `Domain::map`'s clauses: the frames are this value's, in whole granules (1), accessed as atomics only (2), and freed after a
        // strict unmap or never (3).
        match unsafe { device.map_single(phys, len, Direction::Bidirectional) } {
            Ok(iova) => {
                let (device, writing) = (ManuallyDrop::new(device.clone()), Mutex::default());
                Ok(Self { device, frames, phys, count, iova, writing })
            }
            Err(error @ MapListError::Unconfirmed { .. }) => Err(error),
            Err(error) => {
                let frames = ManuallyDrop::into_inner(frames);
                // SAFETY: the frames came from `alloc` above, and no device reaches them.
                unsafe { frames.free(phys, count) };
                Err(error)
            }
        }
    }

    /// The address of the first byte for the device.
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// The address of the first byte in memory; the rest follows in one piece.
    pub fn phys(&self) -> PhysAddr {
        self.phys
    }

    /// The number of bytes, in whole frames.
    pub fn size(&self) -> usize {
        self.words() * WORD
    }

    /// The number of 64-bit words.
    pub fn words(&self) -> usize {
        self.count * TABLE_ENTRIES
    }

    /// The 64-bit word at `index`; `None` past the end. Not every machine has atomic read-modify-writes in [uncached](Frames::UNCACHED) frames.
    pub fn word(&self, index: usize) -> Option<&AtomicU64> {
        if index >= self.words() {
            return None;
        }
        let offset = (index / TABLE_ENTRIES) as u64 * FRAME_SIZE;
        let frame = self.phys.checked_add(offset)?;
        // SAFETY: `new` allocated `frame`; only `release` frees it, which `free` and `drop` call last, so no `&self` outlives it.
        let words = unsafe { self.frames.table(frame) };
        words.get(index % TABLE_ENTRIES)
    }

    /// Copies the bytes from `offset` on to `out`, word by word; `None`, with nothing copied, if some of them do not exist.
    ///
    /// If a device is writing them, each word is an old or a new one. A driver that has read that the device is done calls
    /// [`DmaDevice::sync_for_cpu`] before this call, which orders the two reads. O(`out.len()`); never waits.
    #[must_use = "`None` says that nothing was copied"]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        self.each_word(offset, out.len(), |word, at, part| {
            load_part(word, part.start, &mut out[at..at + part.len()]);
        })
    }

    /// Copies `bytes` to the memory from `offset` on, word by word; `None`, with nothing copied, if some do not fit. O(`bytes.len()`).
    ///
    /// The other bytes of a word stay as they are, even if the device or another CPU writes them meanwhile. Call [`DmaDevice::sync_for_device`]
    /// before telling the device: it orders that store after this write.
    ///
    /// **In [uncached](Frames::UNCACHED) frames** a partly written word is loaded and stored, as a machine may have no atomic read-modify-writes
    /// there. Several CPUs' calls do not lose each other's bytes, but a store in between to the rest of the word, by the device or to a
    /// [`word`](Self::word), is lost. So a driver writes words that the device also writes only as a whole, and only when the protocol gives them to
    /// the driver.
    ///
    /// Context: never waits for hardware. In uncached frames this takes a lock on a CPU that the platform lends, for 64 words at a time: the caller
    /// holds no CPU.
    #[must_use = "`None` says that nothing was copied"]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        if !F::UNCACHED {
            return self.each_word(offset, bytes.len(), |word, at, part| {
                store_part(word, part.start, &bytes[at..at + part.len()]);
            });
        }
        offset.checked_add(bytes.len()).filter(|end| *end <= self.size())?;
        let platform = self.device.domain().platform();
        let mut done = 0;
        while done < bytes.len() {
            let part = &bytes[done..bytes.len().min(done + SLICE)];
            platform.with_cpu(|_| {
                let writing = self.writing.lock();
                let written = self.each_word(offset + done, part.len(), |word, at, range| {
                    let new = &part[at..at + range.len()];
                    let old = if new.len() < WORD { word.load(Ordering::Relaxed) } else { 0 };
                    word.store(with_part(old, range.start, new), Ordering::Relaxed);
                });
                drop(writing);
                written
            })?;
            done += part.len();
        }
        Some(())
    }

    /// The CPU's address of the [`size`](Self::size) bytes; `None` if the frames are not adjacent in its address space. O(frames).
    ///
    /// The pointer is valid until this value is freed or dropped. A device may change the memory at any time, so accesses must be atomic or volatile,
    /// and references only to atomics.
    pub fn as_ptr(&self) -> Option<NonNull<u8>> {
        let mut first = None;
        for index in 0..self.count {
            // Exposed provenance: the pointer reaches all frames, and no single `&Table` covers more than one.
            let at = core::ptr::from_ref(self.word(index * TABLE_ENTRIES)?).expose_provenance();
            let first = *first.get_or_insert(at);
            if at.checked_sub(first)? != index * FRAME_SIZE as usize {
                return None;
            }
        }
        NonNull::new(core::ptr::with_exposed_provenance_mut(first?))
    }

    /// All words as one slice, with [`word`](Self::word)'s rules for each; `None` if the frames are not adjacent, as for [`as_ptr`](Self::as_ptr).
    /// O(frames).
    ///
    /// ```
    /// # #[cfg(feature = "std")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::sync::Arc;
    /// # use std::sync::atomic::Ordering;
    /// # use portcullis::prelude::*;
    /// # use portcullis_model::{Context, Iommu, IommuConfig, Memory};
    /// # let memory = Memory::new(1 << 20);
    /// # let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    /// # let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level())?;
    /// # let (disk, id) = (DeviceId(0), DomainId(1));
    /// # iommu.attach(disk, Context::SecondStage { domain: id, root: table.root(), levels: table.levels() });
    /// # let domain = Domain::builder(table, iommu.queue(), id).build(StdPlatform::new())?;
    /// let device = domain.attach(disk, DmaMask::BITS_64)?;
    /// // A ring of 1,024 words: the device is told `iova`, and the driver uses `ring`.
    /// let memory = CoherentMemory::new(device.dma(), memory, 8192)?;
    /// let (iova, ring) = (memory.iova(), memory.as_slice().ok_or("frames here and there")?);
    /// ring[3].store(0x1234, Ordering::Release);
    /// # let mut word = [0; 8];
    /// # iommu.dma_read(disk, Iova::new(iova.get() + 24), &mut word)?;
    /// # assert_eq!((u64::from_le_bytes(word), ring.len()), (0x1234, 1024));
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "std"))]
    /// # fn main() {}
    /// ```
    pub fn as_slice(&self) -> Option<&[AtomicU64]> {
        let first = self.as_ptr()?;
        // SAFETY: the frames are adjacent words (`Frames::table`), freed only in `release`, which `free` and `drop` call last. All access to them is
        // atomic.
        Some(unsafe { core::slice::from_raw_parts(first.as_ptr().cast(), self.words()) })
    }

    /// Calls `f` for each word that holds some of the `len` bytes from `offset` on. `f` gets the word, how many of these bytes lie in earlier words,
    /// and which bytes of this word belong to them.
    fn each_word(
        &self,
        offset: usize,
        len: usize,
        mut f: impl FnMut(&AtomicU64, usize, Range<usize>),
    ) -> Option<()> {
        let end = offset.checked_add(len).filter(|end| *end <= self.size())?;
        let mut at = offset;
        while at < end {
            let (index, skip) = (at / WORD, at % WORD);
            let part = skip..WORD.min(skip + (end - at));
            let bytes = part.len();
            f(self.word(index)?, at - offset, part);
            at += bytes;
        }
        Some(())
    }

    /// Unmaps the memory, strictly under every policy, and frees it: a freed page may have any owner next.
    ///
    /// Context: waits for one invalidation. The caller holds no lock and no CPU.
    ///
    /// # Errors
    /// [`UnmapError`]: the memory is never freed, as a device may still reach it.
    pub fn free(self) -> Result<(), UnmapError> {
        ManuallyDrop::new(self).release()
    }

    fn release(&mut self) -> Result<(), UnmapError> {
        let len = self.count as u64 * FRAME_SIZE;
        if self.device.is_translated() {
            let domain = self.device.domain();
            let iova = self.iova;
            let range = IovaRange::of_pages(iova, len, domain.granule())
                .ok_or(UnmapError::NoSuchRange { iova, len })?;
            let neighbours = range.len().saturating_sub(len);
            domain.end(range, neighbours, Rule::Strictly, |_| ())?;
        }
        // SAFETY: `new` allocated the frames, `self` is not used again, and the device cannot reach them any more (or, in passthrough, always
        // reached all memory).
        unsafe { self.frames.free(self.phys, self.count) };
        // SAFETY: as above. After a failure neither is dropped: they keep the memory and the tables.
        unsafe {
            ManuallyDrop::drop(&mut self.frames);
            ManuallyDrop::drop(&mut self.device);
        }
        Ok(())
    }
}

impl<F: Frames, M: Mapper, P: Platform> Drop for CoherentMemory<F, M, P> {
    fn drop(&mut self) {
        // On failure the memory leaks.
        let _ = self.release();
    }
}
