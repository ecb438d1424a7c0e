//! `portcullis protect`, `unprotect` and `status`: devices of this machine, behind the module portcullis.
//!
//! The module (folder `kmod`) shows what it does in `/sys/kernel/portcullis`, and takes orders there. Everything else is
//! found in sysfs. What is read is bounded, may be gone the next moment, and is escaped where it is shown.

pub mod args;
mod change;
pub mod device;
pub mod host;
mod keep;
mod module;
mod protect;
mod refused;
pub mod status;
mod stops;
mod table;
#[cfg(test)]
#[cfg(target_os = "linux")]
#[path = "../../tests/linux/mod.rs"]
mod tests;

use std::error::Error;

use self::args::{Protect, Status, Unprotect};

/// Puts a device behind the module.
pub fn protect(asked: &Protect) -> Result<(), Box<dyn Error>> {
    Ok(protect::protect(&here(), &asked.device, &asked.settings(), asked.how())?)
}

/// Gives a device back.
pub fn unprotect(asked: &Unprotect) -> Result<(), Box<dyn Error>> {
    Ok(protect::unprotect(&here(), &asked.device, asked.how())?)
}

/// Says what is protected.
pub fn status(asked: &Status) -> Result<(), Box<dyn Error>> {
    let found = here().status(asked)?;
    let text = if asked.json {
        status::json(&found, asked)?
    } else {
        table::text(&found, crate::look::is_unicode(), crate::look::columns())
    };
    Ok(crate::print(&text)?)
}

/// This machine.
pub fn here() -> host::Host<'static> {
    host::Host::new("/", &host::Here)
}
