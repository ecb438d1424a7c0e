//! The first and the last numbers of endpoints and domains.

use super::*;

#[test]
fn the_first_and_the_last_of_endpoints_are_attached_to_the_first_and_the_last_of_domains() {
    let bench = Bench::detached();
    let (first, last) = bench.unit.domains();
    assert_eq!((first, last), (DomainId(0), DomainId(u16::MAX - 2)), "two are the driver's own");
    let held = || bench.fake.device().endpoints.clone();
    for number in [first, last] {
        let mapper = bench.unit.mapper(number, Vec::new()).unwrap();
        for endpoint in [0, u32::MAX] {
            mapper.attach(DeviceId(endpoint)).unwrap();
            assert_eq!(held().get(&endpoint), Some(&(number.0.into(), false)));
            assert_eq!(mapper.attach(DeviceId(endpoint)), Err(UnitError::Attached { device: endpoint }));
            bench.unit.detach(DeviceId(endpoint)).unwrap();
            assert_eq!(held().get(&endpoint), None);
        }
    }
    // SAFETY: there is no memory.
    unsafe { bench.unit.pass_through(DeviceId(u32::MAX)) }.unwrap();
    assert_eq!(held().get(&u32::MAX), Some(&(u32::from(last.0) + 1, true)));
    for domain in [last.0 + 1, last.0 + 2] {
        let none = UnitError::NoSuchDomain { domain, first: first.0, last: last.0 };
        assert_eq!(bench.unit.mapper(DomainId(domain), Vec::new()).map(drop), Err(none));
    }
}
