//! Entries that hardware takes as absent, and that the [mark](Format::MARK) keeps from being free:
//! those of a page that is [broken](super::split), and of a table that is [set
//! aside](super::reclaim). Both can be told apart, and the table's entry can be put back as it was.

use super::format::Format;

/// Returns whether `entry` belongs to a page that is broken.
#[inline]
pub(super) const fn is_broken<X: Format>(entry: u64) -> bool {
    X::BREAK_BEFORE_MAKE && entry == X::MARK
}

/// Returns the entry of a table as it is stored while the table is set aside.
pub(super) fn aside<X: Format>(entry: u64) -> u64 {
    entry & !X::PRESENT | X::MARK
}

/// Returns the entry of the table whose entry was set aside as `aside`.
pub(super) fn put_back<X: Format>(aside: u64) -> u64 {
    aside & !X::MARK | X::PRESENT
}
