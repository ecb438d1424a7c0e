//! The names that the author of a driver needs, in one line: `use portcullis::prelude::*`.

pub use crate::SetupError;
pub use crate::addr::{DeviceId, Direction, DmaSegment, DomainId, Iova, IovaRange, PhysAddr, PhysSegment};
pub use crate::bounce::PoolConfig;
pub use crate::dma::{
    AnyQueue, CoherentMemory, Device, DmaBuffer, DmaDomain, DmaMapError, DmaMask, DmaUnmapError, Ended,
    Machine, Mapping, Queue, QueueConfig, RawMapping,
};
pub use crate::domain::{Domain, Policy};
pub use crate::pgtable::{AmdV1, Arm, PageTable, Riscv, VtdSecondStage, X86FirstStage};
#[cfg(feature = "std")]
pub use crate::std_platform::StdPlatform;
