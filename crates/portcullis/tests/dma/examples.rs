//! The drivers in `examples`, run.

/// The kernel's side, which needs no `std`. `tests/no-std` has none.
#[path = "../../examples/kernel/machine.rs"]
mod kernel;
#[path = "../../examples/map.rs"]
mod map;
#[path = "../../examples/nic.rs"]
mod nic;
#[path = "../../examples/prp.rs"]
mod prp;
#[path = "../../examples/unplug.rs"]
mod unplug;

#[test]
fn a_buffer() {
    map::main().unwrap();
}

#[test]
fn a_kernel() {
    let seen = kernel::run().unwrap();
    assert_eq!((seen.strict_waits, seen.lazy_waits, seen.flushes), (1, 0, 1));
    assert!(seen.iova.get() <= u32::MAX.into() && seen.iova.get() != seen.phys.get(), "{seen:?}");
}

#[test]
fn a_network_card() {
    nic::main().unwrap();
}

#[test]
fn an_nvme_disk() {
    prp::main().unwrap();
}

#[test]
fn a_device_that_goes() {
    unplug::main().unwrap();
}
