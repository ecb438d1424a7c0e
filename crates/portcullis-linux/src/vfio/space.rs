//! An [`AddressSpace`] of the kernel's, and the [`Mapper`] that maps in it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use portcullis::addr::{IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::Platform;

use super::book::{Book, joined};
use super::calls::Calls;
use super::error::OpenError;
use super::iommufd::Iommufd;
use super::limits::{locked_too_much, page_size};
use super::ranges::Ranges;
use super::type1::Container;

/// A kernel's interface to its IOMMU.
#[derive(Debug, Clone)]
pub(super) enum Kernel {
    Iommufd(Arc<Iommufd>),
    Type1(Arc<Container>),
}

/// How full an address space is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Mappings that the kernel has.
    pub mappings: u64,
    /// The most that it takes; `None` where only memory limits them.
    pub most_mappings: Option<u64>,
    /// Bytes that are mapped. Their pages are locked in memory.
    pub bytes: u64,
    /// System calls that maps and unmaps have made since the space was opened.
    pub calls: u64,
}

/// The addresses of one or more devices of this process: an IOAS of iommufd, or a container of VFIO's type 1.
///
/// It is [a device's](super::Device::space), and others may [join](super::Device::open_in) it. It can be cloned; it ends, with all of its
/// mappings, when the last clone, device and mapper of it is gone, or when the process ends in whatever way.
///
/// A child of `fork` has the file, too: mappings then live until both have ended.
#[derive(Clone)]
pub struct AddressSpace {
    pub(super) kernel: Kernel,
    space: Arc<Space>,
}

impl fmt::Debug for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

impl AddressSpace {
    pub(super) fn new(kernel: Kernel, ranges: &Ranges) -> Result<Self, OpenError> {
        let calls: Arc<dyn Calls> = match &kernel {
            Kernel::Iommufd(iommufd) => Arc::clone(iommufd) as _,
            Kernel::Type1(container) => Arc::clone(container) as _,
        };
        Ok(Self { kernel, space: Arc::new(Space::new(calls, ranges).ok_or(OpenError::NoAddresses)?) })
    }

    /// The addresses that its devices can use, and the pages by which they are mapped.
    pub fn geometry(&self) -> &Geometry {
        &self.space.geometry
    }

    /// How full it is. Takes a lock.
    pub fn usage(&self) -> Usage {
        self.space.usage()
    }

    /// Which of the kernel's interfaces it is of.
    pub fn kind(&self) -> Kind {
        match self.kernel {
            Kernel::Iommufd(_) => Kind::Iommufd,
            Kernel::Type1(_) => Kind::Type1,
        }
    }

    /// What maps in it, for a [`Domain`](portcullis::domain::Domain). One domain has it: where there are two, one refuses what the other
    /// has mapped at the same addresses.
    ///
    /// # Safety
    /// 1. **Every address of memory is one of this process**, and not of the machine's memory: the pieces that buffers name
    ///    ([`DmaBuffer`](portcullis::dma::DmaBuffer)) to the domain of this mapper, and what its memory gives it
    ///    ([`Frames`](portcullis::platform::Frames)). [`Heap`](crate::heap::Heap) and [`HeapBuffer`](crate::heap::HeapBuffer) have such
    ///    addresses. Those of a simulated machine, or of a kernel's own memory, would open other memory of the process.
    /// 2. Where a buffer is mapped and not copied, its devices are trusted with the rest of its first and last page. A whole number of pages has no such rest, and
    ///    queues that [copy](portcullis::dma::QueueConfig::bounce) or [choose](portcullis::dma::QueueConfig::auto) open none.
    pub unsafe fn mapper(&self) -> KernelMapper {
        KernelMapper { space: Arc::clone(&self.space) }
    }
}

/// Which of the kernel's interfaces an address space is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// iommufd.
    Iommufd,
    /// VFIO's type 1, version 2.
    Type1,
}

/// Maps in an [`AddressSpace`]. The addresses of memory are the process's own.
///
/// A map makes one system call for each piece that is contiguous in the process's memory, and an unmap one for each run of neighbours;
/// each pins or unpins pages (5 to 20 us for 4 KiB in a guest, 10 ms for a GiB). A map that fails removes what it has entered. The
/// kernel removes its mappings as a whole only, so the domain removes one when all of its parts are to go.
///
/// **Many small buffers.** Each map by itself is a mapping of the kernel's, of which a container takes 65,535, and takes its own call: the
/// kernel can neither add to a mapping that devices use nor join two without a moment in which neither is there. So let
/// neighbours come together. What is mapped before the device uses the first of it is noted by
/// [`Pieces`](portcullis::domain::Pieces), in any order, and mapped by one call for each run of neighbours. An area that its owner says may
/// stay open as a whole is registered once ([`Keep::UntilForgotten`](crate::registration::Keep)), and its buffers are lent
/// by a [`RegistrationCache`](crate::registration::RegistrationCache) without a call.
///
/// An unmap returns when no device reaches the range any more, as the kernel gives its pages back then. So [`sync`](Mapper::sync) has
/// nothing to wait for, and lazy protection is as strict here.
///
/// Of the attributes it keeps the permissions. (A device that may write may also read where the IOMMU's tables say so: AMD's and
/// Intel's do not.)
///
/// The lock of the book of mappings is not held during system calls. Waits for the kernel: not for handlers of signals.
pub struct KernelMapper {
    space: Arc<Space>,
}

