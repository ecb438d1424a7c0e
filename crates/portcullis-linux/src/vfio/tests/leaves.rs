//! Devices that leave an address space, and that join it later.

use std::io::ErrorKind;
use std::sync::atomic::Ordering;

use portcullis::addr::{Direction, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{DmaMask, DomainBuilder, OpsConfig, QueueConfig};
use portcullis::invalidation::Gather;
use portcullis::mapper::Mapper;
use portcullis::std_platform::StdPlatform;

use super::device::{NAME, iommufd, type1};
use super::fake::{Fake, PAGE, Way};
use super::kernel::Kernel;
use crate::heap::{Heap, HeapBuffer};
use crate::vfio::{Device, KernelMapper, Kind, Machine};

const BESIDE: &str = "0000:01:00.1";
const OTHER: &str = "0000:02:00.0";

const UNSET: &str = "dev/vfio/7: GROUP_UNSET_CONTAINER 0";

fn map(mapper: &KernelMapper, page: u64, permissions: Permissions) {
    let range = IovaRange::new(Iova::new(page * PAGE), PAGE).unwrap();
    let list = [(PhysAddr::new(0x5_0000_0000 + page * PAGE), PAGE)];
    // SAFETY: no device reaches anything through a fake kernel.
    unsafe { mapper.map(&StdPlatform::new(), range, list, permissions.into(), &mut Gather::new()) }.unwrap();
}

/// Removed bytes, and kept bytes.
fn unmap(mapper: &KernelMapper, page: u64) -> (u64, u64) {
    let range = IovaRange::new(Iova::new(page * PAGE), PAGE).unwrap();
    let unmapped = mapper.unmap(&StdPlatform::new(), range, &mut Gather::new());
    (unmapped.bytes, unmapped.kept)
}

fn of_device(device: &Device) -> KernelMapper {
    // SAFETY: no device reaches anything through a fake kernel.
    unsafe { device.space().mapper() }
}

fn mapped(page: u64, flags: u32) -> String {
    format!(
        "dev/vfio/vfio: IOMMU_MAP_DMA [20, {flags:x}, {:x}, 5, {:x}, 0, 1000, 0]",
        page * PAGE,
        page * PAGE
    )
}

fn unmapped(page: u64) -> String {
    format!("dev/vfio/vfio: IOMMU_UNMAP_DMA [18, 0, {:x}, 0, 1000, 0]", page * PAGE)
}

/// The calls of a device that joins an empty container.
fn joins(name: &str, group: u32) -> Vec<String> {
    vec![
        format!("dev/vfio/{group}: GROUP_GET_STATUS [8, 0]"),
        format!("dev/vfio/{group}: GROUP_SET_CONTAINER dev/vfio/vfio"),
        "dev/vfio/vfio: SET_IOMMU 3".into(),
        format!("dev/vfio/{group}: GROUP_GET_DEVICE_FD {name}"),
        "dev/vfio/vfio: IOMMU_GET_INFO 24".into(),
        "dev/vfio/vfio: IOMMU_GET_INFO 88".into(),
    ]
}

/// By every kind of queue, and by number.
#[test]
fn buffers_come_back_when_their_device_is_released() {
    for (kernel, kind) in [(iommufd as fn() -> Kernel, Kind::Iommufd), (type1, Kind::Type1)] {
        let kernel = kernel();
        let device = Device::open(NAME).unwrap();
        let pool = PoolConfig { idle_ns: u64::MAX, ..PoolConfig::default() };
        let builder = DomainBuilder::new(of_device(&device)).bounce(Heap, pool);
        let domain = builder.build_as::<Machine>(StdPlatform::new()).unwrap();
        let attached = domain.attach(device.id(), DmaMask::BITS_64).unwrap();
        let configs = [
            QueueConfig::direct(),
            QueueConfig::batched(4),
            QueueConfig::ring(8, 4 * PAGE).batch(4),
            QueueConfig::bounce(),
        ];
        let mut queues: Vec<_> = configs
            .into_iter()
            .map(|config| {
                let mut queue = attached.queue(config).unwrap();
                let buffers = (0..6).map(|_| HeapBuffer::new(4 * PAGE as usize).unwrap());
                let mapped: Vec<_> =
                    buffers.map(|buffer| queue.map(buffer, Direction::FromDevice).unwrap()).collect();
                (queue, mapped)
            })
            .collect();
        let ops = attached.ops(OpsConfig::Strict).unwrap();
        let by_number = HeapBuffer::new(PAGE as usize).unwrap();
        // SAFETY: as above.
        unsafe { ops.map(by_number.phys(), PAGE, Direction::ToDevice, Default::default()) }.unwrap();
        let before = device.space().usage();
        assert!(before.mappings > 18 && before.bytes >= 19 * PAGE, "{before:?}");
        device.release().unwrap();
        kernel.asked();

        for (queue, mapped) in &mut queues {
            let mut back = 0;
            for mapping in mapped.drain(..) {
                queue.unmap(mapping).unwrap().for_each(|_| back += 1);
            }
            queue.commit().unwrap().for_each(|_| back += 1);
            assert_eq!(back, 6, "{queue:?}");
        }
        // SAFETY: no other call runs.
        assert_eq!(unsafe { ops.unmap_all() }.unwrap().0, 1);
        drop((queues, ops, attached));
        assert_eq!(domain.space().stats().lost_iova_bytes, 0);
        let (calls, space) = (kernel.asked().len() as u64, device.space().clone());
        drop((domain, device));
        assert_eq!((space.usage().mappings, space.usage().bytes), (0, 0), "the pool's with the domain");
        match kind {
            // The kernel keeps them, because other devices may be there.
            Kind::Iommufd => assert!(
                calls >= 6 && calls == space.usage().calls - before.calls - kernel.asked().len() as u64
            ),
            Kind::Type1 => {
                assert_eq!((calls, space.usage().calls), (0, before.calls), "the kernel has removed all")
            }
        }
    }
}

#[test]
fn a_container_gets_its_mappings_again_with_its_next_device() {
    let kernel = type1();
    let device = Device::open(NAME).unwrap();
    let (mapper, space) = (of_device(&device), device.space().clone());
    map(&mapper, 3, Permissions::READ);
    map(&mapper, 1, Permissions::WRITE);
    map(&mapper, 2, Permissions::READ_WRITE);
    let calls = space.usage().calls;
    kernel.asked();
    device.release().unwrap();
    assert_eq!(kernel.asked(), [UNSET]);
    assert!(!kernel.is_open(NAME) && !kernel.is_open("vfio/7"), "the kernel waits for neither");
    // No device reaches anything: maps and unmaps are only recorded.
    assert_eq!(unmap(&mapper, 2), (PAGE, 0));
    map(&mapper, 4, Permissions::READ);
    assert_eq!((kernel.asked(), space.usage().calls, space.usage().mappings), (vec![], calls, 3));

    let other = Device::open_in(OTHER, &space).unwrap();
    let mut expected = joins(OTHER, 8);
    expected.extend([mapped(1, 2), mapped(3, 1), mapped(4, 1)]);
    assert_eq!((kernel.asked(), space.usage().calls), (expected, calls + 3));
    assert_eq!(unmap(&mapper, 1), (PAGE, 0));
    map(&mapper, 2, Permissions::READ_WRITE);
    assert_eq!(kernel.asked(), [unmapped(1), mapped(2, 3)]);
    // The first returns, and reaches the others' mappings.
    let again = Device::open_in(NAME, &space).unwrap();
    let mut expected = joins(NAME, 7);
    expected.remove(2);
    assert_eq!(kernel.asked(), expected);
    drop((other, again));
    assert_eq!(kernel.asked(), ["dev/vfio/8: GROUP_UNSET_CONTAINER 0", UNSET]);
}

/// If the kernel does not map all of it again, the device is closed, and may be opened later.
#[test]
fn a_device_that_cannot_have_all_mappings_does_not_join() {
    let kernel = type1();
    let device = Device::open(NAME).unwrap();
    let (mapper, space) = (of_device(&device), device.space().clone());
    map(&mapper, 1, Permissions::READ);
    device.release().unwrap();
    kernel.asked();
    for code in [libc::ENOMEM, libc::EFAULT] {
        kernel.set(|kernel| kernel.fails = vec![("IOMMU_MAP_DMA", code)]);
        let error = Device::open_in(NAME, &space).unwrap_err().to_string();
        let why = std::io::Error::from_raw_os_error(code);
        assert_eq!(error, format!("mapping again what the address space has failed: {why}"));
        let mut expected = joins(NAME, 7);
        expected.extend([mapped(1, 1), UNSET.into()]);
        assert_eq!(kernel.asked(), expected);
        assert!(!kernel.is_open(NAME) && !kernel.is_open("vfio/7"));
    }
    kernel.set(|kernel| kernel.fails.clear());
    assert_eq!(space.usage().mappings, 1);
    let _joined = Device::open_in(NAME, &space).unwrap();
    assert_eq!(kernel.asked().pop(), Some(mapped(1, 1)));
    // Nor does a device that cannot use the addresses, or whose file the kernel does not return.
    for (call, code) in [("IOMMU_GET_INFO", libc::EIO), ("GROUP_GET_DEVICE_FD", libc::EIO)] {
        kernel.set(|kernel| kernel.fails = vec![(call, code)]);
        assert!(Device::open_in(OTHER, &space).is_err());
        assert_eq!(kernel.asked().pop().as_deref(), Some("dev/vfio/8: GROUP_UNSET_CONTAINER 0"), "{call}");
    }
}

/// A container keeps a group until its last device has gone, and mappings until the last group has.
#[test]
fn what_devices_share_outlives_the_one_that_goes() {
    let kernel = type1();
    let first = Device::open(NAME).unwrap();
    let mapper = of_device(&first);
    let beside = Device::open_in(BESIDE, first.space()).unwrap();
    let other = Device::open_in(OTHER, first.space()).unwrap();
    map(&mapper, 1, Permissions::READ);
    map(&mapper, 2, Permissions::READ);
    kernel.asked();
    first.release().unwrap();
    assert_eq!(kernel.asked(), [""; 0], "its group has another device");
    assert!(kernel.is_open("vfio/7") && !kernel.is_open(NAME));
    beside.release().unwrap();
    assert_eq!(kernel.asked(), [UNSET]);
    // The other device reaches both until they are unmapped.
    assert_eq!(unmap(&mapper, 1), (PAGE, 0));
    assert_eq!(kernel.asked(), [unmapped(1)]);
    drop(other);
    kernel.asked();
    assert_eq!((unmap(&mapper, 2), kernel.asked()), ((PAGE, 0), vec![]));

    // By iommufd, the space keeps them without any device.
    let kernel = iommufd();
    let first = Device::open(NAME).unwrap();
    let (mapper, space) = (of_device(&first), first.space().clone());
    let other = Device::open_in(BESIDE, &space).unwrap();
    map(&mapper, 1, Permissions::READ);
    first.release().unwrap();
    assert!(!kernel.is_open("vfio/devices/vfio3") && kernel.is_open("vfio/devices/vfio4"));
    other.release().unwrap();
    kernel.asked();
    let _again = Device::open_in(NAME, &space).unwrap();
    assert_eq!(kernel.asked().len(), 3, "bound, attached, and asked for its addresses");
    assert_eq!((unmap(&mapper, 1), kernel.asked().len()), ((PAGE, 0), 1));
}

/// A child of a fork has the device's file: then the kernel keeps the group, and the device its mappings.
#[test]
fn a_device_that_another_process_has_goes_on() {
    let kernel = type1();
    let device = Device::open(NAME).unwrap();
    let (mapper, space) = (of_device(&device), device.space().clone());
    map(&mapper, 1, Permissions::READ);
    map(&mapper, 2, Permissions::READ);
    kernel.set(|kernel| kernel.fails = vec![("GROUP_UNSET_CONTAINER", libc::EBUSY)]);
    kernel.asked();
    for _ in 0..2 {
        assert_eq!(device.release().unwrap_err().raw_os_error(), Some(libc::EBUSY));
        assert_eq!(kernel.asked(), [UNSET]);
    }
    assert_eq!((unmap(&mapper, 1), kernel.asked()), ((PAGE, 0), vec![unmapped(1)]));
    // It may come back, and go; the first one's state is unknown meanwhile, because the kernel still has its group. For an unplugged one
    // the kernel may be the first to remove it, and says so.
    let mut joined = Device::open_in(NAME, &space).unwrap();
    let [_, _, _, rest @ ..] = &joins(NAME, 7)[..] else { panic!("it sets the container") };
    assert_eq!(kernel.asked(), [&[UNSET.to_owned()], rest].concat());
    for code in [libc::EINVAL, libc::ENODEV] {
        kernel.set(|kernel| kernel.fails = vec![("GROUP_UNSET_CONTAINER", code)]);
        joined.release().unwrap();
        kernel.asked();
        assert_eq!((unmap(&mapper, 2), kernel.asked()), ((PAGE, 0), vec![]));
        joined = Device::open_in(NAME, &space).unwrap();
        map(&mapper, 2, Permissions::READ);
    }
}

/// The child ends, and the kernel removes the group by itself, or at the next request: its mappings are gone then.
#[test]
fn what_the_kernel_kept_for_another_process_is_asked_for_again() {
    let kernel = type1();
    let kept = || {
        let device = Device::open(NAME).unwrap();
        let (mapper, space) = (of_device(&device), device.space().clone());
        map(&mapper, 1, Permissions::READ);
        map(&mapper, 2, Permissions::READ);
        kernel.set(|kernel| kernel.fails = vec![("GROUP_UNSET_CONTAINER", libc::EBUSY)]);
        assert_eq!(device.release().unwrap_err().raw_os_error(), Some(libc::EBUSY));
        kernel.asked();
        (device, mapper, space)
    };
    for fails in [vec![], vec![("GROUP_UNSET_CONTAINER", libc::ENODEV)]] {
        let (_device, mapper, space) = kept();
        kernel.set(|kernel| kernel.fails = fails);
        let joined = Device::open_in(OTHER, &space).unwrap();
        let mut expected = vec![UNSET.to_owned()];
        expected.extend(joins(OTHER, 8));
        expected.extend([mapped(1, 1), mapped(2, 1)]);
        assert_eq!(kernel.asked(), expected);
        assert_eq!((unmap(&mapper, 1), kernel.asked()), ((PAGE, 0), vec![unmapped(1)]));
        drop(joined);
    }
}

#[test]
fn a_release_that_failed_is_tried_again() {
    let kernel = type1();
    let device = Device::open(NAME).unwrap();
    let mapper = of_device(&device);
    map(&mapper, 1, Permissions::READ);
    kernel.set(|kernel| kernel.fails = vec![("GROUP_UNSET_CONTAINER", libc::EBUSY)]);
    assert!(device.release().is_err());
    let beside = Device::open_in(BESIDE, device.space()).unwrap();
    kernel.set(|kernel| kernel.fails.clear());
    kernel.asked();
    // The kernel would say that the other device has the group.
    assert_eq!(device.release().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    assert_eq!(kernel.asked(), [""; 0]);
    kernel.set(|kernel| kernel.fails = vec![("GROUP_UNSET_CONTAINER", libc::EBUSY)]);
    assert!(beside.release().is_err());
    kernel.set(|kernel| kernel.fails.clear());
    kernel.asked();
    device.release().unwrap();
    assert_eq!(kernel.asked(), [UNSET]);
    assert_eq!((unmap(&mapper, 1), kernel.asked()), ((PAGE, 0), vec![]));
    device.release().unwrap();
    beside.release().unwrap();
    assert_eq!(kernel.asked(), [""; 0]);
}

/// A call while another thread closes the device waits for that, and returns its result.
#[test]
fn a_release_waits_for_one_that_is_under_way() {
    let _kernel = type1();
    let device = Device::open(NAME).unwrap();
    let mapper = of_device(&device);
    let held = mapper.space().while_it_changes();
    std::thread::scope(|threads| {
        // These threads have no fake kernel: a real one knows no such call of a file.
        let release = || device.release().unwrap_err().raw_os_error();
        let first = threads.spawn(release);
        let released = || device.read_config(0, &mut []).is_err();
        while !released() {
            std::thread::yield_now();
        }
        let second = threads.spawn(release);
        // Longer waits make it surer that a release without a wait is seen to return.
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!second.is_finished());
        drop(held);
        assert_eq!([first, second].map(|release| release.join().unwrap()), [Some(libc::ENOTTY); 2]);
    });
}

#[test]
fn registers_of_a_device_that_is_released_have_all_bits() {
    let kernel = iommufd();
    kernel.set(|kernel| {
        kernel.regions[0] = (7, 0x2000, 0x8000);
        kernel.regions[2] = (7, 0x1000, 0xa000);
        kernel.regions[7] = (3, 256, 0x4000);
    });
    let device = Device::open(NAME).unwrap();
    let (kept, gone) = ([device.bar(0).unwrap(), device.bar(2).unwrap()], device.bar(0).unwrap());
    drop(gone);
    kept[0].write32(8, 7).unwrap();
    assert_eq!((kept[0].read32(8), kept[1].read64(0)), (Some(7), Some(0)));
    kernel.asked();
    device.release().unwrap();
    assert!(!kernel.is_open("vfio/devices/vfio3"));
    for registers in &kept {
        registers.write32(8, 9).unwrap();
        registers.write64(16, 9).unwrap();
        let all = [registers.read64(8), registers.read64(16), registers.read64(registers.size() - 8)];
        assert_eq!((all, registers.read32(8)), ([Some(u64::MAX); 3], Some(u32::MAX)));
        assert_eq!((registers.read32(registers.size()), registers.write64(4, 0)), (None, None));
    }
    // No more calls to the kernel.
    let is_told = |error: std::io::Error| {
        assert_eq!(
            (error.kind(), error.to_string()),
            (ErrorKind::NotConnected, format!("{NAME} was released"))
        );
    };
    is_told(device.bar(0).unwrap_err());
    is_told(device.read_config(0, &mut [0; 4]).unwrap_err());
    is_told(device.write_config(0, &[0; 4]).unwrap_err());
    is_told(device.set_bus_master(true).unwrap_err());
    is_told(device.reset().unwrap_err());
    device.release().unwrap();
    assert_eq!((device.name(), kernel.asked()), (NAME, vec![]));
}

/// Here the kernel does not replace the second registers, whose address is not page-aligned.
#[test]
fn a_device_whose_registers_cannot_be_covered_goes_on() {
    let kernel = iommufd();
    kernel.set(|kernel| {
        kernel.regions[0] = (7, 0x2000, 0x8000);
        kernel.regions[2] = (7, 0x1000, 0xa800);
        kernel.regions[7] = (3, 256, 0x4000);
    });
    let device = Device::open(NAME).unwrap();
    let (first, second) = (device.bar(0).unwrap(), device.bar(2).unwrap());
    for round in 0..2 {
        assert_eq!(device.release().unwrap_err().raw_os_error(), Some(libc::EINVAL));
        second.write32(8, round).unwrap();
        assert_eq!((first.read32(8), second.read32(8)), (Some(u32::MAX), Some(round)));
        device.read_config(0, &mut [0; 4]).unwrap();
    }
    drop(second);
    device.release().unwrap();
    assert!(!kernel.is_open("vfio/devices/vfio3"));
}

/// Registers and device share the file, whichever is dropped first.
#[test]
fn the_file_closes_with_the_last_that_has_it() {
    let kernel = type1();
    kernel.set(|kernel| {
        kernel.regions[0] = (7, 0x2000, 0x8000);
        kernel.regions[7] = (3, 256, 0x4000);
    });
    for registers_first in [true, false] {
        let device = Device::open(NAME).unwrap();
        let (space, registers) = (device.space().clone(), device.bar(0).unwrap());
        kernel.asked();
        if registers_first {
            drop(registers);
            assert!(kernel.is_open(NAME) && kernel.asked().is_empty());
            drop(device);
        } else {
            drop(device);
            assert!(kernel.is_open(NAME) && kernel.asked().is_empty());
            assert_eq!((registers.write32(4, 5), registers.read32(4)), (Some(()), Some(5)));
            drop(registers);
        }
        assert_eq!((kernel.is_open(NAME), kernel.asked()), (false, vec![UNSET.to_owned()]));
        drop(space);
    }
}

/// With a kernel that keeps mappings: after the last device has left, and the next has come.
#[test]
fn a_map_that_could_not_be_undone_goes_with_the_last_device() {
    let fake = Fake::new(Way::Type1);
    let mapper = fake.mapper();
    map(&mapper, 1, Permissions::READ);
    // The first piece of a list is mapped, the second refused, and the first then stays.
    fake.stuck.store(3, Ordering::Relaxed);
    *fake.fails.lock().unwrap() = Some((2, libc::EFAULT));
    let range = IovaRange::new(Iova::new(8 * PAGE), 2 * PAGE).unwrap();
    let list = [(PhysAddr::new(0x9000), PAGE), (PhysAddr::new(0x1000), PAGE)];
    let (platform, mut gather) = (StdPlatform::new(), Gather::new());
    // SAFETY: as above.
    let failed = unsafe { mapper.map(&platform, range, list, Permissions::READ.into(), &mut gather) };
    assert!(failed.is_err() && mapper.sync(&gather).is_err());
    assert_eq!((fake.count(), mapper.usage().mappings), (2, 2));
    let space = mapper.space();
    fake.mappings.lock().unwrap().clear();
    space.is_out(&mut space.while_it_changes());
    assert!(mapper.sync(&gather).is_ok());
    assert_eq!(mapper.usage().mappings, 1);
    space.is_in(&mut space.while_it_changes()).unwrap();
    assert_eq!((fake.count(), fake.reaches(PAGE)), (1, Some((0x5_0000_1000, Permissions::READ))));
}
