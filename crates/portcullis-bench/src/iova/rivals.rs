//! The crates of the registry, each behind a lock where it has none of its own.
//!
//! Each is asked for natural alignment where it can give it.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use buddy_system_allocator::FrameAllocator;
use offset_allocator::Allocation;
use range_alloc::RangeAllocator;
use vm_allocator::{AddressAllocator, AllocPolicy, RangeInclusive};
use vmem::{Arena, Bt};

use super::allocator::{Allocator, Make, Pages};
use crate::runner::Failure;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `offset-allocator`.
pub(crate) struct Offset(Mutex<offset_allocator::Allocator>);

/// The crate's own handle, and how many pages were asked for, which it does not tell without its lock.
#[derive(Clone, Copy)]
pub(crate) struct OffsetRange {
    allocation: Allocation,
    pages: u32,
}

pub(crate) fn offset_allocator() -> Make<Offset> {
    Arc::new(|space| {
        let size = u32::try_from(space.pages).unwrap_or(u32::MAX);
        // A node for each live range and one for each hole between two of them, of which it keeps some back.
        let nodes = u32::try_from(2 * space.live + 1024);
        let nodes = nodes.map_err(|_| Failure::Unsupported("more ranges than 32 bits count".into()))?;
        Ok(Offset(Mutex::new(offset_allocator::Allocator::with_max_allocs(size, nodes))))
    })
}

impl Allocator for Offset {
    type Range = OffsetRange;

    fn aligned(&self) -> bool {
        false
    }

    fn alloc(&self, pages: u64) -> Option<OffsetRange> {
        let pages = u32::try_from(pages).ok()?;
        Some(OffsetRange { allocation: lock(&self.0).allocate(pages)?, pages })
    }

    fn free(&self, range: OffsetRange) -> bool {
        lock(&self.0).free(range.allocation);
        true
    }

    fn pages(&self, range: OffsetRange) -> Pages {
        Pages { first: range.allocation.offset.into(), pages: range.pages.into() }
    }
}

/// `range-alloc`.
pub(crate) struct RangeAlloc(Mutex<RangeAllocator<u64>>);

pub(crate) fn range_alloc() -> Make<RangeAlloc> {
    Arc::new(|space| Ok(RangeAlloc(Mutex::new(RangeAllocator::new(0..space.pages)))))
}

impl Allocator for RangeAlloc {
    type Range = Pages;

    fn alloc(&self, pages: u64) -> Option<Pages> {
        let Range { start, end } =
            lock(&self.0).allocate_range_aligned(pages, pages.next_power_of_two()).ok()?;
        Some(Pages { first: start, pages: end - start })
    }

    fn free(&self, range: Pages) -> bool {
        lock(&self.0).free_range(range.first..range.first + range.pages);
        true
    }

    fn pages(&self, range: Pages) -> Pages {
        range
    }
}

/// Orders of a buddy allocator that holds 2^36 pages in one block.
const BUDDY_ORDERS: usize = 37;

/// `buddy_system_allocator`.
pub(crate) struct Buddy(Mutex<FrameAllocator<BUDDY_ORDERS>>);

pub(crate) fn buddy_system_allocator() -> Make<Buddy> {
    Arc::new(|space| {
        let pages = usize::try_from(space.pages);
        let pages = pages.map_err(|_| Failure::Unsupported("more pages than this machine counts".into()))?;
        let mut frames = FrameAllocator::new();
        frames.add_frame(0, pages);
        Ok(Buddy(Mutex::new(frames)))
    })
}

impl Allocator for Buddy {
    type Range = Pages;

    fn alloc(&self, pages: u64) -> Option<Pages> {
        let first = lock(&self.0).alloc(pages as usize)?;
        Some(Pages { first: first as u64, pages })
    }

    fn free(&self, range: Pages) -> bool {
        lock(&self.0).dealloc(range.first as usize, range.pages as usize);
        true
    }

    fn pages(&self, range: Pages) -> Pages {
        range
    }
}

/// `vm-allocator`.
pub(crate) struct Vm(Mutex<AddressAllocator>);

/// Freeing a range of one unit can fail with `Underflow`, so its unit is the byte.
const VM_PAGE: u64 = 4096;

pub(crate) fn vm_allocator() -> Make<Vm> {
    Arc::new(|space| {
        let allocator = AddressAllocator::new(0, space.pages * VM_PAGE);
        Ok(Vm(Mutex::new(allocator.map_err(|error| Failure::Unsupported(error.to_string()))?)))
    })
}

impl Allocator for Vm {
    type Range = RangeInclusive;

    fn alloc(&self, pages: u64) -> Option<RangeInclusive> {
        let (len, alignment) = (pages * VM_PAGE, pages.next_power_of_two() * VM_PAGE);
        lock(&self.0).allocate(len, alignment, AllocPolicy::FirstMatch).ok()
    }

    fn free(&self, range: RangeInclusive) -> bool {
        lock(&self.0).free(&range).is_ok()
    }

    fn pages(&self, range: RangeInclusive) -> Pages {
        Pages { first: range.start() / VM_PAGE, pages: range.len() / VM_PAGE }
    }
}

/// Memory for the boundary tags of `vmem`: each in a box of its own. (The crate does this itself with a
/// nightly compiler.)
struct Tags;

// SAFETY: as the trait asks, `allocate` returns memory of the size and alignment of a tag, which stays valid
// until `deallocate` is called with it, and `Tags` has no state that moving it could disturb.
unsafe impl vmem::Allocator for Tags {
    fn allocate(&self) -> Option<NonNull<Bt>> {
        Some(NonNull::from(Box::leak(Box::<Bt>::new_uninit())).cast())
    }

    unsafe fn deallocate(&self, tag: NonNull<Bt>) {
        // SAFETY: the caller's promise is that `tag` came from `allocate` and is not used any more; that was
        // a leaked box of exactly this type.
        drop(unsafe { Box::from_raw(tag.cast::<MaybeUninit<Bt>>().as_ptr()) });
    }
}

/// `vmem`.
pub(crate) struct Vmem(Arena<'static, 'static, Tags, Mutex<()>>);

pub(crate) fn vmem() -> Make<Vmem> {
    Arc::new(|space| {
        let refused = |error: vmem::Error| Failure::Unsupported(error.to_string());
        let arena = Arena::create("bench", 1, None, Tags).map_err(refused)?;
        arena.add_span(0, space.pages as usize).map_err(refused)?;
        Ok(Vmem(arena))
    })
}

impl Allocator for Vmem {
    type Range = Pages;

    fn aligned(&self) -> bool {
        // Its constrained allocation would align, but it takes a free segment off its list twice and so loses
        // the others of that list: soon it refuses everything.
        false
    }

    fn alloc(&self, pages: u64) -> Option<Pages> {
        let first = self.0.alloc(pages as usize, vmem::AllocPolicy::InstantFit).ok()?;
        Some(Pages { first: first as u64, pages })
    }

    fn free(&self, range: Pages) -> bool {
        self.0.free(range.first as usize).is_ok()
    }

    fn pages(&self, range: Pages) -> Pages {
        range
    }
}
