//! What can be asked of this machine's devices.

use std::fmt;

use clap::{Args, ValueEnum};
use serde::Serialize;

#[derive(Debug, Args)]
pub struct Protect {
    /// The device: a PCI address (0000:00:04.0, or 00:04.0), a network interface (eth0), or a disk (/dev/nvme0n1, sda).
    /// With --keep also a rule for devices to come: driver:NAME, class:0108 (the first digits of a PCI class),
    /// untrusted (behind a port that firmware calls external), all
    pub device: String,

    /// How it is protected
    #[arg(long, value_enum, value_name = "POLICY")]
    pub policy: Policy,

    /// With --policy lazy: microseconds for which the device may reach what its driver has unmapped, up to an hour
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3_600_000_000))]
    pub window_us: Option<u64>,

    /// With --policy bounce or auto: bytes up to which a buffer may be copied, from 4096
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(4096..=1 << 30))]
    pub threshold: Option<u64>,

    /// Do not ask before the device's driver is unbound, even where that stops this system's disk or this session
    #[arg(long)]
    pub yes: bool,

    /// Protect it at each boot as well, by /etc/modprobe.d/portcullis.conf
    #[arg(long)]
    pub keep: bool,
}

impl Protect {
    /// What does not belong to the policy, if anything.
    pub fn misplaced(&self) -> Option<&'static str> {
        let lazy = matches!(self.policy, Policy::Lazy);
        let copies = matches!(self.policy, Policy::Bounce | Policy::Auto);
        match self {
            _ if self.window_us.is_some() && !lazy => {
                Some("--window-us belongs to --policy lazy: no other policy has a window")
            }
            _ if self.threshold.is_some() && !copies => {
                Some("--threshold belongs to --policy bounce or auto: no other policy copies")
            }
            _ => None,
        }
    }

    pub fn how(&self) -> How {
        How { yes: self.yes, keep: self.keep }
    }

    pub fn settings(&self) -> Settings {
        Settings { policy: self.policy.name().into(), window_us: self.window_us, threshold: self.threshold }
    }
}

#[derive(Debug, Args)]
pub struct Unprotect {
    /// The device, named as for `portcullis protect`
    pub device: String,

    /// Do not ask before the device's driver is unbound, even where that stops this system's disk or this session
    #[arg(long)]
    pub yes: bool,

    /// Take it out of /etc/modprobe.d/portcullis.conf as well, which protects it at each boot
    #[arg(long)]
    pub keep: bool,
}

impl Unprotect {
    pub fn how(&self) -> How {
        How { yes: self.yes, keep: self.keep }
    }
}

/// How a device changes hands.
#[derive(Debug, Clone, Copy)]
pub struct How {
    /// Change the devices without a question.
    pub yes: bool,
    /// It is for each boot.
    pub keep: bool,
}

#[derive(Debug, Args, Serialize)]
pub struct Status {
    /// Only this device, named as for `portcullis protect` [default: all]
    pub device: Option<String>,

    /// Print JSON for machines (docs/linux.md describes it)
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// Each unmap waits until the IOMMU confirms that the device no longer reaches the buffer
    Strict,
    /// The driver has a buffer back at once, and the device reaches it until the window ends (--window-us)
    Lazy,
    /// The device gets copies of buffers up to --threshold, and reaches no byte besides; larger ones are mapped as strict does
    Bounce,
    /// A buffer is copied or mapped strictly, in the way that measures cheaper
    Auto,
}

impl Policy {
    /// As the module spells it.
    fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Lazy => "lazy",
            Self::Bounce => "bounce",
            Self::Auto => "auto",
        }
    }
}

/// A policy with its figures, in the words that the module takes: for a device, and as its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    pub policy: String,
    pub window_us: Option<u64>,
    pub threshold: Option<u64>,
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "policy={}", self.policy)?;
        self.window_us.map_or(Ok(()), |window| write!(f, " window_us={window}"))?;
        self.threshold.map_or(Ok(()), |bytes| write!(f, " threshold={bytes}"))
    }
}
