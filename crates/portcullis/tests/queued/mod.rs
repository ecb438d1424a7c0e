//! Queues of a device that a test has made by itself.
#![allow(dead_code, reason = "each test file uses a part")]

use std::convert::Infallible;

use portcullis::addr::DeviceId;
use portcullis::dma::{Device, DmaBuffer, DmaDevice, DmaDomain, DmaMask, Ended, Mapping, Queue, QueueConfig};
use portcullis::domain::Domain;
use portcullis::heap::Shared;
use portcullis::mapper::Mapper;
use portcullis::platform::Platform;

/// A device as the front door has it, and its queue.
pub type Nic<M, P> = Device<(M, P, Infallible)>;
pub type QueueOf<M, P, B> = Queue<(M, P, Infallible), B>;

/// A device of the domain that reaches addresses up to `mask`.
pub fn nic<M: Mapper, P: Platform>(domain: &Shared<Domain<M, P>>, mask: u64) -> Nic<M, P> {
    let bits = DmaMask::bits(u64::BITS - mask.leading_zeros());
    assert_eq!(bits.last(), mask);
    DmaDomain::over(domain.clone(), None).unwrap().attach(DeviceId(7), bits).unwrap()
}

/// A queue for the domain and the reach of `device`, by the policy of the domain.
pub fn queue<M: Mapper, P: Platform, B: DmaBuffer>(
    device: &DmaDevice<M, P>,
    config: QueueConfig,
) -> QueueOf<M, P, B> {
    nic(device.domain(), device.mask()).queue(config).unwrap()
}

/// The same, whose mappings end one by one.
pub fn direct<M: Mapper, P: Platform, B: DmaBuffer>(device: &DmaDevice<M, P>) -> QueueOf<M, P, B> {
    queue(device, QueueConfig::direct())
}

/// Ends a mapping whose buffer comes back at once.
pub fn end<M: Mapper, P: Platform, B: DmaBuffer>(queue: &mut QueueOf<M, P, B>, mapping: Mapping<B>) -> B {
    let Ended::Done(buffer) = queue.unmap(mapping).unwrap() else { panic!("it waits for nobody") };
    buffer
}
