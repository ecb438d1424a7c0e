//! The tables of `docs/strict.md`: strict protection in front of the software IOMMU, set as the hardware of "Fast
//! & Safe" (SOSP 2024) is thought to be. Everything comes out of the simulated caches and repeats exactly.

pub mod machine;
pub mod paper;
pub mod throughput;

mod driver;
mod linux;
