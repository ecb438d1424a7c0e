//! A device over a fake kernel that records system calls: their arguments, and the device's reaction to each answer and error.

use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::Gather;
use portcullis::mapper::Mapper;
use portcullis::pgtable::MapError;
use portcullis::std_platform::StdPlatform;

use super::fake::PAGE;
use super::kernel::{Kernel, RANGES, State};
use crate::vfio::{AddressSpace, Device, Kind, OpenError};

pub const NAME: &str = "0000:01:00.0";
pub const CDEV: &str = "vfio/devices/vfio3";

/// With iommufd, and two devices.
pub fn iommufd() -> Kernel {
    let kernel = Kernel::with(&["iommu", CDEV, "vfio/devices/vfio4"]);
    kernel.device(NAME, 7, Some("vfio3"));
    kernel.device("0000:01:00.1", 7, Some("vfio4"));
    kernel
}

/// With type 1, and two devices in a group and one in another.
pub fn type1() -> Kernel {
    let kernel = Kernel::with(&["vfio/vfio", "vfio/7", "vfio/8", NAME, "0000:01:00.1", "0000:02:00.0"]);
    kernel.device(NAME, 7, None);
    kernel.device("0000:01:00.1", 7, None);
    kernel.device("0000:02:00.0", 8, None);
    kernel
}

const OPEN_IOMMUFD: [&str; 4] = [
    "dev/iommu: IOAS_ALLOC [c, 0, 0]",
    "dev/vfio/devices/vfio3: DEVICE_BIND_IOMMUFD [18, 0] dev/iommu [0, 0, 0]",
    "dev/vfio/devices/vfio3: DEVICE_ATTACH_IOMMUFD_PT [10, 0, 7, 0]",
    "dev/iommu: IOAS_IOVA_RANGES [20, 7, 40, 0] [0, 0]",
];

const OPEN_TYPE1: [&str; 8] = [
    "dev/vfio/vfio: GET_API_VERSION 0",
    "dev/vfio/vfio: CHECK_EXTENSION 3",
    "dev/vfio/7: GROUP_GET_STATUS [8, 0]",
    "dev/vfio/7: GROUP_SET_CONTAINER dev/vfio/vfio",
    "dev/vfio/vfio: SET_IOMMU 3",
    "dev/vfio/7: GROUP_GET_DEVICE_FD 0000:01:00.0",
    // The first answer gives the length.
    "dev/vfio/vfio: IOMMU_GET_INFO 24",
    "dev/vfio/vfio: IOMMU_GET_INFO 88",
];

fn has_ranges(space: &AddressSpace) {
    let geometry = space.geometry();
    assert_eq!((geometry.aperture.start().get(), geometry.aperture.last().get()), (0, RANGES[1].1));
    let hole = geometry.reserved[0];
    assert_eq!((hole.start().get(), hole.last().get()), (RANGES[0].1 + 1, RANGES[1].0 - 1));
    assert_eq!(geometry.page_sizes.smallest().unwrap().bytes(), PAGE);
}

/// Maps two pages at page 16 and unmaps them; returns what was unmapped.
pub fn map_and_unmap(space: &AddressSpace, permissions: Permissions) -> (Result<(), MapError>, (u64, u64)) {
    // SAFETY: no device reaches anything through a fake kernel.
    let mapper = unsafe { space.mapper() };
    let (platform, range) = (StdPlatform::new(), IovaRange::new(Iova::new(0x1_0001_0000), 2 * PAGE).unwrap());
    let list = [(PhysAddr::new(0x5_0000_3000), 2 * PAGE)];
    // SAFETY: as above.
    let mapped = unsafe { mapper.map(&platform, range, list, permissions.into(), &mut Gather::new()) };
    let unmapped = mapper.unmap(&platform, range, &mut Gather::new());
    (mapped, (unmapped.bytes, unmapped.kept))
}

