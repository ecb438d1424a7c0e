//! What a review of the whole library found where one caller's steps lie between another's, where a callback panics, or where a
//! range is not of whole granules: each test failed on the build before.
//!
//! What happens in between is tried at every step of a call, not at a certain one. Where two CPUs meet, the one may have to
//! wait for the other: it is waited for so long only, which decides how much is tried, but not what is right.
#![cfg(not(loom))]

mod cleaning;
mod granules;
mod late;
mod lifecycle;
mod losses;
mod machine;
mod pages;
mod parts;

mod singles;
mod steps;
mod visits;
