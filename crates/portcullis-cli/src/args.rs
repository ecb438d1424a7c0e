//! What can be asked for.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use indicatif::HumanCount;
use portcullis::domain::Policy;
use portcullis_model::scale::POLICIES;
use portcullis_trace::replay::{FORMATS, Mode, built_in_names};

#[cfg(feature = "bench")]
use crate::bench::args::Bench;

/// DMA remapping: what protection from devices costs, and what it leaves exposed.
#[derive(Debug, Parser)]
#[command(name = "portcullis", version, propagate_version = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a recorded DMA trace through each protection policy: cost and exposure side by side
    Replay(Replay),
    /// Rewrite a recording without what is private in it; it replays to the same figures
    Anonymize {
        /// The recording; `-` for standard input
        input: PathBuf,
        /// The file to write, as plain text, which must not exist yet; `-` for standard output
        output: PathBuf,
    },
    /// Simulate what each policy costs a server with many CPUs, and what is the hottest there
    Scale(Scale),
    /// Measure the library and its parts beside their rivals, in one run
    #[cfg(feature = "bench")]
    Bench(Bench),
    /// Measure what cache lines and copies cost on this machine, and print it for `scale --calibration`
    #[cfg(feature = "bench")]
    Calibrate,
    /// Measure the library and its parts beside their rivals: needs a build with the feature `bench`
    #[cfg(not(feature = "bench"))]
    #[command(disable_help_flag = true)]
    Bench(Absent),
    /// Measure what cache lines and copies cost on this machine: needs a build with the feature `bench`
    #[cfg(not(feature = "bench"))]
    #[command(disable_help_flag = true)]
    Calibrate(Absent),
    /// Make one page of HTML, with plots, of the results that other commands print with --json
    Report(ReportOptions),
    /// Print a script that completes this command's names and options in a shell
    Completions {
        /// The shell: for bash, save the output as ~/.local/share/bash-completion/completions/portcullis
        shell: clap_complete::Shell,
    },
    /// Print the manual page: save the output as portcullis.1 in a folder that man searches
    Man,
}

/// What a command that this build lacks was given.
#[cfg(not(feature = "bench"))]
#[derive(Debug, Args)]
pub struct Absent {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    ignored: Vec<std::ffi::OsString>,
}

#[derive(Debug, Args)]
pub struct ReportOptions {
    /// What `replay`, `bench` or `scale` printed with --json; `-` for standard input
    #[arg(required = true, value_name = "RESULT")]
    pub results: Vec<PathBuf>,

    /// Write the page to this file [default: standard output; report.html where that is a terminal]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Say what changed between two results of one command: the first is before, the second after
    #[arg(long)]
    pub compare: bool,
}

#[derive(Debug, Args)]
pub struct Replay {
    /// The trace: text of Linux's tracefs with the events dma:* and iommu:*, plain, gzip or zstd; `-` for
    /// standard input. Without it, the file that standard input is, or else a trace of an NVMe disk and a
    /// network card that ships with Portcullis
    pub trace: Option<PathBuf>,

    /// Policies to compare, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "POLICY,..")]
    pub policy: Vec<PolicyName>,

    /// Hardware whose waits to assume, or a TOML file that describes it (its name has a `.` or a `/`)
    #[arg(long, value_name = "NAME|FILE", default_value = "vtd", value_parser = ProfileName)]
    pub profile: String,

    /// Print a profile as the TOML file that --profile reads, to be changed, and replay nothing
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "vtd", exclusive = true,
          value_parser = PossibleValuesParser::new(built_in_names()))]
    pub print_profile: Option<String>,

    /// Format of the page tables [default: the profile's]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(FORMATS))]
    pub format: Option<String>,

    /// What the driver and the stack above it spend on each mapping besides, in nanoseconds, up to 1,000,000,000
    #[arg(long, value_name = "NS", default_value_t = 1000, allow_negative_numbers = true,
          value_parser = whole::<0, 1_000_000_000>)]
    pub work: u64,

    /// Only the mappings of this device, named as in the trace (0000:00:03.0)
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,

    /// Read the first N events only
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole::<1, { u64::MAX }>)]
    pub limit: Option<u64>,

    /// Replay N times, 100 at most, and show how far the runs lie apart [default: 3 where one takes less than 3 s,
    /// else 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole::<1, 100>)]
    pub repeat: Option<u64>,

    /// Print all figures behind the verdict, in a wide table
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    pub full: bool,

    /// Print JSON for machines (docs/replay.md describes it) instead of a table
    #[arg(long)]
    pub json: bool,

    /// Print a line of comma-separated figures for each policy instead of a table
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,

    /// Explain the words of the table, and say where the profile's figures come from
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    pub legend: bool,

    /// Say what was cheaper for the policy `adaptive`, to copy or to map, and what it chose
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    pub explain: bool,

    /// Fail on the first thing in the trace that would only be warned of
    #[arg(long)]
    pub strict_parse: bool,
}

