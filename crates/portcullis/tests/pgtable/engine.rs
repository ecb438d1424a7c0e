//! The page-table engine, whatever the format: against a plain map, without memory, with hardware that does not
//! answer, with CPUs in each other's way.

#[cfg(not(watched))]
mod bounded;
#[cfg(not(watched))]
mod cleaning;
#[cfg(not(watched))]
mod entries;
#[cfg(not(watched))]
mod mapper;
mod near;
#[cfg(not(watched))]
mod platforms;
#[cfg(not(watched))]
mod random;
#[cfg(not(watched))]
mod reclaim;
#[cfg(not(watched))]
mod split;
#[cfg(not(watched))]
mod stress;
mod support;
#[cfg(not(watched))]
mod unwinds;
