//! [`KernelMapper`], which maps in a kernel address space, and the record of its mappings.

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

/// Maps in an [`AddressSpace`](super::AddressSpace). Memory addresses are the process's.
///
/// A map makes one system call for each contiguous piece of the process's memory, and an unmap one for each run of neighbours; each pins or
/// unpins pages (5 to 20 us for 4 KiB in a guest, 10 ms for a GiB). A failed map removes what it has entered. The kernel removes only whole
/// mappings, so the domain removes one when all of its parts are unmapped.
///
/// **Many small buffers.** Each map is a mapping of the kernel, and a container takes 65,535 of them, with a call each: the kernel can
/// neither extend a mapping in use nor join two without a gap. So let neighbours come together. [`Pieces`](portcullis::domain::Pieces)
/// collects memory that is mapped before the device uses any of it, in any order, and maps each run of neighbours by one call. An area that
/// its owner may leave open as a whole is registered once ([`Keep::UntilForgotten`](crate::registration::Keep)), and a
/// [`RegistrationCache`](crate::registration::RegistrationCache) shares its buffers without a call.
///
/// An unmap returns when no device reaches the range any more, because the kernel unpins the pages then. So [`sync`](Mapper::sync) does not
/// wait, and lazy protection is as strict here.
///
/// Of the attributes it supports the permissions. (Some IOMMUs' tables make writable pages readable; AMD's and Intel's do not.)
///
/// System calls run without the lock of the record. Context: waits for the kernel; not for signal handlers.
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

/// An address space of either kernel interface.
pub struct Space {
    calls: Arc<dyn Calls>,
    geometry: Geometry,
    most_mappings: Option<u64>,
    book: Mutex<Book>,
    /// Ranges that a failed map could not remove: no sync succeeds before they are gone.
    stuck: Mutex<Vec<IovaRange>>,
    has_stuck: AtomicBool,
    made: AtomicU64,
    /// Whether the kernel has the recorded mappings. Not while a container has no device: then it has none, and no device reaches anything.
    /// Every map and unmap holds it for reading.
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
        // No code panics half-way while it is held.
        self.in_kernel.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks all maps and unmaps while a device comes or goes.
    pub fn while_it_changes(&self) -> RwLockWriteGuard<'_, bool> {
        self.in_kernel.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel has removed all mappings with the last device: also what failed maps could not remove.
    pub fn is_out(&self, in_kernel: &mut bool) {
        *in_kernel = false;
        for range in self.stuck().drain(..) {
            drop(self.book().take(range));
        }
    }

    /// Makes the kernel map all recorded mappings, because a device is attached again.
    ///
    /// # Errors
    /// The first error, as an `errno`. Some may be mapped then.
    pub fn is_in(&self, in_kernel: &mut bool) -> Result<(), i32> {
        if std::mem::replace(in_kernel, true) {
            return Ok(());
        }
        let all: Vec<Piece> = self.book().all().collect();
        all.into_iter().try_for_each(|Piece { range, address, permissions }| {
            // SAFETY: the caller of its map promised that the memory may be open for as long as it is recorded.
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

    /// The kernel's calls; counts the next one.
    fn calls(&self) -> &dyn Calls {
        self.made.fetch_add(1, Ordering::Relaxed);
        &*self.calls
    }

    /// Records all pieces, or none.
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

    /// Maps all pieces. After an error it removes the earlier ones.
    ///
    /// # Safety
    /// As for [`Calls::map`], for each piece.
    unsafe fn map_pieces(&self, pieces: &[Piece]) -> Result<(), (MapError, bool)> {
        let in_kernel = self.in_kernel();
        self.enter(pieces).map_err(|error| (error, false))?;
        for (index, piece) in pieces.iter().enumerate().filter(|_| *in_kernel) {
            // SAFETY: the contract of `Calls::map` is the caller's.
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

    /// Removes a piece of a failed list. If the kernel does not, nothing is confirmed until it does.
    fn undo(&self, range: IovaRange) {
        if self.calls().unmap(range).is_err() {
            self.stuck().push(range);
            // Release and acquire are the lock's: a caller that confirms this map has seen it fail.
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
                // Less, if another holder of the file has removed some: whether anyone waited for that is not known.
                Ok(bytes) => {
                    unmapped.bytes += bytes.min(len);
                    gather.add(joined);
                }
                Err(_) => {
                    let mut book = self.book();
                    // `take` has removed these from the record above, and the kernel maps nothing over them: there is room for each.
                    for mapping in run {
                        let _ = book.add(*mapping);
                    }
                    unmapped.kept += len;
                }
            }
        }
        unmapped
    }

    /// Removes what failed maps could not.
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

// SAFETY:
// - 1 and 2: a map opens only the given memory (`Calls`, 2), and after an unmap no device reaches it (`Calls`, 1): so a sync does not wait.
//   While the kernel has no mappings of the space, which has no device, both change only the record, which is mapped before a device is
//   attached.
// - 3: a failed map removes what it has entered; if it cannot, no sync returns `Ok` before that is gone.
// - 4 and 8: an unmap removes the recorded mappings of the range; what the kernel does not remove is reported as kept, and recorded again.
//   A call that panics may have done any part of that. (Mappings that another process made by the same file are not recorded.)
// - 5 to 7 and 9: `unmap_now` is the default; there are no section flags and no fast calls; the geometry is a constant.
unsafe impl Mapper for KernelMapper {
    const REMOVES_WHOLES: bool = true;

    fn geometry(&self) -> &Geometry {
        &self.space.geometry
    }

    /// None: an unmap has waited.
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
        // SAFETY: clauses 1 to 4 are the caller's; the addresses are the process's by clause 1 of `AddressSpace::mapper`.
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
    /// A mapper over a fake kernel.
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
