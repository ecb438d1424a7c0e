//! Addresses, page sizes, ranges, pieces of memory, and the names of devices and domains: newtypes with checked
//! arithmetic only. All are plain values: no function allocates, blocks or takes longer than a few instructions.

mod range;

pub use range::IovaRange;

use core::fmt;

/// Why a range cannot exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddrError {
    /// A range of no bytes has no address.
    #[error("no range at {start:#x}: a range holds at least one byte")]
    EmptyRange {
        /// Where the range would have begun.
        start: u64,
    },
    /// The range's last byte lies past the end of the 64-bit address space, or the range is all of that space, whose
    /// length 64 bits cannot hold (`len` is `u64::MAX` then).
    #[error("the range at {start:#x} runs past the end of the 64-bit address space, or is all of it")]
    Wraps {
        /// Where the range begins.
        start: u64,
        /// Its length in bytes.
        len: u64,
    },
}

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl From<$name> for u64 {
            fn from(address: $name) -> Self {
                address.0
            }
        }

        impl $name {
            /// The address `value`.
            pub const fn new(value: u64) -> Self {
                Self(value)
            }

            /// The address as a number.
            pub const fn get(self) -> u64 {
                self.0
            }

            /// The address `bytes` further on; `None` if that wraps.
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// The distance from `earlier` in bytes; `None` if `earlier` is above this address.
            pub const fn offset_from(self, earlier: Self) -> Option<u64> {
                self.0.checked_sub(earlier.0)
            }

            /// The start of the page of size `size` that holds this address.
            pub const fn align_down(self, size: PageSize) -> Self {
                Self(self.0 & !size.offset_mask())
            }

            /// Bytes from the start of the page of size `size` to this address.
            pub const fn page_offset(self, size: PageSize) -> u64 {
                self.0 & size.offset_mask()
            }

            /// Whether a page of size `size` begins here.
            pub const fn is_aligned(self, size: PageSize) -> bool {
                self.page_offset(size) == 0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }

        impl fmt::LowerHex for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, f)
            }
        }
    };
}

address! {
    /// An I/O virtual address: what a device puts on the bus, in bytes.
    Iova
}

address! {
    /// A physical address: where the memory is, in bytes.
    PhysAddr
}

/// The size of a page in bytes: a power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSize {
    offset_mask: u64,
}

impl PageSize {
    /// 4 KiB.
    pub const SIZE_4K: Self = Self { offset_mask: (1 << 12) - 1 };
    /// 2 MiB.
    pub const SIZE_2M: Self = Self { offset_mask: (1 << 21) - 1 };
    /// 1 GiB.
    pub const SIZE_1G: Self = Self { offset_mask: (1 << 30) - 1 };

    /// The page size of 2^`shift` bytes; `None` if 64 bits cannot hold it.
    pub const fn from_shift(shift: u32) -> Option<Self> {
        if shift < u64::BITS { Some(Self { offset_mask: (1 << shift) - 1 }) } else { None }
    }

    /// The binary logarithm of the size in bytes.
    pub const fn shift(self) -> u32 {
        self.bytes().trailing_zeros()
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        self.offset_mask + 1
    }

    /// The bits of an address that count bytes inside the page.
    pub const fn offset_mask(self) -> u64 {
        self.offset_mask
    }

    /// `bytes` rounded up to whole pages; `None` if that wraps.
    pub const fn round_up(self, bytes: u64) -> Option<u64> {
        match bytes.checked_add(self.offset_mask()) {
            Some(sum) => Some(sum & !self.offset_mask()),
            None => None,
        }
    }
}

/// A set of page sizes, one bit for each power of two.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PageSizes(u64);

impl PageSizes {
    /// No page size at all.
    pub const EMPTY: Self = Self(0);

    /// The set with `size` added.
    pub const fn with(self, size: PageSize) -> Self {
        Self(self.0 | size.bytes())
    }

    /// Whether `size` is in the set.
    pub const fn contains(self, size: PageSize) -> bool {
        self.0 & size.bytes() != 0
    }

    /// The smallest size in the set, the *granule*; `None` for the empty set.
    pub const fn smallest(self) -> Option<PageSize> {
        PageSize::from_shift(self.0.trailing_zeros())
    }
}

impl fmt::Debug for PageSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageSizes({:#x})", self.0)
    }
}

