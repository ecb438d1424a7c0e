//! Names by audience: [`driver`] for a driver's author, and [`kernel`] for an embedder that gives drivers a domain (a
//! kernel, a VMM, a program in user space). `use portcullis::prelude::*` has all of them.

pub use self::driver::*;
pub use self::kernel::*;

/// For authors of drivers, who are given a [`Device`].
pub mod driver {
    pub use crate::SetupError;
    pub use crate::addr::{Direction, DmaSegment, Iova};
    pub use crate::dma::{
        BufferList, BufferPool, CoherentMemory, Device, DmaBuffer, DmaMapError, DmaMask, DmaUnmapError,
        Ended, Machine, Mapping, NotMapped, NotUnmapped, PoolBuffer, Queue, QueueConfig,
    };
    pub use crate::domain::Policy;
}

/// For embedders, who make domains, and map by physical address.
pub mod kernel {
    pub use crate::SetupError;
    pub use crate::addr::{DeviceId, DomainId, IovaRange, PhysAddr, PhysSegment};
    pub use crate::bounce::PoolConfig;
    pub use crate::dma::{AnyQueue, DmaDomain, DmaMask, Machine, RawMapping};
    pub use crate::domain::{Domain, Policy};
    pub use crate::pgtable::{AmdV1, Arm, PageTable, Riscv, VtdSecondStage, X86FirstStage};
    pub use crate::platform::{CopyMemory, Frames, Platform};
    #[cfg(feature = "std")]
    pub use crate::std_platform::StdPlatform;
}
