//! What stops while a device has no driver.

use super::{ASK, Fake, How, YES};

const DISK: &str = "0000:00:04.0";

/// What is said to stop when the device that `name` means has no driver, and whether this system does not survive it.
fn stops(fake: &Fake, name: &str) -> Vec<(String, bool)> {
    let host = fake.host();
    let stops = host.stops(&[host.find(name).unwrap()]);
    stops.into_iter().map(|stop| (stop.what, stop.is_fatal)).collect()
}

fn partition(fake: &Fake) {
    fake.child("block", DISK, "nvme/nvme0/nvme0n1/nvme0n1p2");
    fake.link("sys/dev/block/259:2", "sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/nvme0n1p2");
}

#[test]
fn file_systems_are_found_by_number_by_name_and_below_volumes() {
    let fake = Fake::new();
    partition(&fake);
    assert_eq!(stops(&fake, DISK), []);
    fake.mount("/proc", "0:22", "proc", "proc");
    fake.mount("/srv/my\\040data", "259:2", "ext4", "/dev/root");
    fake.in_class("block", "sys/devices/virtual/block/dm-0");
    fake.link(
        "sys/devices/virtual/block/dm-0/slaves/nvme0n1p2",
        "sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1/nvme0n1p2",
    );
    fake.link("sys/dev/block/253:0", "sys/devices/virtual/block/dm-0");
    fake.mount("/", "253:0", "ext4", "/dev/mapper/root");
    fake.mount("/back\\134slash", "0:40", "xfs", "/dev/nvme0n1p2");
    fake.mount("/net", "0:41", "nfs", "server:/share");
    // A second one at the same place lies over the first: one sentence is enough.
    fake.mount("/srv/my\\040data", "259:2", "ext4", "/dev/root");
    let expected = [
        ("the file system at /srv/my data is on it", false),
        ("the file system at / is on it", true),
        ("the file system at /back\\slash is on it", false),
    ];
    assert_eq!(stops(&fake, DISK), expected.map(|(what, is_fatal)| (what.to_owned(), is_fatal)));
    // No disk, nothing mounted; it is an interface, which is up.
    assert_eq!(stops(&fake, "eth0"), [("the network interface eth0 is up".to_owned(), false)]);
}

#[test]
fn a_file_system_on_several_disks_is_on_each() {
    let fake = Fake::new();
    partition(&fake);
    fake.child("block", "0000:00:06.0", "block/sda");
    fake.mount("/", "0:33", "btrfs", "/dev/sda");
    assert_eq!(stops(&fake, DISK), []);
    let devices = "sys/fs/btrfs/5ee5/devices";
    fake.link(&format!("{devices}/sda"), "sys/devices/pci0000:00/0000:00:06.0/block/sda");
    fake.link(&format!("{devices}/nvme0n1"), "sys/devices/pci0000:00/0000:00:04.0/nvme/nvme0/nvme0n1");
    assert_eq!(stops(&fake, DISK), [("the file system at / is on it".to_owned(), true)]);
    assert_eq!(stops(&fake, "sda"), [("the file system at / is on it".to_owned(), true)]);
    let fake = Fake::new();
    fake.mount("/", "0:34", "bcachefs", "/dev/sdz:/dev/nvme0n1");
    assert_eq!(stops(&fake, DISK), [("the file system at / is on it".to_owned(), true)]);
}

#[test]
fn a_root_that_does_not_tell_its_disks_may_be_on_any() {
    let fake = Fake::new();
    fake.mount("/", "0:35", "zfs", "rpool/root");
    fake.mount("/home", "0:36", "zfs", "rpool/home");
    assert_eq!(stops(&fake, DISK), [("the root file system (zfs) may be on it".to_owned(), true)]);
    assert_eq!(stops(&fake, "0000:00:06.0"), [], "which has no disk");
    for in_memory in ["rootfs", "tmpfs", "ramfs", "overlay"] {
        let fake = Fake::new();
        fake.mount("/", "0:2", in_memory, in_memory);
        assert_eq!(stops(&fake, DISK), [], "which is in memory");
    }
}

#[test]
fn swap_is_found_on_partitions_and_in_files() {
    let fake = Fake::new();
    partition(&fake);
    fake.child("block", "0000:00:06.0", "block/sda");
    fake.link("sys/dev/block/8:0", "sys/devices/pci0000:00/0000:00:06.0/block/sda");
    fake.mount("/", "8:0", "ext4", "/dev/sda");
    fake.mount("/big", "259:2", "ext4", "/dev/nvme0n1p2");
    let swaps = |line: &str| fake.file("proc/swaps", &format!("Filename Type Size Used Priority\n{line}\n"));
    for (line, is_here) in [
        ("/dev/nvme0n1p2 partition 9 0 -2", true),
        ("/dev/sda partition 9 0 -2", false),
        ("/big/swap\\040file file 9 0 -2", true),
        ("/bigger/swapfile file 9 0 -2", false),
        ("/swapfile file 9 0 -2", false),
    ] {
        swaps(line);
        let found = stops(&fake, DISK)
            .into_iter()
            .filter(|(what, _)| what.contains("swap space"))
            .collect::<Vec<_>>();
        assert_eq!(found.len(), usize::from(is_here), "{line}: {found:?}");
        assert!(found.iter().all(|(_, is_fatal)| *is_fatal));
    }
}

