//! What can be asked for.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use indicatif::HumanCount;
use portcullis::domain::Policy;
use portcullis_model::scale::POLICIES;
use portcullis_trace::budget;
use portcullis_trace::replay::{FORMATS, Mode, built_in_names};
use serde::{Deserialize, Serialize};

#[cfg(feature = "bench")]
use crate::bench::args::Bench;
use crate::doctor::args as doctor;
use crate::linux::args as linux;
use crate::machine;
#[cfg(target_os = "linux")]
use crate::record::args as record;

/// DMA remapping: what protection from devices costs, and what it leaves exposed.
#[derive(Debug, Parser)]
#[command(name = "portcullis", version, propagate_version = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Record the DMA of this machine, for `replay`: needs root
    #[cfg(target_os = "linux")]
    Record(record::Record),
    /// Show what each device maps now, and what it may still reach after its unmap: needs root
    #[cfg(target_os = "linux")]
    Watch(record::Watch),
    /// Replay recorded DMA under each way to protect memory: what each costs, and what it leaves open to devices
    Replay(Replay),
    /// Remove what is private from a recording: what is left replays to the same figures
    Anonymize {
        /// The recording; `-` for standard input
        input: PathBuf,
        /// The file to write, as plain text, which must not exist yet; `-` for standard output
        output: PathBuf,

        #[command(flatten)]
        memory: Memory,
    },
    /// Simulate what each policy costs a server with many CPUs, and what takes the most time there
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
    /// Put a device of this machine behind Portcullis, or switch its policy: needs root and the module (docs/linux.md)
    Protect(linux::Protect),
    /// Give a device of this machine back to Linux's own protection
    Unprotect(linux::Unprotect),
    /// List the protected devices of this machine, what each can reach now, and what its protection has cost
    Status(linux::Status),
    /// Look for what is wrong with DMA protection on this machine, what it means, and what to type next
    #[command(after_help = doctor::AFTER_HELP)]
    Doctor(doctor::Doctor),
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

impl Command {
    /// What it may take; `None` where it reads no file that could ask for much.
    pub fn memory(&self) -> Option<Memory> {
        match self {
            Self::Replay(Replay { memory, .. })
            | Self::Anonymize { memory, .. }
            | Self::Scale(Scale { memory, .. })
            | Self::Report(ReportOptions { memory, .. }) => Some(*memory),
            Self::Bench(_) | Self::Completions { .. } | Self::Man => None,
            Self::Protect(_) | Self::Unprotect(_) | Self::Status(_) | Self::Doctor(_) => None,
            #[cfg(target_os = "linux")]
            Self::Record(_) | Self::Watch(_) => None,
            #[cfg(feature = "bench")]
            Self::Calibrate => None,
            #[cfg(not(feature = "bench"))]
            Self::Calibrate(_) => None,
        }
    }
}

/// What a command that this build lacks was given.
#[cfg(not(feature = "bench"))]
#[derive(Debug, Args)]
pub struct Absent {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    ignored: Vec<std::ffi::OsString>,
}

/// What a command may take, whatever the files say that it reads.
#[derive(Debug, Clone, Copy, Args)]
pub struct Memory {
    /// Memory to take at the most, such as 512M or 4G: what needs more ends with an error that says what to leave out
    #[arg(long = "memory", value_name = "SIZE", default_value = "2G", value_parser = size)]
    pub bytes: u64,
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

    #[command(flatten)]
    pub memory: Memory,
}

#[derive(Debug, Args)]
pub struct Replay {
    /// The recording: what Linux's tracefs prints of the events dma:* and iommu:* (docs/replay.md says how to
    /// record), plain, gzip or zstd; `-` for standard input. Without it: standard input if that is a file, or else a
    /// recording of an NVMe disk and a network card that ships with Portcullis
    pub trace: Option<PathBuf>,

    /// Policies to compare, separated by commas [default: all]. Linux without our module has strict,lazy,swiotlb,passthrough
    #[arg(long, value_enum, value_delimiter = ',', value_name = "POLICY,..")]
    pub policy: Vec<PolicyName>,

    /// IOMMU whose waits to assume: vtd is Intel's, smmuv3 is Arm's, virtio-iommu is a guest's, none answers at once.
    /// Or a TOML file that describes one (its name has a `.` or a `/`): for AMD's see docs/replay.md#an-amd-machine
    #[arg(long, value_name = "NAME|FILE", default_value = "vtd", value_parser = ProfileName)]
    pub profile: String,