/// A physically contiguous piece of a buffer. Two words, the address first, so that lists from C need no copy.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PhysSegment {
    /// Where it begins.
    pub phys: PhysAddr,
    /// Its length in bytes.
    pub len: u64,
}

impl PhysSegment {
    /// The address of its last byte.
    ///
    /// # Errors
    /// [`AddrError::EmptyRange`] for no bytes, [`AddrError::Wraps`] if the last byte has no address.
    #[inline]
    pub(crate) fn last(self) -> Result<PhysAddr, AddrError> {
        let Self { phys, len } = self;
        let distance = len.checked_sub(1).ok_or(AddrError::EmptyRange { start: phys.0 })?;
        phys.checked_add(distance).ok_or(AddrError::Wraps { start: phys.0, len })
    }

    /// Bytes of the granules that it touches. Meaningless if the end wraps, which the caller checks.
    #[inline]
    pub(crate) const fn bytes_of_granules(self, granule: PageSize) -> u64 {
        let mask = granule.offset_mask();
        (self.phys.0 & mask).wrapping_add(self.len).wrapping_add(mask) & !mask
    }
}

/// Whether all pieces of a list but the first begin at a granule, and all but the last end at one, so that one segment
/// covers them for the device. The sums were checked.
#[inline]
pub(crate) fn touch(list: &[PhysSegment], granule: PageSize) -> bool {
    let ends = |piece: &PhysSegment| piece.phys.0.wrapping_add(piece.len);
    // Without a branch for each pair, as the pieces of most lists do touch.
    list.windows(2).fold(0, |all, pair| all | ends(&pair[0]) | pair[1].phys.0) & granule.offset_mask() == 0
}

/// A piece of a mapping as the device sees it: what a driver writes into a descriptor. Laid out as a [`PhysSegment`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DmaSegment {
    /// The address for the device.
    pub iova: Iova,
    /// Its length in bytes.
    pub len: u64,
}

/// The number by which the hardware's caches tell address spaces apart. Most IOMMUs have 16 bits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u16);

/// A device as the IOMMU knows it, in 32 bits: by a PCI segment and requester ID, a stream ID, or another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

/// What a device may do with the memory behind a translation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Permissions(u8);

impl Permissions {
    /// The device may read.
    pub const READ: Self = Self(1);
    /// The device may write.
    pub const WRITE: Self = Self(2);
    /// The device may do both.
    pub const READ_WRITE: Self = Self(3);

    /// The permissions to read, write, or both; `None` for neither.
    pub const fn of(read: bool, write: bool) -> Option<Self> {
        match (read, write) {
            (false, false) => None,
            (true, false) => Some(Self::READ),
            (false, true) => Some(Self::WRITE),
            (true, true) => Some(Self::READ_WRITE),
        }
    }

    /// Whether all of `wanted` is allowed.
    pub const fn allows(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }
}

impl fmt::Debug for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            1 => "r-",
            2 => "-w",
            _ => "rw",
        })
    }
}

/// Which way the data of a mapping goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The device reads memory (a transmit buffer, a disk write).
    ToDevice,
    /// The device writes memory (a receive buffer, a disk read).
    FromDevice,
    /// Both.
    Bidirectional,
}

impl Direction {
    /// All of them, by [number](Self::index).
    pub const ALL: [Self; 3] = [Self::ToDevice, Self::FromDevice, Self::Bidirectional];

    /// Its number in [`ALL`](Self::ALL).
    #[inline]
    pub const fn index(self) -> usize {
        match self {
            Self::ToDevice => 0,
            Self::FromDevice => 1,
            Self::Bidirectional => 2,
        }
    }

    /// The inverse of [`index`](Self::index) for the lowest two bits; 3 also gives `Bidirectional`.
    #[inline]
    pub(crate) const fn from_bits(index: u64) -> Self {
        match index & 3 {
            0 => Self::ToDevice,
            1 => Self::FromDevice,
            _ => Self::Bidirectional,
        }
    }

    /// The permissions that this direction needs.
    pub const fn permissions(self) -> Permissions {
        match self {
            Self::ToDevice => Permissions::READ,
            Self::FromDevice => Permissions::WRITE,
            Self::Bidirectional => Permissions::READ_WRITE,
        }
    }
}