#[test]
fn iommufd_is_asked_for_an_address_space_and_for_what_is_mapped_there() {
    let kernel = iommufd();
    let device = Device::open(NAME).unwrap();
    assert_eq!(kernel.asked(), OPEN_IOMMUFD);
    assert_eq!((device.name(), device.id().0, device.space().kind()), (NAME, 0x100, Kind::Iommufd));
    has_ranges(device.space());
    assert_eq!(device.space().usage().most_mappings, None);
    // FIXED_IOVA is 1, WRITEABLE 2, READABLE 4.
    for (permissions, flags) in
        [(Permissions::READ, 5), (Permissions::WRITE, 3), (Permissions::READ_WRITE, 7)]
    {
        assert_eq!(map_and_unmap(device.space(), permissions), (Ok(()), (2 * PAGE, 0)));
        let map = format!("dev/iommu: IOAS_MAP [28, {flags}, 7, 0, 3000, 5, 2000, 0, 10000, 1]");
        assert_eq!(kernel.asked(), [map.as_str(), "dev/iommu: IOAS_UNMAP [18, 7, 10000, 1, 2000, 0]"]);
    }
    // The kernel returns the number of unmapped bytes, and the error of a map.
    kernel.set(|kernel| kernel.unmapped = Some(PAGE));
    assert_eq!(map_and_unmap(device.space(), Permissions::READ), (Ok(()), (PAGE, 0)));
    kernel.set(|kernel| kernel.fails = vec![("IOAS_UNMAP", libc::ENOENT)]);
    assert_eq!(map_and_unmap(device.space(), Permissions::READ), (Ok(()), (0, 2 * PAGE)));
    assert_eq!((device.space().usage().mappings, device.space().usage().calls), (1, 10));
}

#[test]
fn type_1_is_asked_for_a_container_and_for_what_is_mapped_there() {
    let kernel = type1();
    let device = Device::open(NAME).unwrap();
    assert_eq!(kernel.asked(), OPEN_TYPE1);
    assert_eq!((device.name(), device.id().0, device.space().kind()), (NAME, 0x100, Kind::Type1));
    has_ranges(device.space());
    assert_eq!(device.space().usage().most_mappings, Some(65_535));
    // READ is 1, WRITE 2.
    for (permissions, flags) in
        [(Permissions::READ, 1), (Permissions::WRITE, 2), (Permissions::READ_WRITE, 3)]
    {
        assert_eq!(map_and_unmap(device.space(), permissions), (Ok(()), (2 * PAGE, 0)));
        let map = format!("dev/vfio/vfio: IOMMU_MAP_DMA [20, {flags}, 3000, 5, 10000, 1, 2000, 0]");
        assert_eq!(
            kernel.asked(),
            [map.as_str(), "dev/vfio/vfio: IOMMU_UNMAP_DMA [18, 0, 10000, 1, 2000, 0]"]
        );
    }
    kernel.set(|kernel| kernel.unmapped = Some(PAGE));
    assert_eq!(map_and_unmap(device.space(), Permissions::READ), (Ok(()), (PAGE, 0)));
    kernel.set(|kernel| kernel.fails = vec![("IOMMU_UNMAP_DMA", libc::EINVAL)]);
    assert_eq!(map_and_unmap(device.space(), Permissions::READ), (Ok(()), (0, 2 * PAGE)));
}

#[test]
fn what_the_kernel_has_against_a_map_is_told() {
    for (kernel, call) in [(iommufd as fn() -> Kernel, "IOAS_MAP"), (type1, "IOMMU_MAP_DMA")] {
        let kernel = kernel();
        let device = Device::open(NAME).unwrap();
        for (code, expected) in [
            (libc::EEXIST, MapError::AlreadyMapped { at: Iova::new(0x1_0001_0000) }),
            (libc::EFAULT, MapError::Refused { code: libc::EFAULT }),
        ] {
            kernel.set(|kernel| kernel.fails = vec![(call, code)]);
            assert_eq!(map_and_unmap(device.space(), Permissions::READ), (Err(expected), (0, 0)));
        }
    }
}

