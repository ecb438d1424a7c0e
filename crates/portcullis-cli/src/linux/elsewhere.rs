//! `portcullis protect`, `unprotect` and `status` on systems that are not Unix.

pub mod args;

use std::error::Error;

use self::args::{Protect, Status, Unprotect};

/// What is said on systems without a module.
const NOT_HERE: &str = "the module portcullis is for Linux, so this command is, too";

pub fn protect(_: &Protect) -> Result<(), Box<dyn Error>> {
    Err(NOT_HERE.into())
}

pub fn unprotect(_: &Unprotect) -> Result<(), Box<dyn Error>> {
    Err(NOT_HERE.into())
}

pub fn status(_: &Status) -> Result<(), Box<dyn Error>> {
    Err(NOT_HERE.into())
}
