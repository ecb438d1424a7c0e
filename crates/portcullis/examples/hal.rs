//! A published driver over Portcullis: the crate `virtio-drivers` asks its embedder for the trait `Hal`, and [`Adaptor`]
//! implements it by a queue and coherent memory. Its driver of an entropy device then runs unchanged, for each way to protect.
//!
//! The machine is made of software: the device ([`Entropy`]) reads its ring and writes its bytes through an IOMMU. In a kernel
//! the adaptor is shorter: `tests/kernel/src/net.rs` has it over QEMU's network card.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::error::Error;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use portcullis::mapper::TableMapper;
use portcullis::prelude::*;
use portcullis_model::{Buffer, Context, Fault, Iommu, IommuConfig, Memory};
use virtio_drivers::device::rng::VirtIORng;
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, PhysAddr as At};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The machine by name, as the adaptor's state is in a static.
enum Pc {}

impl Machine for Pc {
    type Mapper = TableMapper<Arc<Memory>, portcullis_model::Queue, VtdSecondStage>;
    type Platform = StdPlatform;
    type Memory = Arc<Memory>;
}

type Ring = CoherentMemory<Arc<Memory>, <Pc as Machine>::Mapper, StdPlatform>;

/// What `Hal`'s functions, which have no `self`, find.
struct State {
    memory: Arc<Memory>,
    device: Device<Pc>,
    queue: Queue<Pc, Buffer>,
    /// What is mapped, by its address for the device.
    rings: BTreeMap<At, Ring>,
    shared: BTreeMap<At, Mapping<Buffer>>,
}

thread_local! {
    static STATE: RefCell<Option<State>> = const { RefCell::new(None) };
}

/// Calls `f` with the state. `Hal` has no word for a failure, so one ends the program.
fn with<R>(f: impl FnOnce(&mut State) -> Result<R, Box<dyn Error>>) -> R {
    STATE
        .with_borrow_mut(|state| f(state.as_mut().expect("the adaptor has its queue")))
        .expect("memory can be mapped")
}

struct Adaptor;

// SAFETY: memory for rings is zeroed pages of their own that both sides reach; what is shared stays mapped until it is unshared,
// and the address is the device's for it.
unsafe impl Hal for Adaptor {
    fn dma_alloc(pages: usize, _: BufferDirection) -> (At, NonNull<u8>) {
        with(|state| {
            let ring = CoherentMemory::new(state.device.dma(), Arc::clone(&state.memory), pages * PAGE_SIZE)?;
            let found = (ring.iova().get(), ring.as_ptr().ok_or("frames that are not side by side")?);
            state.rings.insert(found.0, ring);
            Ok(found)
        })
    }

    unsafe fn dma_dealloc(at: At, _: NonNull<u8>, _: usize) -> i32 {
        let free = |state: &mut State| Ok(state.rings.remove(&at).is_some_and(|ring| ring.free().is_ok()));
        if with(free) { 0 } else { -1 }
    }

    unsafe fn mmio_phys_to_virt(_: At, _: usize) -> NonNull<u8> {
        unimplemented!("only a PCI device has registers in memory")
    }

    unsafe fn share(buffer: NonNull<[u8]>, direction: BufferDirection) -> At {
        let direction = match direction {
            BufferDirection::DriverToDevice => Direction::ToDevice,
            BufferDirection::DeviceToDriver => Direction::FromDevice,
            BufferDirection::Both => Direction::Bidirectional,
        };
        with(|state| {
            // The driver's buffer is this process's memory, and the simulated machine has its own, so the bytes are copied there
            // and back. A kernel has no such step: it calls `map_raw` with the buffer's physical address.
            let original = state.memory.buffer(buffer.len() as u64).ok_or("out of memory")?;
            if direction != Direction::FromDevice {
                // SAFETY: the caller's buffer, which nobody writes during the call.
                original.write(0, unsafe { buffer.as_ref() })?;
            }
            let mapping = state.queue.map(original, direction)?;
            let at = mapping.iova().get();
            state.shared.insert(at, mapping);
            Ok(at)
        })
    }

    unsafe fn unshare(at: At, mut buffer: NonNull<[u8]>, direction: BufferDirection) {
        with(|state| {
            let mapping = state.shared.remove(&at).ok_or("nothing is shared there")?;
            let mut ended = None;
            state.queue.unmap(mapping)?.for_each(|original| ended = Some(original));
            // `Hal` has no word for later, so nothing waits for a batch.
            let original = match ended {
                Some(original) => original,
                None => state.queue.commit()?.next().ok_or("no buffer came back")?,
            };
            if direction != BufferDirection::DriverToDevice {
                // SAFETY: the caller's buffer, which nobody else uses during the call.
                original.read(0, unsafe { buffer.as_mut() })?;
            }
            Ok(())
        });
    }
}

/// The device: it answers each request with the bytes 1, 2, 3..
struct Entropy {
    iommu: Arc<Iommu>,
    id: DeviceId,
    /// Its virtqueue: how many places it has, and the addresses of its descriptors, requests and answers.
    size: u64,
    rings: [At; 3],
    /// How many requests it has answered.
    answered: u16,
    /// Where it was last told to write.
    told: Iova,
}