impl fmt::Debug for KernelMapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelMapper").field("usage", &self.space.usage()).finish_non_exhaustive()
    }
}

/// An address space, whatever its kernel.
pub(super) struct Space {
    calls: Arc<dyn Calls>,
    geometry: Geometry,
    most_mappings: Option<u64>,
    book: Mutex<Book>,
    /// What a map that failed could not remove again: nothing is confirmed before it is gone.
    stuck: Mutex<Vec<IovaRange>>,
    has_stuck: AtomicBool,
    made: AtomicU64,
}

/// A piece of a list: where it is mapped, and where it is in the process.
struct Piece {
    range: IovaRange,
    address: u64,
}

impl Space {
    pub(super) fn new(calls: Arc<dyn Calls>, ranges: &Ranges) -> Option<Self> {
        let geometry = ranges.geometry(page_size())?;
        Some(Self {
            calls,
            geometry,
            most_mappings: ranges.most_mappings,
            book: Mutex::default(),
            stuck: Mutex::default(),
            has_stuck: AtomicBool::new(false),
            made: AtomicU64::new(0),
        })
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // Nothing in it panics half-way.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn usage(&self) -> Usage {
        let book = self.book();
        // Relaxed: only the number counts.
        let calls = self.made.load(Ordering::Relaxed);
        Usage { mappings: book.len(), most_mappings: self.most_mappings, bytes: book.bytes(), calls }
    }

    /// The kernel's calls, of which the next one counts.
    fn calls(&self) -> &dyn Calls {
        self.made.fetch_add(1, Ordering::Relaxed);
        &*self.calls
    }

    /// The pieces of a list, checked. Pieces that lie beside each other in the process are one.
    fn pieces(
        &self,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
    ) -> Result<Vec<Piece>, MapError> {
        let granule = self.geometry.page_sizes.smallest().map_or(1, |size| size.bytes());
        let misaligned = |phys| MapError::Misaligned { range, phys, granule };
        if !(range.start().get() | range.len()).is_multiple_of(granule) {
            return Err(misaligned(PhysAddr::new(0)));
        }
        if !self.geometry.aperture.contains_range(range) {
            return Err(MapError::BeyondAperture { range, last: self.geometry.aperture.last() });
        }
        let mut pieces: Vec<Piece> = Vec::new();
        let mut done = 0_u64;
        for (phys, len) in list {
            if !(phys.get() | len).is_multiple_of(granule) || len == 0 {
                return Err(misaligned(phys));
            }
            let at = range.start().checked_add(done);
            done = done.saturating_add(len);
            let too_long = MapError::Length { range, list: done };
            let at = at.filter(|_| done <= range.len()).ok_or(too_long)?;
            match pieces.last_mut() {
                Some(last) if last.address.checked_add(last.range.len()) == Some(phys.get()) => {
                    last.range =
                        IovaRange::new(last.range.start(), last.range.len() + len).map_err(|_| too_long)?;
                }
                _ => {
                    pieces.try_reserve(1).map_err(|_| MapError::OutOfMemory)?;
                    pieces.push(Piece {
                        range: IovaRange::new(at, len).map_err(|_| too_long)?,
                        address: phys.get(),
                    });
                }
            }
        }
        if done == range.len() { Ok(pieces) } else { Err(MapError::Length { range, list: done }) }
    }

    /// Enters all pieces into the book, or none.
    fn enter(&self, pieces: &[Piece]) -> Result<(), MapError> {
        let mut book = self.book();
        let wanted = pieces.len() as u64;
        if let Some(most) = self.most_mappings
            && book.len() + wanted > most
        {
            let what =
                "mappings of a container (raise vfio_iommu_type1.dma_entry_limit, or map larger pieces)";
            return Err(MapError::Limit { what, used: book.len(), wanted, most });
        }
        for (index, piece) in pieces.iter().enumerate() {
            if let Err(at) = book.add(piece.range) {
                pieces[..index].iter().for_each(|piece| drop(book.take(piece.range)));
                return Err(MapError::AlreadyMapped { at });
            }
        }
        Ok(())
    }

    /// Has the kernel map all pieces. Where it refuses one, those before are removed again.
    ///
    /// # Safety
    /// As [`Calls::map`], for each.
    unsafe fn map_pieces(&self, pieces: &[Piece], permissions: Permissions) -> Result<(), (MapError, bool)> {
        self.enter(pieces).map_err(|error| (error, false))?;
        for (index, piece) in pieces.iter().enumerate() {
            // SAFETY: the caller's promise.
            if let Err(code) = unsafe { self.calls().map(piece.range, piece.address, permissions) } {
                let (entered, others) = pieces.split_at(index);
                others.iter().for_each(|piece| drop(self.book().take(piece.range)));
                let error = self.why(code, piece);
                entered.iter().for_each(|piece| self.undo(piece.range));
                return Err((error, index > 0));
            }
        }
        Ok(())
    }

