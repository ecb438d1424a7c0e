//! Everything below panics, fails, refuses or runs dry, once at every call: a scenario runs once
//! to count the calls into `Frames`, `Mapper`, `InvalidationQueue`, `Platform` and
//! `CacheMaintenance`, then once for each call and each way in which that can go wrong.
//!
//! A device tries every address that it ever saw, at each step and afterwards. Checked are after each run:
//! - nothing that was given back (a buffer returned or dropped, a frame freed) is reached;
//! - nothing is lost where the operation said that it did what it should, and what was lost by an error or a panic is not
//!   more afterwards;
//! - in the end every address is free again, or counted as lost;
//! - once everything works again, the same work succeeds, three times over, and in a bounded number of steps.

#![allow(dead_code, reason = "for formats and queues that have no scenario yet")]

mod adaptive;
mod changes;
mod counts;
mod dma;
mod doubles;
mod faults;
mod hostile;
mod ops;
mod pool;
mod queue;
#[path = "../queued/mod.rs"]
mod queued;
mod ring;
mod run;
mod space;
mod swiotlb;
mod tables;
