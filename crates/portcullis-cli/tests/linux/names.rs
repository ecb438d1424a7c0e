//! Which device a name means.

use super::Fake;
use crate::linux::device::{FindError, is_plain};

fn found(fake: &Fake, name: &str) -> String {
    fake.host().find(name).map_or_else(|error| error.to_string(), |device| device.name)
}

#[test]
fn a_pci_device_is_named_by_its_address() {
    let fake = Fake::new();
    fake.pci("0001:02:00.0", "9", None);
    fake.pci("0000:ab:1f.7", "10", None);
    for (name, expected) in [
        ("0000:00:04.0", "0000:00:04.0"),
        ("00:04.0", "0000:00:04.0"),
        ("pci/0000:00:04.0", "0000:00:04.0"),
        ("0000:AB:1F.7", "0000:ab:1f.7"),
        ("AB:1f.7", "0000:ab:1f.7"),
        // Not in the first domain, and in one other only.
        ("02:00.0", "0001:02:00.0"),
    ] {
        assert_eq!(found(&fake, name), expected, "{name}");
    }
    // With a second one of these, it is no name any more.
    fake.pci("0002:02:00.0", "11", None);
    let several = fake.host().find("02:00.0").unwrap_err();
    assert!(matches!(&several, FindError::Several { found, .. } if found.len() == 2), "{several}");
    assert!(several.to_string().contains("0001:02:00.0 and 0002:02:00.0"), "{several}");
}

#[test]
fn an_interface_is_its_nearest_device_with_a_group() {
    let fake = Fake::new();
    // virtio's own bus has no groups.
    fake.link("sys/devices/pci0000:00/0000:00:05.0/virtio2/subsystem", "sys/bus/virtio");
    assert_eq!(found(&fake, "eth0"), "0000:00:05.0");
    // A device of the platform's bus, as on Arm.
    fake.on_bus(
        "platform",
        "fe9c0000.ethernet",
        "sys/devices/platform/fe9c0000.ethernet",
        "12",
        Some("dwmac"),
    );
    fake.in_class("net", "sys/devices/platform/fe9c0000.ethernet/net/end0");
    assert_eq!(found(&fake, "end0"), "fe9c0000.ethernet");
    assert_eq!(found(&fake, "platform/fe9c0000.ethernet"), "fe9c0000.ethernet");
    // A bond is all that it is made of, and a bridge over it as well.
    fake.in_class("net", "sys/devices/virtual/net/bond0");
    fake.link(
        "sys/devices/virtual/net/bond0/lower_eth0",
        "sys/devices/pci0000:00/0000:00:05.0/virtio2/net/eth0",
    );
    fake.in_class("net", "sys/devices/virtual/net/br0");
    fake.link("sys/devices/virtual/net/br0/lower_bond0", "sys/devices/virtual/net/bond0");
    assert_eq!(found(&fake, "br0"), "0000:00:05.0");
    fake.link("sys/devices/virtual/net/bond0/lower_end0", "sys/devices/platform/fe9c0000.ethernet/net/end0");
    assert!(found(&fake, "br0").contains("0000:00:05.0 and fe9c0000.ethernet"), "{}", found(&fake, "br0"));
    // One that leads back to itself ends.
    fake.link("sys/devices/virtual/net/bond0/lower_br0", "sys/devices/virtual/net/br0");
    assert!(found(&fake, "br0").contains("several devices"));
}

