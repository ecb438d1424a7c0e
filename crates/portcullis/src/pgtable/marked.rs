//! Non-present entries that the [busy bit](Format::MARK) still reserves: [break-before-make](super::split)
//! placeholders, and entries of tables that are [set aside](super::reclaim), which can be put back as they were.

use super::format::Format;

#[inline]
pub(super) const fn is_broken<X: Format>(entry: u64) -> bool {
    X::BREAK_BEFORE_MAKE && entry == X::MARK
}

pub(super) fn aside<X: Format>(entry: u64) -> u64 {
    entry & !X::PRESENT | X::MARK
}

pub(super) fn put_back<X: Format>(aside: u64) -> u64 {
    aside & !X::MARK | X::PRESENT
}
