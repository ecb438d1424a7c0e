//! `portcullis doctor` on systems that are not Unix.

pub mod args;

use std::error::Error;
use std::process::ExitCode;

use self::args::Doctor;

pub fn run(_: &Doctor) -> Result<ExitCode, Box<dyn Error>> {
    crate::look::tell("portcullis: doctor looks at Linux machines\n");
    Ok(ExitCode::from(args::COULD_NOT))
}