    /// Removes a piece of a list that failed. Where the kernel does not, nothing is confirmed until it does.
    fn undo(&self, range: IovaRange) {
        if self.calls().unmap(range).is_err() {
            self.stuck.lock().unwrap_or_else(PoisonError::into_inner).push(range);
            // Release and acquire are the lock's: who is to confirm this map has seen it fail.
            self.has_stuck.store(true, Ordering::Relaxed);
        } else {
            drop(self.book().take(range));
        }
    }

    fn why(&self, code: i32, piece: &Piece) -> MapError {
        match code {
            libc::EEXIST => MapError::AlreadyMapped { at: piece.range.start() },
            libc::ENOSPC => {
                let used = self.book().len();
                let what =
                    "mappings of a container (raise vfio_iommu_type1.dma_entry_limit, or map larger pieces)";
                MapError::Limit { what, used, wanted: 1, most: self.most_mappings.unwrap_or(used) }
            }
            libc::ENOMEM => {
                locked_too_much(self.book().bytes(), piece.range.len()).unwrap_or(MapError::OutOfMemory)
            }
            code => MapError::Refused { code },
        }
    }

    fn unmap(&self, range: IovaRange, gather: &mut Gather) -> Unmapped {
        let (whole, kept) = self.book().take(range);
        let mut unmapped = Unmapped { kept, ..Unmapped::of(range, 0) };
        for run in joined(&whole) {
            let len = run.iter().fold(0, |sum, mapping| sum + mapping.len());
            let Ok(joined) = IovaRange::new(run[0].start(), len) else { continue };
            match self.calls().unmap(joined) {
                // Less, where somebody else who has the file has removed some: of that it is not known who waited for it.
                Ok(bytes) => {
                    unmapped.bytes += bytes.min(len);
                    gather.add(joined);
                }
                Err(_) => {
                    let mut book = self.book();
                    // `take` has removed these from the book above, and the kernel maps nothing over them: there is room for each.
                    for mapping in run {
                        let _ = book.add(*mapping);
                    }
                    unmapped.kept += len;
                }
            }
        }
        unmapped
    }

    /// Removes what maps that failed could not.
    #[cold]
    fn unstick(&self) -> Result<(), InvalidationError> {
        let mut stuck = self.stuck.lock().unwrap_or_else(PoisonError::into_inner);
        let mut code = None;
        stuck.retain(|range| match self.calls().unmap(*range) {
            Ok(_) => {
                drop(self.book().take(*range));
                false
            }
            Err(refused) => {
                code = Some(refused);
                true
            }
        });
        self.has_stuck.store(!stuck.is_empty(), Ordering::Relaxed);
        code.map_or(Ok(()), |code| Err(InvalidationError::Rejected { code: code.unsigned_abs() }))
    }
}

// SAFETY: by clause of the trait:
// - A map opens the memory that it is given, by `Calls`, and after an unmap of `Calls` no device reaches it: so a sync has nothing to wait for.
// - A map that fails removes what it has entered; where it cannot, no sync says `Ok` before that is gone.
// - An unmap removes what the book has of the range, and what the kernel does not remove is kept, and in the book again. Where a call
//   panics, it may have done any part of that. (Of what another process has mapped by the same file the book knows nothing.)
// - `unmap_now` is the trait's own. There are no marks, no short ways, and the geometry is a constant.
unsafe impl Mapper for KernelMapper {
    const REMOVES_WHOLES: bool = true;

    fn geometry(&self) -> &Geometry {
        &self.space.geometry
    }

    /// Nothing: an unmap has waited.
    fn costs(&self) -> Costs {
        Costs { submission_ns: 0, request_ns: 0, refill_ns: 0 }
    }

    unsafe fn map<P: Platform>(
        &self,
        _: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        let pieces = self.space.pieces(range, list)?;
        // SAFETY: the caller's promise; the addresses are the process's by the promise of `AddressSpace::mapper`.
        unsafe { self.space.map_pieces(&pieces, attributes.permissions) }.map_err(|(error, entered)| {
            if entered {
                gather.add(range);
            }
            error
        })
    }

    fn unmap<P: Platform>(&self, _: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        self.space.unmap(range, gather)
    }

    #[inline]
    fn sync(&self, _: &Gather) -> Result<(), InvalidationError> {
        if self.space.has_stuck.load(Ordering::Relaxed) { self.space.unstick() } else { Ok(()) }
    }
}

#[cfg(test)]
impl KernelMapper {
    /// A mapper over a kernel of the test's own.
    pub(super) fn over(calls: Arc<dyn Calls>, ranges: &Ranges) -> Option<Self> {
        Some(Self { space: Arc::new(Space::new(calls, ranges)?) })
    }

    pub(super) fn usage(&self) -> Usage {
        self.space.usage()
    }
}
