//! What kernels ask of every unit that walks page tables in memory.

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::InvalidationQueue;
use portcullis::pgtable::{Format, PageTable};
use portcullis::platform::Frames;

use crate::fault::Fault;
use crate::host::UnitError;

/// What a device is led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attachment<X> {
    /// The page table of a domain.
    Table {
        /// The domain's number, by which it asks for invalidations.
        domain: DomainId,
        /// The root of its page table.
        root: PhysAddr,
        /// The layout of the page table.
        format: X,
    },
    /// All memory, by its physical addresses.
    PassThrough,
}

impl<X: Format + Copy> Attachment<X> {
    /// The page table of the domain `number`.
    pub fn table<F: Frames>(number: DomainId, table: &PageTable<F, X>) -> Self {
        Self::Table { domain: number, root: table.root(), format: *table.format() }
    }
}

/// A unit that walks page tables of layout `X`, and is the queue of its domains' invalidations.
///
/// The order of its life: made by its module's `start`, [`attach`](Self::attach) for what must not be interrupted,
/// [`enable`](Self::enable), attach and detach as devices come and go, [`shut_down`](Self::shut_down). Its structures stay
/// allocated when it is dropped instead, as the hardware goes on reading them.
pub trait Iommu<X: Format>: InvalidationQueue {
    /// The layout for the page tables of domains: the widest that is common, with large pages, as far as the unit has them.
    ///
    /// # Errors
    /// [`UnitError::Lacks`]: the unit walks no tables of this kind.
    fn layout(&self) -> Result<X, UnitError>;

    /// The numbers that domains may have, the first and the last.
    fn domains(&self) -> (DomainId, DomainId);

    /// The last address that a device may use. Of more, the unit refuses all, even where the tables go on:
    /// a domain [hands out none above it](portcullis::dma::DomainBuilder::last_iova).
    fn last_iova(&self) -> Iova;

    /// The addresses that the unit translates for no device, whatever tables say: on a PC, writes
    /// there are interrupts. The mappers of its domains must keep them out of use
    /// ([`reserve`](portcullis::dma::DomainBuilder::reserve)).
    fn reserved(&self) -> &'static [IovaRange] {
        &[]
    }

    /// Lets no device reach anything but what it is attached to, from the moment that this returns `Ok`. The unit forgets whatever it
    /// has cached. It may have translated before, by firmware's tables: then no moment is without translation, unless the driver's own
    /// documentation names one. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`], [`UnitError::Unconfirmed`]: call this again. Until it has returned `Ok`, devices may reach anything.
    fn enable(&self) -> Result<(), UnitError>;

    /// Leads `device` to `to`. May allocate frames for structures of the unit's, which stay. O(1); waits for the unit where that
    /// caches what is absent.
    ///
    /// # Errors
    /// [`UnitError::Attached`], [`UnitError::NoSuchDevice`], [`UnitError::NoSuchDomain`], [`UnitError::NoSuchTables`],
    /// [`UnitError::BadRoot`], [`UnitError::Lacks`] for a unit without pass-through, [`UnitError::OutOfMemory`]: nothing has changed.
    /// [`UnitError::Unconfirmed`], [`UnitError::TimedOut`]: the device counts as attached, and may be refused.
    ///
    /// # Safety
    /// - A table that is named has that layout, all its changes are told to this unit as that domain's, and it exists until
    ///   [`detach`](Self::detach) of the device has returned `Ok`.
    /// - All tables that are attached to this unit under one number at a time are the same table: the unit takes what it has
    ///   cached under a number for its domain's.
    /// - A device without translation reaches all memory: the caller answers for it.
    unsafe fn attach(&self, device: DeviceId, to: Attachment<X>) -> Result<(), UnitError>;

    /// Leads `device` to nothing. When this returns `Ok`, its accesses are refused, and none of those before is under way (where
    /// the unit can wait for them). Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::NotAttached`], [`UnitError::NoSuchDevice`]. [`UnitError::Unconfirmed`], [`UnitError::TimedOut`]: the device may
    /// still reach what it was attached to, and is attached until another call returns `Ok`.
    fn detach(&self, device: DeviceId) -> Result<(), UnitError>;

    /// The next refused access that the unit has recorded, if there is one. What comes while its records are full is lost. Waits for
    /// nothing.
    fn next_fault(&self) -> Option<Fault>;

    /// Turns the unit off and gives its memory back. **Devices then reach all memory**, as without an IOMMU. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`], [`UnitError::Unconfirmed`]: the unit may go on, and its memory stays allocated.
    fn shut_down(self) -> Result<(), UnitError>
    where
        Self: Sized;
}

/// The addresses from `first` to `last`, for constants.
pub(crate) const fn addresses(first: u64, last: u64) -> IovaRange {
    match IovaRange::from_bounds(Iova::new(first), Iova::new(last)) {
        Ok(range) => range,
        Err(_) => panic!("a constant's last address is below its first"),
    }
}
