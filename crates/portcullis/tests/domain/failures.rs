//! Failures of other systems that the design is to exclude, one file for each: tests that would catch them.
//!
//! Those of the address allocator are in `iova/space.rs` and `iova/failures.rs`.

mod f06_timer_drains;
mod f07_freed_before_invalidated;
mod f08_half_a_batch;
mod f09_page_tables;
mod f18_lock_held_while_hardware_works;
