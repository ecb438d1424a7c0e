//! Why a device could not be opened, and what to do about it.

use std::fmt;
use std::io;

use super::interrupts::InterruptKind;

/// Why a device could not be opened. `{:?}` prints the text, too, for errors that `main` returns.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no such device.
    #[error("there is no PCI device {name}: names are like 0000:01:00.0 (`lspci -D` lists them)")]
    NoDevice {
        /// The name.
        name: String,
    },
    /// The device is behind no IOMMU.
    #[error(
        "{name} is behind no IOMMU: turn it on in the firmware (VT-d, AMD-Vi, SMMU), and boot Linux with intel_iommu=on where it \
         is Intel's; give one to a virtual machine (QEMU: -device intel-iommu)"
    )]
    NoGroup {
        /// The device.
        name: String,
    },
    /// The device is not bound to VFIO.
    #[error(
        "{name} has {}, and VFIO must have it. As root: modprobe vfio-pci; echo vfio-pci > /sys/bus/pci/devices/{name}/driver_override; \
         {}echo {name} > /sys/bus/pci/drivers_probe",
        driver.as_ref().map_or("no driver".to_owned(), |driver| format!("the driver {driver}")),
        driver.as_ref().map_or(String::new(), |_| format!("echo {name} > /sys/bus/pci/devices/{name}/driver/unbind; "))
    )]
    NotBound {
        /// The device.
        name: String,
        /// Its driver.
        driver: Option<String>,
    },
    /// Another device in its IOMMU group is bound to a kernel driver.
    #[error(
        "{name} cannot be told from {other} by the IOMMU, which has the driver {driver}: unbind that, too, or bind it to vfio-pci"
    )]
    NotViable {
        /// The device.
        name: String,
        /// The other device of its group.
        other: String,
        /// The other's driver.
        driver: String,
    },
    /// This user may not open a file of the kernel.
    #[error(
        "{path} may not be opened by this user: give it to a group of yours (chgrp, chmod g+rw; a rule of udev keeps that), or be root"
    )]
    Permission {
        /// The file.
        path: String,
    },
    /// The device, or its group, is already open.
    #[error("{path} is in use: another process has the device, or another device of its group")]
    Busy {
        /// The file.
        path: String,
    },
    /// The IOMMU has no interrupt remapping: a device could raise any interrupt. The administrator may allow that.
    #[error(
        "the IOMMU does not check the interrupts of devices (no interrupt remapping), so that a device could raise any: turn it on in the \
         firmware, or, for devices that are trusted, boot Linux with {parameter}"
    )]
    UnsafeInterrupts {
        /// The parameter that allows it.
        parameter: &'static str,
    },
    /// The kernel has neither iommufd nor VFIO's type 1.
    #[error(
        "this kernel has neither iommufd (/dev/iommu) nor VFIO's type 1 (/dev/vfio/vfio): modprobe vfio-pci vfio_iommu_type1, or build \
         it with CONFIG_VFIO_PCI"
    )]
    NoVfio,
    /// The kernel allows devices no addresses.
    #[error("the kernel lets the device have no addresses")]
    NoAddresses,
    /// The device cannot use all addresses of the space that it was to join.
    #[error(
        "{name} cannot use all addresses of the address space that it was to join: open it by itself, or first"
    )]
    OtherAddresses {
        /// The device.
        name: String,
    },
    /// A system call failed.
    #[error("{call} failed: {error}")]
    Call {
        /// Its name.
        call: String,
        /// Its error.
        error: io::Error,
    },
}

impl fmt::Debug for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for InterruptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl OpenError {
    pub(super) fn call(call: impl Into<String>, error: io::Error) -> Self {
        Self::Call { call: call.into(), error }
    }
}

/// Why a device's interrupts could not be turned on. `{:?}` prints the text, too.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum InterruptError {
    /// The device, or the machine, has too few interrupts of a kind.
    #[error("{name} has {most} interrupts of {} at the most, and not {wanted}", named(kinds))]
    TooFew {
        /// The device.
        name: String,
        /// The kinds that were tried.
        kinds: Vec<InterruptKind>,
        /// How many were requested.
        wanted: u32,
        /// How many one of them has.
        most: u32,
    },
    /// Interrupts of an earlier call have not been dropped.
    #[error(
        "{name} has interrupts in use, and one kind may be at a time: drop all that an earlier call returned"
    )]
    InUse {
        /// The device.
        name: String,
    },
    /// A system call failed.
    #[error("{call} failed: {error}")]
    Call {
        /// Its name.
        call: &'static str,
        /// Its error.
        error: io::Error,
    },
}

fn named(kinds: &[InterruptKind]) -> String {
    let names = kinds.iter().map(|kind| match kind {
        InterruptKind::MsiX => "MSI-X",
        InterruptKind::Msi => "MSI",
        InterruptKind::Intx => "INTx",
        InterruptKind::UnplugRequest => "the kind for unplug requests",
    });
    names.collect::<Vec<_>>().join(" or ")
}

impl InterruptError {
    pub(super) fn call(call: &'static str, error: io::Error) -> Self {
        Self::Call { call, error }
    }
}
