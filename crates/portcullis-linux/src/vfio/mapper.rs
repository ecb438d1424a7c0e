//! The [`KernelMapper`] that maps in an address space of the kernel's, and the account of what is mapped.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use portcullis::addr::{IovaRange, PhysAddr};
use portcullis::invalidation::{Costs, Gather, InvalidationError};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::Platform;

use super::book::{Book, joined};
use super::calls::Calls;
use super::limits::{locked_too_much, page_size};
use super::opened::locked;
use super::ranges::Ranges;
use super::space::Usage;
use crate::pieces::{self, Piece};

/// Maps in an [`AddressSpace`](super::AddressSpace). The addresses of memory are the process's own.
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

impl KernelMapper {
    pub(super) fn new(space: Arc<Space>) -> Self {
        Self { space }
    }
}

/// An address space, whatever its kernel.
pub struct Space {
    calls: Arc<dyn Calls>,
    geometry: Geometry,
    most_mappings: Option<u64>,
    book: Mutex<Book>,
    /// What a map that failed could not remove again: nothing is confirmed before it is gone.
    stuck: Mutex<Vec<IovaRange>>,
    has_stuck: AtomicBool,
    made: AtomicU64,
    /// Whether the kernel has what the book has. Not while a container has no device: there it keeps nothing, and nobody reaches
    /// anything. All that maps and unmaps holds it for reading.
    in_kernel: RwLock<bool>,
}

impl Space {
    pub fn new(calls: Arc<dyn Calls>, ranges: &Ranges) -> Option<Self> {
        let geometry = ranges.geometry(page_size())?;
        Some(Self {
            calls,
            geometry,
            most_mappings: ranges.most_mappings,
            book: Mutex::default(),
            stuck: Mutex::default(),
            has_stuck: AtomicBool::new(false),
            made: AtomicU64::new(0),
            in_kernel: RwLock::new(true),
        })
    }

    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn in_kernel(&self) -> RwLockReadGuard<'_, bool> {
        // Nothing panics half-way while it is held.
        self.in_kernel.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps all that maps and unmaps waiting, while a device comes or goes.
    pub fn while_it_changes(&self) -> RwLockWriteGuard<'_, bool> {
        self.in_kernel.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel has removed all mappings, as no device is there any more: nothing is in anybody's way that maps which failed could not
    /// remove.
    pub fn is_out(&self, in_kernel: &mut bool) {
        *in_kernel = false;
        for range in self.stuck().drain(..) {
            drop(self.book().take(range));
        }
    }

    /// Has the kernel map what the book has, as a device is there again.
    ///
    /// # Errors
    /// The first refusal, as an error of `errno`. Some may be mapped then.
    pub fn is_in(&self, in_kernel: &mut bool) -> Result<(), i32> {
        if std::mem::replace(in_kernel, true) {
            return Ok(());
        }
        let all: Vec<Piece> = self.book().all().collect();
        all.into_iter().try_for_each(|Piece { range, address, permissions }| {
            // SAFETY: who mapped it has promised, for as long as it is in the book, that the memory may be open.
            unsafe { self.calls().map(range, address, permissions) }
        })
    }

    fn stuck(&self) -> MutexGuard<'_, Vec<IovaRange>> {
        locked(&self.stuck)
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        locked(&self.book)
    }

    pub fn usage(&self) -> Usage {
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
            if let Err(at) = book.add(*piece) {
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
    unsafe fn map_pieces(&self, pieces: &[Piece]) -> Result<(), (MapError, bool)> {
        let in_kernel = self.in_kernel();
        self.enter(pieces).map_err(|error| (error, false))?;
        for (index, piece) in pieces.iter().enumerate().filter(|_| *in_kernel) {
            // SAFETY: the caller's promise.
            if let Err(code) = unsafe { self.calls().map(piece.range, piece.address, piece.permissions) } {
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
            self.stuck().push(range);
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
        let in_kernel = self.in_kernel();
        let (whole, kept) = self.book().take(range);
        let mut unmapped = Unmapped { kept, ..Unmapped::of(range, 0) };
        for run in joined(&whole) {
            let len = run.iter().fold(0, |sum, mapping| sum + mapping.range.len());
            let Ok(joined) = IovaRange::new(run[0].range.start(), len) else { continue };
            match if *in_kernel { self.calls().unmap(joined) } else { Ok(len) } {
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
        let _in_kernel = self.in_kernel();
        let mut stuck = self.stuck();
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
//   While the kernel has nothing of the space, as it has no device, both change the book alone, which is mapped before a device comes.
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
        let pieces = pieces::checked(&self.space.geometry, range, list, attributes.permissions)?;
        // SAFETY: the caller's promise; the addresses are the process's by the promise of `AddressSpace::mapper`.
        unsafe { self.space.map_pieces(&pieces) }.map_err(|(error, entered)| {
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

    pub(super) fn space(&self) -> &Space {
        &self.space
    }
}
