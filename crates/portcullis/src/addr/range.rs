//! [`IovaRange`]: a range holds at least one byte, and its last address exists, so `start + len - 1` never wraps.

use core::fmt;
use core::num::NonZeroU64;

use super::{AddrError, Iova, PageSize};

/// A range of I/O virtual addresses that holds at least one byte and never wraps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IovaRange {
    start: Iova,
    len: NonZeroU64,
}

impl IovaRange {
    /// The `len` bytes from `start` on.
    ///
    /// # Errors
    /// [`AddrError::EmptyRange`] for no bytes, [`AddrError::Wraps`] if the last byte has no address.
    pub const fn new(start: Iova, len: u64) -> Result<Self, AddrError> {
        let Some(len) = NonZeroU64::new(len) else {
            return Err(AddrError::EmptyRange { start: start.0 });
        };
        if start.0.checked_add(len.get() - 1).is_none() {
            return Err(AddrError::Wraps { start: start.0, len: len.get() });
        }
        Ok(Self { start, len })
    }

    /// As `new`, unchecked: for a piece of an existing range.
    #[inline]
    pub(crate) const fn inside(start: Iova, len: NonZeroU64) -> Self {
        debug_assert!(start.0.checked_add(len.get() - 1).is_some());
        Self { start, len }
    }

    /// The range from `first` to `last`, both inside it.
    ///
    /// # Errors
    /// [`AddrError::EmptyRange`] if `last` lies before `first`; [`AddrError::Wraps`] for the whole 64-bit space, whose
    /// length 64 bits cannot hold.
    pub const fn from_bounds(first: Iova, last: Iova) -> Result<Self, AddrError> {
        match last.0.checked_sub(first.0) {
            Some(u64::MAX) => Err(AddrError::Wraps { start: first.0, len: u64::MAX }),
            Some(distance) => Self::new(first, distance + 1),
            None => Err(AddrError::EmptyRange { start: first.0 }),
        }
    }

    /// The whole pages of `size` that hold the `len` bytes from `start` on; `None` if there is no such range.
    #[inline]
    pub(crate) fn of_pages(start: Iova, len: u64, size: PageSize) -> Option<Self> {
        // With `len` 0, `checked_add(u64::MAX)` succeeds only for `start` 0, and `last` is the highest address. The
        // pages are then all 2^64 bytes, as for any range that touches every page: their length wraps to 0, and
        // `NonZeroU64` refuses it.
        let last = start.checked_add(len.wrapping_sub(1))?;
        let start = start.align_down(size);
        let len = (last.get() | size.offset_mask()).wrapping_sub(start.get()).wrapping_add(1);
        Some(Self { start, len: NonZeroU64::new(len)? })
    }

    /// The first address.
    pub const fn start(self) -> Iova {
        self.start
    }

    /// The length in bytes, never 0.
    pub const fn len(self) -> u64 {
        self.len.get()
    }

    /// Returns `false`: a range holds at least one byte. (Clippy expects it beside [`len`](Self::len).)
    pub const fn is_empty(self) -> bool {
        false
    }

    /// The last address that is inside.
    pub const fn last(self) -> Iova {
        Iova(self.start.0 + (self.len.get() - 1))
    }

    /// Whether `address` is inside.
    pub const fn contains(self, address: Iova) -> bool {
        self.start.0 <= address.0 && address.0 <= self.last().0
    }

    /// Whether all of `other` is inside.
    pub const fn contains_range(self, other: Self) -> bool {
        self.start.0 <= other.start.0 && other.last().0 <= self.last().0
    }

    #[inline]
    pub(crate) fn joined(self, next: Self) -> Option<Self> {
        let is_next = self.last().0.checked_add(1) == Some(next.start.0);
        let len = self.len.checked_add(next.len()).filter(|_| is_next)?;
        Some(Self::inside(self.start, len))
    }

    /// The smallest range that holds both.
    ///
    /// # Errors
    /// [`AddrError::Wraps`] if that is the whole 64-bit space, whose length 64 bits cannot hold.
    pub fn hull(self, other: Self) -> Result<Self, AddrError> {
        Self::from_bounds(self.start.min(other.start), self.last().max(other.last()))
    }
}

impl fmt::Display for IovaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:#x}, {:#x}]", self.start.0, self.last().0)
    }
}
