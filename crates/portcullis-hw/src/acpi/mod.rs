//! Firmware's tables: which units there are, which devices each is in front of, and which memory firmware goes on using.
//!
//! Tables come from firmware, which is often wrong. One odd entry refuses no table: what can be used is read, and what is wrong is
//! [told](Flaw), one sentence each, for the log. Two things are never guessed, as a device would be taken for protected that is not:
//!
//! - where registers are: a unit that cannot be where it is said to be is *refused*, and its devices are behind no other unit;
//! - which devices a unit is in front of: where the list of them cannot be read, the unit is refused, and none is in front of "all others".
//!
//! A kernel decides what it does about flaws. It may refuse a table whose [checksum](Flaw::Checksum) is off.
//! Whatever a table holds, no field is read from outside its bytes, and time and memory are bounded by its length.

mod bytes;
mod dmar;
mod flaw;
mod iort;
mod ivrs;
mod reserved;
#[cfg(all(test, not(loom)))]
mod tests;

pub use dmar::{Dmar, DmarScope, DmarScopeKind, DmarUnit};
pub use flaw::{AcpiError, Flaw};
pub use iort::{Iort, IortComponent, IortReserved, IortRoot, IortUnit};
pub use ivrs::{Ivrs, IvrsNamed, IvrsUnit};
pub use reserved::Reserved;
