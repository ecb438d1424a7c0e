//! A program's memory limit for the contents of a file, and its usage.
//!
//! A recording of a hundred bytes can name unlimited memory, devices and times, and each replayed policy tracks them. So the program's
//! allocator counts memory: no structure can be forgotten. A program makes [`Counted`] its global allocator, and sets a limit with
//! [`set_limit`]. Then
//! - reading and replaying end with an error that names the line once less than a sixteenth of it is left ([`check`]), or before they begin
//!   something that is known to need more ([`check_with`]);
//! - an allocation that would still exceed the limit, such as a large table that grows, never returns: `full` ends the program.
//!
//! Bytes are counted as in glibc's `malloc`: with 8 bytes before each allocation, rounded up to 16, and to whole pages from 128 KiB on. Not
//! counted is memory outside the allocator (the program's code, its stacks), and memory that stays with the process because of
//! fragmentation.
//!
//! Cost: each thread counts locally, and adds to the shared counter when it is more than [`STEP`] bytes away. So the count is exact to that
//! for each thread. No call takes a lock.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use crate::figures::bytes;

/// The default limit: 2 GiB.
pub const USUAL: u64 = 2 << 30;

/// The lowest limit: with less, the structures of one policy and one device do not fit.
pub const LEAST: u64 = 64 << 20;

/// Bytes that a thread counts locally.
pub const STEP: i64 = 64 << 10;

/// From this size on glibc maps whole pages for an allocation.
const MAPPED: usize = 128 << 10;

static USED: AtomicI64 = AtomicI64::new(0);
static PEAK: AtomicI64 = AtomicI64::new(0);
static LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);
static LINE: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Without a destructor, so that an allocator may use it at any time of a thread's life.
    static OWN: Cell<i64> = const { Cell::new(0) };
}

/// The system's allocator, with a count.
#[derive(Debug)]
pub struct Counted {
    full: fn(Over) -> !,
}

impl Counted {
    /// Calls `full` instead of an allocation that would exceed the limit, which is off from then on. It must not unwind.
    pub const fn new(full: fn(Over) -> !) -> Self {
        Self { full }
    }

    fn take(&self, bytes: i64) {
        let Some(own) = count(bytes) else { return };
        let used = USED.fetch_add(own, Ordering::Relaxed) + own;
        PEAK.fetch_max(used, Ordering::Relaxed);
        let limit = LIMIT.load(Ordering::Relaxed);
        if own > 0 && used as u64 > limit && used > 0 {
            LIMIT.store(u64::MAX, Ordering::Relaxed);
            (self.full)(Over { used: (used - bytes).max(0) as u64, wanted: bytes.max(0) as u64, limit });
        }
    }
}

/// Adds to this thread's count; returns all of it when it must be added to the shared one.
fn count(bytes: i64) -> Option<i64> {
    OWN.try_with(|own| {
        let sum = own.get() + bytes;
        let enough = sum.abs() >= STEP;
        own.set(if enough { 0 } else { sum });
        enough.then_some(sum)
    })
    // The thread is about to end.
    .unwrap_or(Some(bytes))
}

/// The counted bytes of an allocation of `size` bytes.
fn taken(size: usize) -> i64 {
    let granule = if size >= MAPPED { 4096 } else { 16 };
    // No layout is larger than `isize::MAX`, and no allocation exceeds the address space.
    (size.saturating_add(8).next_multiple_of(granule).max(32)) as i64
}

// SAFETY: each method passes its call on to the system's allocator.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.take(taken(layout.size()));
        // SAFETY: the contract of `alloc` is the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.take(taken(layout.size()));
        // SAFETY: the contract of `alloc_zeroed` is the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        self.take(-taken(layout.size()));
        // SAFETY: the contract of `dealloc` is the caller's.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.take(taken(size) - taken(layout.size()));
        // SAFETY: the contract of `realloc` is the caller's.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// The memory limit was exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Over {
    /// Bytes in use.
    pub used: u64,
    /// Further bytes requested, as far as that is known.
    pub wanted: u64,
    /// The limit in bytes.
    pub limit: u64,
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |size: u64| bytes(size as f64);
        write!(f, "{} of memory are in use", size(self.used))?;
        if self.wanted > 0 {
            write!(f, ", {} more are wanted", size(self.wanted))?;
        }
        let needed = self.used.saturating_add(self.wanted);
        let more = more(self.limit, |limit| limit - limit / 16 > needed);
        write!(f, ", and --memory allows {}: {}", size(self.limit), WayOut(more))
    }
}

