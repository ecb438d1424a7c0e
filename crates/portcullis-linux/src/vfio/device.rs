//! A [`Device`] that this process drives: its registers, and the address space that its accesses go through.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use memmap2::MmapOptions;
use portcullis::addr::DeviceId;
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_REGION_INFO_FLAG_MMAP, vfio_region_info,
};

use super::error::{InterruptError, OpenError};
use super::interrupts::{Interrupt, InterruptKind};
use super::ioctl::{call, call_with, vfio};
use super::iommufd::{self, Iommufd, bind};
use super::opened::Opened;
use super::registers::Registers;
use super::space::{AddressSpace, Kernel, Member};
use super::sysfs::{IOMMUS, Place, path};
use super::type1::{self, Container};

/// Base address registers of a device.
const BARS: u32 = 6;

const GET_REGION_INFO: u64 = vfio(8);
const RESET: u64 = vfio(11);

/// The command register of PCI's configuration space, and its bits for memory and for accesses of the device's own (PCI Local Bus
/// Specification 3.0, 6.2.2).
const COMMAND: u64 = 4;
const MEMORY: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

/// A PCI device in the hands of this process. The kernel resets it, where it knows how, when it and all of its [`Registers`] and
/// [`Interrupt`]s are dropped, as each of these holds the device's file; when it is [released](Self::release); and when the process ends.
///
/// It makes no access of its own before [`set_bus_master`](Self::set_bus_master). After that it reaches what is mapped in its
/// [address space](Self::space), and nothing else.
#[derive(Debug)]
pub struct Device {
    opened: Arc<Opened>,
    place: Place,
}

impl Device {
    /// Opens the device of this name, like `0000:01:00.0`, with an address space of its own: by iommufd where the kernel has it, else
    /// by VFIO's type 1. VFIO must have the device; the error says how to give it. Makes a dozen system calls, and the kernel resets
    /// the device.
    ///
    /// # Errors
    /// [`OpenError`] says what to do.
    pub fn open(name: &str) -> Result<Self, OpenError> {
        let place = Place::find(name)?;
        place.check_bound(&path(IOMMUS))?;
        if place.cdev()?.is_some() && path(iommufd::PATH).exists() {
            let kernel = Arc::new(Iommufd::open()?);
            let file = bind(&kernel, &place)?;
            kernel.attach(&file).map_err(|error| OpenError::call("VFIO_DEVICE_ATTACH_IOMMUFD_PT", error))?;
            let ranges = kernel.ranges().map_err(|error| OpenError::call("IOMMU_IOAS_IOVA_RANGES", error))?;
            let space = AddressSpace::new(Kernel::Iommufd(kernel), &ranges)?;
            return Ok(Self::new(place, space, Member { file, group: None }));
        }
        Self::open_by_type1(place)
    }

