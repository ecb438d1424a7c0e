//! What `portcullis bench` can be asked for.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use portcullis_bench::{bounce, invalidation, iova, path, pgtable};
use serde::Serialize;

use crate::args::ProfileName;
use crate::machine;

#[derive(Debug, Args)]
pub struct Bench {
    #[command(subcommand)]
    pub what: BenchWhat,
}

#[derive(Debug, Subcommand)]
pub enum BenchWhat {
    /// Allocation of I/O virtual addresses, beside Linux's allocator and crates of the registry
    Iova(BenchIova),
    /// Page tables in the formats of hardware, beside Linux's
    Pgtable(BenchPgtable),
    /// Unmaps with their waits for the hardware and their locks, beside the design of 2015
    Invalidation(BenchInvalidation),
    /// Bounce buffers, beside a bare copy, Linux's swiotlb, and mapping without a bounce
    Bounce(BenchBounce),
    /// Maps and unmaps as drivers call them, beside Linux's parts composed, and beside the library's own parts
    Path(BenchPath),
}

#[derive(Debug, Args, Serialize)]
pub struct BenchIova {
    /// Workloads, separated by commas [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME,..", hide_possible_values = true,
          value_parser = PossibleValuesParser::new(iova::WORKLOADS.map(|workload| workload.name)))]
    pub workload: Vec<String>,

    /// Subjects to measure, separated by commas [default: all; linux with --rival only]
    #[arg(long, value_delimiter = ',', value_name = "NAME,..",
          value_parser = PossibleValuesParser::new(iova::SUBJECTS.map(|subject| subject.name)))]
    pub subject: Vec<String>,

    #[command(flatten)]
    #[serde(flatten)]
    pub options: BenchOptions,
}

#[derive(Debug, Args, Serialize)]
pub struct BenchPgtable {
    /// Formats, separated by commas [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME,..",
          value_parser = PossibleValuesParser::new(pgtable::formats()))]
    pub format: Vec<String>,

    /// Workloads, separated by commas [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME,..",
          value_parser = PossibleValuesParser::new(pgtable::work::WORKLOADS.map(|workload| workload.name)))]
    pub workload: Vec<String>,

    /// Subjects to measure, separated by commas [default: portcullis, stores, locked; with --rival, linux]
    #[arg(long, value_delimiter = ',', value_name = "NAME,..",
          value_parser = PossibleValuesParser::new(pgtable::SUBJECTS.map(|subject| subject.name)))]
    pub subject: Vec<String>,

    /// Also tables whose changes are written back from the CPU's caches: the subjects that end in -nc
    #[arg(long, conflicts_with = "subject")]
    pub incoherent: bool,

    #[command(flatten)]
    #[serde(flatten)]
    pub options: BenchOptions,
}

#[derive(Debug, Args, Serialize)]
pub struct BenchInvalidation {
    /// Workloads, separated by commas [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME,..",
          value_parser = PossibleValuesParser::new(invalidation::WORKLOADS.map(|workload| workload.name)))]
    pub workload: Vec<String>,

    /// Subjects to measure, separated by commas [default: all that do the workload]
    #[arg(long, value_delimiter = ',', value_name = "NAME,..",
          value_parser = PossibleValuesParser::new(invalidation::SUBJECTS.map(|subject| subject.name)))]
    pub subject: Vec<String>,

    /// Hardware whose waits to make, in real time, or a TOML file that describes it
    #[arg(long, value_name = "NAME|FILE", default_value = "vtd", value_parser = ProfileName)]
    pub profile: String,

    #[command(flatten)]
    #[serde(flatten)]
    pub options: ManyThreads,
}

