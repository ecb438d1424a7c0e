//! What can be asked for.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use portcullis::domain::Policy;

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
}

#[derive(Debug, Args)]
pub struct Replay {
    /// The trace: text of Linux's tracefs with the events dma:* and iommu:*, plain, gzip or zstd; `-` for
    /// standard input. Without it, a trace of an NVMe disk and a network card that ships with Portcullis
    pub trace: Option<PathBuf>,

    /// Policies to compare, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "POLICY,..")]
    pub policy: Vec<PolicyName>,

    /// Hardware whose waits to assume: none, vtd, smmuv3, virtio-iommu, or a TOML file
    #[arg(long, value_name = "NAME|FILE", default_value = "vtd")]
    pub profile: String,

    /// What the driver and the stack above it spend per map-and-unmap pair, in nanoseconds
    #[arg(long, value_name = "NS", default_value_t = 1000)]
    pub work: u64,

    /// Only the mappings of this device, named as in the trace (0000:00:03.0)
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,

    /// Stop after so many events
    #[arg(long, value_name = "EVENTS", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,

    /// Print JSON for machines (docs/replay.md describes it) instead of a table
    #[arg(long)]
    pub json: bool,

    /// Explain each line of the table, and say where the profile's figures come from
    #[arg(long, conflicts_with = "json")]
    pub legend: bool,

    /// Fail on the first thing in the trace that would only be warned of
    #[arg(long)]
    pub strict_parse: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    /// One invalidation, waited for, per unmap
    Strict,
    /// Invalidations put off by up to 256 unmaps or 10 ms
    Lazy,
    /// No translation
    Passthrough,
}

impl PolicyName {
    pub fn policy(self) -> Policy {
        match self {
            Self::Strict => Policy::Strict,
            Self::Lazy => Policy::LAZY,
            Self::Passthrough => Policy::Passthrough,
        }
    }
}
