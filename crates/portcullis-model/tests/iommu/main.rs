//! The software IOMMU: its walkers, caches, queue and ledger.

#[path = "../common/mod.rs"]
mod common;

mod coherence;
mod device_tlb;
#[path = "../../../portcullis/tests/dice/mod.rs"]
mod dice;
mod exposure;
mod formats;
#[path = "../../../portcullis/tests/golden/mod.rs"]
mod golden;
mod invalidation;
mod iotlb;
mod ledger;
mod memory;
mod opened;
mod rings;
#[path = "../../../portcullis/tests/said/mod.rs"]
mod said;
mod scale;
mod sentences;
mod strict_tables;
mod translation;
mod walk_cache;
mod whole;
