//! The domains of a unit, made in one way: [`Iommu::domain`], a builder, [`UnitDomain::attach`].
//!
//! Invariant: **a device is led to the tables of the domain that it is attached to, and these exist until it is led there no
//! more.** So attaching is safe. What `Iommu::attach` asks of its caller holds by ownership:
//!
//! | clause | what makes it hold |
//! |---|---|
//! | the table has the unit's layout | [`Iommu::domain`] makes it of [`Iommu::layout`] |
//! | its changes are told to this unit, as that domain's | its mapper has a [`UnitQueue`], which has the unit and the number |
//! | it exists until the device is detached | a [`UnitDomain`] keeps it until then, and for ever where the unit does not confirm that |
//! | one number, one table | a [`UnitQueue`] has its number alone, from before its table is there until after that is gone |
//!
//! Who has no unit of these drivers builds domains by [`portcullis::dma::DomainBuilder`], and leads devices there by other means.

mod builder;
mod tables;

pub use builder::UnitDomainBuilder;
pub(crate) use tables::builder as tables;
pub use tables::{UnitQueue, UnitTables};

use alloc::vec::Vec;
use core::fmt;
use core::mem::ManuallyDrop;

use portcullis::SetupError;
use portcullis::addr::{DeviceId, Iova, IovaRange};
use portcullis::dma::{Device, DmaDomain, DmaMask, Machine};
use portcullis::mapper::Mapper;
use portcullis::pgtable::MapError;

use crate::host::UnitError;
use crate::sync::Mutex;

/// A mapper with its unit, which leads devices to it.
///
/// # Safety
/// 1. From [`attach_device`](Self::attach_device) until a [`detach_device`](Self::detach_device) of the device has returned `Ok`,
///    the device reaches what this mapper maps, and nothing else.
/// 2. When `detach_device` has returned `Ok`, or [`UnitError::NotAttached`], the unit reads nothing of the mapper's on the
///    device's behalf any more, and the device reaches nothing by it.
/// 3. After an error of `attach_device` that [changes nothing](UnitError::changes_nothing) the device is led where it was.
pub unsafe trait UnitMapper: Mapper {
    /// Leads `device` here, whose domain hands out none of the addresses in `kept`.
    ///
    /// # Errors
    /// Those of [`Iommu::attach`](crate::Iommu::attach); [`UnitError::Reserved`].
    ///
    /// # Safety
    /// The mapper exists until `detach_device` of the device has returned `Ok` or [`UnitError::NotAttached`], unless this returns an
    /// error that changes nothing.
    unsafe fn attach_device(&self, device: DeviceId, kept: &[IovaRange]) -> Result<(), UnitError>;

    /// Leads `device`, which is attached here, to nothing.
    ///
    /// # Errors
    /// Those of [`Iommu::detach`](crate::Iommu::detach).
    fn detach_device(&self, device: DeviceId) -> Result<(), UnitError>;

    /// The addresses that `device` keeps for itself, as far as the unit can tell.
    ///
    /// # Errors
    /// [`UnitError`], where the unit was asked and did not say.
    fn kept_by(&self, device: DeviceId) -> Result<Vec<IovaRange>, UnitError> {
        let _ = device;
        Ok(Vec::new())
    }
}

/// Why a domain of a unit was not made, or a device not attached to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DomainError {
    /// The unit cannot do it, or has not done it.
    #[error(transparent)]
    Unit(#[from] UnitError),
    /// The domain, its table or its device cannot be made.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// Firmware reserves addresses that the unit does not translate: beyond its last, or in its interrupt window.
    #[error(
        "firmware reserves {range} for a device, and the IOMMU does not translate all of it: it translates addresses up to {last}, \
         and none of its interrupt window"
    )]
    Untranslated {
        /// What is reserved.
        range: IovaRange,
        /// The last address that the domain can translate.
        last: Iova,
    },
    /// What firmware reserves cannot be mapped.
    #[error("what firmware reserves for devices cannot be mapped one to one: {0}")]
    Region(MapError),
    /// The policy leaves devices without translation.
    #[error(
        "a unit's domain translates, whatever its policy: a device is let through to all memory by `Attachment::PassThrough`"
    )]
    PassThrough,
}

