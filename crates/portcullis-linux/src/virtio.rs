//! Drivers of the crate `virtio-drivers`, for virtio devices that this process has by VFIO: [`VfioHal`] is their `Hal`, [`Config`] the
//! configuration space of their PCI transport, and [`Translated`] a transport behind an IOMMU.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use portcullis::dma::DomainBuilder;
//! use portcullis::prelude::*;
//! use portcullis_linux::heap::Heap;
//! use portcullis_linux::vfio;
//! use portcullis_linux::virtio::{Config, Translated, VfioHal};
//! use virtio_drivers::device::blk::VirtIOBlk;
//! use virtio_drivers::transport::pci::PciTransport;
//! use virtio_drivers::transport::pci::bus::PciRoot;
//!
//! /// The disk: each device has a type of its own, which selects its `Hal`.
//! enum Disk {}
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Arc::new(vfio::Device::open("0000:01:00.0")?);
//! let mask = DmaMask::BITS_64;
//! // SAFETY: 1: all memory is the process's. 2: the queue copies.
//! let mapper = unsafe { device.space().mapper() };
//! let pool = PoolConfig::default().reached_by(mask.last());
//! let domain = DomainBuilder::new(mapper).bounce(Heap, pool).build(StdPlatform::try_new()?)?;
//! let dma = domain.attach(device.id(), mask)?;
//! VfioHal::<Disk>::connect(&device, &dma, QueueConfig::bounce())?;
//! device.set_bus_master(true)?;
//!
//! let mut bus = PciRoot::new(Config::new(&device));
//! let transport = PciTransport::new::<VfioHal<Disk>, _>(&mut bus, Config::PLACE)?;
//! let mut disk = VirtIOBlk::<VfioHal<Disk>, _>::new(Translated::new(transport)?)?;
//! let mut block = [0; 512];
//! disk.read_blocks(0, &mut block)?;
//! # Ok(())
//! # }
//! ```

mod translated;

use std::any::{TypeId, type_name};
use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use portcullis::SetupError;
use portcullis::addr::{Direction, DmaSegment, Iova};
use portcullis::dma::{CoherentMemory, Device, Ended, Queue, QueueConfig, RawMapping};
use portcullis::std_platform::StdPlatform;
use thiserror::Error;
use virtio_drivers::transport::pci::bus::{ConfigurationAccess, DeviceFunction};
use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, PhysAddr};

use crate::buffer::segment;
use crate::heap::Heap;
use crate::vfio::{self, KernelMapper, Machine, Registers, give_up};

pub use translated::{NotTranslated, Translated};

/// Hosts, by type: `Hal`'s functions have no `self`.
static HOSTS: RwLock<Option<HashMap<TypeId, Arc<Host>>>> = RwLock::new(None);

/// The state of a device's `Hal`.
struct Host {
    pci: Arc<vfio::Device>,
    device: Device<Machine>,
    state: Mutex<State>,
}

struct State {
    queue: Queue<Machine, Infallible>,
    /// Coherent memory and mappings, by IOVA.
    rings: HashMap<PhysAddr, CoherentMemory<Heap, KernelMapper, StdPlatform>>,
    shared: HashMap<PhysAddr, RawMapping>,
    /// Registers whose addresses the driver has.
    registers: Vec<(PhysAddr, Registers)>,
}

/// The `Hal` of the device that `Name`, any type of the program, stands for.
///
/// Rings are [`CoherentMemory`], and buffers go through a queue, which maps or copies them by its configuration. `share` and `unshare` take
/// locks that are held only shortly, and may make system calls as the queue's maps and unmaps do.
///
/// # Panics
/// `share` if the buffer cannot be mapped, because `Hal` has no error for that, and all functions before [`connect`](Self::connect). If a
/// mapping cannot be *ended*, the process **aborts**: the device would keep access to the caller's memory.
#[derive(Debug)]
pub struct VfioHal<Name>(PhantomData<fn() -> Name>);

/// Why [`VfioHal::connect`] failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The type already stands for a device.
    #[error("{name} stands for a device already: take another type, or disconnect that one")]
    InUse {
        /// The type's name.
        name: &'static str,
    },
    /// The queue cannot be made.
    #[error(transparent)]
    Setup(#[from] SetupError),
}