/// By iommufd if the kernel and the device have it, unless the caller wants type 1.
#[test]
fn a_device_is_opened_by_what_the_kernel_has() {
    let both = ["iommu", CDEV, "vfio/vfio", "vfio/7", NAME];
    let opened = |files: &[&str], cdev, open: fn(&str) -> Result<Device, OpenError>| {
        let kernel = Kernel::with(files);
        kernel.device(NAME, 7, cdev);
        open(NAME).map(|device| device.space().kind()).map_err(|error| error.to_string())
    };
    assert_eq!(opened(&both, Some("vfio3"), Device::open), Ok(Kind::Iommufd));
    assert_eq!(opened(&both, None, Device::open), Ok(Kind::Type1));
    assert_eq!(opened(&both[2..], Some("vfio3"), Device::open), Ok(Kind::Type1));
    assert_eq!(opened(&both, Some("vfio3"), Device::open_type1), Ok(Kind::Type1));
    for (files, open) in [(&[][..], Device::open as fn(&str) -> _), (&both[..2], Device::open_type1)] {
        assert_eq!(opened(files, None, open), Err(OpenError::NoVfio.to_string()));
    }
    let gone = "opening /dev/vfio/devices/vfio3 failed: No such file or directory (os error 2)";
    assert_eq!(opened(&both[..1], Some("vfio3"), Device::open), Err(gone.into()));
    let gone = "opening /dev/vfio/7 failed: No such file or directory (os error 2)";
    assert_eq!(opened(&both[2..3], None, Device::open), Err(gone.into()));
}

#[test]
fn a_device_that_is_not_vfios_is_not_opened() {
    let kernel = type1();
    super::kernel::device(&kernel.path("sys/bus/pci/devices"), "0000:03:00.0", Some("nvme"), Some(9));
    let device = Device::open("0000:02:00.0").unwrap();
    kernel.asked();
    let none = OpenError::NoDevice { name: "0000:04:00.0".into() }.to_string();
    let driven = OpenError::NotBound { name: "0000:03:00.0".into(), driver: Some("nvme".into()) }.to_string();
    for (name, expected) in [("0000:04:00.0", none), ("0000:03:00.0", driven)] {
        let opened = [Device::open(name), Device::open_type1(name), Device::open_in(name, device.space())];
        for opened in opened {
            assert_eq!(opened.unwrap_err().to_string(), expected);
        }
    }
    assert_eq!(kernel.asked(), [""; 0]);
}

/// The meaning of a failed call, by its code.
fn assert_means(kernel: fn() -> Kernel, call: &'static str, cases: &[(i32, String)]) {
    for (code, expected) in cases {
        let kernel = kernel();
        kernel.set(|kernel| kernel.fails = vec![(call, *code)]);
        assert_eq!(Device::open(NAME).unwrap_err().to_string(), *expected, "{call}: {code}");
    }
}

fn failed(call: &str, code: i32) -> (i32, String) {
    (code, format!("{call} failed: {}", std::io::Error::from_raw_os_error(code)))
}

fn unsafe_interrupts(parameter: &'static str) -> (i32, String) {
    (libc::EPERM, OpenError::UnsafeInterrupts { parameter }.to_string())
}

fn not_viable() -> String {
    let (other, driver) = ("another device".into(), "of the kernel".into());
    OpenError::NotViable { name: NAME.into(), other, driver }.to_string()
}

