//! The front door: one driver for every strategy. Whatever protects its queue, a buffer that came back is out of the device's
//! reach, and one that did not is nobody's.

#[cfg(not(watched))]
mod counts;
mod failures;
#[cfg(not(watched))]
mod limits;
#[cfg(not(watched))]
mod parts;
#[cfg(not(watched))]
mod policies;
mod pooled;
#[cfg(not(watched))]
mod raw;
mod typed;
pub mod world;
