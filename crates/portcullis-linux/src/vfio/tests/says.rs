//! The kernel's answers, names, ranges.

use portcullis::addr::{Iova, IovaRange};
use portcullis::pgtable::MapError;

use super::kernel::device;
use crate::vfio::error::OpenError;
use crate::vfio::limits::{locked, locked_elsewhere, most_locked, over};
use crate::vfio::ranges::Ranges;
use crate::vfio::sysfs::{Place, numbers};
use crate::vfio::type1::ranges_in;

fn range(first: u64, last: u64) -> IovaRange {
    IovaRange::from_bounds(Iova::new(first), Iova::new(last)).unwrap()
}

/// An answer to `VFIO_IOMMU_GET_INFO`, with two capabilities.
pub fn answer() -> Vec<u8> {
    let mut info = Vec::new();
    // Length, flags (sizes and capabilities), page sizes, offset of the first capability, padding.
    info.extend([104_u32, 3].iter().flat_map(|word| word.to_ne_bytes()));
    info.extend((4096_u64 | 2 << 20 | 1 << 30).to_ne_bytes());
    info.extend([24_u32, 0].iter().flat_map(|word| word.to_ne_bytes()));
    // Number 3, version 1, the next at 40; 65,535 left.
    info.extend([1 << 16 | 3, 40, 65_535, 0_u32].iter().flat_map(|word| word.to_ne_bytes()));
    // Number 1, version 1, the last; two ranges.
    info.extend([1 << 16 | 1, 0, 2, 0_u32].iter().flat_map(|word| word.to_ne_bytes()));
    info.extend([0, 0xfedf_ffff, 0xfef0_0000, (1_u64 << 39) - 1].iter().flat_map(|word| word.to_ne_bytes()));
    info
}

#[test]
fn capabilities_are_read_in_whichever_order_they_come() {
    let ranges = ranges_in(&answer()).unwrap();
    assert_eq!(ranges.allowed, [range(0, 0xfedf_ffff), range(0xfef0_0000, (1 << 39) - 1)]);
    assert_eq!((ranges.page_sizes, ranges.most_mappings), (4096 | 2 << 20 | 1 << 30, Some(65_535)));
    // Without ranges (Linux before 5.4) nothing is guessed.
    let mut without = answer();
    without[40] = 2;
    assert_eq!(ranges_in(&without), None);
    without[4] = 1;
    assert_eq!(ranges_in(&without), None);
}

#[test]
fn any_answer_is_survived() {
    for at in 0..answer().len() {
        for byte in 0..=255 {
            let mut changed = answer();
            changed[at] = byte;
            let _ = ranges_in(&changed);
        }
        let _ = ranges_in(&answer()[..at]);
    }
}

#[test]
fn what_lies_between_ranges_is_reserved() {
    let ranges = ranges_in(&answer()).unwrap();
    let geometry = ranges.geometry(4096).unwrap();
    assert_eq!(
        (geometry.aperture, geometry.reserved.as_slice()),
        (range(0, (1 << 39) - 1), &[range(0xfee0_0000, 0xfeef_ffff)][..])
    );
    assert_eq!(geometry.page_sizes.smallest().unwrap().bytes(), 4096);
    // A process with larger pages maps by these.
    assert_eq!(ranges.geometry(64 << 10).unwrap().page_sizes.smallest().unwrap().bytes(), 64 << 10);
    assert!(ranges.allow(&geometry));
    // Another device has more holes, fewer addresses or larger pages.
    let less = |allowed: Vec<IovaRange>, page_sizes| Ranges { allowed, page_sizes, most_mappings: None };
    assert!(!less(vec![range(0, 0xfedf_ffff), range(0xfef0_0000, (1 << 32) - 1)], 4096).allow(&geometry));
    assert!(!less(vec![range(0, 0x9fff_ffff), range(0xfef0_0000, (1 << 39) - 1)], 4096).allow(&geometry));
    assert!(!less(ranges.allowed.clone(), 64 << 10).allow(&geometry));
    assert!(less(vec![range(0, (1 << 48) - 1)], 4096).allow(&geometry));
    assert!(less(Vec::new(), 4096).geometry(4096).is_none());
}

/// AMD's IOMMU reports all 64-bit addresses, whose number does not fit into 64 bits.
#[test]
fn all_64_bits_of_addresses_are_taken_but_for_the_last_page() {
    let mut whole = answer();
    whole[48] = 1;
    whole[56..72].copy_from_slice(&[0, u64::MAX].map(u64::to_ne_bytes).concat());
    let last = u64::MAX - 4096;
    assert_eq!(ranges_in(&whole).unwrap().allowed, [range(0, last)]);
    let mut parts = answer();
    parts[80..88].copy_from_slice(&u64::MAX.to_ne_bytes());
    let geometry = ranges_in(&parts).unwrap().geometry(4096).unwrap();
    assert_eq!(geometry.aperture, range(0, last));
    assert_eq!(geometry.reserved, [range(0xfee0_0000, 0xfeef_ffff)]);
}

#[test]
fn names_of_devices_are_names_and_no_paths() {
    assert_eq!(numbers("0000:01:1f.7"), Some([0, 1, 31, 7]));
    assert_eq!(numbers("10000:e1:00.0"), Some([0x10000, 0xe1, 0, 0]));
    for name in [
        "",
        "01:00.0",
        "0000:01:00",
        "0000:01:00.8",
        "0000:01:20.0",
        "0000:1:00.0",
        "../../../etc",
        "0000:01:00.0/..",
        "0000:+1:00.0",
    ] {
        assert_eq!(numbers(name), None, "{name}");
    }
}

