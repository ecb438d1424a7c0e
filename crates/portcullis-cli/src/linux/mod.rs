//! `portcullis protect`, `unprotect` and `status`: devices of this machine, behind the module portcullis.
//!
//! The module (folder `kmod`) shows what it does in `/sys/kernel/portcullis`, and takes orders there. Everything else is
//! found in sysfs. What is read is bounded, may be gone the next moment, and is escaped where it is shown.

pub mod args;
#[cfg(unix)]
mod change;
#[cfg(unix)]
pub mod device;
#[cfg(unix)]
pub mod host;
#[cfg(unix)]
mod keep;
#[cfg(unix)]
mod module;
#[cfg(unix)]
mod protect;
#[cfg(unix)]
mod refused;
#[cfg(unix)]
pub mod status;
#[cfg(unix)]
mod stops;
#[cfg(unix)]
mod table;
#[cfg(test)]
#[cfg(target_os = "linux")]
#[path = "../../tests/linux/mod.rs"]
mod tests;

use std::error::Error;

use self::args::{Protect, Status, Unprotect};

/// Puts a device behind the module.
#[cfg(unix)]
pub fn protect(asked: &Protect) -> Result<(), Box<dyn Error>> {
    Ok(protect::protect(&here(), &asked.device, &asked.settings(), asked.how())?)
}

/// Gives a device back.
#[cfg(unix)]
pub fn unprotect(asked: &Unprotect) -> Result<(), Box<dyn Error>> {
    Ok(protect::unprotect(&here(), &asked.device, asked.how())?)
}

/// Says what is protected.
#[cfg(unix)]
pub fn status(asked: &Status) -> Result<(), Box<dyn Error>> {
    let found = here().status(asked)?;
    let text = if asked.json {
        status::json(&found, asked)?
    } else {
        table::text(&found, crate::look::is_unicode())
    };
    Ok(crate::print(&text)?)
}

#[cfg(unix)]
fn here() -> host::Host<'static> {
    host::Host::new("/", &host::Here)
}

#[cfg(not(unix))]
pub fn protect(_: &Protect) -> Result<(), Box<dyn Error>> {
    Err(NOT_HERE.into())
}

#[cfg(not(unix))]
pub fn unprotect(_: &Unprotect) -> Result<(), Box<dyn Error>> {
    Err(NOT_HERE.into())
}

#[cfg(not(unix))]
pub fn status(_: &Status) -> Result<(), Box<dyn Error>> {
    Err(NOT_HERE.into())
}

/// What is said on systems without a module.
#[cfg(not(unix))]
const NOT_HERE: &str = "the module portcullis is for Linux, so this command is, too";