impl Entropy {
    fn read<const N: usize>(&self, at: At) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        self.iommu.dma_read(self.id, Iova::new(at), &mut bytes)?;
        Ok(bytes)
    }

    fn write(&self, at: At, bytes: &[u8]) -> Result<(), Fault> {
        self.iommu.dma_write(self.id, Iova::new(at), bytes)
    }

    /// Answers what is in the ring (virtio 1.2, section 2.7 "Split Virtqueues").
    fn answer(&mut self) -> Result<(), Fault> {
        let [descriptors, requests, answers] = self.rings;
        while u16::from_le_bytes(self.read(requests + 2)?) != self.answered {
            let place = u64::from(self.answered) % self.size;
            let head = u16::from_le_bytes(self.read(requests + 4 + 2 * place)?);
            let descriptor = descriptors + 16 * u64::from(head);
            self.told = Iova::new(u64::from_le_bytes(self.read(descriptor)?));
            let len = u32::from_le_bytes(self.read(descriptor + 8)?);
            let bytes: Vec<u8> = (1..=len).map(|number| number as u8).collect();
            self.write(self.told.get(), &bytes)?;
            let answer = [u32::from(head), len].map(u32::to_le_bytes).concat();
            self.write(answers + 4 + 8 * place, &answer)?;
            self.answered = self.answered.wrapping_add(1);
            self.write(answers + 2, &self.answered.to_le_bytes())?;
        }
        Ok(())
    }
}

/// The driver's way to the device's registers.
struct Registers(Rc<RefCell<Entropy>>, DeviceStatus);

impl Transport for Registers {
    fn device_type(&self) -> DeviceType {
        DeviceType::EntropySource
    }
    fn read_device_features(&mut self) -> u64 {
        // VIRTIO_F_VERSION_1
        1 << 32
    }
    fn write_driver_features(&mut self, _: u64) {}
    fn max_queue_size(&mut self, _: u16) -> u32 {
        8
    }
    fn notify(&mut self, _: u16) {
        self.0.borrow_mut().answer().expect("the device reaches its ring and the buffer");
    }
    fn get_status(&self) -> DeviceStatus {
        self.1
    }
    fn set_status(&mut self, status: DeviceStatus) {
        self.1 = status;
    }
    fn set_guest_page_size(&mut self, _: u32) {}
    fn requires_legacy_layout(&self) -> bool {
        false
    }
    fn queue_set(&mut self, _: u16, size: u32, descriptors: At, driver: At, device: At) {
        let mut entropy = self.0.borrow_mut();
        (entropy.size, entropy.rings) = (size.into(), [descriptors, driver, device]);
    }
    fn queue_unset(&mut self, _: u16) {}
    fn queue_used(&mut self, _: u16) -> bool {
        self.0.borrow().size > 0
    }
    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }
    fn read_config_generation(&self) -> u32 {
        0
    }
    fn read_config_space<V: FromBytes + IntoBytes>(&self, _: usize) -> virtio_drivers::Result<V> {
        Err(virtio_drivers::Error::ConfigSpaceMissing)
    }
    fn write_config_space<V: IntoBytes + Immutable>(&mut self, _: usize, _: V) -> virtio_drivers::Result<()> {
        Err(virtio_drivers::Error::ConfigSpaceMissing)
    }
}

fn run(name: &str, config: QueueConfig) -> Result<(), Box<dyn Error>> {
    let memory = Memory::new(64 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let (id, card) = (DomainId(1), DeviceId(5));
    let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level())?;
    iommu.attach(card, Context::SecondStage { domain: id, root: table.root(), levels: table.levels() });
    let domain = Domain::builder(table, iommu.queue(), id)
        .bounce(Arc::clone(&memory), PoolConfig::default())
        .build_as::<Pc>(StdPlatform::new())?;
    let device = domain.attach(card, DmaMask::BITS_64)?;
    let queue = device.queue(config)?;
    let (rings, shared) = (BTreeMap::new(), BTreeMap::new());
    STATE.set(Some(State { memory: Arc::clone(&memory), device, queue, rings, shared }));

    let (told, rings) = (Iova::new(0), [0; 3]);
    let entropy = Entropy { iommu: Arc::clone(&iommu), id: card, size: 0, rings, answered: 0, told };
    let entropy = Rc::new(RefCell::new(entropy));
    let mut driver = VirtIORng::<Adaptor, _>::new(Registers(Rc::clone(&entropy), DeviceStatus::empty()))
        .map_err(|error| error.to_string())?;
    let mut bytes = [0; 100];
    for _ in 0..20 {
        bytes.fill(0);
        let len = driver.request_entropy(&mut bytes).map_err(|error| error.to_string())?;
        assert!(len == 100 && bytes.iter().zip(1..).all(|(byte, number)| *byte == number));
    }
    let late = match iommu.dma_write(card, entropy.borrow().told, b"too late") {
        Ok(()) => "reaches a copy that nobody reads",
        Err(_) => "is refused",
    };
    drop(driver);
    // All of it came back, the rings too.
    let state = STATE.take().ok_or("the adaptor has its queue")?;
    assert!(state.rings.is_empty() && state.shared.is_empty() && bytes[..8] == [1, 2, 3, 4, 5, 6, 7, 8]);
    println!("{name:<7} 20 requests of 100 bytes; a late write of the device {late}");
    Ok(())
}

/// The same by each strategy.
///
/// # Errors
/// What did not work.
pub fn main() -> Result<(), Box<dyn Error>> {
    run("direct", QueueConfig::direct())?;
    run("ring", QueueConfig::ring(64, 4096).batch(1))?;
    run("bounce", QueueConfig::bounce())?;
    run("auto", QueueConfig::auto(64, 4096).batch(1))
}
