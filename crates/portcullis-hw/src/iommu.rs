//! The interface of every unit that walks page tables in memory.

use alloc::sync::Arc;

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::InvalidationQueue;
use portcullis::pgtable::{Format, PageTable};
use portcullis::platform::{Frames, Platform};

use crate::domain::{self, DomainError, UnitDomainBuilder, UnitTables};
use crate::fault::Fault;
use crate::host::UnitError;
use crate::numbers::Numbers;

/// What a device is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attachment<X> {
    /// The page table of a domain.
    Table {
        /// The domain's number, which its invalidations name.
        domain: DomainId,
        /// The root of its page table.
        root: PhysAddr,
        /// The layout of the page table.
        format: X,
    },
    /// All memory, by physical addresses.
    PassThrough,
}

impl<X: Format + Copy> Attachment<X> {
    /// The table of the domain `number`.
    pub fn table<F: Frames>(number: DomainId, table: &PageTable<F, X>) -> Self {
        Self::Table { domain: number, root: table.root(), format: *table.format() }
    }
}

/// A unit that walks page tables of layout `X`, and is the queue of its domains' invalidations.
///
/// Life cycle: its module's `start`; domains and devices that must not be interrupted ([`domain`](Self::domain)); [`enable`](Self::enable);
/// attach and detach; [`shut_down`](Self::shut_down). A drop instead leaks its structures, because the hardware goes on reading them.
///
/// An `Arc` of a unit is the unit. CPUs share waits if [`Host::cpus`](crate::Host::cpus) gives their number.
///
/// # Safety
/// Safe calls of a [`UnitDomain`](crate::UnitDomain) attach devices, and rely on the unit:
///
/// 1. From [`attach`](Self::attach) until [`detach`](Self::detach) has returned `Ok`, a device reaches what its table maps, and what the
///    unit has cached under the domain's number and has not been asked to invalidate. It reaches nothing else.
/// 2. When `detach` has returned `Ok`, or [`UnitError::NotAttached`], the device reaches nothing, none of its accesses is outstanding, and
///    the unit reads no table on its behalf. What was cached under the domain's number is invalidated.
/// 3. After an error of `attach` that [changes nothing](UnitError::changes_nothing) the device is attached as before.
/// 4. The unit walks tables of [`layout`](Self::layout), which is always the same, in memory of [`frames`](Self::frames).
/// 5. [`numbers`](Self::numbers) always returns the same value, which all handles of this unit share, and no other unit.
pub unsafe trait Iommu<X: Format>: InvalidationQueue {
    /// The memory of the unit's structures and of its domains' tables.
    type Frames: Frames;

    /// That memory.
    fn frames(&self) -> &Self::Frames;

    /// The domain numbers in use.
    fn numbers(&self) -> &Numbers;

    /// Begins the domain `number`, which no other has, with a table of the unit's layout and memory. It allocates no address that the unit
    /// does not translate: above [`last_iova`](Self::last_iova), or [reserved](Self::reserved). Allocates the root of the table; does not
    /// wait.
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

    /// The layout of domains' page tables: the widest in common use, with large pages, as far as the unit supports them.
    ///
    /// # Errors
    /// [`UnitError::Lacks`]: the unit walks no tables of this kind.
    fn layout(&self) -> Result<X, UnitError>;

    /// The first and the last domain number.
    fn domains(&self) -> (DomainId, DomainId);

    /// The last address that a device may use. The unit refuses all above it, even if the tables go further: a domain [allocates none above
    /// it](portcullis::dma::DomainBuilder::last_iova).
    fn last_iova(&self) -> Iova;

    /// Addresses that the unit translates for no device, whatever tables say: on a PC, writes there are interrupts. The mappers of its
    /// domains must [reserve](portcullis::dma::DomainBuilder::reserve) them.
    fn reserved(&self) -> &'static [IovaRange] {
        &[]
    }

    /// Turns translation on: from the return of `Ok` a device reaches only what it is attached to. Invalidates all of the unit's caches. A
    /// unit that already translates, by firmware's tables, goes on without a gap, unless the driver documents one. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`], [`UnitError::Unconfirmed`]: call this again. Until it has returned `Ok`, devices may reach anything.
    fn enable(&self) -> Result<(), UnitError>;

    /// Attaches `device` to `to`. May allocate frames for the unit's structures, which stay. O(1); waits for the unit in caching mode.
    ///
    /// # Errors
    /// [`UnitError::Attached`], [`UnitError::NoSuchDevice`], [`UnitError::NoSuchDomain`], [`UnitError::NoSuchTables`],
    /// [`UnitError::BadRoot`], [`UnitError::Lacks`] for a unit without pass-through, [`UnitError::OutOfMemory`]: nothing has changed.
    /// [`UnitError::Unconfirmed`], [`UnitError::TimedOut`]: the device counts as attached, and may be refused.
    ///
    /// [`UnitDomain::attach`](crate::UnitDomain::attach) is this for the unit's own domains, and safe. Use this for tables made elsewhere,
    /// and for devices that pass through.
    ///
    /// # Safety
    /// 1. A named table has the named layout, its invalidations go to this unit under that domain's number, and it exists until
    ///    [`detach`](Self::detach) of the device has returned `Ok`.
    /// 2. All tables that are attached to this unit under one number at a time are the same table, and a number that
    ///    [`domain`](Self::domain) has assigned is that domain's: the unit tags its caches by the number.
    /// 3. A device without translation reaches all memory: the caller answers for it.
    unsafe fn attach(&self, device: DeviceId, to: Attachment<X>) -> Result<(), UnitError>;

    /// Detaches `device`. After `Ok` its accesses are refused, and no earlier one is outstanding (if the unit can wait for them). Waits for
    /// the unit.
    ///
    /// # Errors
    /// [`UnitError::NotAttached`], [`UnitError::NoSuchDevice`]. [`UnitError::Unconfirmed`], [`UnitError::TimedOut`]: the device may
    /// still reach what it was attached to, and is attached until another call returns `Ok`.
    fn detach(&self, device: DeviceId) -> Result<(), UnitError>;

    /// The next recorded fault, if there is one. Faults while the records are full are lost. Does not wait.
    fn next_fault(&self) -> Option<Fault>;

    /// Turns the unit off and frees its memory. **Devices then reach all memory**, as without an IOMMU. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`], [`UnitError::Unconfirmed`]: the unit may go on, and its memory stays allocated.
    fn shut_down(self) -> Result<(), UnitError>
    where
        Self: Sized;
}

// SAFETY: clauses 1 to 5, and those of the queue, are the unit's: each method passes its call on.
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
        // SAFETY: clauses 1 to 3 are the caller's.
        unsafe { U::attach(self, device, to) }
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitError> {
        U::detach(self, device)
    }

    fn next_fault(&self) -> Option<Fault> {
        U::next_fault(self)
    }

    /// Shuts down the unit if this is its last `Arc`: [`UnitError::Shared`] otherwise.
    fn shut_down(self) -> Result<(), UnitError> {
        Arc::into_inner(self).ok_or(UnitError::Shared)?.shut_down()
    }
}

pub(crate) const fn addresses(first: u64, last: u64) -> IovaRange {
    match IovaRange::from_bounds(Iova::new(first), Iova::new(last)) {
        Ok(range) => range,
        Err(_) => panic!("a constant's last address is below its first"),
    }
}
