//! What the kernel and the module say no to, in sentences that say what to do.

use std::io;

use portcullis_trace::Printable;

use super::change::{Failed, Step};
use super::device::{Device, list};
use super::host::Host;

/// Where the module's line is that says more.
const LOG: &str = "`dmesg | grep portcullis` says more";

/// Why there is no module.
#[derive(Debug, thiserror::Error)]
pub enum Unloaded {
    #[error("there is no program modprobe: {0}")]
    NoModprobe(io::Error),
    #[error("the module portcullis is not installed for this kernel: docs/linux.md says how to get it")]
    Missing,
    #[error(
        "this kernel takes signed modules only (Secure Boot), and portcullis is not signed with a key that it knows: \
         docs/linux.md#secure-boot says how to enrol one"
    )]
    Unsigned,
    #[error("the module portcullis cannot be loaded: {}. {LOG}", Printable(said))]
    Refused { said: String },
    #[error("modprobe has loaded portcullis, but /sys/kernel/portcullis/protect is not there. {LOG}")]
    Silent,
}

/// A change that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}{left}")]
pub struct Refusal {
    what: String,
    left: String,
}

impl Refusal {
    /// `done` is what the devices are not: protected, given back.
    pub fn new(host: &Host<'_>, failed: Failed, done: &str) -> Self {
        let Failed { step, device, why, left } = failed;
        let driver = Printable(host.driver(&device).unwrap_or_else(|| "its driver".into())).to_string();
        let what = match step {
            Step::Unbind => format!("{device} is not {done}, as {driver} keeps it: {why}"),
            Step::Change => why,
            Step::Bind => format!("{device} is not {done}, as its driver does not take it afterwards: {why}"),
        };
        let left = match left.as_slice() {
            [] => format!(". Everything is as it was; {LOG}."),
            all => {
                let told = all.iter().map(|one| host.left(one)).collect::<Vec<_>>();
                format!(". NOT PUT BACK: {}. {LOG}.", list(&told))
            }
        };
        Self { what, left }
    }
}

impl Host<'_> {
    /// Loads the module where it is not.
    pub fn load(&self) -> Result<(), Unloaded> {
        if self.has_module() {
            return Ok(());
        }
        match self.outside.load() {
            Err(error) => Err(Unloaded::NoModprobe(error)),
            Ok(Ok(())) if self.has_module() => Ok(()),
            Ok(Ok(())) => Err(Unloaded::Silent),
            Ok(Err(said)) if said.contains("not found") => Err(Unloaded::Missing),
            Ok(Err(said))
                if said.contains("Key was rejected") || said.contains("equired key not available") =>
            {
                Err(Unloaded::Unsigned)
            }
            Ok(Err(said)) => Err(Unloaded::Refused { said }),
        }
    }

    /// A step back that failed.
    fn left(&self, (step, device, error): &(Step, Device, io::Error)) -> String {
        match step {
            Step::Unbind => format!("{device} is still with its driver ({error})"),
            Step::Change => format!("the protection of {device} is not as it was ({error})"),
            Step::Bind => {
                let bus = self.bus(device).unwrap_or_default();
                format!(
                    "{device} has no driver ({error}; `echo {device} > /sys/bus/{}/drivers_probe` tries again)",
                    Printable(bus)
                )
            }
        }
    }

    /// What the module's answer to a change of this device means.
    pub fn refused(&self, device: &Device, error: &io::Error) -> Refusal {
        Refusal { what: self.why_refused(device, error), left: format!(". {LOG}.") }
    }

    pub fn why_refused(&self, device: &Device, error: &io::Error) -> String {
        match error.raw_os_error() {
            Some(libc::ENODEV | libc::ENOENT) => format!("{device} is gone, or does no DMA"),
            Some(libc::EOPNOTSUPP) => format!(
                "{device} cannot be protected: no IOMMU translates for it, it caches translations itself (ATS), or another part of the kernel has \
                 its mappings (docs/linux.md#what-can-go-wrong)"
            ),
            Some(libc::EBUSY) => {
                let others = self
                    .sharing(device)
                    .into_iter()
                    .filter_map(|one| Some(format!("{one} ({})", Printable(self.driver(&one)?))));
                match list(&others.collect::<Vec<_>>()) {
                    others if others.is_empty() => {
                        format!("{device} is in use: its IOMMU group belongs to something else, such as vfio")
                    }
                    others => {
                        format!("{device} is in use: drivers have {others}, which must be unbound first")
                    }
                }
            }
            Some(libc::ENOSPC) => format!(
                "{device} can name too few addresses: firmware and the host bridge's windows have them all"
            ),
            Some(libc::EINVAL) if self.is_external(device) => format!(
                "{device} is behind an external port, and for such a device the module refuses lazy: take strict, bounce or auto"
            ),
            Some(libc::EINVAL) => {
                let version = self.text(&self.of_module("version")).unwrap_or_else(|| "not known".into());
                format!(
                    "the module does not understand what it was told: its version is {}, and this is {}",
                    Printable(version),
                    env!("CARGO_PKG_VERSION")
                )
            }
            Some(libc::ENOMEM) => format!("there is not enough memory to protect {device}"),
            _ => format!("{device}: {error}"),
        }
    }
}
