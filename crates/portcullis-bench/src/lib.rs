//! Benchmarks of Portcullis beside its rivals.
//!
//! Every benchmark measures all of its *subjects* (Portcullis and whatever it is compared with) in one run,
//! interleaved, so that whatever else the machine does meanwhile falls on all of them alike; and each thread
//! stays on a core of its own. A figure is the median of several repetitions, printed with the least and the
//! greatest.
//!
//! # Where things are
//! - What every benchmark shares: the pinned threads ([`team`]), what runs repetitions in turn ([`runner`]),
//!   the clock for single operations ([`timer`]), what the machine can do at best ([`limits`]), what it is
//!   ([`machine`]), the report ([`report`]) and its table for people ([`table`]).
//! - What a benchmark is asked for ([`request`]), and how it finds Linux's code ([`rival`]).
//! - The allocation of I/O virtual addresses: [`iova`].
//! - Page tables in the formats of hardware: [`pgtable`].
//! - Invalidations, their waits and their locks: [`invalidation`].
//! - Bounce buffers: [`bounce`].
//! - The whole way of a mapping, as a driver calls it: [`path`].
//! - What lines, atomics and copies cost on the machine at hand: [`calibrate`].
//! - The drivers of IOMMUs over units that take no time, for two of these: [`units`].
//!
//! # What it costs
//! Threads that spin while they wait for each other to start: as many cores as threads are measured with. (Where
//! there are more threads than cores, they let each other run.)

pub mod bounce;
pub mod calibrate;
pub mod invalidation;
pub mod iova;
mod lane;
pub mod limits;
pub mod machine;
pub mod path;
pub mod pgtable;
pub mod report;
pub mod request;
pub mod rival;
pub mod runner;
mod stats;
pub mod table;
pub mod team;
pub mod timer;
pub mod units;
