//! Whole runs against files in `tests/whole`: each system call of a device's life, with its arguments and result, and the effect of each
//! error that the kernel may return instead. With `PORTCULLIS_WRITE_TABLES=1` the tests write the files.

#[path = "../../../../portcullis/tests/golden/mod.rs"]
mod golden;

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};

use portcullis::addr::{IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::Gather;
use portcullis::mapper::Mapper;
use portcullis::std_platform::StdPlatform;

use golden::is_golden;

use super::device::{NAME, iommufd, map_and_unmap, type1, with_regions};
use super::fake::{Fake, PAGE, Way, ranges};
use super::kernel::{Kernel, State};
use crate::vfio::calls::Calls;
use crate::vfio::{AddressSpace, Device, KernelMapper, OpenError};

/// The calls of a whole life, and the result of each step.
struct Told<'k> {
    kernel: &'k Kernel,
    text: String,
}

impl Told<'_> {
    fn step(&mut self, what: &str, ended: impl Debug) {
        writeln!(self.text, "{what} -> {ended:?}").unwrap();
        self.kernel.asked().iter().for_each(|asked| writeln!(self.text, "    {asked}").unwrap());
    }
}

fn space(space: &AddressSpace) -> String {
    format!("{:?} {:?} {:?}", space.kind(), space.usage(), space.geometry())
}

fn opened(device: Result<Device, OpenError>) -> Result<Device, String> {
    device.map_err(|error| error.to_string())
}

/// Opens devices, uses them, and ends.
fn life(kernel: &Kernel) -> String {
    let mut told = Told { kernel, text: String::new() };
    for (how, device) in
        [("open", opened(Device::open(NAME))), ("open_type1", opened(Device::open_type1(NAME)))]
    {
        match device {
            Ok(device) => {
                told.step(how, (device.name(), device.id(), space(device.space())));
                let other = opened(Device::open_in("0000:01:00.1", device.space()));
                told.step("open_in", other.map(|other| space(other.space())));
                let third = opened(Device::open_in("0000:02:00.0", device.space()));
                told.step("open_in", third.map(|other| space(other.space())));
                for permissions in [Permissions::READ, Permissions::WRITE, Permissions::READ_WRITE] {
                    told.step(
                        &format!("map {permissions:?}, unmap"),
                        map_and_unmap(device.space(), permissions),
                    );
                }
                told.step("usage", device.space().usage());
            }
            Err(error) => told.step(how, error),
        }
    }
    told.text
}