#[derive(Debug, Args)]
pub struct Scale {
    /// What the CPUs do: memcached, nvme, nic, swiotlb, disk-2008, nested, or the file of a trace
    #[arg(long, value_name = "NAME|TRACE", default_value = "memcached")]
    pub workload: String,

    /// Policies to compare, separated by commas [default: ours]
    #[arg(long, value_delimiter = ',', value_name = "POLICY,..",
          value_parser = PossibleValuesParser::new(POLICIES.map(|policy| policy.name)))]
    pub policy: Vec<String>,

    /// Numbers of CPUs, separated by commas, up to 256
    #[arg(long, value_delimiter = ',', value_name = "N,..", default_value = "64",
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub cpus: Vec<u16>,

    /// Sockets that they are spread over [default: one for each 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub sockets: Option<u8>,

    /// Hardware whose waits to assume, or a TOML file that describes it (its name has a `.` or a `/`)
    #[arg(long, value_name = "NAME|FILE", default_value = "vtd", value_parser = ProfileName)]
    pub profile: String,

    /// What `portcullis calibrate` has printed, in place of a server in round figures
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,

    /// What a trace's driver and the stack above it spend on each mapping besides, in nanoseconds
    #[arg(long, value_name = "NS", default_value_t = 1000,
          value_parser = clap::value_parser!(u64).range(0..=1_000_000_000))]
    pub work: u64,

    /// Print JSON for machines (docs/scaling.md describes it) instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    /// One invalidation, waited for, per unmap
    Strict,
    /// One wait for 32 unmaps of a device, at the latest after 10 ms: until then they count as mapped
    StrictBatch,
    /// The same for 64 descriptors out of a ring of addresses, with one range to invalidate
    StrictRing,
    /// Each mapping copied through buffers that stay mapped, protected to the byte
    Bounce,
    /// Copied so, or mapped in a ring as in strict-ring: what is cheaper, as measured meanwhile
    Adaptive,
    /// Invalidations put off by up to 256 unmaps or 10 ms
    Lazy,
    /// Each mapping copied through a pool, as on machines without an IOMMU: protects nothing
    Swiotlb,
    /// No translation
    Passthrough,
}

impl PolicyName {
    pub fn mode(self) -> Mode {
        match self {
            Self::Strict => Policy::Strict.into(),
            Self::StrictBatch => Mode::StrictBatch,
            Self::StrictRing => Mode::StrictRing,
            Self::Bounce => Mode::Bounce,
            Self::Adaptive => Mode::Adaptive,
            Self::Lazy => Policy::LAZY.into(),
            Self::Swiotlb => Mode::Swiotlb,
            Self::Passthrough => Mode::PASSTHROUGH,
        }
    }
}

/// A whole number from `LEAST` to `MOST`.
fn whole<const LEAST: u64, const MOST: u64>(text: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number| (LEAST..=MOST).contains(number));
    number.ok_or_else(|| match MOST {
        u64::MAX => format!("expected a whole number from {LEAST}"),
        _ => format!("expected a whole number from {LEAST} to {}", HumanCount(MOST)),
    })
}

/// Takes the name of a profile that ships with Portcullis, or of a file, which is what has a `.` or a `/` in it.
#[derive(Debug, Clone)]
pub struct ProfileName;

impl TypedValueParser for ProfileName {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        match value.to_str() {
            Some(file) if file.contains(['.', '/', '\\']) => Ok(file.to_owned()),
            // The last stands for any file, and is one itself, so that none is taken for a name.
            _ => PossibleValuesParser::new(built_in_names().into_iter().chain(["FILE.toml"]))
                .parse_ref(command, argument, value),
        }
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(built_in_names().into_iter().map(PossibleValue::new)))
    }
}