#[test]
fn a_call_that_fails_says_what_to_do() {
    let (perm, io) = (libc::EPERM, libc::EIO);
    assert_means(iommufd, "IOAS_ALLOC", &[failed("IOMMU_IOAS_ALLOC", perm)]);
    let busy = OpenError::Busy { path: "/dev/vfio/devices/vfio3".into() }.to_string();
    let bind = [
        unsafe_interrupts("iommufd.allow_unsafe_interrupts=1"),
        (libc::EBUSY, not_viable()),
        (libc::EINVAL, busy),
        failed("VFIO_DEVICE_BIND_IOMMUFD", io),
    ];
    assert_means(iommufd, "DEVICE_BIND_IOMMUFD", &bind);
    let attach = [failed("VFIO_DEVICE_ATTACH_IOMMUFD_PT", libc::EINVAL)];
    assert_means(iommufd, "DEVICE_ATTACH_IOMMUFD_PT", &attach);
    assert_means(iommufd, "IOAS_IOVA_RANGES", &[failed("IOMMU_IOAS_IOVA_RANGES", perm)]);
    let no_vfio = |code| (code, OpenError::NoVfio.to_string());
    assert_means(type1, "GET_API_VERSION", &[no_vfio(perm)]);
    assert_means(type1, "CHECK_EXTENSION", &[no_vfio(perm)]);
    assert_means(type1, "GROUP_GET_STATUS", &[failed("VFIO_GROUP_GET_STATUS", perm)]);
    for call in ["GROUP_SET_CONTAINER", "SET_IOMMU"] {
        let parameter = "vfio_iommu_type1.allow_unsafe_interrupts=1";
        assert_means(type1, call, &[unsafe_interrupts(parameter), failed(&format!("VFIO_{call}"), io)]);
    }
    assert_means(type1, "GROUP_GET_DEVICE_FD", &[failed("VFIO_GROUP_GET_DEVICE_FD", perm)]);
    assert_means(type1, "IOMMU_GET_INFO", &[failed("VFIO_IOMMU_GET_INFO", perm)]);
}

#[test]
fn an_answer_that_will_not_do_says_why() {
    let why = |kernel: fn() -> Kernel, change: fn(&mut State)| {
        let kernel = kernel();
        kernel.set(change);
        Device::open(NAME).unwrap_err().to_string()
    };
    let no_vfio = OpenError::NoVfio.to_string();
    assert_eq!(why(type1, |kernel| kernel.api_version = 1), no_vfio);
    assert_eq!(why(type1, |kernel| kernel.has_type1 = 0), no_vfio);
    // Its other flag says that the group has a container.
    assert_eq!(why(type1, |kernel| kernel.group_flags = 2), not_viable());
    let none = "VFIO_IOMMU_GET_INFO failed: the kernel says no ranges of addresses";
    assert_eq!(why(type1, |kernel| kernel.info[4] = 1), none);
    assert_eq!(why(iommufd, |kernel| kernel.ranges.0.clear()), OpenError::NoAddresses.to_string());
}

/// The answer is longer than any kernel's.
#[test]
fn an_answer_is_read_up_to_64_kib() {
    let kernel = type1();
    kernel.set(|kernel| kernel.info.resize(1 << 20, 0));
    has_ranges(Device::open(NAME).unwrap().space());
    let sizes: Vec<String> =
        kernel.asked().iter().filter_map(|asked| Some(asked.split_once("GET_INFO ")?.1.to_owned())).collect();
    assert_eq!(sizes, ["24", "65536"]);
}

/// Each group is added once, and the first sets the container's kind.
#[test]
fn devices_of_a_group_share_it_and_groups_share_a_container() {
    let kernel = type1();
    let first = Device::open(NAME).unwrap();
    kernel.asked();
    let second = Device::open_in("0000:01:00.1", first.space()).unwrap();
    assert_eq!((second.name(), second.id().0), ("0000:01:00.1", 0x101));
    assert_eq!(
        kernel.asked(),
        ["dev/vfio/7: GROUP_GET_DEVICE_FD 0000:01:00.1", OPEN_TYPE1[6], OPEN_TYPE1[7]]
    );
    let third = Device::open_in("0000:02:00.0", first.space()).unwrap();
    let expected = [
        "dev/vfio/8: GROUP_GET_STATUS [8, 0]",
        "dev/vfio/8: GROUP_SET_CONTAINER dev/vfio/vfio",
        "dev/vfio/8: GROUP_GET_DEVICE_FD 0000:02:00.0",
        OPEN_TYPE1[6],
        OPEN_TYPE1[7],
    ];
    assert_eq!(kernel.asked(), expected);
    // One's mappings are all others', too.
    map_and_unmap(first.space(), Permissions::READ).0.unwrap();
    assert_eq!([second.space().usage().calls, third.space().usage().calls], [2; 2]);
}

