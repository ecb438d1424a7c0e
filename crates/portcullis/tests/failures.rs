//! Failures of other systems that the design is to exclude, one file for each: tests that would catch them.
//!
//! Those of the address allocator are in `iova_space.rs` and `iova_failures.rs`.

mod chosen;
mod common;
mod queued;
mod rig;

mod failures {
    pub mod f06_timer_drains;
    pub mod f07_freed_before_invalidated;
    pub mod f08_half_a_batch;
    pub mod f09_page_tables;
    pub mod f18_lock_held_while_hardware_works;
}