impl<Name: 'static> VfioHal<Name> {
    /// Makes `Name` stand for this device. Its driver's buffers go through a queue of this configuration. Allocates.
    ///
    /// # Errors
    /// [`ConnectError`]
    pub fn connect(
        pci: &Arc<vfio::Device>,
        device: &Device<Machine>,
        config: QueueConfig,
    ) -> Result<(), ConnectError> {
        let queue = device.queue(config)?;
        let (rings, shared, registers) = Default::default();
        let state = Mutex::new(State { queue, rings, shared, registers });
        let mut hosts = HOSTS.write().unwrap_or_else(PoisonError::into_inner);
        let hosts = hosts.get_or_insert_default();
        if hosts.contains_key(&TypeId::of::<Name>()) {
            return Err(ConnectError::InUse { name: type_name::<Name>() });
        }
        hosts.insert(
            TypeId::of::<Name>(),
            Arc::new(Host { pci: Arc::clone(pci), device: device.clone(), state }),
        );
        Ok(())
    }

    /// Ends the rings, the queue and the registers of `Name`, which then stands for no device.
    ///
    /// # Safety
    /// 1. No driver and no transport that was made with this `Hal` is left, and no thread makes a call of it.
    pub unsafe fn disconnect() {
        let host = HOSTS
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .as_mut()
            .and_then(|hosts| hosts.remove(&TypeId::of::<Name>()));
        // Without the lock, because this may make system calls.
        drop(host);
    }

    /// Calls `f` with the state of `Name`.
    fn with<R>(f: impl FnOnce(&Host, &mut State) -> R) -> R {
        let hosts = HOSTS.read().unwrap_or_else(PoisonError::into_inner);
        let host = hosts.as_ref().and_then(|hosts| hosts.get(&TypeId::of::<Name>())).cloned();
        drop(hosts);
        let Some(host) = host else {
            panic!("{} stands for no device: see VfioHal::connect", type_name::<Name>());
        };
        f(&host, &mut host.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

// SAFETY:
// - `dma_alloc`: zeroed, contiguous frames of the heap, the ring's alone until it is freed or the host ends (clause 1 of `disconnect`).
// - `mmio_phys_to_virt`: the device's registers, which the host keeps mapped likewise. Each structure of a transport has a part of its own.
// - `share`, `unshare`: in between, the device reaches the buffer, or a copy of it.
unsafe impl<Name: 'static> Hal for VfioHal<Name> {
    fn dma_alloc(pages: usize, _: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        let ring = |host: &Host, state: &mut State| {
            let ring = CoherentMemory::new(host.device.dma(), Heap, pages.checked_mul(PAGE_SIZE)?).ok()?;
            // No domain allocates zero, which would mean "none".
            let found = (ring.iova().get(), ring.as_ptr()?);
            state.rings.insert(found.0, ring);
            Some(found)
        };
        Self::with(ring).unwrap_or((0, NonNull::dangling()))
    }

    unsafe fn dma_dealloc(at: PhysAddr, _: NonNull<u8>, _: usize) -> i32 {
        let free =
            |_: &Host, state: &mut State| state.rings.remove(&at).is_some_and(|ring| ring.free().is_ok());
        if Self::with(free) { 0 } else { -1 }
    }

    unsafe fn mmio_phys_to_virt(at: PhysAddr, size: usize) -> NonNull<u8> {
        let found = Self::with(|host, state| state.registers_at(&host.pci, at, size));
        found.unwrap_or_else(|error| panic!("registers at {at:#x}: {error}"))
    }

    unsafe fn share(buffer: NonNull<[u8]>, direction: BufferDirection) -> PhysAddr {
        let direction = match direction {
            BufferDirection::DriverToDevice => Direction::ToDevice,
            BufferDirection::DeviceToDriver => Direction::FromDevice,
            BufferDirection::Both => Direction::Bidirectional,
        };
        let list = [segment(buffer.cast().as_ptr(), buffer.len())];
        let mapped = Self::with(|_, state| {
            let mut out = [DmaSegment { iova: Iova::new(0), len: 0 }];
            // SAFETY: the driver's buffer, of this process; no code accesses it during the call, and the driver does not before `unshare`.
            // Only this queue ends the mapping.
            let (mapping, _) = unsafe { state.queue.map_raw(&list, direction, &mut out) }?;
            let at = mapping.iova().get();
            state.shared.insert(at, mapping);
            Ok(at)
        });
        mapped.unwrap_or_else(|error: portcullis::dma::DmaMapError| {
            if error.may_be_reached() {
                give_up(&error);
            }
            panic!("a buffer of {} bytes cannot be shared: {error}", buffer.len())
        })
    }

    unsafe fn unshare(at: PhysAddr, _: NonNull<[u8]>, _: BufferDirection) {
        Self::with(|_, state| {
            let Some(mapping) = state.shared.remove(&at) else { return };
            // The driver owns its buffer again when this returns, so nothing waits for a batch.
            match state.queue.unmap_raw(mapping) {
                Ok(Ended::Done(()) | Ended::Flushed(())) => {}
                Ok(Ended::Pending) => _ = state.queue.commit_raw().unwrap_or_else(|error| give_up(&error)),
                Err(failed) => give_up(&failed.error),
            }
        });
    }
}

impl State {
    /// The address of the registers at a bus address.
    fn registers_at(&mut self, pci: &vfio::Device, at: PhysAddr, size: usize) -> io::Result<NonNull<u8>> {
        let inside = |(first, registers): &(PhysAddr, Registers)| {
            let offset = usize::try_from(at.checked_sub(*first)?).ok()?;
            let is_inside = offset.checked_add(size)? <= registers.size();
            // SAFETY: inside the mapping.
            if is_inside { NonNull::new(unsafe { registers.as_ptr().add(offset) }) } else { None }
        };
        if let Some(found) = self.registers.iter().find_map(inside) {
            return Ok(found);
        }
        let mut number = 0;
        while number < 6 {
            let (first, is_long) = bar_address(pci, number)?;
            // Other BARs are of another kind, or absent.
            if first.is_some_and(|first| first <= at)
                && let Ok(registers) = pci.bar(number)
            {
                let bar = (first.unwrap_or(0), registers);
                if let Some(found) = inside(&bar) {
                    self.registers.push(bar);
                    return Ok(found);
                }
            }
            number += if is_long { 2 } else { 1 };
        }
        Err(io::ErrorKind::NotFound.into())
    }
}

/// The address in a base address register, if it is a memory BAR, and whether it also uses the next one (PCI Local Bus Specification 3.0,
/// 6.2.5.1).
fn bar_address(pci: &vfio::Device, number: u32) -> io::Result<(Option<PhysAddr>, bool)> {
    let mut bytes = [0; 8];
    let at = 0x10 + 4 * u64::from(number);
    pci.read_config(at, &mut bytes[..4])?;
    let is_memory = bytes[0] & 1 == 0;
    let is_long = is_memory && bytes[0] & 6 == 4 && number < 5;
    if is_long {
        pci.read_config(at + 4, &mut bytes[4..])?;
    }
    Ok((is_memory.then_some(u64::from_le_bytes(bytes) & !0xf), is_long))
}

/// The configuration space of a device, for the PCI transport of `virtio-drivers`: of a bus with only this device, in
/// [`PLACE`](Self::PLACE).
#[derive(Debug)]
pub struct Config(Arc<vfio::Device>);

impl Config {
    /// The device's place on that bus.
    pub const PLACE: DeviceFunction = DeviceFunction { bus: 0, device: 0, function: 0 };

    /// That of a device.
    pub fn new(device: &Arc<vfio::Device>) -> Self {
        Self(Arc::clone(device))
    }
}

/// A failed read has all bits set, like that of an absent device; a failed write changes nothing.
impl ConfigurationAccess for Config {
    fn read_word(&self, place: DeviceFunction, offset: u8) -> u32 {
        let mut bytes = [0xff; 4];
        if place != Self::PLACE || self.0.read_config(offset.into(), &mut bytes).is_err() {
            return u32::MAX;
        }
        u32::from_le_bytes(bytes)
    }

    fn write_word(&mut self, place: DeviceFunction, offset: u8, value: u32) {
        if place == Self::PLACE {
            let _ = self.0.write_config(offset.into(), &value.to_le_bytes());
        }
    }

    unsafe fn unsafe_clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}
