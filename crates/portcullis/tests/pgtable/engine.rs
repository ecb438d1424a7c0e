//! The page-table engine, whatever the format: against a plain map, without memory, with hardware that does not
//! answer, with CPUs in each other's way.

mod bounded;
mod cleaning;
mod entries;
mod mapper;
mod near;
mod platforms;
mod random;
mod reclaim;
mod split;
mod stress;
mod support;