#[test]
fn the_interface_of_this_session_is_named() {
    let routes = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
                  br0 00000000 0101A8C0 0003 0 0 0 00000000 0 0 0\n\
                  eth1 0001A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n";
    let carries = [("the network interface eth0 carries this session".to_owned(), false)];
    let up = [("the network interface eth0 is up".to_owned(), false)];
    let fake = Fake::new();
    fake.file("proc/net/route", routes);
    let ipv6 = format!(
        "{:032x} 00 {:032x} 00 {:032x} 00000400 1 0 00000003 eth1\n20010db8{:024x} 20 {:032x} 00 {:032x} 00000100 1 0 00000001 eth0\n\
         {:032x} 00 {:032x} 00 {:032x} ffffffff 1 0 00200200 lo\n",
        0, 0, 0, 0, 0, 0, 0, 0, 0
    );
    fake.file("proc/net/ipv6_route", &ipv6);
    fake.in_class("net", "sys/devices/virtual/net/br0");
    fake.link(
        "sys/devices/virtual/net/br0/lower_eth0",
        "sys/devices/pci0000:00/0000:00:05.0/virtio2/net/eth0",
    );
    let from = |address: &str| {
        fake.file("proc/self/environ", &format!("A=b\0SSH_CONNECTION={address} 50000 10.0.0.1 22\0"));
        stops(&fake, "eth0")
    };
    // The longest of the routes that lead there, whatever the interfaces' names.
    fake.file(
        "proc/net/route",
        &routes.replace("eth1 0001A8C0", "br0 0001A8C0").replace("br0 00000000", "eth1 00000000"),
    );
    assert_eq!((from("192.168.1.7"), from("203.0.113.9")), (carries.to_vec(), up.to_vec()));
    fake.file("proc/net/route", routes);
    // A link's own address names its interface.
    fake.file(
        "proc/net/ipv6_route",
        &format!("fe80{:028x} 0a {:032x} 00 {:032x} 00000100 1 0 00000001 br0\n", 0, 0, 0),
    );
    assert_eq!(from("fe80::1%eth1"), carries);
    fake.file("proc/net/ipv6_route", &ipv6);
    // By the bridge over it; not by another interface, to which a longer route leads; and the same with addresses of IPv6.
    assert_eq!(from("203.0.113.9"), carries);
    assert_eq!(from("192.168.1.7"), up);
    assert_eq!(from("::ffff:203.0.113.9"), carries);
    assert_eq!(from("2001:db8::1"), carries);
    assert_eq!(from("fe80::1%eth1"), up);
    for nothing in ["", "x", "\u{1b}[2J", "1.2.3"] {
        assert_eq!(from(nothing), up);
    }
    // sudo forgets it; the shell above has it.
    fake.file("proc/self/environ", "A=b\0");
    fake.file("proc/self/status", "Name:\tportcullis\nPPid:\t77\n");
    fake.file("proc/77/status", "Name:\tsudo\nPPid:\t76\n");
    fake.file("proc/76/environ", "SSH_CONNECTION=203.0.113.9 50000 10.0.0.1 22\0");
    assert_eq!(stops(&fake, "eth0"), carries);
    // The longest route leads there, and its length is no more than an address has bits. A route of the machine's own has no
    // interface.
    let route = |to: &str, bits: &str, name: &str| {
        format!("{to} {bits} {:032x} 00 {:032x} 00000100 1 0 00000001 {name}\n", 0, 0)
    };
    let there = format!("20010db8{:024x}", 1);
    for (routes, expected) in [
        (vec![route(&format!("{:032x}", 0), "00", "eth0")], &carries),
        (vec![route(&there, "80", "eth0"), route(&there, "40", "eth1")], &carries),
        (vec![route(&there, "80", "lo"), route(&there, "40", "eth0")], &carries),
        (vec![route(&there, "81", "eth1"), route(&there, "40", "eth0")], &carries),
        (vec![route(&there, "80", "eth1"), route(&there, "40", "eth0")], &up),
        (vec![route(&format!("20010db8{:024x}", 2), "80", "eth0")], &up),
    ] {
        fake.file("proc/net/ipv6_route", &routes.concat());
        assert_eq!(from("2001:db8::1"), *expected, "{routes:?}");
    }
    fake.file("proc/self/environ", "A=b\0");
    // A loop of parents, which a file may claim, ends.
    fake.file("proc/77/status", "PPid:\t77\n");
    assert_eq!(stops(&fake, "eth0"), up);
    // What does not know whether it is up, as many drivers say, may be.
    for (state, expected) in [("unknown", &up[..]), ("dormant", &up), ("up", &up), ("down", &[])] {
        fake.file("sys/class/net/eth0/operstate", &format!("{state}\n"));
        assert_eq!(stops(&fake, "eth0"), expected, "{state}");
    }
}

#[test]
fn what_the_system_needs_is_not_taken_without_yes() {
    for keeps in [false, true] {
        let fake = Fake::new();
        partition(&fake);
        fake.mount("/", "259:2", "ext4", "/dev/nvme0n1p2");
        // Nobody is asked: an answer out of habit would end this system.
        fake.answer.set(Some(true));
        let result = fake.protect(DISK, "policy=bounce", How { yes: false, keep: keeps });
        assert!(fake.writes.borrow().is_empty() && fake.questions.borrow().is_empty());
        if keeps {
            // The next boot is time enough.
            result.unwrap();
            assert!(fake.heard().contains("stays as it is until the next boot"), "{}", fake.heard());
            assert!(fake.root.join("etc/modprobe.d/portcullis.conf").exists());
        } else {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("the file system at / is on it") && error.contains("--keep"), "{error}");
            fake.protect(DISK, "policy=bounce", YES).unwrap();
            assert!(fake.is_protected(DISK) && fake.heard().contains("the file system at / is on it"));
            let error = fake.unprotect(DISK, ASK).unwrap_err().to_string();
            assert!(error.contains("and this system needs it"), "{error}");
        }
    }
}