#[test]
fn a_device_joins_a_space_of_iommufd_whose_addresses_it_can_use() {
    let kernel = iommufd();
    let first = Device::open(NAME).unwrap();
    kernel.asked();
    let other = "0000:01:00.1";
    assert!(Device::open_in(other, first.space()).is_ok());
    let joined = OPEN_IOMMUFD[1..].iter().map(|asked| asked.replace("vfio3", "vfio4")).collect::<Vec<_>>();
    assert_eq!(kernel.asked(), joined);
    let why = |change: fn(&mut State)| {
        kernel.set(change);
        let why = Device::open_in(other, first.space()).unwrap_err().to_string();
        kernel.set(|kernel| kernel.fails.clear());
        why
    };
    let others = OpenError::OtherAddresses { name: other.into() }.to_string();
    for code in [libc::EADDRINUSE, libc::EINVAL] {
        kernel.set(|kernel| kernel.fails = vec![("DEVICE_ATTACH_IOMMUFD_PT", code)]);
        assert_eq!(why(|_| ()), others, "{code}");
    }
    let (_, perm) = failed("VFIO_DEVICE_ATTACH_IOMMUFD_PT", libc::EPERM);
    assert_eq!(why(|kernel| kernel.fails = vec![("DEVICE_ATTACH_IOMMUFD_PT", libc::EPERM)]), perm);
    let (_, perm) = failed("the ranges of addresses", libc::EPERM);
    assert_eq!(why(|kernel| kernel.fails = vec![("IOAS_IOVA_RANGES", libc::EPERM)]), perm);
    // The space had more before.
    assert_eq!(why(|kernel| kernel.ranges.0[1].1 = (1 << 32) - 1), others);
    // A device without a file of its own uses type 1.
    kernel.device("0000:02:00.0", 8, None);
    let error = Device::open_in("0000:02:00.0", first.space()).unwrap_err();
    assert!(matches!(error, OpenError::NoVfio), "{error}");
}

/// Offsets of configuration space and of BAR 1 in the device's file, and bytes of it.
pub const CONFIG: u64 = 0x4000;
pub const BAR: u64 = 0x8000;
pub const BYTES: u64 = 0x2000;
/// A region that can be read, written and mapped.
const ALL: u32 = 7;

pub fn with_regions() -> (Kernel, Device) {
    let kernel = iommufd();
    kernel.set(|kernel| {
        kernel.regions[1] = (ALL, BYTES, BAR);
        kernel.regions[2] = (ALL, 0, BAR);
        kernel.regions[3] = (3, BYTES, BAR);
        kernel.regions[6] = (ALL, BYTES, BAR);
        kernel.regions[7] = (3, 256, CONFIG);
    });
    let device = Device::open(NAME).unwrap();
    kernel.asked();
    (kernel, device)
}

fn region(index: u32) -> String {
    format!("dev/vfio/devices/vfio3: DEVICE_GET_REGION_INFO [20, 0, {index}, 0, 0, 0, 0, 0]")
}

