//! All register writes that a device sees of its driver (VIRTIO 1.3, sections 3.1.1 "Driver Requirements: Device Initialization", 4.1.4.3
//! "Common configuration structure layout", 5.13.5 "Device Initialization").

use super::*;

type Write = (usize, usize, u64);

const STATUS: usize = 0x14;
const SELECT: usize = 0x16;
const BYPASS: usize = 0x200 + 36;
/// Doorbells: of requests, with their queue's number, and of events.
const REQUESTS: Write = (0x100, 2, 0);
const EVENTS: Write = (0x104, 2, 1);

/// Writes that turn on queue `number`, with `size` descriptors, at the addresses of its three parts.
fn queue(number: u64, size: u64, [descriptors, driver, device]: [u64; 3]) -> Vec<Write> {
    let halves = |at: usize, address: u64| [(at, 4, address & 0xffff_ffff), (at + 4, 4, address >> 32)];
    let parts = [halves(0x20, descriptors), halves(0x28, driver), halves(0x30, device)];
    [&[(SELECT, 2, number), (0x18, 2, size)][..], &parts.concat(), &[(0x1c, 2, 1)]].concat()
}

#[test]
fn a_device_is_taken_over_and_given_up_in_the_order_of_the_specification() {
    let fake = Fake::new();
    // Features that this driver never accepts: BYPASS, MMIO, IN_ORDER; and settings of a previous driver.
    fake.device().features |= 1 << 3 | 1 << 5 | 1 << 35 | feature::ACCESS_PLATFORM;
    fake.device().bytes[STATUS] = 0xf;
    let unit = start(&fake).unwrap();
    let writes = || core::mem::take(&mut fake.device().writes);
    let queues = fake.device().queues;
    for (_, [descriptors, driver, device]) in queues {
        assert_eq!((descriptors % 4096, driver, device), (0, descriptors + 0x1000, descriptors + 0x1400));
        assert_eq!(fake.memory.read(driver, 2), 1, "the driver looks for itself, and wants no interrupt");
    }
    let mut wanted = alloc::vec![(STATUS, 1, 0), (STATUS, 1, 3), (0x00, 4, 0), (0x00, 4, 1)];
    // INPUT_RANGE, DOMAIN_RANGE, MAP_UNMAP, PROBE, BYPASS_CONFIG; VERSION_1, ACCESS_PLATFORM.
    wanted.extend([(0x08, 4, 0), (0x0c, 4, 0x57), (0x08, 4, 1), (0x0c, 4, 3), (STATUS, 1, 0xb)]);
    wanted.extend([(SELECT, 2, 0), (SELECT, 2, 1)]);
    wanted.extend(queue(0, 256, queues[0].1));
    wanted.extend(queue(1, 16, queues[1].1));
    // Its queues are set before DRIVER_OK; buffers for events; endpoints are attached elsewhere, and detached.
    wanted.extend([(STATUS, 1, 0xf), EVENTS, REQUESTS, REQUESTS]);
    assert_eq!(writes(), wanted);
    unit.enable().unwrap();
    assert_eq!(writes(), [(BYPASS, 1, 0)]);
    unit.shut_down().unwrap();
    assert_eq!(writes(), [(BYPASS, 1, 1), (STATUS, 1, 0)]);
}

#[test]
fn numbers_of_the_driver_s_own_are_behind_those_of_domains() {
    let fake = Fake::new();
    fake.device().configure(config::DOMAIN_START, 4, 3);
    fake.device().configure(config::DOMAIN_END, 4, 9);
    let unit = start(&fake).unwrap();
    assert_eq!(unit.domains(), (DomainId(3), DomainId(7)));
    // SAFETY: there is no memory.
    unsafe { unit.pass_through(DeviceId(ENDPOINT)) }.unwrap();
    assert_eq!(fake.device().endpoints[&ENDPOINT], (8, true));
}

/// Section 2.5: a field of more than 32 bits, and fields that belong together, are read again if the generation has changed.
#[test]
fn a_configuration_that_changes_is_read_again_and_not_for_ever() {
    for (unsettled, is_settled) in [(1, true), (30, true), (1000, false)] {
        let fake = Fake::new();
        fake.device().unsettled = unsettled;
        let error = start(&fake).map(drop);
        let what = "leave its configuration as it is";
        let wanted = if is_settled { Ok(()) } else { Err(UnitError::TimedOut { what, waited_ns: 0 }) };
        assert_eq!(error, wanted, "{unsettled}");
    }
}

#[test]
fn devices_pass_by_until_the_device_says_that_they_do_not() {
    let fake = Fake::new();
    let unit = start(&fake).unwrap();
    fake.device().keeps_bypass = true;
    assert!(matches!(unit.enable(), Err(UnitError::TimedOut { what: "turn bypass off", .. })));
    fake.device().keeps_bypass = false;
    unit.enable().unwrap();
    fake.device().keeps_bypass = true;
    assert!(matches!(unit.shut_down(), Err(UnitError::TimedOut { what: "turn bypass on", .. })));
}