    /// As [`open`](Self::open), by VFIO's type 1 even where the kernel has iommufd.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_type1(name: &str) -> Result<Self, OpenError> {
        let place = Place::find(name)?;
        place.check_bound(&path(IOMMUS))?;
        Self::open_by_type1(place)
    }

    fn open_by_type1(place: Place) -> Result<Self, OpenError> {
        if !path(type1::PATH).exists() {
            return Err(OpenError::NoVfio);
        }
        let container = Arc::new(Container::open()?);
        let (file, group) = container.add(&place)?;
        let ranges = container.ranges().map_err(|error| OpenError::call("VFIO_IOMMU_GET_INFO", error))?;
        let space = AddressSpace::new(Kernel::Type1(container), &ranges)?;
        Ok(Self::new(place, space, Member { file, group: Some(group) }))
    }

    fn new(place: Place, space: AddressSpace, member: Member) -> Self {
        Self { opened: Arc::new(Opened::new(place.name(), space, member)), place }
    }

    /// As [`open`](Self::open), in an address space that another device has, or had: it reaches at once what is mapped there, also what
    /// was mapped before it was plugged in. The kernel takes some microseconds for each mapping. With type 1, maps and unmaps of the space
    /// wait meanwhile.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`OpenError::OtherAddresses`] where the device can use less than the space has; an
    /// [`OpenError::Call`] where it has no memory, or may lock no more of it, for what is to be mapped. The device is closed then.
    pub fn open_in(name: &str, space: &AddressSpace) -> Result<Self, OpenError> {
        let place = Place::find(name)?;
        place.check_bound(&path(IOMMUS))?;
        let member = space.add(&place)?;
        Ok(Self::new(place, space.clone(), member))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.place.name()
    }

    /// The number by which it makes its accesses: bus, device and function.
    pub fn id(&self) -> DeviceId {
        self.place.id()
    }

    /// What its accesses go through.
    pub fn space(&self) -> &AddressSpace {
        self.opened.space()
    }

    /// The registers behind base address register `number`, 0 to 5, which the device is told to answer for. Makes six system calls.
    ///
    /// An access to them ends the process by a signal (`SIGBUS`) while the device is not told to answer: after
    /// [`write_config`](Self::write_config) has taken that back, and in a low power state. A driver does neither while threads access
    /// registers.
    ///
    /// Of a device that is pulled out without warning all bits of a read are set, and there is no signal. Where a driver reads such a value, it
    /// reads another register that never has it, as NVMe's version, or the vendor's number by [`read_config`](Self::read_config);
    /// and if that has all bits set, too, it [releases](Self::release) the device. A device that is unplugged in order answers until it is
    /// released. Afterwards, too, all bits are set, and there is no signal.
    ///
    /// # Errors
    /// Where there are none, or they cannot be mapped.
    pub fn bar(&self, number: u32) -> io::Result<Registers> {
        // Regions beyond are no BARs.
        let region = if number < BARS { Some(self.region(number)?) } else { None };
        let has =
            |region: &vfio_region_info| region.size > 0 && region.flags & VFIO_REGION_INFO_FLAG_MMAP != 0;
        let region = region.filter(has).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("{} has no registers behind BAR {number}", self.name()),
            )
        })?;
        let len = usize::try_from(region.size).map_err(io::Error::other)?;
        self.change_command(|command| command | MEMORY)?;
        let map = |file: &File| MmapOptions::new().offset(region.offset).len(len).map_raw(file);
        Ok(Registers::new(self.opened.map(map)?, Arc::clone(&self.opened)))
    }

    fn region(&self, index: u32) -> io::Result<vfio_region_info> {
        let mut region =
            vfio_region_info { argsz: size_of::<vfio_region_info>() as u32, index, ..Default::default() };
        // SAFETY: it is this call's structure, and points nowhere.
        self.opened.with(|file| unsafe { call(file.as_fd(), GET_REGION_INFO, &mut region) })?;
        Ok(region)
    }

    /// Reads PCI's configuration space from `offset` on. One or two system calls.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read_config(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let region = self.region(VFIO_PCI_CONFIG_REGION_INDEX)?;
        let at = region.offset.checked_add(offset).ok_or(io::ErrorKind::InvalidInput)?;
        self.opened.with(|file| file.read_exact_at(out, at))
    }

    /// Writes to PCI's configuration space. The kernel keeps what is its own from being changed.
    ///
    /// # Errors
    /// The kernel's.
    pub fn write_config(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let region = self.region(VFIO_PCI_CONFIG_REGION_INDEX)?;
        let at = region.offset.checked_add(offset).ok_or(io::ErrorKind::InvalidInput)?;
        self.opened.with(|file| file.write_all_at(bytes, at))
    }

    /// Lets the device make accesses of its own, or keeps it from them.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_bus_master(&self, on: bool) -> io::Result<()> {
        self.change_command(|command| if on { command | BUS_MASTER } else { command & !BUS_MASTER })
    }

    fn change_command(&self, change: impl FnOnce(u16) -> u16) -> io::Result<()> {
        let mut command = [0; 2];
        self.read_config(COMMAND, &mut command)?;
        self.write_config(COMMAND, &change(u16::from_le_bytes(command)).to_le_bytes())
    }

    /// Resets the device, which takes up to a second.
    ///
    /// # Errors
    /// The kernel's; `ENOTTY` where it knows no way to reset it.
    pub fn reset(&self) -> io::Result<()> {
        // SAFETY: it takes a number.
        self.opened.with(|file| unsafe { call_with(file.as_fd(), RESET, 0) }).map(drop)
    }

    /// Turns on `count` interrupts, numbered from 0 on, of `kind`; without one, of the first of MSI-X, MSI and INTx of which the device has as
    /// many. They are on, and their kind is the only one in use, until all are dropped; for another count, drop these first.
    ///
    /// Two system calls, one more for each kind that has too few, and one for each interrupt; the kernel takes up to a millisecond.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let disk = portcullis_linux::vfio::Device::open("0000:01:00.0")?;
    /// disk.set_bus_master(true)?;
    /// let registers = disk.bar(0)?;
    /// let interrupt = disk.interrupts(None, 1)?.pop().ok_or("there is one")?;
    /// loop {
    ///     interrupt.wait()?;
    ///     // The driver takes what is done off the queues, and has the device take its wire back, if that is what it has:
    ///     registers.write32(0x10, 1).ok_or("no register")?;
    ///     interrupt.unmask()?;
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`InterruptError`], with nothing turned on.
    pub fn interrupts(
        &self,
        kind: impl Into<Option<InterruptKind>>,
        count: u32,
    ) -> Result<Vec<Interrupt>, InterruptError> {
        match kind.into() {
            Some(kind) => Interrupt::all(&self.opened, &[kind], count),
            None => Interrupt::all(
                &self.opened,
                &[InterruptKind::MsiX, InterruptKind::Msi, InterruptKind::Intx],
                count,
            ),
        }
    }

    /// The kernel's request that the device be [released](Self::release): it is to be unplugged, or somebody unbinds it from VFIO. The
    /// kernel raises it as soon as it wants the device, and again every 10 seconds, and the unplug waits for the release. Without one it only writes a line to its log.
    ///
    /// # Errors
    /// As [`interrupts`](Self::interrupts).
    pub fn unplug_request(&self) -> Result<Interrupt, InterruptError> {
        let mut one = self.interrupts(InterruptKind::UnplugRequest, 1)?;
        // As many as were asked for.
        one.pop().ok_or_else(|| InterruptError::InUse { name: self.name().to_owned() })
    }

    /// Lets go of the device, whoever has [`Registers`] and [`Interrupt`]s of it: when this returns `Ok`, it reaches no memory any more,
    /// and the kernel, which has reset it, goes on with an unplug that waited.
    ///
    /// - Its mappings are over *for it*. The driver has its buffers back as always: each mapping goes to
    ///   [`Queue::unmap`](portcullis::dma::Queue::unmap), and the queue is [committed](portcullis::dma::Queue::commit); who maps by number
    ///   calls [`DmaOps::unmap_all`](portcullis::dma::DmaOps::unmap_all). The space lives on: mappings that other devices use
    ///   stay, and a device that [joins](Self::open_in) later reaches what is mapped then. (A container of type 1 has
    ///   removed all mappings with its last device: unmaps make no system call then, and a device that joins has them
    ///   made again, of what the process has at these addresses by then.)
    /// - Reads of its registers have all bits set from then on, and writes change nothing: accesses under way end.
    /// - Threads that wait for its interrupts return an error, and so does every later call of the device's.
    ///
    /// Two system calls for each [`bar`](Self::bar), one or two to close it, of which the kernel makes a reset of up to a second, and one
    /// for each interrupt. With type 1, maps and unmaps of the space wait meanwhile. Called again, it
    /// does nothing where it has returned `Ok`, and else tries again.
    ///
    /// # Errors
    /// The kernel's, where it has no memory to take the registers' place: the device is not released, and it may be tried again. All
    /// registers are the device's as before; only where the kernel has the memory, and does not put it there, those of a
    /// [`bar`](Self::bar) that came before may be covered already.
    /// `EBUSY` where another process, as a child of `fork`, has the file of a device of type 1: it is closed here, but the
    /// device goes on, and its mappings are as they were. Called again, it asks the kernel again, and returns `EBUSY` as long as that process
    /// or another device of the same group has the group. With iommufd, and while this process has another device of the
    /// group, the kernel does not say it: `Ok` is returned, though a device that a child of `fork` has goes on until the child ends.
    pub fn release(&self) -> io::Result<()> {
        self.opened.release()
    }
}
