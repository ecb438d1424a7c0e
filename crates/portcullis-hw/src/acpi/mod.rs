//! Firmware tables: the units, the devices that each translates for, and the memory that firmware goes on using.
//!
//! Firmware tables are often wrong. One wrong entry does not refuse a table: the parser uses what it can, and reports the rest as
//! [flaws](Flaw), one sentence each for the log. It never guesses two things, because a device could then seem protected that is not:
//!
//! - where registers are: a unit with an impossible register address is *refused*, and no other unit takes its devices;
//! - which devices a unit has: if its list cannot be read, the unit is refused, and no unit takes "all other devices".
//!
//! A kernel decides what to do about flaws. It may refuse a table with a wrong [checksum](Flaw::Checksum). Whatever a table holds, no field
//! is read from outside its bytes, and its length bounds time and memory.

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
