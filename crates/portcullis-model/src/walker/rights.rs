//! The rights of page-table entries, common to all formats.

use std::fmt;
use std::ops::BitOr;

use portcullis::addr::Permissions;

/// Rights. A format without one of them always grants it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rights(u8);

impl Rights {
    /// Reads.
    pub const READ: Self = Self(1);
    /// Writes.
    pub const WRITE: Self = Self(2);
    /// Instruction fetches (by unprivileged requests).
    pub const EXECUTE: Self = Self(4);
    /// Unprivileged requests, which devices send, have the other rights, too.
    pub const USER: Self = Self(8);
    /// Everything.
    pub const ALL: Self = Self(15);

    /// Whether it has all of `wanted`.
    pub const fn contains(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }

    /// It without `taken`.
    pub const fn without(self, taken: Self) -> Self {
        Self(self.0 & !taken.0)
    }

    /// The intersection; `None` if that allows neither a read nor a write.
    pub const fn intersection(self, other: Self) -> Option<Self> {
        let both = Self(self.0 & other.0);
        if both.0 & (Self::READ.0 | Self::WRITE.0) == 0 { None } else { Some(both) }
    }

    /// The permissions of an unprivileged data request.
    pub fn for_device(self) -> Option<Permissions> {
        if !self.contains(Self::USER) {
            return None;
        }
        match (self.contains(Self::READ), self.contains(Self::WRITE)) {
            (true, true) => Some(Permissions::READ_WRITE),
            (true, false) => Some(Permissions::READ),
            (false, true) => Some(Permissions::WRITE),
            (false, false) => None,
        }
    }

    /// These rights, without `right` unless `granted`.
    pub(super) const fn only_if(self, granted: bool, right: Self) -> Self {
        if granted { self } else { self.without(right) }
    }
}

impl BitOr for Rights {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |right, letter| if self.contains(right) { letter } else { '-' };
        let letters = [(Self::READ, 'r'), (Self::WRITE, 'w'), (Self::EXECUTE, 'x'), (Self::USER, 'u')];
        letters.into_iter().try_for_each(|(right, name)| write!(f, "{}", letter(right, name)))
    }
}
