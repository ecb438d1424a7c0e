//! Domains of the unit, which reserve what their devices reserve.

use portcullis::addr::{Direction, DmaSegment, PhysSegment};
use portcullis::dma::{DmaMask, Queue, QueueConfig};

use super::*;
use crate::acpi::Reserved;
use crate::domain::DomainError;

const FIRST: DeviceId = DeviceId(OTHER);

fn unit(fake: &Fake) -> Arc<Unit<Fake>> {
    let unit = Arc::new(start(fake).unwrap());
    unit.enable().unwrap();
    unit
}

#[test]
fn a_device_is_attached_where_its_own_addresses_are_kept_free() {
    let fake = Fake::new();
    let unit = unit(&fake);
    let kept = IovaRange::from_bounds(Iova::new(KEPT.0), Iova::new(KEPT.1)).unwrap();
    let careless = unit.domain(DomainId(1)).unwrap().build(StdPlatform::new()).unwrap();
    let reserved = DomainError::Unit(UnitError::Reserved { device: OTHER, range: kept });
    assert_eq!(careless.attach(FIRST, DmaMask::BITS_64).err(), Some(reserved));
    assert_eq!(careless.detach(FIRST), Err(UnitError::NotAttached { device: OTHER }));

    let in_use = DomainError::Unit(UnitError::DomainInUse { domain: 1 });
    assert_eq!(unit.domain::<StdPlatform>(DomainId(1)).map(drop), Err(in_use));
    let builder = unit.domain(DomainId(2)).unwrap().for_device(FIRST).unwrap();
    let domain = builder.build(StdPlatform::new()).unwrap();
    let device = domain.attach(FIRST, DmaMask::BITS_64).unwrap();
    let attached = DomainError::Unit(UnitError::Attached { device: OTHER });
    assert_eq!(domain.attach(FIRST, DmaMask::BITS_64).err(), Some(attached));
    assert_eq!(careless.attach(FIRST, DmaMask::BITS_64).err(), Some(attached));

    // The device's highest addresses are the unit's.
    let mut queue: Queue<_> = device.queue(QueueConfig::direct()).unwrap();
    let (page, mut view) =
        ([PhysSegment { phys: PhysAddr::new(0x5000), len: PAGE }], [DmaSegment::default()]);
    // SAFETY: there is no memory.
    let (mapping, _) = unsafe { queue.map_raw(&page, Direction::FromDevice, &mut view) }.unwrap();
    let at = view[0].iova.get();
    assert_eq!(fake.device().mapped(2), [(at, at + PAGE - 1)]);
    let last = unit.aperture().last().get();
    assert!(at + (PAGE - 1) <= last && at > last / 2, "{at:#x} of {last:#x}");
    let _ = queue.unmap_raw(mapping).unwrap();

    // The number is released, and the device is detached with its domain.
    drop((queue, device, domain));
    assert_eq!(fake.device().endpoints.get(&OTHER), None);
    let again = unit.domain(DomainId(2)).unwrap().for_device(FIRST).unwrap();
    again.build(StdPlatform::new()).unwrap().attach(FIRST, DmaMask::BITS_64).unwrap();
    let (first, last) = unit.domains();
    for beyond in [first.0.checked_sub(1), last.0.checked_add(1)].into_iter().flatten() {
        let none = UnitError::NoSuchDomain { domain: beyond, first: first.0, last: last.0 };
        assert_eq!(unit.domain::<StdPlatform>(DomainId(beyond)).map(drop), Err(DomainError::Unit(none)));
    }
}

#[test]
fn what_a_device_keeps_for_itself_is_none_of_firmwares_regions() {
    let fake = Fake::new();
    let unit = unit(&fake);
    let range = IovaRange::new(Iova::new(KEPT.0 - PAGE), 2 * PAGE).unwrap();
    let builder = unit.domain(DomainId(1)).unwrap().for_device(FIRST).unwrap();
    // SAFETY: there is no memory.
    let builder = unsafe { builder.regions([Reserved { range, permissions: Permissions::READ }]) };
    let built = builder.build(StdPlatform::new()).map(drop);
    let last = unit.aperture().last();
    assert_eq!(built, Err(DomainError::Untranslated { range, last }));
    // An adjacent mapping exists before the device is attached.
    let range = IovaRange::new(Iova::new(KEPT.0 - PAGE), PAGE).unwrap();
    let builder = unit.domain(DomainId(1)).unwrap().for_device(FIRST).unwrap();
    // SAFETY: there is no memory.
    let builder = unsafe { builder.regions([Reserved { range, permissions: Permissions::READ }]) };
    let domain = builder.build(StdPlatform::new()).unwrap();
    domain.attach(FIRST, DmaMask::BITS_64).unwrap();
    assert_eq!(fake.device().mapped(1), [(range.start().get(), range.last().get())]);
}

#[test]
fn an_attach_that_is_late_is_undone_by_its_domain() {
    let fake = Fake::new();
    fake.device().features &= !feature::PROBE;
    let unit = unit(&fake);
    let domain = unit.domain(DomainId(1)).unwrap().build(StdPlatform::new()).unwrap();
    fake.device().holds = true;
    let late = domain.attach(FIRST, DmaMask::BITS_64).map(drop);
    assert!(matches!(late, Err(DomainError::Unit(UnitError::TimedOut { .. }))), "{late:?}");
    // It counts as attached until a detach is answered.
    assert!(domain.attach(FIRST, DmaMask::BITS_64).is_err());
    fake.device().holds = false;
    fake.catch_up();
    domain.detach(FIRST).unwrap();
    assert_eq!(fake.device().endpoints.get(&OTHER), None);
    domain.attach(FIRST, DmaMask::BITS_64).unwrap();
}
