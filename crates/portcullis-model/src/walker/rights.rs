//! What page-table entries allow, in the terms of all formats together.

use std::fmt;
use std::ops::BitOr;

use portcullis::addr::Permissions;

/// What entries allow. A format without one of these rights always grants it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rights(u8);

impl Rights {
    /// Reads.
    pub const READ: Self = Self(1);
    /// Writes.
    pub const WRITE: Self = Self(2);
    /// Reads of code (by requests without privilege).
    pub const EXECUTE: Self = Self(4);
    /// All that is allowed is allowed to requests without privilege too, which is what devices send.
    pub const USER: Self = Self(8);
    /// Everything.
    pub const ALL: Self = Self(15);

    /// Whether all of `wanted` is allowed.
    pub const fn contains(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }

    /// What is left without `taken`.
    pub const fn without(self, taken: Self) -> Self {
        Self(self.0 & !taken.0)
    }

    /// What both allow; `None` where that is neither a read nor a write by anybody.
    pub const fn intersection(self, other: Self) -> Option<Self> {
        let both = Self(self.0 & other.0);
        if both.0 & (Self::READ.0 | Self::WRITE.0) == 0 { None } else { Some(both) }
    }

    /// What a device's request without privilege may do with data.
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

    /// These rights if `granted`, or else those without `right`.
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
