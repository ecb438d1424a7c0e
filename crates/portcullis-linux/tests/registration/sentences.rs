//! The text of errors.

use std::io;

use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::domain::MapListError;
use portcullis_linux::registration::{
    AcquireError, ForgetError, RegistrationConfigError, ReleaseRegistrationError,
};
use portcullis_linux::vfio::{InterruptError, InterruptKind, OpenError};

use crate::said::{assert_said, pair};
use crate::support::{Bench, KEPT, TIMEOUT, pages};

#[test]
fn each_error_of_a_registration_says_its_own_figures() {
    let bench = Bench::new(1, 1);
    let registration = bench.acquire(pages(0, 1), KEPT).unwrap();
    let (error, PhysSegment { phys, .. }) = (TIMEOUT, pages(0, 1));
    let other = ReleaseRegistrationError::OtherCache { registration };
    let limits = RegistrationConfigError::Limits { entries: 5, bytes: 0x6000, most: 7 };
    let said = [
        pair(RegistrationConfigError::NoTranslation, "a domain without translation has nothing to register"),
        pair(limits, "a cache of 5 entries and 24576 bytes: 1 to 7 entries and a granule are needed"),
        pair(RegistrationConfigError::OutOfMemory { entries: 5 }, "no memory to keep account of 5 entries"),
        pair(
            AcquireError::TooLarge { bytes: 0x9000, limit: 0x8000 },
            "36864 bytes of granules: the cache's limit is 32768",
        ),
        pair(AcquireError::NoEntry { limit: 3 }, "all of the cache's limit of 3 entries are held"),
        pair(
            AcquireError::NoBytes { wanted: 0x4000, limit: 0x8000, held: 0x5000 },
            "16384 bytes are wanted: of the cache's limit of 32768, 20480 are held",
        ),
        pair(AcquireError::NoMemory, "no memory to keep account of who waits for room"),
        pair(
            AcquireError::Eviction { error },
            "no room could be made, as unmapped entries may still be reached: the IOMMU did not confirm an invalidation within 1 ns",
        ),
        pair(
            AcquireError::Forgotten { phys: PhysAddr::new(0x1000), len: 0x2000 },
            "the 8192 bytes at 0x1000 were forgotten while they were being acquired",
        ),
        pair(
            AcquireError::Unconfirmed { error },
            "forgotten while it was being acquired, and devices may still reach it: the IOMMU did not confirm an invalidation within \
             1 ns",
        ),
        pair(
            AcquireError::Map(MapListError::EmptySegment { index: 4, phys }),
            "segment 4, at 0x900000000, is empty",
        ),
        pair(&other, "a registration of another cache"),
        pair(
            ReleaseRegistrationError::Unconfirmed { error },
            "released, but devices may still reach it: the IOMMU did not confirm an invalidation within 1 ns",
        ),
        pair(
            ForgetError { entries: 6, error },
            "devices may still reach what 6 entries were for: the IOMMU did not confirm an invalidation within 1 ns",
        ),
    ];
    assert_said(&said, &[include_str!("../../src/registration/error.rs")]);
    let ReleaseRegistrationError::OtherCache { registration } = other else { unreachable!() };
    bench.cache.release(registration).unwrap();
    bench.finish();
}

#[test]
fn each_error_of_a_device_says_what_to_do() {
    let name = || "0000:01:00.0".to_owned();
    let path = || "/dev/vfio/7".to_owned();
    let not_bound =
        |driver: Option<&str>| OpenError::NotBound { name: name(), driver: driver.map(str::to_owned) };
    let not_viable =
        OpenError::NotViable { name: name(), other: "0000:01:00.1".into(), driver: "nvme".into() };
    let error = || io::Error::other("no luck");
    let said = [
        pair(
            OpenError::NoDevice { name: name() },
            "there is no PCI device 0000:01:00.0: names are like 0000:01:00.0 (`lspci -D` lists them)",
        ),
        pair(
            OpenError::NoGroup { name: name() },
            "0000:01:00.0 is behind no IOMMU: turn it on in the firmware (VT-d, AMD-Vi, SMMU), and boot Linux with intel_iommu=on where \
             it is Intel's; give one to a virtual machine (QEMU: -device intel-iommu)",
        ),
        pair(
            not_bound(Some("nvme")),
            "0000:01:00.0 has the driver nvme, and VFIO must have it. As root: modprobe vfio-pci; echo vfio-pci > \
             /sys/bus/pci/devices/0000:01:00.0/driver_override; echo 0000:01:00.0 > /sys/bus/pci/devices/0000:01:00.0/driver/unbind; \
             echo 0000:01:00.0 > /sys/bus/pci/drivers_probe",
        ),
        pair(
            not_viable,
            "0000:01:00.0 cannot be told from 0000:01:00.1 by the IOMMU, which has the driver nvme: unbind that, too, or bind it to \
             vfio-pci",
        ),
        pair(
            OpenError::Permission { path: path() },
            "/dev/vfio/7 may not be opened by this user: give it to a group of yours (chgrp, chmod g+rw; a rule of udev keeps that), or \
             be root",
        ),
        pair(
            OpenError::Busy { path: path() },
            "/dev/vfio/7 is in use: another process has the device, or another device of its group",
        ),
        pair(
            OpenError::UnsafeInterrupts { parameter: "a.b=1" },
            "the IOMMU does not check the interrupts of devices (no interrupt remapping), so that a device could raise any: turn it on \
             in the firmware, or, for devices that are trusted, boot Linux with a.b=1",
        ),
        pair(
            OpenError::NoVfio,
            "this kernel has neither iommufd (/dev/iommu) nor VFIO's type 1 (/dev/vfio/vfio): modprobe vfio-pci vfio_iommu_type1, or \
             build it with CONFIG_VFIO_PCI",
        ),
        pair(OpenError::NoAddresses, "the kernel lets the device have no addresses"),
        pair(
            OpenError::OtherAddresses { name: name() },
            "0000:01:00.0 cannot use all addresses of the address space that it was to join: open it by itself, or first",
        ),
        pair(OpenError::Call { call: "ioctl".into(), error: error() }, "ioctl failed: no luck"),
        pair(
            InterruptError::TooFew {
                name: name(),
                kinds: vec![InterruptKind::MsiX, InterruptKind::Intx],
                wanted: 3,
                most: 2,
            },
            "0000:01:00.0 has 2 interrupts of MSI-X or INTx at the most, and not 3",
        ),
        pair(
            InterruptError::InUse { name: name() },
            "0000:01:00.0 has interrupts in use, and one kind may be at a time: drop all that an earlier call returned",
        ),
        pair(InterruptError::Call { call: "ioctl", error: error() }, "ioctl failed: no luck"),
    ];
    assert_said(&said, &[include_str!("../../src/vfio/error.rs")]);
    assert_eq!(
        not_bound(None).to_string(),
        "0000:01:00.0 has no driver, and VFIO must have it. As root: modprobe vfio-pci; echo vfio-pci > \
         /sys/bus/pci/devices/0000:01:00.0/driver_override; echo 0000:01:00.0 > /sys/bus/pci/drivers_probe"
    );
}