#[test]
fn a_disk_is_its_controller_by_whatever_name() {
    let fake = Fake::new();
    fake.child("block", "0000:00:04.0", "nvme/nvme0/nvme0n1/nvme0n1p2");
    fake.in_class("nvme", "sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0");
    fake.file("dev/nvme0", "");
    std::fs::create_dir_all(fake.root.join("dev/disk/by-id")).unwrap();
    std::os::unix::fs::symlink("../../nvme0n1p2", fake.root.join("dev/disk/by-id/disk-part2")).unwrap();
    for name in [
        "nvme0n1",
        "/dev/nvme0n1",
        "nvme0n1p2",
        "/dev/nvme0n1p2",
        "/dev/disk/by-id/disk-part2",
        "nvme0",
        "/dev/nvme0",
    ] {
        assert_eq!(found(&fake, name), "0000:00:04.0", "{name}");
    }
    // A USB stick is its controller.
    fake.pci("0000:00:07.0", "7", Some("xhci_hcd"));
    fake.child("block", "0000:00:07.0", "usb1/1-1/1-1:1.0/host2/target2:0:0/2:0:0:0/block/sda");
    assert_eq!(found(&fake, "sda"), "0000:00:07.0");
    // Old controllers of RAID have a folder in /dev.
    fake.child("block", "0000:00:06.0", "block/cciss!c0d0");
    assert_eq!(found(&fake, "/dev/cciss/c0d0"), "0000:00:06.0");
    // A volume is the disks below it.
    fake.in_class("block", "sys/devices/virtual/block/dm-0");
    fake.link(
        "sys/devices/virtual/block/dm-0/slaves/nvme0n1p2",
        "sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/nvme0n1p2",
    );
    std::fs::create_dir_all(fake.root.join("dev/mapper")).unwrap();
    std::os::unix::fs::symlink("../dm-0", fake.root.join("dev/mapper/data")).unwrap();
    assert_eq!(found(&fake, "/dev/mapper/data"), "0000:00:04.0");
}

#[test]
fn a_disk_with_several_paths_is_reached_through_its_subsystem() {
    let fake = Fake::new();
    let subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0";
    fake.in_class("nvme-subsystem", subsystem);
    fake.in_class("block", &format!("{subsystem}/nvme1n1"));
    fake.in_class("nvme", "sys/devices/pci0000:00/0000:00:06.0/nvme/nvme1");
    fake.link(&format!("{subsystem}/nvme1"), "sys/devices/pci0000:00/0000:00:06.0/nvme/nvme1");
    assert_eq!(found(&fake, "/dev/nvme1n1"), "0000:00:06.0");
    // What is shown is the disk that people know, and not the path to it, which has no node in /dev.
    let path = "sys/devices/pci0000:00/0000:00:06.0/nvme/nvme1/nvme1c1n1";
    fake.in_class("block", path);
    fake.file(&format!("{path}/hidden"), "1\n");
    fake.in_class("block", &format!("{subsystem}/nvme1n1/nvme1n1p1"));
    fake.file(&format!("{subsystem}/nvme1n1/nvme1n1p1/partition"), "1\n");
    fake.file("sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/hidden", "0\n");
    let host = fake.host();
    let uses = |name: &str| host.uses_of(&host.find(name).unwrap());
    assert_eq!(
        (uses("0000:00:06.0"), uses("0000:00:04.0")),
        (vec!["nvme1n1".into()], vec!["nvme0n1".into()])
    );
}

#[test]
fn what_is_no_device_is_said_to_be_none() {
    let fake = Fake::new();
    fake.in_class("net", "sys/devices/virtual/net/lo");
    assert!(found(&fake, "lo").contains("no device on a bus behind it"), "{}", found(&fake, "lo"));
    // An interface and a disk of one name, and only one of them is meant.
    fake.child("block", "0000:00:06.0", "block/eth0");
    assert!(
        found(&fake, "eth0").contains("several devices: 0000:00:05.0 and 0000:00:06.0"),
        "{}",
        found(&fake, "eth0")
    );
    fake.file("secret", "");
    for name in [
        "",
        ".",
        "..",
        "/",
        "eth9",
        "00:09.0",
        "/dev/none",
        "/dev",
        "/dev/../secret",
        "../../secret",
        "a/b/c",
        "pci/",
        "/sys/bus",
    ] {
        let error = fake.host().find(name).unwrap_err();
        assert!(matches!(error, FindError::Unknown { .. }), "{name}: {error}");
    }
}