#[test]
fn a_devices_life_is_the_same_calls() {
    let mut text = String::new();
    for (name, kernel) in [("iommufd", iommufd as fn() -> Kernel), ("type 1", type1)] {
        writeln!(text, "-- {name}\n{}", life(&kernel())).unwrap();
    }
    let (kernel, device) = with_regions();
    let mut told = Told { kernel: &kernel, text };
    for number in 0..9 {
        told.step(
            &format!("bar {number}"),
            device.bar(number).map(|registers| registers.size()).map_err(|error| error.to_string()),
        );
    }
    for (offset, len) in [(0, 4), (4, 2), (255, 1), (252, 4), (253, 4), (256, 1), (u64::MAX, 2)] {
        let mut bytes = vec![0xee; len];
        let read = device.read_config(offset, &mut bytes).map_err(|error| error.to_string());
        told.step(&format!("read_config {offset}"), (read, &bytes));
        let written = device.write_config(offset, &[0x5a; 4][..len]).map_err(|error| error.to_string());
        told.step(&format!("write_config {offset}"), written);
    }
    for on in [true, false, false, true] {
        let set = device.set_bus_master(on).map_err(|error| error.to_string());
        let mut command = [0; 4];
        device.read_config(4, &mut command).unwrap();
        told.step(&format!("set_bus_master {on}"), (set, command));
    }
    told.step("reset", device.reset().map_err(|error| error.to_string()));
    is_golden(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/whole/calls.txt"), &told.text);
}

/// Removes the folder's name, which differs in each run.
fn sentence(kernel: &Kernel, ended: impl Debug) -> String {
    format!("{ended:?}").replace(&kernel.path("").display().to_string(), "/")
}

#[test]
fn each_error_is_told_as_before() {
    const CODES: [(&str, i32); 12] = [
        ("EPERM", libc::EPERM),
        ("ENOENT", libc::ENOENT),
        ("EIO", libc::EIO),
        ("EBUSY", libc::EBUSY),
        ("EEXIST", libc::EEXIST),
        ("ENODEV", libc::ENODEV),
        ("EINVAL", libc::EINVAL),
        ("ENOTTY", libc::ENOTTY),
        ("ENOSPC", libc::ENOSPC),
        ("EFAULT", libc::EFAULT),
        ("EOPNOTSUPP", libc::EOPNOTSUPP),
        ("EADDRINUSE", libc::EADDRINUSE),
    ];
    let mut text = String::new();
    for (name, new, calls) in [
        (
            "iommufd",
            iommufd as fn() -> Kernel,
            &[
                "IOAS_ALLOC",
                "DEVICE_BIND_IOMMUFD",
                "DEVICE_ATTACH_IOMMUFD_PT",
                "IOAS_IOVA_RANGES",
                "IOAS_MAP",
                "IOAS_UNMAP",
            ][..],
        ),
        (
            "type 1",
            type1,
            &[
                "GET_API_VERSION",
                "CHECK_EXTENSION",
                "GROUP_GET_STATUS",
                "GROUP_SET_CONTAINER",
                "SET_IOMMU",
                "GROUP_GET_DEVICE_FD",
                "IOMMU_GET_INFO",
                "IOMMU_MAP_DMA",
                "IOMMU_UNMAP_DMA",
            ],
        ),
    ] {
        for call in calls {
            let mut lines: Vec<(String, Vec<&str>)> = Vec::new();
            let kernel = new();
            for (code_name, code) in CODES {
                kernel.set(|kernel| kernel.fails = vec![(call, code)]);
                let ended = match Device::open(NAME) {
                    Ok(device) => {
                        let ended = map_and_unmap(device.space(), Permissions::READ);
                        sentence(&kernel, (ended, device.space().usage()))
                    }
                    Err(error) => sentence(&kernel, error.to_string()),
                };
                // The system's text for the code is the same for each call.
                let ended = ended.replace(&std::io::Error::from_raw_os_error(code).to_string(), "...");
                let ended = format!("{ended}, after {} calls", kernel.asked().len());
                match lines.iter_mut().find(|(line, _)| *line == ended) {
                    Some((_, codes)) => codes.push(code_name),
                    None => lines.push((ended, vec![code_name])),
                }
            }
            for (ended, codes) in lines {
                writeln!(text, "{name}: {call}: {}\n    {ended}", codes.join(" ")).unwrap();
            }
        }
    }
    type Change = (&'static str, fn(&mut State));
    let changes: [Change; 12] = [
        ("api_version", |kernel| kernel.api_version = 1),
        ("has_type1", |kernel| kernel.has_type1 = 0),
        ("group_flags", |kernel| kernel.group_flags = 2),
        ("no ranges", |kernel| kernel.ranges.0.clear()),
        ("one page", |kernel| kernel.ranges.0 = vec![(0x1000, 0x1fff)]),
        ("less than a page", |kernel| kernel.ranges.0 = vec![(0x1000, 0x1ffe)]),
        ("ranges in disorder", |kernel| kernel.ranges.0.reverse()),
        ("all addresses", |kernel| kernel.ranges.0 = vec![(0, u64::MAX)]),
        ("large pages", |kernel| kernel.ranges.1 = 2 << 20),
        ("no pages", |kernel| kernel.ranges.1 = 0),
        ("short info", |kernel| kernel.info.truncate(24)),
        ("half unmapped", |kernel| kernel.unmapped = Some(PAGE)),
    ];
    for (name, new) in [("iommufd", iommufd as fn() -> Kernel), ("type 1", type1)] {
        for (about, change) in changes {
            let kernel = new();
            kernel.set(change);
            let ended = match Device::open(NAME) {
                Ok(device) => {
                    let ended = map_and_unmap(device.space(), Permissions::READ);
                    sentence(&kernel, (ended, space(device.space())))
                }
                Err(error) => sentence(&kernel, error.to_string()),
            };
            writeln!(text, "{name}: {about}\n    {ended}").unwrap();
        }
        // Devices that do not exist, or are not bound to VFIO.
        let kernel = new();
        kernel.device("0000:03:00.0", 9, None);
        super::kernel::device(&kernel.path("sys/bus/pci/devices"), "0000:04:00.0", Some("nvme"), Some(10));
        super::kernel::device(&kernel.path("sys/bus/pci/devices"), "0000:05:00.0", None, Some(11));
        super::kernel::device(&kernel.path("sys/bus/pci/devices"), "0000:06:00.0", Some("vfio-pci"), None);
        super::kernel::device(&kernel.path("sys/bus/pci/devices"), "0000:02:00.1", Some("e1000e"), Some(8));
        for device in [
            "",
            "0000:01:00",
            "../x",
            "0000:09:00.0",
            "0000:03:00.0",
            "0000:04:00.0",
            "0000:05:00.0",
            "0000:06:00.0",
            "0000:02:00.0",
        ] {
            let ended = Device::open(device).map(drop).map_err(|error| error.to_string());
            writeln!(text, "{name}: open {device:?}\n    {}", sentence(&kernel, ended)).unwrap();
        }
    }
    is_golden(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/whole/errors.txt"), &text);
}

/// A fake that records each call and its answer.
struct Logged(Arc<Fake>, Mutex<String>);

impl Logged {
    fn log<T: Debug>(&self, call: String, answer: T) -> T {
        writeln!(self.1.lock().unwrap(), "    {call} -> {answer:?}").unwrap();
        answer
    }
}

fn shown(range: IovaRange) -> String {
    format!("{:#x}+{:#x}", range.start().get(), range.len())
}

// SAFETY: 1 and 2: no device reaches anything through it.
unsafe impl Calls for Logged {
    unsafe fn map(&self, range: IovaRange, address: u64, permissions: Permissions) -> Result<(), i32> {
        // SAFETY: as above.
        let answer = unsafe { self.0.map(range, address, permissions) };
        self.log(format!("map {} to {address:#x} {permissions:?}", shown(range)), answer)
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, i32> {
        let answer = self.0.unmap(range);
        self.log(format!("unmap {}", shown(range)), answer)
    }
}

/// Lists of pieces are mapped and unmapped, whole and in part, and each of their calls fails once.
#[test]
fn a_mapper_makes_the_same_calls() {
    let list = |pieces: &[(u64, u64)]| {
        pieces.iter().map(|(page, pages)| (PhysAddr::new(page * PAGE), pages * PAGE)).collect::<Vec<_>>()
    };
    let range = |page: u64, pages: u64| {
        IovaRange::new(portcullis::addr::Iova::new(page * PAGE), pages * PAGE).unwrap()
    };
    let mut text = String::new();
    for way in [Way::Iommufd, Way::Type1] {
        for fails in [
            None,
            Some((0, libc::EEXIST)),
            Some((1, libc::ENOSPC)),
            Some((2, libc::EINVAL)),
            Some((4, libc::EIO)),
            Some((7, libc::EBUSY)),
        ] {
            for stuck in [usize::MAX, 2] {
                if stuck < usize::MAX && (fails.is_none() || way == Way::Type1) {
                    continue;
                }
                writeln!(text, "-- {way:?}, fails {fails:?}, stuck from {stuck}").unwrap();
                let fake = Fake::new(way);
                *fake.fails.lock().unwrap() = fails;
                fake.stuck.store(stuck, std::sync::atomic::Ordering::Relaxed);
                let logged = Arc::new(Logged(Arc::clone(&fake), Mutex::default()));
                let mapper = KernelMapper::over(Arc::clone(&logged) as _, &ranges(&fake)).unwrap();
                let mut step = |what: String, ended: String| {
                    let calls = std::mem::take(&mut *logged.1.lock().unwrap());
                    writeln!(text, "{what} -> {ended}\n{calls}    {:?}", mapper.usage()).unwrap();
                };
                let platform = StdPlatform::new();
                for (at, pieces) in [
                    (range(16, 7), list(&[(256, 2), (258, 1), (1024, 4)])),
                    (range(24, 2), list(&[(512, 1), (600, 1)])),
                    (range(23, 1), list(&[(700, 1)])),
                    (range(18, 1), list(&[(800, 1)])),
                    (range(30, 3), list(&[(900, 2)])),
                    (range(30, 1), list(&[(900, 2)])),
                    (range(0xfedff, 2), list(&[(900, 2)])),
                    (range(1 << 27, 1), list(&[(900, 1)])),
                    (range(40, 1), vec![(PhysAddr::new(77), PAGE)]),
                ] {
                    let mut gather = Gather::new();
                    // SAFETY: no device reaches anything through a fake kernel.
                    let mapped = unsafe {
                        mapper.map(&platform, at, pieces, Permissions::READ_WRITE.into(), &mut gather)
                    };
                    let synced = mapper.sync(&gather);
                    step(
                        format!("map {}", shown(at)),
                        format!("{mapped:?} {} {synced:?}", gather.is_empty()),
                    );
                }
                for at in [range(17, 1), range(16, 7), range(20, 4), range(0, 64)] {
                    let mut gather = Gather::new();
                    let unmapped = mapper.unmap(&platform, at, &mut gather);
                    step(
                        format!("unmap {}", shown(at)),
                        format!("{unmapped:?} {} {:?}", gather.is_empty(), mapper.sync(&gather)),
                    );
                }
            }
        }
    }
    is_golden(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/whole/mapper.txt"), &text);
}