/// A domain of a unit: its devices are attached to the domain and to the unit in one call.
///
/// Dropped, it detaches its devices, each of which waits for the unit. Where the unit does not confirm that, the domain's tables
/// stay allocated for ever, and its number in use, as the device may still be led there. A caller that is to learn of this
/// [detaches](Self::detach) its devices before.
pub struct UnitDomain<X: Machine>
where
    X::Mapper: UnitMapper,
{
    dma: DmaDomain<X>,
    /// Addresses that are never handed out.
    kept: Vec<IovaRange>,
    /// Devices that are led to the mapper, or may be. Held while the unit is waited for: nothing but attaching waits for it.
    attached: Mutex<Vec<DeviceId>>,
}

impl<X: Machine> fmt::Debug for UnitDomain<X>
where
    X::Mapper: UnitMapper,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnitDomain").field("attached", &*self.attached.lock()).finish_non_exhaustive()
    }
}

impl<X: Machine> UnitDomain<X>
where
    X::Mapper: UnitMapper,
{
    fn new(dma: DmaDomain<X>, kept: Vec<IovaRange>) -> Self {
        Self { dma, kept, attached: Mutex::new(Vec::new()) }
    }

    /// The domain as drivers have it: its address space, its pool.
    pub fn dma(&self) -> &DmaDomain<X> {
        &self.dma
    }

    /// Makes `device` one of this domain, with the addresses that it can put on the bus, and leads it to the domain's
    /// translations: it reaches what is mapped here, and nothing else. Waits for the unit; allocates a unit's structures.
    ///
    /// # Errors
    /// [`SetupError::BeyondReach`], and those of [`Iommu::attach`](crate::Iommu::attach): [`UnitError::Attached`] where the device
    /// is attached anywhere. The device is attached to nothing then, and reaches nothing, unless the unit did not confirm
    /// that either: [`detach`](Self::detach) tries again.
    pub fn attach(&self, device: DeviceId, mask: DmaMask) -> Result<Device<X>, DomainError> {
        let made = self.dma.attach(device, mask)?;
        let mut attached = self.attached.lock();
        if attached.contains(&device) {
            return Err(UnitError::Attached { device: device.0 }.into());
        }
        // Before it is led anywhere: whatever becomes of the call, `drop` knows of the device.
        attached.try_reserve(1).map_err(|_| UnitError::OutOfMemory)?;
        attached.push(device);
        let mapper = self.dma.space().mapper();
        // SAFETY: the mapper is the domain's, which this value has until `detach` or `drop` have detached the device; where that
        // is not confirmed, the domain is never dropped.
        let error = match unsafe { mapper.attach_device(device, &self.kept) } {
            Ok(()) => return Ok(made),
            Err(error) => error,
        };
        if error.changes_nothing() || is_gone(mapper.detach_device(device)) {
            attached.retain(|other| *other != device);
        }
        Err(error.into())
    }

    /// Leads `device` to nothing: when this returns `Ok`, its accesses are refused, and none of those before is under way. Waits
    /// for the unit. What is mapped for it stays mapped for the domain's other devices until its queues unmap it.
    ///
    /// # Errors
    /// [`UnitError::NotAttached`] where the device is none of this domain's. [`UnitError::Unconfirmed`],
    /// [`UnitError::TimedOut`]: it may still reach what is mapped here, and is attached until another call returns `Ok`.
    pub fn detach(&self, device: DeviceId) -> Result<(), UnitError> {
        let mut attached = self.attached.lock();
        if !attached.contains(&device) {
            return Err(UnitError::NotAttached { device: device.0 });
        }
        let detached = self.dma.space().mapper().detach_device(device);
        if is_gone(detached) {
            attached.retain(|other| *other != device);
            return Ok(());
        }
        detached
    }
}

/// Whether a device is led to the mapper no more.
fn is_gone(detached: Result<(), UnitError>) -> bool {
    matches!(detached, Ok(()) | Err(UnitError::NotAttached { .. }))
}

impl<X: Machine> Drop for UnitDomain<X>
where
    X::Mapper: UnitMapper,
{
    fn drop(&mut self) {
        // Also where the unit's driver panics, as a host may.
        let kept = ManuallyDrop::new(self.dma.clone());
        let mapper = self.dma.space().mapper();
        let attached = self.attached.get_mut();
        attached.retain(|device| !is_gone(mapper.detach_device(*device)));
        if attached.is_empty() {
            drop(ManuallyDrop::into_inner(kept));
        }
    }
}
