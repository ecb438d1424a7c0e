//! What can be asked of `portcullis doctor`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

/// What the command ends with where it could not look.
pub const COULD_NOT: u8 = 2;

/// What `--help` says below the options.
pub const AFTER_HELP: &str = "\
Exit code: 0 if there is nothing to do, 1 if a finding is critical or a warning,
2 if it could not look. Notices do not count.";

#[derive(Debug, Args, Serialize)]
pub struct Doctor {
    /// Look at another machine: its files lie below DIR, as /proc and /sys would, with its kernel log in DIR/dmesg
    /// (docs/doctor.md has the command that collects them)
    #[arg(long, value_name = "DIR")]
    #[serde(serialize_with = "crate::machine::name")]
    pub root: Option<PathBuf>,

    /// Look twice, N seconds apart, to find counts that only grow; 0 looks once. With --root, DIR/later holds the second
    /// look
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(0..=3600))]
    pub seconds: u16,

    /// Print JSON for machines (docs/doctor.md describes it)
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}
