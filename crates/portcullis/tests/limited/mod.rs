//! A global allocator that counts, and refuses when it is told to. For test binaries of their own.
#![allow(dead_code, reason = "each test file uses a part")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// How often this thread has asked for memory.
    static CALLS: Cell<usize> = const { Cell::new(0) };
    /// Bytes that this thread has got, less those that it has given back.
    static HELD: Cell<isize> = const { Cell::new(0) };
    /// The longest request of this thread that succeeds, in bytes.
    static LIMIT: Cell<usize> = const { Cell::new(usize::MAX) };
    /// How many requests of this thread succeed before all others fail.
    static GRANTS: Cell<usize> = const { Cell::new(usize::MAX) };
    /// Whether only one request fails, when [`GRANTS`] have been made.
    static ONCE: Cell<bool> = const { Cell::new(false) };
    /// Requests of this thread that failed.
    static REFUSED: Cell<usize> = const { Cell::new(0) };
    /// Whether this thread is in what the limits, and the counts, are not for.
    static EXEMPT: Cell<bool> = const { Cell::new(false) };
}

/// The system's allocator, counted and limited per thread.
struct Limited;

/// Counts a request and says whether it may succeed. A thread that is being torn down is not limited.
fn granted(bytes: usize) -> bool {
    if EXEMPT.try_with(Cell::get).unwrap_or(true) {
        return true;
    }
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
    let grant = |grants: &Cell<usize>| match grants.get() {
        usize::MAX => true,
        0 => {
            REFUSED.set(REFUSED.get() + 1);
            if ONCE.get() {
                grants.set(usize::MAX);
            }
            false
        }
        left => {
            grants.set(left - 1);
            true
        }
    };
    LIMIT.try_with(|limit| bytes <= limit.get()).unwrap_or(true) && GRANTS.try_with(grant).unwrap_or(true)
}

fn hold(more: usize, less: usize) {
    if EXEMPT.try_with(Cell::get).unwrap_or(true) {
        return;
    }
    let _ = HELD.try_with(|held| held.set(held.get() + more as isize - less as isize));
}

// SAFETY: every block comes from `System` with the layout that was asked for and goes back to it with the
// same one; a refusal is a null pointer, as the trait asks. `granted` and `hold` neither allocate nor panic:
// their thread-local values are initialised at compile time and need no destructor, and no process holds as
// many bytes as overflow the sum.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !granted(layout.size()) {
            return std::ptr::null_mut();
        }
        hold(layout.size(), 0);
        // SAFETY: the caller keeps the rules of this very function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        hold(0, layout.size());
        // SAFETY: the caller passes a block of this allocator, which is one of `System`'s, with its layout.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !granted(size) {
            return std::ptr::null_mut();
        }
        hold(size, layout.size());
        // SAFETY: as for `dealloc`; the caller vouches for the new size.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Limited = Limited;

fn counted<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = CALLS.get();
    let result = work();
    LIMIT.set(usize::MAX);
    GRANTS.set(usize::MAX);
    (result, CALLS.get() - before)
}

/// Runs `work` while this thread gets no memory in pieces over `bytes`; returns how often it asked.
pub fn in_pieces_of<T>(bytes: usize, work: impl FnOnce() -> T) -> (T, usize) {
    LIMIT.set(bytes);
    counted(work)
}

/// Runs `work` while only the next `grants` requests of this thread get memory; returns how often it asked.
pub fn granting<T>(grants: usize, work: impl FnOnce() -> T) -> (T, usize) {
    GRANTS.set(grants);
    counted(work)
}

/// From now on the next `grants` requests of this thread get memory, and then one does not, or, unless it is to be `once`, none does
/// until [`grant_all`].
pub fn grant(grants: usize, once: bool) {
    REFUSED.set(0);
    ONCE.set(once);
    GRANTS.set(grants);
}

/// From now on all requests of this thread get memory. Returns how many did not.
pub fn grant_all() -> usize {
    GRANTS.set(usize::MAX);
    REFUSED.take()
}

/// Runs `work` of something else than what is tested: its requests get memory, and nothing counts them.
pub fn exempt<T>(work: impl FnOnce() -> T) -> T {
    let before = EXEMPT.replace(true);
    let result = work();
    EXEMPT.set(before);
    result
}

/// Bytes that this thread has got from the allocator, less those that it has given back.
pub fn held() -> isize {
    HELD.get()
}