#[test]
fn an_error_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let device = |name, driver, group| device(folder.path(), name, driver, group);
    device("0000:01:00.0", Some("nvme"), Some(7));
    device("0000:01:00.1", None, Some(8));
    device("0000:01:00.2", Some("vfio-pci"), None);
    device("0000:02:00.0", Some("vfio-pci"), Some(9));
    device("0000:02:00.1", Some("snd_hda_intel"), Some(9));
    device("0000:03:00.0", Some("nvme"), None);
    let find = |name| Place::find_in(folder.path(), name);
    let (none, some) = (folder.path().join("no IOMMU"), folder.path());
    let checked = |name, iommus: &std::path::Path| find(name).unwrap().check_bound(iommus);
    let why = |name| checked(name, some).unwrap_err().to_string();
    assert!(
        why("0000:01:00.0").contains("the driver nvme") && why("0000:01:00.0").contains("driver_override")
    );
    assert!(why("0000:01:00.0").contains("0000:01:00.0/driver/unbind"));
    assert!(why("0000:01:00.1").contains("no driver") && !why("0000:01:00.1").contains("unbind"));
    assert!(why("0000:01:00.2").contains("intel_iommu=on"));
    // With an IOMMU, the group may come with the driver.
    assert!(why("0000:03:00.0").contains("driver_override"));
    assert!(matches!(checked("0000:03:00.0", &none), Err(OpenError::NoGroup { .. })));
    checked("0000:02:00.0", some).unwrap();
    assert_eq!(
        (find("0000:02:00.0").unwrap().group().unwrap(), find("0000:02:00.0").unwrap().id().0),
        (9, 0x200)
    );
    let not_viable = find("0000:02:00.0").unwrap().not_viable().to_string();
    assert!(not_viable.contains("0000:02:00.1") && not_viable.contains("snd_hda_intel"), "{not_viable}");
    assert!(matches!(find("0000:04:00.0"), Err(OpenError::NoDevice { .. })));
}

/// As the shell and `/proc` print it.
#[test]
fn what_a_process_may_lock_is_the_limit_of_locked_memory() {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max locked memory")).unwrap();
    assert_eq!(most_locked(), limit.split_whitespace().next().unwrap().parse().ok());
    let status = "VmPin:\t      96 kB\nVmLck:\t      12 kB\nVmHWM:\t    9000 kB\n";
    assert_eq!((locked(status), locked("VmPin:\t 96 kB\n")), (12 << 10, 0));
}

#[test]
fn what_this_process_has_locked_is_known() {
    let page = [0_u8; 1];
    // SAFETY: the page stays at its address, locked or not.
    assert_eq!(unsafe { libc::mlock(page.as_ptr().cast(), 1) }, 0);
    assert!(locked_elsewhere() >= 4096);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::munlock(page.as_ptr().cast(), 1) }, 0);
}

#[test]
fn more_than_may_be_locked_is_told_with_the_limit() {
    let limit = |used, wanted, most| Some((used, wanted, most));
    for (most, elsewhere, used, wanted, expected) in [
        (Some(100), 0, 60, 40, None),
        (Some(100), 0, 60, 41, limit(60, 41, 100)),
        (Some(100), 0, 61, 40, limit(61, 40, 100)),
        (Some(100), 30, 30, 40, None),
        (Some(100), 31, 30, 40, limit(30, 40, 100)),
        (Some(100), 200, 0, 1, limit(0, 1, 100)),
        (Some(100), 0, u64::MAX, u64::MAX, limit(u64::MAX, u64::MAX, 100)),
        (None, 200, u64::MAX, u64::MAX, None),
    ] {
        let found = match over(most, elsewhere, used, wanted) {
            Some(MapError::Limit { what, used, wanted, most }) => {
                assert!(what.contains("locked for devices (raise `ulimit -l`"), "{what}");
                limit(used, wanted, most)
            }
            other => {
                assert_eq!(other, None);
                None
            }
        };
        assert_eq!(found, expected, "{most:?} {elsewhere} {used} {wanted}");
    }
}

/// A device may be bound to any VFIO driver. A bridge or a stub in its group does not prevent that.
#[test]
fn drivers_that_are_in_nobodys_way_are_not_told_of() {
    let folder = tempfile::tempdir().unwrap();
    let drivers = ["vfio-pci", "mlx5-vfio-pci", "pci-stub", "pcieport"];
    for (function, driver) in drivers.into_iter().enumerate() {
        device(folder.path(), &format!("0000:01:00.{function}"), Some(driver), Some(7));
    }
    device(folder.path(), "0000:01:00.4", None, Some(7));
    let place = |function| Place::find_in(folder.path(), &format!("0000:01:00.{function}")).unwrap();
    for (function, is_bound) in [(0, true), (1, true), (2, false), (3, false), (4, false)] {
        assert_eq!(place(function).check_bound(folder.path()).is_ok(), is_bound, "{function}");
    }
    let told = || match place(0).not_viable() {
        OpenError::NotViable { name, other, driver } => [name, other, driver],
        other => panic!("{other}"),
    };
    assert_eq!(told(), ["0000:01:00.0", "another device", "of the kernel"]);
    device(folder.path(), "0000:01:00.5", Some("nvme"), Some(7));
    assert_eq!(told(), ["0000:01:00.0", "0000:01:00.5", "nvme"]);
}