#[test]
fn the_configuration_space_is_where_the_kernel_says() {
    let (kernel, device) = with_regions();
    let file = std::fs::File::options().read(true).write(true).open(kernel.path("dev").join(CDEV)).unwrap();
    file.write_all_at(&[1, 2, 3, 4], CONFIG + 0x10).unwrap();
    let mut read = [0; 4];
    device.read_config(0x10, &mut read).unwrap();
    assert_eq!((read, kernel.asked()), ([1, 2, 3, 4], vec![region(7)]));
    device.write_config(0x12, &[9, 8]).unwrap();
    file.read_exact_at(&mut read, CONFIG + 0x10).unwrap();
    assert_eq!((read, kernel.asked()), ([1, 2, 9, 8], vec![region(7)]));
    for error in [device.read_config(u64::MAX, &mut read), device.write_config(u64::MAX, &read)] {
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    // Only one bit of the command register.
    let command = || {
        let mut command = [0; 4];
        file.read_exact_at(&mut command, CONFIG + 4).unwrap();
        command
    };
    file.write_all_at(&[0xf1, 0xff, 0xaa, 0xaa], CONFIG + 4).unwrap();
    device.set_bus_master(true).unwrap();
    assert_eq!(command(), [0xf5, 0xff, 0xaa, 0xaa]);
    device.set_bus_master(false).unwrap();
    assert_eq!(command(), [0xf1, 0xff, 0xaa, 0xaa]);
    device.bar(1).unwrap();
    assert_eq!(command(), [0xf3, 0xff, 0xaa, 0xaa]);
    kernel.asked();
    device.reset().unwrap();
    assert_eq!(kernel.asked(), ["dev/vfio/devices/vfio3: DEVICE_RESET 0"]);
    kernel.set(|kernel| {
        kernel.fails = vec![("DEVICE_RESET", libc::ENOTTY), ("DEVICE_GET_REGION_INFO", libc::EIO)]
    });
    assert_eq!(device.reset().unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    assert_eq!(device.read_config(0, &mut read).unwrap_err().raw_os_error(), Some(libc::EIO));
    assert_eq!(device.bar(1).unwrap_err().raw_os_error(), Some(libc::EIO));
}

#[test]
fn registers_are_those_of_the_bar_up_to_its_last() {
    let (kernel, device) = with_regions();
    // No registers, no memory, and no BAR.
    for number in [0, 2, 3, 6, 7, u32::MAX] {
        let error = device.bar(number).unwrap_err();
        let asked = if number < 6 { vec![region(number)] } else { vec![] };
        assert_eq!(kernel.asked(), asked);
        let expected = format!("{NAME} has no registers behind BAR {number}");
        assert_eq!((error.kind(), error.to_string()), (ErrorKind::NotFound, expected));
    }
    kernel.asked();
    let registers = device.bar(1).unwrap();
    assert_eq!(kernel.asked(), [region(1), region(7), region(7)]);
    let file = std::fs::File::options().read(true).write(true).open(kernel.path("dev").join(CDEV)).unwrap();
    file.write_all_at(&0x0807_0605_0403_0201_u64.to_le_bytes(), BAR + BYTES - 8).unwrap();
    let (size, last) = (BYTES as usize, BYTES as usize - 8);
    assert_eq!(registers.size(), size);
    assert_eq!(registers.read64(last), Some(0x0807_0605_0403_0201));
    assert_eq!([registers.read32(last), registers.read32(last + 4)], [Some(0x0403_0201), Some(0x0807_0605)]);
    registers.write32(last + 4, 0xa4a3_a2a1).unwrap();
    registers.write64(8, 0x1112_1314_1516_1718).unwrap();
    assert_eq!(registers.read64(last), Some(0xa4a3_a2a1_0403_0201));
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, BAR + 8).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), 0x1112_1314_1516_1718);
    // Beyond the last, unaligned, and with an overflow.
    for offset in [size, last + 1, last + 2, last + 6, usize::MAX, usize::MAX - 3] {
        assert_eq!((registers.read32(offset), registers.write32(offset, 1)), (None, None), "{offset:#x}");
    }
    for offset in [size, last + 1, last + 4, usize::MAX, usize::MAX - 7] {
        assert_eq!((registers.read64(offset), registers.write64(offset, 1)), (None, None), "{offset:#x}");
    }
    assert_eq!(registers.read64(last), Some(0xa4a3_a2a1_0403_0201));
}

/// An unreadable folder does not mean that the kernel lacks a feature, and does not select type 1.
#[test]
fn a_folder_that_cannot_be_read_is_told() {
    let kernel = iommufd();
    let folder = kernel.path("sys/bus/pci/devices").join(NAME).join("vfio-dev");
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, "no folder").unwrap();
    let told = Device::open(NAME).unwrap_err();
    assert!(matches!(told, OpenError::Call { .. }), "{told}");
    assert!(told.to_string().contains("vfio-dev failed: Not a directory"), "{told}");
}
