//! A network card by the `virtio-drivers` crate, whose memory goes through a queue of Portcullis.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ptr::NonNull;

use portcullis::addr::{Direction, DmaSegment, PhysAddr as Phys, PhysSegment};
use portcullis::dma::{AnyQueue, CoherentMemory, Device, Ended, Machine, QueueConfig, RawMapping};
use spin::Mutex;
use virtio_drivers::device::net::VirtIONetRaw;
use virtio_drivers::transport::pci::PciTransport;
use virtio_drivers::transport::pci::bus::{ConfigurationAccess, DeviceFunction, PciRoot};
use virtio_drivers::{BufferDirection, Hal, PhysAddr};

use self::translated::Translated;
use crate::firmware::Pci;
use crate::memory::Memory;

#[path = "../../../crates/portcullis-linux/src/virtio/translated.rs"]
mod translated;

/// What `Hal`'s functions, which have no `self`, find: the card's queue, what it shares, and where its rings' memory comes from.
struct Card {
    queue: Box<dyn AnyQueue + Send>,
    shared: BTreeMap<u64, RawMapping>,
    memory: Box<dyn Rings + Send>,
}

static CARD: Mutex<Option<Card>> = Mutex::new(None);

/// Memory that the card and the driver share for long.
trait Rings {
    fn take(&mut self, pages: usize) -> Option<(u64, NonNull<u8>)>;
    fn give_back(&mut self, at: u64) -> bool;
}

pub struct RingsOf<X: Machine> {
    device: Device<X>,
    taken: BTreeMap<u64, CoherentMemory<Memory, X::Mapper, X::Platform>>,
}

impl<X: Machine> Rings for RingsOf<X> {
    fn take(&mut self, pages: usize) -> Option<(u64, NonNull<u8>)> {
        let memory = CoherentMemory::new(self.device.dma(), Memory, pages * 4096).ok()?;
        let found = (memory.iova().get(), memory.as_ptr()?);
        self.taken.insert(found.0, memory);
        Some(found)
    }

    fn give_back(&mut self, at: u64) -> bool {
        self.taken.remove(&at).is_some_and(|memory| memory.free().is_ok())
    }
}

struct Mapped;

// SAFETY: memory for rings is whole zeroed frames that both sides reach; what is shared is mapped until it is unshared, and the
// address is the device's for it.
unsafe impl Hal for Mapped {
    fn dma_alloc(pages: usize, _: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        let mut card = CARD.lock();
        card.as_mut().and_then(|card| card.memory.take(pages)).expect("memory for the card's rings")
    }

    unsafe fn dma_dealloc(at: PhysAddr, _: NonNull<u8>, _: usize) -> i32 {
        let mut card = CARD.lock();
        if card.as_mut().is_some_and(|card| card.memory.give_back(at)) { 0 } else { -1 }
    }

    unsafe fn mmio_phys_to_virt(at: PhysAddr, _: usize) -> NonNull<u8> {
        NonNull::new(at as *mut u8).expect("registers are not at 0")
    }

    unsafe fn share(buffer: NonNull<[u8]>, direction: BufferDirection) -> PhysAddr {
        let direction = match direction {
            BufferDirection::DriverToDevice => Direction::ToDevice,
            BufferDirection::DeviceToDriver => Direction::FromDevice,
            BufferDirection::Both => Direction::Bidirectional,
        };
        let segment =
            PhysSegment { phys: Phys::new(buffer.as_ptr().addr() as u64), len: buffer.len() as u64 };
        let mut view = [DmaSegment::default()];
        let mut card = CARD.lock();
        let card = card.as_mut().expect("the card is there");
        // SAFETY: the driver's buffer, which nothing but the card uses until it is unshared.
        let mapped = unsafe { card.queue.map_raw(&[segment], direction, &mut view) };
        let (mapping, _) = mapped.expect("the card's buffers can be mapped");
        card.shared.insert(view[0].iova.get(), mapping);
        view[0].iova.get()
    }

    unsafe fn unshare(at: PhysAddr, _: NonNull<[u8]>, _: BufferDirection) {
        let mut card = CARD.lock();
        let card = card.as_mut().expect("the card is there");
        let mapping = card.shared.remove(&at).expect("it was shared");
        if card.queue.unmap_raw(mapping).expect("the IOMMU confirms") == Ended::Pending {
            card.queue.commit_raw().expect("the IOMMU confirms");
        }
    }
}

/// The configuration space of bus 0, by its ports.
struct Ports;

impl ConfigurationAccess for Ports {
    fn read_word(&self, device: DeviceFunction, register: u8) -> u32 {
        Pci(device.device << 3 | device.function).read(register)
    }

    fn write_word(&mut self, device: DeviceFunction, register: u8, data: u32) {
        Pci(device.device << 3 | device.function).write(register, data);
    }

    unsafe fn unsafe_clone(&self) -> Self {
        Ports
    }
}

/// Asks for the hardware address of QEMU's router (10.0.2.2) by ARP, and returns it.
pub fn ask_router<X: Machine<Platform = crate::host::Kernel>>(
    pci: Pci,
    device: Device<X>,
    config: QueueConfig,
) -> Option<[u8; 6]>
where
    Device<X>: Send,
    RingsOf<X>: Send,
    portcullis::dma::Queue<X>: Send,
{
    let queue: portcullis::dma::Queue<X> = device.queue(config).ok()?;
    let memory = RingsOf { device, taken: BTreeMap::new() };
    *CARD.lock() = Some(Card { queue: Box::new(queue), shared: BTreeMap::new(), memory: Box::new(memory) });
    pci.registers();
    let place = DeviceFunction { bus: 0, device: pci.0 >> 3, function: pci.0 & 7 };
    let transport = PciTransport::new::<Mapped, _>(&mut PciRoot::new(Ports), place).ok()?;
    let mut card: VirtIONetRaw<Mapped, _, 16> = VirtIONetRaw::new(Translated::new(transport).ok()?).ok()?;
    let own = card.mac_address();

    let mut received = alloc::vec![0_u8; 2048];
    // SAFETY: `received` is left alone until the card is done with it.
    let token = unsafe { card.receive_begin(&mut received) }.ok()?;
    let mut frame = alloc::vec![0_u8; 12];
    frame.extend([0xff; 6]);
    frame.extend(own);
    // ARP, Ethernet, IPv4, a request: who has 10.0.2.2, tell 10.0.2.15.
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(own);
    frame.extend([10, 0, 2, 15, 0, 0, 0, 0, 0, 0, 10, 0, 2, 2]);
    frame.resize(12 + 60, 0);
    // The crate writes its header into the first bytes.
    let mut sent: Vec<u8> = frame;
    card.fill_buffer_header(&mut sent).ok()?;
    // SAFETY: `sent` is left alone until the card is done with it.
    let sending = unsafe { card.transmit_begin(&sent) }.ok()?;
    let began = crate::boot::now_ns();
    let waits = || crate::boot::now_ns() - began < 10_000_000_000;
    while card.poll_transmit().is_none() && waits() {}
    // SAFETY: the buffer of `sending`.
    unsafe { card.transmit_complete(sending, &sent) }.ok()?;
    while card.poll_receive().is_none() && waits() {}
    // SAFETY: the buffer of `token`.
    let (header, len) = unsafe { card.receive_complete(token, &mut received) }.ok()?;
    let answer = received.get(header..header + len)?;
    // An ARP answer, to this card.
    let is_answer = answer.get(12..14)? == [8, 6] && answer.get(20..22)? == [0, 2] && answer.get(..6)? == own;
    is_answer.then(|| answer[22..28].try_into().ok()).flatten()
}
