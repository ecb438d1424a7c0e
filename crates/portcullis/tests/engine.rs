//! The page-table engine, whatever the format: against a plain map, without memory, with hardware that does not
//! answer, with CPUs in each other's way.

mod common;
#[macro_use]
#[path = "common/inner_format.rs"]
mod inner_format;

mod engine {
    pub mod bounded;
    pub mod cleaning;
    pub mod entries;
    pub mod mapper;
    pub mod near;
    pub mod platforms;
    pub mod random;
    pub mod reclaim;
    pub mod split;
    pub mod stress;
    pub mod support;
}
