//! An NVMe disk behind an IOMMU, and a driver for it.
//!
//! `cargo run --release --example nvme -- --iommu vtd --policy strict` has QEMU make both. The disk is written, read back and verified, by
//! the policy that is asked for. Then the controller is told to write where a buffer was, as a broken one would.
//!
//! `cargo run --release --example nvme -- --pci 0000:01:00.0` takes a disk of this machine that VFIO has, and measures random reads, by each
//! way to map their buffers.
//!
//! `driver` is what a driver's author writes, for both; `model` and `pci` are what lies around it.
#![allow(
    unsafe_code,
    reason = "memory is opened by its number: QEMU's, which this process reaches as atomics only, or the process's own"
)]

#[path = "../../../portcullis-hw/tests/conformance/amdvi.rs"]
mod amdvi;
mod driver;
#[path = "../../../portcullis-hw/tests/conformance/kind.rs"]
mod kind;
#[path = "../../../portcullis-hw/tests/machine/mod.rs"]
mod machine;
mod model;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod pci;
#[path = "../../../portcullis-hw/tests/conformance/riscv.rs"]
mod riscv;
#[path = "../../../portcullis-hw/tests/conformance/smmuv3.rs"]
mod smmuv3;
#[path = "../../../portcullis-hw/tests/conformance/virtio.rs"]
mod virtio;
#[path = "../../../portcullis-hw/tests/conformance/vtd.rs"]
mod vtd;

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use portcullis::dma::QueueConfig;
use portcullis::domain::Policy;

use kind::Tables;
use machine::{QemuHost, Result};

/// Runs an NVMe driver: behind one of QEMU's IOMMUs, which needs QEMU 10 or later, or with a disk of this machine.
#[derive(Debug, Parser)]
struct Options {
    /// The IOMMU.
    #[arg(long, value_enum, default_value_t = Unit::Vtd)]
    iommu: Unit,
    /// How long the disk may reach what it was given, and how.
    #[arg(long, value_enum, default_value_t = Way::Strict)]
    policy: Way,
    /// A disk of this machine that VFIO has, instead of QEMU's: how fast it is read is measured.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    #[command(flatten)]
    pci: pci::Options,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Unit {
    /// Intel VT-d.
    Vtd,
    /// AMD-Vi.
    Amdvi,
    /// Arm SMMUv3, first stage.
    Smmuv3,
    /// The RISC-V IOMMU.
    Riscv,
    /// virtio-iommu.
    Virtio,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Way {
    /// Each unmap waits for its invalidation.
    Strict,
    /// Unmaps wait together.
    StrictBatch,
    /// The same out of a ring of addresses.
    StrictRing,
    /// Data is copied through buffers that stay mapped.
    Bounce,
    /// Copied, or mapped in a ring, whatever is cheaper.
    Adaptive,
    /// Invalidations are put off.
    Lazy,
}

impl Way {
    fn config(self) -> QueueConfig {
        match self {
            Self::Strict | Self::Lazy => QueueConfig::direct(),
            Self::StrictBatch => QueueConfig::batched(32),
            Self::StrictRing => QueueConfig::ring(4032, 4096).batch(64),
            Self::Bounce => QueueConfig::bounce(),
            Self::Adaptive => QueueConfig::auto(4032, 4096).batch(64),
        }
    }

    fn policy(self) -> Policy {
        if self == Self::Lazy { Policy::LAZY } else { Policy::Strict }
    }
}

/// A clock.
fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

fn run(options: &Options) -> Result<()> {
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    if let Some(name) = &options.pci.name {
        return pci::run(name, &options.pci);
    }
    match options.iommu {
        Unit::Vtd => model::run::<Tables<portcullis_hw::vtd::Unit<QemuHost>>>(options.policy),
        Unit::Amdvi => model::run::<Tables<portcullis_hw::amdvi::Unit<QemuHost>>>(options.policy),
        Unit::Smmuv3 => model::run::<Tables<smmuv3::Smmu<12, 0>>>(options.policy),
        Unit::Riscv => model::run::<Tables<portcullis_hw::riscv::Unit<QemuHost>>>(options.policy),
        Unit::Virtio => model::run::<virtio::VirtioIommu>(options.policy),
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvme: {error}");
            ExitCode::FAILURE
        }
    }
}
