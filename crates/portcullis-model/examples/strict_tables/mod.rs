//! The tables of `docs/strict.md`: strict protection on the software IOMMU, configured like the presumed hardware of "Fast & Safe" (SOSP
//! 2024). All figures come from the simulated caches and repeat exactly.

pub mod machine;
pub mod paper;
pub mod throughput;

mod driver;
mod linux;
