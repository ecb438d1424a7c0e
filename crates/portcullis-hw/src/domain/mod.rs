//! The domains of a unit: [`Iommu::domain`], a builder, [`UnitDomain::attach`].
//!
//! Invariant: **a device uses the tables of the domain that it is attached to, and these exist until it no longer does.** So attaching is
//! safe. The clauses of `Iommu::attach` hold by ownership:
//!
//! | clause | why it holds |
//! |---|---|
//! | the table has the unit's layout | [`Iommu::domain`] makes it of [`Iommu::layout`] |
//! | its invalidations go to this unit, as that domain's | its mapper has a [`UnitQueue`], which has the unit and the number |
//! | it exists until the device is detached | a [`UnitDomain`] owns it until then, and leaks it if the unit does not confirm that |
//! | one number, one table | a [`UnitQueue`] has a number of its own, from before its table is there until after that is gone |
//!
//! A program without a unit of these drivers builds domains by [`portcullis::dma::DomainBuilder`], and attaches devices by other means.

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

/// A mapper and its unit, which attaches devices to it.
///
/// # Safety
/// 1. From [`attach_device`](Self::attach_device) until a [`detach_device`](Self::detach_device) of the device has returned `Ok`,
///    the device reaches what this mapper maps, and nothing else.
/// 2. When `detach_device` has returned `Ok`, or [`UnitError::NotAttached`], the unit reads nothing of the mapper's on the
///    device's behalf any more, and the device reaches nothing by it.
/// 3. After an error of `attach_device` that [changes nothing](UnitError::changes_nothing) the device is attached as before.
pub unsafe trait UnitMapper: Mapper {
    /// Attaches `device`, whose domain reserves the addresses in `kept`.
    ///
    /// # Errors
    /// Those of [`Iommu::attach`](crate::Iommu::attach); [`UnitError::Reserved`].
    ///
    /// # Safety
    /// 1. The mapper exists until `detach_device` of the device has returned `Ok` or [`UnitError::NotAttached`], unless this returns an
    ///    error that changes nothing.
    unsafe fn attach_device(&self, device: DeviceId, kept: &[IovaRange]) -> Result<(), UnitError>;

    /// Detaches `device`, which is attached here.
    ///
    /// # Errors
    /// Those of [`Iommu::detach`](crate::Iommu::detach).
    fn detach_device(&self, device: DeviceId) -> Result<(), UnitError>;

    /// The addresses that `device` reserves, as far as the unit can tell.
    ///
    /// # Errors
    /// [`UnitError`] if the unit did not answer.
    fn kept_by(&self, device: DeviceId) -> Result<Vec<IovaRange>, UnitError> {
        let _ = device;
        Ok(Vec::new())
    }
}

/// Why a unit's domain was not made, or a device not attached to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DomainError {
    /// The unit cannot do it, or did not do it.
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
        /// The reserved range.
        range: IovaRange,
        /// The last address that the domain can translate.
        last: Iova,
    },
    /// The memory that firmware reserves cannot be mapped.
    #[error("what firmware reserves for devices cannot be mapped one to one: {0}")]
    Region(MapError),
    /// The policy is passthrough.
    #[error(
        "a unit's domain translates, whatever its policy: a device is let through to all memory by `Attachment::PassThrough`"
    )]
    PassThrough,
}

/// A domain of a unit: one call attaches a device to both.
///
/// Drop detaches its devices; each waits for the unit. If the unit does not confirm that, the tables are leaked and the number stays in
/// use, because the device may still use them. A caller that must know of this calls [`detach`](Self::detach) before.
pub struct UnitDomain<X: Machine>
where
    X::Mapper: UnitMapper,
{
    dma: DmaDomain<X>,
    /// Reserved addresses.
    kept: Vec<IovaRange>,
    /// Devices that use the mapper, or may. Held during the wait for the unit: only attach and detach take it.
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

    /// The domain as drivers use it: its address space, its pool.
    pub fn dma(&self) -> &DmaDomain<X> {
        &self.dma
    }

    /// Attaches `device`, with its DMA mask: it reaches what the domain maps, and nothing else. Waits for the unit; allocates the unit's
    /// structures.
    ///
    /// # Errors
    /// [`SetupError::BeyondReach`], and those of [`Iommu::attach`](crate::Iommu::attach): [`UnitError::Attached`] if the device is attached
    /// anywhere. The device is then attached to nothing, and reaches nothing, unless the unit did not confirm that either:
    /// [`detach`](Self::detach) tries again.
    pub fn attach(&self, device: DeviceId, mask: DmaMask) -> Result<Device<X>, DomainError> {
        let made = self.dma.attach(device, mask)?;
        let mut attached = self.attached.lock();
        if attached.contains(&device) {
            return Err(UnitError::Attached { device: device.0 }.into());
        }
        // Before the attach: whatever happens to the call, `drop` knows of the device.
        attached.try_reserve(1).map_err(|_| UnitError::OutOfMemory)?;
        attached.push(device);
        let mapper = self.dma.space().mapper();
        // SAFETY: 1: this value owns the domain, and with it the mapper, until `detach` or `drop` have detached the device; if that is not
        // confirmed, the domain is never dropped.
        let error = match unsafe { mapper.attach_device(device, &self.kept) } {
            Ok(()) => return Ok(made),
            Err(error) => error,
        };
        if error.changes_nothing() || is_gone(mapper.detach_device(device)) {
            attached.retain(|other| *other != device);
        }
        Err(error.into())
    }

    /// Detaches `device`. After `Ok` its accesses are refused, and no earlier one is outstanding. Waits for the unit. Its mappings stay in
    /// the domain, for the other devices, until its queues unmap them.
    ///
    /// # Errors
    /// [`UnitError::NotAttached`] if the device is not this domain's. [`UnitError::Unconfirmed`], [`UnitError::TimedOut`]: it may still
    /// reach the domain's mappings, and stays attached until another call returns `Ok`.
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

/// Whether a device no longer uses the mapper.
fn is_gone(detached: Result<(), UnitError>) -> bool {
    matches!(detached, Ok(()) | Err(UnitError::NotAttached { .. }))
}

impl<X: Machine> Drop for UnitDomain<X>
where
    X::Mapper: UnitMapper,
{
    fn drop(&mut self) {
        // Even if the unit's driver panics.
        let kept = ManuallyDrop::new(self.dma.clone());
        let mapper = self.dma.space().mapper();
        let attached = self.attached.get_mut();
        attached.retain(|device| !is_gone(mapper.detach_device(*device)));
        if attached.is_empty() {
            drop(ManuallyDrop::into_inner(kept));
        }
    }
}