    /// Print a profile as the TOML file that --profile reads, to be changed, and replay nothing
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "vtd", exclusive = true,
          value_parser = PossibleValuesParser::new(built_in_names()))]
    pub print_profile: Option<String>,

    /// Format of the page tables [default: the profile's]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(FORMATS))]
    pub format: Option<String>,

    /// CPU time that everything but protection takes for each mapping, such as 50us or 1.5ms [default: all that the
    /// recording's CPUs had]
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, value_parser = nanoseconds)]
    pub work: Option<u64>,

    /// What `portcullis calibrate` has printed: the choice then rests on what this machine takes for a copied KiB, and not
    /// on a server in round figures
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,

    /// Print what each policy costs at other rates, too: from 500 ns to 10 ms of other CPU time for each mapping
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    pub sweep: bool,

    /// Choose among what can be had there
    #[arg(long, value_enum, value_name = "WHERE", default_value = "linux")]
    pub on: On,

    /// Only the mappings of this device, named as in the trace (0000:00:03.0) or by its last parts (03.0)
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,

    /// Read the first N events only
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole::<1, { u64::MAX }>)]
    pub limit: Option<u64>,

    /// Replay N times, 100 at most, and show how far the runs lie apart [default: 3 where one takes less than 3 s and
    /// the recording is no pipe, else 1]
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

    /// Say on which counts and prices the choice rests, and what `adaptive` chose: to copy or to map
    #[arg(long, conflicts_with_all = ["json", "csv"])]
    pub explain: bool,

    /// Fail at the first line or mapping of the trace that there would otherwise be a warning of
    #[arg(long)]
    pub strict_parse: bool,

    #[command(flatten)]
    pub memory: Memory,
}

#[derive(Debug, Args, Serialize)]
pub struct Scale {
    /// What the CPUs do: memcached, nvme, nvme-2026, nic, nic-page-pool, swiotlb, disk-2008, nested, or the file of a trace
    #[arg(long, value_name = "NAME|TRACE", default_value = "memcached")]
    pub workload: String,

    /// Policies to compare, separated by commas [default: those of the library]
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

    /// IOMMUs that the devices are behind, each with a queue of its own [default: one for each 32 CPUs; servers have 4 to 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub units: Option<u16>,

    /// IOMMU whose waits to assume: vtd is Intel's, smmuv3 is Arm's, virtio-iommu is a guest's, none answers at once.
    /// Or a TOML file that describes one (its name has a `.` or a `/`)
    #[arg(long, value_name = "NAME|FILE", default_value = "vtd", value_parser = ProfileName)]
    pub profile: String,

    /// Format of the page tables, which tells whose driver Linux's strict is of, and whether our module runs there
    /// [default: the profile's]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(FORMATS))]
    pub format: Option<String>,

    /// What `portcullis calibrate` has printed, in place of a server in round figures
    #[arg(long, value_name = "FILE")]
    #[serde(serialize_with = "machine::name")]
    pub calibration: Option<PathBuf>,

    /// CPU time that everything but protection takes for each mapping of a recording, such as 50us or 1.5ms. The
    /// other workloads have times of their own [default: as in `replay`, all that the recording's CPUs had]
    #[arg(long, value_name = "TIME", allow_negative_numbers = true, value_parser = nanoseconds)]
    #[serde(rename = "work_ns")]
    pub work: Option<u64>,

    /// Choose among what can be had there
    #[arg(long, value_enum, value_name = "WHERE", default_value = "linux")]
    pub on: On,

    /// Say on which counts and prices the choice rests, and where each price comes from
    #[arg(long, conflicts_with = "json")]
    #[serde(skip)]
    pub explain: bool,

    /// Print JSON for machines (docs/scaling.md describes it) instead of a table
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,

    #[command(flatten)]
    #[serde(skip)]
    pub memory: Memory,
}

/// Where protection is to be switched on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum On {
    /// Linux's own drivers, unchanged: Linux's modes, and the module's (docs/linux.md)
    #[default]
    Linux,
    /// A driver or a kernel that uses the library: its queues, too
    Library,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    /// Each unmap waits until the IOMMU confirms that no device reaches the buffer
    Strict,
    /// 32 unmaps of a device wait together, 10 ms at the most; the driver has none of these buffers back before
    StrictBatch,
    /// 64 unmaps of a device wait together; addresses come in order, so that one command usually ends all
    StrictRing,
    /// Devices get copies, in buffers that stay mapped: they reach no byte besides
    Bounce,
    /// Copies each buffer as bounce does, or maps it as strict-ring does, whichever measures cheaper
    Adaptive,
    /// The driver has a buffer back at once, and devices reach it for up to 256 unmaps or 10 ms more
    Lazy,
    /// Memory is mapped when it is used first and never unmapped, as libraries like SPDK do: devices reach it all the time
    Registered,
    /// Devices get copies, but no IOMMU keeps them from all other memory: protects nothing
    Swiotlb,
    /// Devices reach all memory: protects nothing
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
            Self::Registered => Mode::Registered,
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

/// Units of time, with their nanoseconds. One that ends another stands behind it.
const UNITS: [(&str, f64); 4] = [("ns", 1.0), ("us", 1e3), ("µs", 1e3), ("ms", 1e6)];

/// The shortest time that can be asked for, and the longest: a second. No CPU does nothing but map and unmap, and all shares are of
/// what it does besides.
const NS: std::ops::RangeInclusive<f64> = 1.0..=1e9;

