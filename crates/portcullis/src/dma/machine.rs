//! [`Machine`]: mapper, platform and memory as one type parameter.

use core::convert::Infallible;

use super::Clock;
use crate::addr::PhysAddr;
use crate::bounce::pool::BounceDevice;
use crate::dma::{AdaptiveRing, DmaDevice, RawBatch, StrictRing};
use crate::mapper::Mapper;
use crate::platform::{CopyMemory, Frames, Platform, Table};

/// The three types behind a queue (mapper, platform, memory) as one parameter: `struct Nic<X: Machine> { rx: Queue<X, Frame>, .. }`.
///
/// A kernel names its own once (`enum Kernel {}`, with [`build_as`](super::DomainBuilder::build_as)). Without a name, use the tuple of the three,
/// which [`build`](super::DomainBuilder::build) returns.
///
/// A driver in a `static` needs a concrete type: name all three. For an IOMMU that walks tables the mapper is a
/// [`TableMapper<F, Q, X>`](crate::mapper::TableMapper) of frames, the unit's queue, and the table format. (`portcullis-hw` calls that of its units
/// `UnitTables<X, U>`.)
///
/// ```
/// # #[cfg(feature = "std")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::convert::Infallible;
/// use std::sync::{Arc, Mutex};
///
/// use portcullis::mapper::TableMapper;
/// use portcullis::prelude::*;
/// use portcullis_model::{Buffer, Iommu, IommuConfig, Memory};
///
/// enum Kernel {}
///
/// impl Machine for Kernel {
///     type Mapper = TableMapper<Arc<Memory>, portcullis_model::Queue, VtdSecondStage>;
///     type Platform = StdPlatform;
///     type Memory = Infallible; // Where queues copy: the memory of `bounce(..)`.
/// }
///
/// struct Nic {
///     rx: Queue<Kernel, Buffer>,
///     posted: Vec<Mapping<Buffer>>,
/// }
///
/// static NIC: Mutex<Option<Nic>> = Mutex::new(None);
///
/// # let memory = Memory::new(16 << 20);
/// # let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
/// # let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level())?;
/// let domain = Domain::builder(table, iommu.queue(), DomainId(1)).build_as::<Kernel>(StdPlatform::new())?;
/// let device = domain.attach(DeviceId(0), DmaMask::BITS_64)?;
/// *NIC.lock()? = Some(Nic { rx: device.queue(QueueConfig::ring(512, 4096))?, posted: Vec::new() });
/// # let buffer = memory.buffer(2048).ok_or("no memory")?;
/// # let mut nic = NIC.lock()?;
/// # let nic = nic.as_mut().ok_or("no card")?;
/// # nic.posted.push(nic.rx.map(buffer, Direction::FromDevice)?);
/// # nic.rx.unmap_all(nic.posted.drain(..), |_| ())?;
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "std"))]
/// # fn main() {}
/// ```
pub trait Machine: 'static {
    /// Changes translations.
    type Mapper: Mapper;
    /// CPUs, the clock, the timer.
    type Platform: Platform;
    /// Copies, for strategies that copy; [`Infallible`], which has no value, if none does. A clone is the same memory.
    type Memory: CopyMemory + Clone;
}

impl<M: Mapper, P: Platform, C: CopyMemory + Clone> Machine for (M, P, C) {
    type Mapper = M;
    type Platform = P;
    type Memory = C;
}

pub(in crate::dma) type DeviceOf<X> = DmaDevice<<X as Machine>::Mapper, <X as Machine>::Platform>;
pub(in crate::dma) type BatchOf<X> = RawBatch<<X as Machine>::Mapper, <X as Machine>::Platform>;
pub(in crate::dma) type RingOf<X> = StrictRing<<X as Machine>::Mapper, <X as Machine>::Platform>;
pub(in crate::dma) type CopyingOf<X> =
    BounceDevice<<X as Machine>::Mapper, <X as Machine>::Platform, <X as Machine>::Memory>;
pub(in crate::dma) type AdaptiveOf<X> =
    AdaptiveRing<<X as Machine>::Mapper, <X as Machine>::Platform, <X as Machine>::Memory, Clock>;

/// The memory of a machine that copies nothing.
// SAFETY: there is no value to call a method of.
unsafe impl Frames for Infallible {
    fn alloc(&self, _: usize) -> Option<PhysAddr> {
        match *self {}
    }

    unsafe fn free(&self, _: PhysAddr, _: usize) {
        match *self {}
    }

    unsafe fn table(&self, _: PhysAddr) -> &Table {
        match *self {}
    }
}

// SAFETY: as above.
unsafe impl CopyMemory for Infallible {
    unsafe fn copy(&self, _: PhysAddr, _: PhysAddr, _: u64) {
        match *self {}
    }

    unsafe fn zero(&self, _: PhysAddr, _: u64) {
        match *self {}
    }
}