/// Names come from firmware and from devices. One with a blank would be several words to the module.
#[test]
fn a_name_that_would_be_another_order_is_refused() {
    let fake = Fake::new();
    for (at, name) in ["a policy=lazy", "b\nc", "d\u{1b}[2J", "-e,f"].into_iter().enumerate() {
        let path = format!("sys/devices/platform/{name}");
        fake.on_bus("platform", name, &path, &format!("2{at}"), None);
        fake.in_class("net", &format!("{path}/net/odd{at}"));
        let error = fake.host().find(&format!("odd{at}")).unwrap_err();
        assert!(matches!(error, FindError::Odd { .. }), "{error}");
        assert!(!error.to_string().contains(['\n', '\u{1b}']), "{error}");
    }
    let error = fake.host().find("no\u{1b}[2J\u{202e}\n").unwrap_err().to_string();
    assert!(error.contains(r"no\u{1b}[2J\u{202e}\u{a}") && !error.contains('\u{1b}'), "{error}");
}

/// Intel's VMD has domains of five digits.
#[test]
fn a_domain_has_four_digits_to_eight() {
    let fake = Fake::new();
    for (name, group) in [("10000:e1:00.0", "21"), ("1234abcd:e2:00.0", "22")] {
        fake.pci(name, group, None);
        assert_eq!(found(&fake, name), name);
        assert_eq!(found(&fake, &name.to_uppercase()), name);
        assert_eq!(found(&fake, name.split_once(':').unwrap().1), name);
    }
    for name in
        ["000:00:04.0", "123456789:00:04.0", "0000:0:04.0", "0000:00:4.0", "0000:00:04.", "0000:00:04.00"]
    {
        assert!(matches!(fake.host().find(name), Err(FindError::Unknown { .. })), "{name}");
    }
}

#[test]
fn a_plain_name_is_one_word_wherever_it_stands() {
    for name in ["a", "0000:00:04.0", "fe9c0000.ethernet", "usb@1_2+3-4"] {
        assert!(is_plain(name), "{name}");
    }
    for name in ["", ".", "..", ".a", "a b", "a,b", "a/b", "a=b", "a#b", "a\nb", "ä"] {
        assert!(!is_plain(name), "{name}");
    }
}

/// A device of PCI that has no group, as before any driver has had it behind virtio-iommu, is one all the same.
#[test]
fn a_device_without_a_group_is_found_by_its_bus() {
    let fake = Fake::new();
    std::fs::remove_file(fake.root.join("sys/devices/pci0000:00/0000:00:05.0/iommu_group")).unwrap();
    assert_eq!(found(&fake, "eth0"), "0000:00:05.0");
    let device = fake.host().find("eth0").unwrap();
    assert_eq!(fake.host().sharing(&device), [device]);
}

/// Of a group the module leaves bridges to other buses to their drivers, those of PCI and of CardBus.
#[test]
fn bridges_to_other_buses_keep_their_drivers() {
    let fake = Fake::new();
    for (name, class) in
        [("0000:00:07.0", "0x060400"), ("0000:00:08.0", "0x060700"), ("0000:00:09.0", "0x060100")]
    {
        fake.pci(name, "1", None);
        fake.file(&format!("sys/bus/pci/devices/{name}/class"), &format!("{class}\n"));
    }
    let of = |name: &str| {
        let device = fake.host().find(name).unwrap();
        let mut names: Vec<String> = fake.host().sharing(&device).into_iter().map(|one| one.name).collect();
        names.sort();
        names
    };
    assert_eq!(of("00:04.0"), ["0000:00:04.0", "0000:00:09.0"]);
    // But where it is named itself.
    assert_eq!(of("00:08.0"), ["0000:00:04.0", "0000:00:08.0", "0000:00:09.0"]);
}
