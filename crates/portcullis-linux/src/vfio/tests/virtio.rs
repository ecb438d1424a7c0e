//! A driver of the crate `virtio-drivers` over a fake kernel, and a device that reaches its mappings.

use std::cell::RefCell;
use std::os::unix::fs::FileExt;
use std::panic::catch_unwind;
use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use portcullis::addr::{DeviceId, Permissions};
use portcullis::dma::{Device, DmaMask, DomainBuilder, QueueConfig};
use portcullis::prelude::PoolConfig;
use portcullis::std_platform::StdPlatform;
use virtio_drivers::device::rng::VirtIORng;
use virtio_drivers::transport::pci::bus::{ConfigurationAccess, DeviceFunction};
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{BufferDirection, Hal, PhysAddr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::device::{BAR, BYTES, CDEV, CONFIG, with_regions};
use super::fake::{Fake, PAGE, Way};
use crate::heap::Heap;
use crate::vfio::Machine;
use crate::virtio::{Config, ConnectError, Translated, VfioHal};

fn attached(fake: &Arc<Fake>) -> Device<Machine> {
    let domain = DomainBuilder::new(fake.mapper()).bounce(Heap, PoolConfig::default());
    domain.build(StdPlatform::new()).unwrap().attach(DeviceId(8), DmaMask::BITS_64).unwrap()
}

/// The device: it answers each request with the bytes 1, 2, 3...
struct Entropy {
    fake: Arc<Fake>,
    /// Offered features, and accepted features.
    offers: u64,
    accepted: u64,
    /// Its virtqueue: size, and the addresses of descriptors, requests and answers.
    size: u64,
    rings: [PhysAddr; 3],
    answered: u16,
    /// Its last target address, and whether that was the driver's own memory.
    told: PhysAddr,
}

/// VIRTIO_F_VERSION_1 and VIRTIO_F_ACCESS_PLATFORM.
const TRANSLATED: u64 = 1 << 32 | 1 << 33;

impl Entropy {
    fn new(fake: &Arc<Fake>, offers: u64) -> Rc<RefCell<Self>> {
        let (size, rings, answered, told) = Default::default();
        Rc::new(RefCell::new(Self {
            fake: Arc::clone(fake),
            offers,
            accepted: 0,
            size,
            rings,
            answered,
            told,
        }))
    }

    /// The process's byte that it reaches; `None` if it may not write.
    fn byte(&self, at: PhysAddr) -> Option<*mut u8> {
        let (address, may) = self.fake.reaches(at)?;
        may.allows(Permissions::WRITE).then(|| with_exposed_provenance_mut(address as usize))
    }

    fn read<const N: usize>(&self, at: PhysAddr) -> [u8; N] {
        // SAFETY: mapped memory exists, and no code writes it while the driver waits.
        std::array::from_fn(|index| unsafe { self.byte(at + index as u64).unwrap().read_volatile() })
    }

    fn write(&self, at: PhysAddr, bytes: &[u8]) {
        for (at, byte) in (at..).zip(bytes) {
            // SAFETY: as above.
            unsafe { self.byte(at).unwrap().write_volatile(*byte) };
        }
    }

    /// Answers the requests in the ring (virtio 1.2, section 2.7 "Split Virtqueues").
    fn answer(&mut self) {
        let [descriptors, requests, answers] = self.rings;
        while u16::from_le_bytes(self.read(requests + 2)) != self.answered {
            let place = u64::from(self.answered) % self.size;
            let head = u16::from_le_bytes(self.read(requests + 4 + 2 * place));
            let descriptor = descriptors + 16 * u64::from(head);
            self.told = u64::from_le_bytes(self.read(descriptor));
            let len = u32::from_le_bytes(self.read(descriptor + 8));
            let bytes: Vec<u8> = (1..=len).map(|number| number as u8).collect();
            self.write(self.told, &bytes);
            let answer = [u32::from(head), len].map(u32::to_le_bytes).concat();
            self.write(answers + 4 + 8 * place, &answer);
            self.answered = self.answered.wrapping_add(1);
            self.write(answers + 2, &self.answered.to_le_bytes());
        }
    }
}

/// The driver's access to the device's registers.
struct Registers(Rc<RefCell<Entropy>>, DeviceStatus);

impl Transport for Registers {
    fn device_type(&self) -> DeviceType {
        DeviceType::EntropySource
    }
    fn read_device_features(&mut self) -> u64 {
        self.0.borrow().offers
    }
    fn write_driver_features(&mut self, features: u64) {
        self.0.borrow_mut().accepted = features;
    }
    fn max_queue_size(&mut self, _: u16) -> u32 {
        8
    }
    fn notify(&mut self, _: u16) {
        self.0.borrow_mut().answer();
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
    fn queue_set(&mut self, _: u16, size: u32, descriptors: PhysAddr, driver: PhysAddr, device: PhysAddr) {
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

/// A driver that knows nothing of this library gets its bytes with each strategy, and nothing stays open.
#[test]
fn a_published_driver_runs_by_each_strategy() {
    enum Name {}
    let (_kernel, pci) = with_regions();
    let pci = Arc::new(pci);
    let strategies = [
        (QueueConfig::direct(), false),
        (QueueConfig::batched(8), false),
        (QueueConfig::ring(64, PAGE).batch(8), false),
        (QueueConfig::bounce(), true),
    ];
    for (config, copies) in strategies {
        let fake = Fake::new(Way::Iommufd);
        VfioHal::<Name>::connect(&pci, &attached(&fake), config).unwrap();
        let entropy = Entropy::new(&fake, TRANSLATED);
        let transport = Translated::new(Registers(Rc::clone(&entropy), DeviceStatus::empty())).unwrap();
        let mut driver = VirtIORng::<VfioHal<Name>, _>::new(transport).unwrap();
        let rings = fake.count();
        assert!(rings > 0, "{config:?}");
        // Not page-aligned, so that a mapping has more than the buffer.
        let mut bytes = [0; 101];
        for _ in 0..20 {
            bytes.fill(0);
            assert_eq!(driver.request_entropy(&mut bytes[1..]), Ok(100));
            assert!(bytes.iter().zip(0..).all(|(byte, number)| *byte == number), "{config:?}: {bytes:?}");
            // Its target is a slot of the pool, which stays mapped, or is no longer mapped.
            assert_eq!(fake.reaches(entropy.borrow().told).is_some(), copies, "{config:?}");
        }
        assert_eq!(entropy.borrow().accepted, TRANSLATED);
        drop(driver);
        assert_eq!(fake.count() > 0, copies, "{config:?}: rings are still mapped");
        // SAFETY: 1: the driver is dropped.
        unsafe { VfioHal::<Name>::disconnect() };
        assert_eq!(fake.count(), 0, "{config:?}");
    }
}

/// Such a device uses the machine's addresses, and would write to other memory.
#[test]
fn a_device_that_goes_round_the_iommu_is_refused() {
    let entropy = Entropy::new(&Fake::new(Way::Iommufd), !(1 << 33));
    let refused = Translated::new(Registers(entropy, DeviceStatus::empty())).map(drop).unwrap_err();
    let says = "the device does not offer VIRTIO_F_ACCESS_PLATFORM: it may go round the IOMMU, to memory of others (QEMU's offer it with iommu_platform=on)";
    assert_eq!(refused.to_string(), says);
}

#[test]
fn what_cannot_be_had_is_told() {
    enum Name {}
    let (_kernel, pci) = with_regions();
    let (fake, pci) = (Fake::new(Way::Type1), Arc::new(pci));
    let connect = || VfioHal::<Name>::connect(&pci, &attached(&fake), QueueConfig::direct());
    let said = |panicked: Box<dyn std::any::Any + Send>| *panicked.downcast::<String>().unwrap();
    let alloc = || VfioHal::<Name>::dma_alloc(1, BufferDirection::Both);
    let name = std::any::type_name::<Name>();
    assert_eq!(
        said(catch_unwind(alloc).unwrap_err()),
        format!("{name} stands for no device: see VfioHal::connect")
    );
    connect().unwrap();
    let error = connect().unwrap_err();
    assert!(matches!(error, ConnectError::InUse { .. }));
    let says = format!("{name} stands for a device already: take another type, or disconnect that one");
    assert_eq!(error.to_string(), says);
    // `Hal` has only two ways: an address of zero, and a panic.
    let fails = || *fake.fails.lock().unwrap() = Some((fake.calls.load(Ordering::Relaxed), libc::EFAULT));
    fails();
    assert_eq!(alloc().0, 0);
    assert_eq!(VfioHal::<Name>::dma_alloc(usize::MAX, BufferDirection::Both).0, 0);
    fails();
    let mut buffer = [0_u8; 64];
    let (at, len) = (buffer.as_mut_ptr().addr(), buffer.len());
    let _ = buffer.as_mut_ptr().expose_provenance();
    let share = move || {
        let buffer = NonNull::new(std::ptr::slice_from_raw_parts_mut(with_exposed_provenance_mut(at), len));
        // SAFETY: it is the test's, which does not access it meanwhile.
        unsafe { VfioHal::<Name>::share(buffer.unwrap(), BufferDirection::DriverToDevice) }
    };
    let why = said(catch_unwind(share).unwrap_err());
    assert!(why.starts_with("a buffer of 64 bytes cannot be shared: "), "{why}");
    assert_eq!(fake.count(), 0);
    // The device may not write a read-only buffer.
    let iova = share();
    assert_eq!(fake.reaches(iova).unwrap(), (at as u64, Permissions::READ));
    // SAFETY: 1: no driver was made.
    unsafe { VfioHal::<Name>::disconnect() };
}

#[test]
fn registers_are_found_by_the_address_that_the_bus_has_for_them() {
    enum Name {}
    let (kernel, pci) = with_regions();
    let (fake, pci) = (Fake::new(Way::Iommufd), Arc::new(pci));
    let file = std::fs::File::options().read(true).write(true).open(kernel.path("dev").join(CDEV)).unwrap();
    // BAR 0 is of ports, BAR 1 has the registers, of 64 bits, and BAR 3 cannot be mapped.
    for (number, value) in [(0, 0xc005_u32), (1, 0xfe00_000c), (2, 0x7), (3, 0xfd00_0000)] {
        file.write_all_at(&value.to_le_bytes(), CONFIG + 0x10 + 4 * number).unwrap();
    }
    file.write_all_at(b"there", BAR + 0x1000).unwrap();
    VfioHal::<Name>::connect(&pci, &attached(&fake), QueueConfig::direct()).unwrap();
    let first = 0x7_fe00_0000;
    let find = |at: PhysAddr, size: usize| {
        // SAFETY: only registers are accepted.
        catch_unwind(|| unsafe { VfioHal::<Name>::mmio_phys_to_virt(at, size) })
    };
    let last = find(first + BYTES - 4, 4).unwrap();
    let found = find(first + 0x1000, 5).unwrap();
    assert_eq!(last.addr().get() - found.addr().get(), BYTES as usize - 4 - 0x1000);
    // SAFETY: registers of the test, which no code writes.
    assert_eq!(unsafe { found.cast::<[u8; 5]>().read_volatile() }, *b"there");
    for (at, size) in
        [(first - 1, 4), (first + BYTES - 3, 4), (0xfe00_0000, 4), (0xfd00_0000, 4), (0xc000, 4)]
    {
        assert!(find(at, size).is_err(), "{at:#x}");
    }
    let mut config = Config::new(&pci);
    let other = DeviceFunction { bus: 0, device: 1, function: 0 };
    config.write_word(Config::PLACE, 0x30, 0x1234_5678);
    config.write_word(other, 0x30, 7);
    let [here, there] = [Config::PLACE, other].map(|place| config.read_word(place, 0x30));
    assert_eq!((here, there), (0x1234_5678, u32::MAX));
    // SAFETY: 1: the registers are no longer used.
    unsafe { VfioHal::<Name>::disconnect() };
}