/// A time in nanoseconds, rounded: a number, whose thousands may be set apart, and its unit.
fn nanoseconds(text: &str) -> Result<u64, String> {
    let with_unit = UNITS.iter().find_map(|(name, ns)| Some((text.strip_suffix(name)?.trim_end(), *ns)));
    let (number, unit) = with_unit.unwrap_or_default();
    let (whole, part) = number.split_once('.').map_or((number, None), |(whole, part)| (whole, Some(part)));
    let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut groups = whole.split(',');
    let first = groups.next().filter(|first| is_digits(first));
    let is_grouped = groups.clone().all(|group| group.len() == 3 && is_digits(group))
        && (groups.next().is_none() || first.is_some_and(|first| first.len() <= 3));
    let plain = first.filter(|_| is_grouped && part.is_none_or(is_digits)).map(|_| number.replace(',', ""));
    let ns = plain.and_then(|number| number.parse::<f64>().ok()).map(|number| (number * unit).round());
    ns.filter(|ns| NS.contains(ns)).map(|ns| ns as u64).ok_or_else(|| {
        "expected a time from 1ns to 1000ms with its unit, ns, us or ms: such as 50us, 1.5ms or 96,482ns"
            .into()
    })
}

/// Units of memory, with the binary logarithm of their bytes.
const SIZES: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

/// A number of bytes: a whole number with its unit, of 1,024 or of its powers.
fn size(text: &str) -> Result<u64, String> {
    let upper = text.trim().to_ascii_uppercase();
    let number = upper.strip_suffix("IB").or(upper.strip_suffix('B')).unwrap_or(&upper);
    let of = |(unit, shift): (char, u32)| Some((number.strip_suffix(unit)?, shift));
    let (number, shift) = SIZES.into_iter().find_map(of).unwrap_or((number, 0));
    let bytes = number.trim_end().parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    bytes.filter(|bytes| *bytes >= budget::LEAST).ok_or_else(|| {
        format!(
            "expected a size with its unit, K, M, G or T of 1,024: from {}M, such as 512M or 4G",
            budget::LEAST >> 20
        )
    })
}

/// Takes the name of a profile that ships with Portcullis, or of a file, which is what has a `.` or a `/` in it.
#[derive(Debug, Clone)]
pub struct ProfileName;

/// What is said to those who ask for a profile of AMD's.
const AMD: &str = "\
there is no profile of AMD's IOMMU, as we know of no published waits.
Make one of yours:

  portcullis replay --print-profile vtd > amd.toml
  (write your waits into it, its name and what it is)
  portcullis replay TRACE --profile ./amd.toml --format amd-v1

docs/replay.md#an-amd-machine says how to record and to measure there.
";

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
            Some(name) if name.to_ascii_lowercase().starts_with("amd") => {
                Err(clap::Error::raw(clap::error::ErrorKind::InvalidValue, AMD))
            }
            // The last stands for any file, and is one itself, so that none is taken for a name.
            _ => PossibleValuesParser::new(built_in_names().into_iter().chain(["FILE.toml"]))
                .parse_ref(command, argument, value),
        }
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(built_in_names().into_iter().map(PossibleValue::new)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Arguments {
        /// What `portcullis replay` is told by these words.
        pub fn replay(words: &[&str]) -> Replay {
            match Self::try_parse_from([&["portcullis", "replay"], words].concat()).unwrap().command {
                Some(Command::Replay(replay)) => replay,
                _ => panic!("{words:?} ask for another command"),
            }
        }
    }

    #[test]
    fn sizes_have_units() {
        let good =
            [("64M", 64 << 20), ("512 MiB", 512 << 20), ("2g", 2 << 30), ("4GB", 4 << 30), ("1T", 1 << 40)];
        for (text, bytes) in good {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert_eq!(size("67108864"), Ok(64 << 20));
        assert_eq!(Arguments::replay(&[]).memory.bytes, budget::USUAL);
        for text in ["", "M", "-1G", "1.5G", "63M", "99999999999T", "0", "2 G x", "inf"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_have_units_and_thousands() {
        let good = [
            ("1ns", 1),
            ("0.5ns", 1),
            ("1000ns", 1_000),
            ("96,482 ns", 96_482),
            ("1,000,000ns", 1_000_000),
            ("250ns", 250),
            ("50us", 50_000),
            ("50 us", 50_000),
            ("0.5µs", 500),
            ("1.5ms", 1_500_000),
            ("2.3ms", 2_300_000),
            ("1,000ms", 1_000_000_000),
        ];
        for (text, ns) in good {
            assert_eq!(nanoseconds(text), Ok(ns), "{text}");
            assert_eq!(Arguments::replay(&["--work", text]).work, Some(ns));
        }
        for text in [
            "",
            "us",
            "0",
            "00",
            "0ns",
            "0us",
            "0.0004us",
            "1000",
            "96,482",
            "-5",
            "+5",
            "5 s",
            "5s",
            "1,00",
            "1000,000",
            ",100",
            "1,,000",
            "1,000.",
            ".5us",
            "1e3",
            "0x10",
            "nan",
            "inf",
            "5us5",
            "1001ms",
            "1000000001",
            "99999999999999999999999",
        ] {
            assert!(nanoseconds(text).is_err(), "{text}");
        }
    }
}
