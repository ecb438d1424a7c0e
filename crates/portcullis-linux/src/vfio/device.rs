//! A [`Device`] that this process drives: its registers, and its address space.

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

/// The command register of PCI configuration space, and its bits for memory and bus mastering (PCI Local Bus Specification 3.0, 6.2.2).
const COMMAND: u64 = 4;
const MEMORY: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

/// A PCI device that this process drives. The kernel resets it, if it can, when it and all of its [`Registers`] and [`Interrupt`]s are
/// dropped, because each of these holds the device's file; when it is [released](Self::release); and when the process ends.
///
/// It makes no access before [`set_bus_master`](Self::set_bus_master). After that it reaches only the mappings of its [address
/// space](Self::space).
#[derive(Debug)]
pub struct Device {
    opened: Arc<Opened>,
    place: Place,
}

impl Device {
    /// Opens a device by name, such as `0000:01:00.0`, with an address space of its own: by iommufd if the kernel has it, else by VFIO's
    /// type 1. It must be bound to VFIO; the error says how. Makes a dozen system calls, and the kernel resets the device.
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

    /// As [`open`](Self::open), in an address space of another device, or a former one: it reaches at once all that is mapped there, also
    /// earlier mappings. The kernel takes some microseconds for each mapping. With type 1, maps and unmaps of the space wait meanwhile.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`OpenError::OtherAddresses`] if the device cannot use all addresses of the space; an [`OpenError::Call`]
    /// if the kernel has no memory, or may lock no more of it, for the mappings. The device is closed then.
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

    /// Its bus, device and function.
    pub fn id(&self) -> DeviceId {
        self.place.id()
    }

    /// The address space of its accesses.
    pub fn space(&self) -> &AddressSpace {
        self.opened.space()
    }

    /// The registers behind base address register `number`, 0 to 5; turns on the device's memory decoding. Makes six system calls.
    ///
    /// While memory decoding is off, an access raises a signal (`SIGBUS`): after [`write_config`](Self::write_config) has turned it off,
    /// and in a low power state. A driver does neither while threads access registers.
    ///
    /// After surprise removal a read has all bits set, and there is no signal. A driver that reads such a value reads another register that
    /// never has it, such as NVMe's version, or the vendor ID by [`read_config`](Self::read_config); if that has all bits set, too, it
    /// [releases](Self::release) the device. After an orderly unplug request a device answers until it is released. Afterwards, too, all
    /// bits are set, and there is no signal.
    ///
    /// # Errors
    /// There are none, or they cannot be mapped.
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
        // SAFETY: clause 1: this call's structure, without pointers.
        self.opened.with(|file| unsafe { call(file.as_fd(), GET_REGION_INFO, &mut region) })?;
        Ok(region)
    }

    /// Reads PCI configuration space from `offset` on. One or two system calls.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read_config(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let region = self.region(VFIO_PCI_CONFIG_REGION_INDEX)?;
        let at = region.offset.checked_add(offset).ok_or(io::ErrorKind::InvalidInput)?;
        self.opened.with(|file| file.read_exact_at(out, at))
    }

    /// Writes to PCI configuration space. The kernel protects its own fields.
    ///
    /// # Errors
    /// The kernel's.
    pub fn write_config(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let region = self.region(VFIO_PCI_CONFIG_REGION_INDEX)?;
        let at = region.offset.checked_add(offset).ok_or(io::ErrorKind::InvalidInput)?;
        self.opened.with(|file| file.write_all_at(bytes, at))
    }

    /// Turns bus mastering on or off.
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
    /// The kernel's; `ENOTTY` if it knows no way to reset it.
    pub fn reset(&self) -> io::Result<()> {
        // SAFETY: clause 1: it takes a number.
        self.opened.with(|file| unsafe { call_with(file.as_fd(), RESET, 0) }).map(drop)
    }

    /// Turns on `count` interrupts, numbered from 0, of `kind`, or of the first of MSI-X, MSI and INTx with enough of them. No other kind
    /// is available until all are dropped; for another count, drop these first.
    ///
    /// Two system calls, one more for each kind with too few, and one for each interrupt; the kernel takes up to a millisecond.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let disk = portcullis_linux::vfio::Device::open("0000:01:00.0")?;
    /// disk.set_bus_master(true)?;
    /// let registers = disk.bar(0)?;
    /// let interrupt = disk.interrupts(None, 1)?.pop().ok_or("there is one")?;
    /// loop {
    ///     interrupt.wait()?;
    /// // The driver processes completions, and makes the device deassert its INTx, if it uses that:
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

    /// The kernel's request to [release](Self::release) the device: it is to be unplugged, or unbound from VFIO. The kernel raises it at
    /// once, and again every 10 seconds, and the unplug waits for the release. Without one it only logs a line.
    ///
    /// # Errors
    /// As [`interrupts`](Self::interrupts).
    pub fn unplug_request(&self) -> Result<Interrupt, InterruptError> {
        let mut one = self.interrupts(InterruptKind::UnplugRequest, 1)?;
        // As many as requested.
        one.pop().ok_or_else(|| InterruptError::InUse { name: self.name().to_owned() })
    }

    /// Releases the device, even if there are [`Registers`] and [`Interrupt`]s of it: after `Ok` it no longer reaches memory, and the
    /// kernel, which has reset it, continues an unplug.
    ///
    /// - Its mappings end *for it*. The driver gets its buffers back as always: it passes each mapping to
    ///   [`Queue::unmap`](portcullis::dma::Queue::unmap), and [commits](portcullis::dma::Queue::commit) the queue; a driver that maps by
    ///   number calls [`DmaOps::unmap_all`](portcullis::dma::DmaOps::unmap_all). The space lives on: mappings that other devices use stay,
    ///   and a device that [joins](Self::open_in) later reaches the mappings of that time. (A container of type 1 has removed all mappings
    ///   with its last device: unmaps then make no system call, and a device that joins has them made again, of the memory that the process
    ///   has at these addresses by then.)
    /// - Reads of its registers have all bits set from then on, and writes change nothing: accesses in progress end.
    /// - Threads that wait for its interrupts return an error, and so does every later call of the device's.
    ///
    /// Two system calls for each [`bar`](Self::bar), one or two to close it, in which the kernel resets it for up to a second, and one for
    /// each interrupt. With type 1, maps and unmaps of the space wait meanwhile. Another call does nothing after `Ok`, and else tries
    /// again.
    ///
    /// # Errors
    /// The kernel's, if it has no memory to replace the registers: the device is not released, and the call may be repeated. All registers
    /// are the device's as before; only if the kernel has the memory, and does not put it there, those of an earlier [`bar`](Self::bar) may
    /// be replaced already.
    /// `EBUSY` if another process, such as a child of `fork`, has the file of a type 1 device: it is closed here, but the device goes on,
    /// with its mappings. Another call asks the kernel again, and returns `EBUSY` as long as that process or another device of the same
    /// group has the group. With iommufd, and while this process has another device of the group, the kernel does not report it: the call
    /// returns `Ok`, though a device that a child of `fork` has goes on until the child ends.
    pub fn release(&self) -> io::Result<()> {
        self.opened.release()
    }
}