#[derive(Debug, Args, Serialize)]
pub struct BenchBounce {
    /// Workloads, separated by commas [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME,..",
          value_parser = PossibleValuesParser::new(bounce::WORKLOADS.map(|workload| workload.name)))]
    pub workload: Vec<String>,

    /// Subjects to measure, separated by commas [default: all that do the workload; linux with --rival only]
    #[arg(long, value_delimiter = ',', value_name = "NAME,..",
          value_parser = PossibleValuesParser::new(bounce::SUBJECTS.map(|subject| subject.name)))]
    pub subject: Vec<String>,

    /// Hardware whose waits `strict` is to take, in real time, or TOML files that describe it, separated by commas
    /// [default: the four]
    #[arg(long, value_delimiter = ',', value_name = "NAME|FILE,..", value_parser = ProfileName)]
    pub profile: Vec<String>,

    /// Mappings of each thread that are in use at a time. More than one: buffers are less hot, and what a map and an unmap
    /// take is told apart
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=bounce::MOST_DEPTH as i64))]
    pub depth: u16,

    /// Linux's own code: a shared library (docs/bench.md says what it exports for each benchmark). Its code is
    /// run
    #[arg(long, value_name = "PATH")]
    #[serde(serialize_with = "machine::name")]
    pub rival: Option<PathBuf>,

    #[command(flatten)]
    #[serde(flatten)]
    pub options: ManyThreads,
}

#[derive(Debug, Args, Serialize)]
pub struct BenchPath {
    /// Workloads, separated by commas: raw, typed, lazy, sg, batch, ring, pool, swiotlb or adaptive, each with -1, -4,
    /// -16 or -64 pages, and with -live64 or -live4096 [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME,..", hide_possible_values = true,
          value_parser = PossibleValuesParser::new(path::workloads().iter().map(|workload| workload.name)))]
    pub workload: Vec<String>,

    /// Subjects to measure, separated by commas [default: all that do the workload; Linux's with --rival and --rival-pt]
    #[arg(long, value_delimiter = ',', value_name = "NAME,..",
          value_parser = PossibleValuesParser::new(path::SUBJECTS.map(|subject| subject.name)))]
    pub subject: Vec<String>,

    /// Hardware whose waits to make, in real time (none answers at once), or a TOML file that describes it
    #[arg(long, value_name = "NAME|FILE", default_value = "none", value_parser = ProfileName)]
    pub profile: String,

    /// Each thread maps in a domain of its own
    #[arg(long)]
    pub own_domains: bool,

    /// Linux's allocator of addresses: a shared library (docs/bench.md says what it exports). Its code is run
    #[arg(long, value_name = "PATH", requires = "rival_pt")]
    #[serde(serialize_with = "machine::name")]
    pub rival: Option<PathBuf>,

    /// Linux's page tables: a shared library, likewise
    #[arg(long, value_name = "PATH", requires = "rival")]
    #[serde(serialize_with = "machine::name")]
    pub rival_pt: Option<PathBuf>,

    #[command(flatten)]
    #[serde(flatten)]
    pub options: ManyThreads,
}

/// What benchmarks whose threads may share cores can be told.
#[derive(Debug, Args, Serialize)]
pub struct ManyThreads {
    /// Numbers of threads, 48 at most; those beyond the number of cores share them [default: 1, 2 and 8; of `path` 1 and
    /// 2]
    #[arg(long, value_delimiter = ',', value_name = "N,..",
          value_parser = clap::value_parser!(u8).range(1..=MOST_THREADS as i64))]
    pub threads: Vec<u8>,

    /// Less than 30 seconds instead of some minutes, with more noise
    #[arg(long)]
    pub quick: bool,

    /// Print JSON for machines (docs/bench.md describes it) instead of a table
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

/// The most threads of each.
const MOST_THREADS: usize = path::MOST_THREADS;
const _: () = assert!(
    bounce::MOST_THREADS == MOST_THREADS && invalidation::MOST_THREADS == MOST_THREADS && MOST_THREADS == 48
);

/// What benchmarks beside Linux's code can be told.
#[derive(Debug, Args, Serialize)]
pub struct BenchOptions {
    /// Numbers of threads, each on a core of its own [default: 1 and 2, as far as the workload allows]
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = clap::value_parser!(u8).range(1..=2))]
    pub threads: Vec<u8>,

    /// Linux's own code: a shared library (docs/bench.md says what it exports for each benchmark). Its code is
    /// run
    #[arg(long, value_name = "PATH")]
    #[serde(serialize_with = "machine::name")]
    pub rival: Option<PathBuf>,

    /// Less than 30 seconds instead of some minutes, with more noise
    #[arg(long)]
    pub quick: bool,

    /// Print JSON for machines (docs/bench.md describes it) instead of a table
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}
