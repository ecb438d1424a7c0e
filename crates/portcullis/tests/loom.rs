//! The lock-free parts under the loom model checker: `cargo xtask test` runs this with `--cfg loom`.
//! Without that configuration the file is empty.
#![cfg(loom)]

mod loom {
    pub mod biased_lock;
    pub mod device_tlb;
    pub mod domain;
    pub mod flush_queue;
    pub mod frames;
    pub mod reclaim;
    pub mod replace;
    pub mod sections;
    pub mod shared;
    pub mod swiotlb;
    pub mod table;
    pub mod ticket_lock;
}
