//! What errors say, word for word.

use std::io;

use crate::linux::args::Unprotect;
use crate::linux::device::{Device, FindError};
use crate::linux::keep::KeepError;
use crate::linux::protect::ProtectError;
use crate::linux::refused::Unloaded;
use crate::sentences::{assert_said, odd, pair};

fn device() -> Device {
    Device { path: "/sys/devices/d".into(), name: "d".into() }
}

#[test]
fn what_is_asked_for_is_how_it_is_done() {
    for (yes, keep) in [(true, false), (false, true)] {
        let how = Unprotect { device: "d".into(), yes, keep }.how();
        assert_eq!((how.yes, how.keep), (yes, keep));
    }
}

#[test]
fn each_error_of_a_change_says_what_to_do() {
    let file = "/etc/f";
    let error = || io::Error::other("no luck");
    let devices = || vec!["d".to_owned(), "e".to_owned()];
    let needed = |keeps| ProtectError::Needed { device: device(), stops: "the disk stops".into(), keeps };
    let said = [
        pair(
            FindError::Unknown { name: odd() },
            "there is no device ODD: name it by its PCI address (lspci lists them), a network interface (ip link), or a disk (lsblk)",
        ),
        pair(
            FindError::NoHardware { name: odd() },
            "ODD is not made of hardware that does DMA: sysfs shows no device on a bus behind it",
        ),
        pair(
            FindError::Several { name: odd(), found: vec![device(), device()] },
            "ODD means several devices: d and d; name one of these",
        ),
        pair(
            FindError::Odd { name: odd() },
            "the name ODD cannot be told to the module: it has other characters than letters, digits and :._@+-",
        ),
        pair(
            KeepError::Foreign { file, wanted: "text".into() },
            "/etc/f was not written by this program: put this into it by hand, or move it away:\ntext",
        ),
        pair(
            KeepError::Other { file, settings: odd(), devices: devices() },
            "/etc/f keeps ODD for d and e, and the module's parameters have one policy for all: protect these with the same, or take \
             them out first (`portcullis unprotect DEVICE --keep`)",
        ),
        pair(KeepError::Absent { file, device: odd() }, "/etc/f keeps nothing for ODD"),
        pair(KeepError::Write { file, source: error() }, "cannot write /etc/f: no luck"),
        pair(Unloaded::NoModprobe(error()), "there is no program modprobe: no luck"),
        pair(
            Unloaded::Missing,
            "the module portcullis is not installed for this kernel: docs/linux.md says how to get it",
        ),
        pair(
            Unloaded::Unsigned,
            "this kernel takes signed modules only (Secure Boot), and portcullis is not signed with a key that it knows: \
             docs/linux.md#secure-boot says how to enrol one",
        ),
        pair(
            Unloaded::Refused { said: odd() },
            "the module portcullis cannot be loaded: ODD. `dmesg | grep portcullis` says more",
        ),
        pair(
            Unloaded::Silent,
            "modprobe has loaded portcullis, but /sys/kernel/portcullis/protect is not there. `dmesg | grep portcullis` says more",
        ),
        pair(ProtectError::NotRoot, "only root may do this: begin the command with sudo"),
        pair(
            ProtectError::Rule { rule: odd() },
            "ODD is a rule, and no device: it takes effect when drivers take devices, so it needs --keep",
        ),
        pair(
            ProtectError::NoIommu { device: device() },
            "d has no IOMMU group, so nothing can keep it from memory. Is the IOMMU on, in the firmware's settings (VT-d, AMD-Vi), and \
             on Intel's machines by intel_iommu=on on the kernel's command line? Behind virtio-iommu a device has a group once a \
             driver has had it.",
        ),
        pair(
            ProtectError::Vfio { device: device(), driver: "vfio-pci".into() },
            "d is in the hands of vfio-pci, which gives it to a virtual machine or a program: it is protected by that",
        ),
        pair(ProtectError::NotPci { device: device() }, "d is no PCI device, and the module takes no others"),
        pair(
            ProtectError::Ruled { device: device(), rule: "all".into() },
            "d would be taken again at once, as the module's parameters say all: take that out (`portcullis unprotect all --keep`), and \
             load the module anew, as at a boot",
        ),
        pair(
            ProtectError::NotProtected { device: device() },
            "d is not protected by Portcullis; `portcullis status` says what is",
        ),
        pair(
            needed(true),
            "d: the disk stops, and this system needs it. Take it out of use, or go on with --yes.",
        ),
        pair(
            ProtectError::Unasked { what: "this is done".into() },
            "nobody is here to be asked, so this needs --yes: this is done",
        ),
        pair(ProtectError::Declined, "nothing was changed, as you said"),
    ];
    let sources = [
        include_str!("../../src/linux/device.rs"),
        include_str!("../../src/linux/keep.rs"),
        include_str!("../../src/linux/protect.rs"),
    ];
    // The last of this source is made of two sentences that other tests look at.
    let refused = include_str!("../../src/linux/refused.rs").replace("#[error(\"{what}{left}\")]", "");
    assert_said(&said, &[&sources[..], &[&refused]].concat());
    let said = needed(false).to_string();
    let expected = "d: the disk stops, and this system needs it. Protect it from the next boot on, with --keep. --yes does it now all the \
                    same, and is for disks that the system can lose, as half of a mirror.";
    assert_eq!(said, expected);
}