/// The largest suggestion for `--memory`: 1 TiB.
const MOST_NAMED: u64 = 1 << 40;

/// The first doubling of `limit` that is `enough`; `None` if no machine has as much.
pub(crate) fn more(limit: u64, enough: impl Fn(u64) -> bool) -> Option<u64> {
    let mut next = limit.checked_next_power_of_two()?;
    loop {
        next = next.checked_mul(2).filter(|next| *next <= MOST_NAMED)?;
        if enough(next) {
            return Some(next);
        }
    }
}

/// Advice when memory is short: a limit that suffices, if one does, and options that need less.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WayOut(pub(crate) Option<u64>);

impl fmt::Display for WayOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            // In the option's syntax.
            Some(size) if size < 1 << 30 => write!(f, "try --memory {}M, or make it less", size >> 20)?,
            Some(size) => write!(f, "try --memory {}G, or make it less", size >> 30)?,
            None => f.write_str("make it less")?,
        }
        f.write_str(" by --device, --limit or --policy")
    }
}

impl std::error::Error for Over {}

/// Sets the limit to `bytes`, at least [`LEAST`].
pub fn set_limit(bytes: u64) {
    LIMIT.store(bytes.max(LEAST), Ordering::Relaxed);
}

/// The limit; `u64::MAX` if none is set.
pub fn limit() -> u64 {
    LIMIT.load(Ordering::Relaxed)
}

/// Bytes in use; 0 unless [`Counted`] is the program's allocator.
pub fn used() -> u64 {
    USED.load(Ordering::Relaxed).max(0) as u64
}

/// Sets the current line of a recording.
pub(crate) fn at_line(line: u64) {
    LINE.store(line, Ordering::Relaxed);
}

/// The last line of the recording; `None` before the first.
pub fn line() -> Option<u64> {
    Some(LINE.load(Ordering::Relaxed)).filter(|line| *line > 0)
}

/// The most bytes in use so far.
pub fn peak() -> u64 {
    PEAK.load(Ordering::Relaxed).max(0) as u64
}

/// Checks for enough memory to go on.
///
/// # Errors
/// [`Over`] if less than a sixteenth of the limit is left.
#[inline]
pub fn check() -> Result<(), Over> {
    check_with(0)
}

/// Checks that `bytes` more fit, with some left.
///
/// # Errors
/// [`Over`] if less than a sixteenth of the limit would be left.
#[inline]
pub fn check_with(bytes: u64) -> Result<(), Over> {
    let (used, limit) = (used(), limit());
    if used.saturating_add(bytes) > limit - limit / 16 && limit != u64::MAX {
        return Err(Over { used, wanted: bytes, limit });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_counted_as_the_c_library_takes_them() {
        assert_eq!([0, 1, 24, 25, 40, 41].map(taken), [32, 32, 32, 48, 48, 64]);
        assert_eq!(taken(128 << 10), (128 << 10) + 4096);
    }

    #[test]
    fn over_says_what_is_in_use_wanted_and_possible() {
        let over = |used, wanted, limit| Over { used, wanted, limit }.to_string();
        assert_eq!(
            over(63 << 20, 3 << 20, 64 << 20),
            "66.1 MB of memory are in use, 3.1 MB more are wanted, and --memory allows 67.1 MB: try --memory 128M, or make it less by \
             --device, --limit or --policy"
        );
        // The suggested size has room for more than requested.
        let tried = |text: String| text.split("try --memory ").nth(1).map(|rest| rest[..4].to_owned());
        assert_eq!(tried(over(63 << 20, 57 << 20, 64 << 20)).as_deref(), Some("256M"));
        assert_eq!(tried(over(2 << 30, 0, 2 << 30)).as_deref(), Some("4G, "));
        assert_eq!(tried(over(2 << 30, 0, (2 << 30) + 1)).as_deref(), Some("8G, "));
        let endless = over(1 << 20, u64::MAX, 64 << 20);
        assert!(
            endless.ends_with("--memory allows 67.1 MB: make it less by --device, --limit or --policy"),
            "{endless}"
        );
        assert!(
            over(1, 0, 64 << 20).starts_with("1 byte of memory are in use, and --memory allows 67.1 MB: ")
        );
    }
}
