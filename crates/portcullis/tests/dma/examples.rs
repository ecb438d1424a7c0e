//! The drivers in `examples`, run.

#[path = "../../examples/hal.rs"]
mod hal;
#[path = "../../examples/nic.rs"]
mod nic;
#[path = "../../examples/prp.rs"]
mod prp;

#[test]
fn a_network_card() {
    nic::main().unwrap();
}

#[test]
fn an_nvme_disk() {
    prp::main().unwrap();
}

#[test]
fn an_adaptor_for_virtio() {
    hal::main().unwrap();
}
