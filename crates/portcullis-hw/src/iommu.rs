//! What kernels ask of every unit that walks page tables in memory.

use alloc::sync::Arc;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::InvalidationQueue;
use portcullis::pgtable::{Format, PageTable};
use portcullis::platform::{Frames, Platform};

use crate::domain::{self, DomainError, UnitDomainBuilder, UnitTables};
use crate::fault::Fault;
use crate::host::UnitError;
use crate::numbers::Numbers;

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
/// The order of its life: made by its module's `start`, domains for what must not be interrupted
/// ([`domain`](Self::domain)) and their devices, [`enable`](Self::enable), attach and detach as devices come and go,
/// [`shut_down`](Self::shut_down). Its structures stay allocated when it is dropped instead, as the hardware goes on reading them.
///
/// An `Arc` of a unit is the unit. CPUs share their waits for it where [`Host::cpus`](crate::Host::cpus) says how many there are.
///
/// # Safety
/// Devices are attached by safe calls of a [`UnitDomain`](crate::UnitDomain), which relies on the unit:
///
/// 1. From [`attach`](Self::attach) until [`detach`](Self::detach) has returned `Ok`, a device reaches what its table maps, and what
///    the unit has cached under the domain's number and was not asked to forget. It reaches nothing else.
/// 2. When `detach` has returned `Ok`, or [`UnitError::NotAttached`], the device reaches nothing, none of its accesses is under way,
///    and the unit reads no table on its behalf. What was cached under the domain's number is forgotten.
/// 3. After an error of `attach` that [changes nothing](UnitError::changes_nothing) the device is led where it was.
/// 4. The unit walks tables of [`layout`](Self::layout), which is always the same, in memory of [`frames`](Self::frames).
/// 5. [`numbers`](Self::numbers) are always the same, those of all that stand for this unit, and of no other.
pub unsafe trait Iommu<X: Format>: InvalidationQueue {
    /// The memory that the unit's structures are made of, and its domains' tables.
    type Frames: Frames;

    /// That memory.
    fn frames(&self) -> &Self::Frames;

    /// The numbers of its domains that are in use.
    fn numbers(&self) -> &Numbers;

    /// Begins the domain `number`, which no other has: its table, which is of the unit's layout and memory. It hands out no address
    /// that the unit does not translate: above [`last_iova`](Self::last_iova), or [reserved](Self::reserved). Allocates the table's
    /// root; waits for nothing.
    ///
    /// # Errors
    /// [`UnitError::NoSuchDomain`], [`UnitError::DomainInUse`], [`UnitError::Lacks`] (see [`layout`](Self::layout)); those of
    /// [`PageTable::new`].
    fn domain<P: Platform>(
        self: &Arc<Self>,
        number: DomainId,
    ) -> Result<UnitDomainBuilder<UnitTables<X, Self>, P>, DomainError>
    where
        Self: Sized,
        Self::Frames: Clone,
    {
        domain::tables(self, number)
    }

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
    /// [`UnitDomain::attach`](crate::UnitDomain::attach) is this for the unit's own domains, and safe. This is for tables that others
    /// have made, and for devices that pass through.
    ///
    /// # Safety
    /// 1. A table that is named has that layout, all its changes are told to this unit as that domain's, and it exists until
    ///    [`detach`](Self::detach) of the device has returned `Ok`.
    /// 2. All tables that are attached to this unit under one number at a time are the same table, and a number that
    ///    [`domain`](Self::domain) has given is that domain's: the unit takes what it has cached under a number for its domain's.
    /// 3. A device without translation reaches all memory: the caller answers for it.
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

// SAFETY: all is the unit's own answer, and its queue passes everything on.
unsafe impl<X: Format, U: Iommu<X>> Iommu<X> for Arc<U> {
    type Frames = U::Frames;

    fn frames(&self) -> &Self::Frames {
        U::frames(self)
    }

    fn numbers(&self) -> &Numbers {
        U::numbers(self)
    }

    fn layout(&self) -> Result<X, UnitError> {
        U::layout(self)
    }

    fn domains(&self) -> (DomainId, DomainId) {
        U::domains(self)
    }

    fn last_iova(&self) -> Iova {
        U::last_iova(self)
    }

    fn reserved(&self) -> &'static [IovaRange] {
        U::reserved(self)
    }

    fn enable(&self) -> Result<(), UnitError> {
        U::enable(self)
    }

    unsafe fn attach(&self, device: DeviceId, to: Attachment<X>) -> Result<(), UnitError> {
        // SAFETY: the caller's promise, clause by clause.
        unsafe { U::attach(self, device, to) }
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitError> {
        U::detach(self, device)
    }

    fn next_fault(&self) -> Option<Fault> {
        U::next_fault(self)
    }

    /// Where this is the last that has it: [`UnitError::Shared`] else.
    fn shut_down(self) -> Result<(), UnitError> {
        Arc::into_inner(self).ok_or(UnitError::Shared)?.shut_down()
    }
}

/// The addresses from `first` to `last`, for constants.
pub(crate) const fn addresses(first: u64, last: u64) -> IovaRange {
    match IovaRange::from_bounds(Iova::new(first), Iova::new(last)) {
        Ok(range) => range,
        Err(_) => panic!("a constant's last address is below its first"),
    }
}
