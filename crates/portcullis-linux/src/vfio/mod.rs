//! Devices that a process drives, and memory for them, by Linux's VFIO: over iommufd if the kernel has it, else over type 1.
//!
//! VFIO gives a process a device, and maps memory of the process for it by system calls, which pin pages. For the core this is a
//! [`Mapper`](portcullis::mapper::Mapper): with queues, pools and rings over it, most I/O needs no system call.
//!
//! ```no_run
//! use portcullis::dma::DomainBuilder;
//! use portcullis::prelude::*;
//! use portcullis_linux::heap::{Heap, HeapBuffer};
//! use portcullis_linux::vfio;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let disk = vfio::Device::open("0000:01:00.0")?;
//! let mask = DmaMask::BITS_64;
//! // SAFETY: 1: all memory is the process's: the heap's, and buffers on it. 2: the queue copies.
//! let mapper = unsafe { disk.space().mapper() };
//! let pool = PoolConfig::default().reached_by(mask.last());
//! let domain = DomainBuilder::new(mapper).bounce(Heap, pool).build(StdPlatform::try_new()?)?;
//! let mut queue = domain.attach(disk.id(), mask)?.queue(QueueConfig::bounce())?;
//! disk.set_bus_master(true)?;
//!
//! let buffer = HeapBuffer::new(4096).ok_or("no memory")?;
//! let mapping = queue.map(buffer, Direction::FromDevice)?;
//! // mapping.iova() goes to the device. It writes, and then:
//! let mut head = [0; 16];
//! queue.unmap(mapping)?.for_each(|buffer| buffer.read(0, &mut head).unwrap_or_default());
//! # Ok(())
//! # }
//! ```
//!
//! **Interrupts** are file descriptors: [`Device::interrupts`] turns on as many as requested, by MSI-X, MSI or INTx, and a thread or an
//! event loop waits for each [`Interrupt`].
//!
//! **Unplug.** The kernel requests it by an interrupt of its own ([`Device::unplug_request`]), and waits until the process releases the
//! device by [`Device::release`]: then the device no longer reaches memory, its registers read as all ones, and waits for its interrupts
//! end. The driver's queues return the buffers, as always:
//!
//! ```no_run
//! # use portcullis::dma::{Mapping, Queue};
//! # use portcullis_linux::heap::HeapBuffer;
//! # use portcullis_linux::vfio::{Device, Machine};
//! # fn unplugged(
//! #     disk: &Device,
//! #     queue: &mut Queue<Machine, HeapBuffer>,
//! #     in_flight: Vec<Mapping<HeapBuffer>>,
//! # ) -> Result<Vec<HeapBuffer>, Box<dyn std::error::Error>> {
//! let request = disk.unplug_request()?;
//! request.wait()?;
//! disk.release()?;
//! let mut buffers = Vec::new();
//! for mapping in in_flight {
//!     queue.unmap(mapping)?.for_each(|buffer| buffers.push(buffer));
//! }
//! queue.commit()?.for_each(|buffer| buffers.push(buffer));
//! # Ok(buffers)
//! # }
//! ```
//!
//! A driver that also waits for interrupts has a thread for the request, which releases the device: waits for interrupts then end, with an
//! error of kind [`NotConnected`](std::io::ErrorKind::NotConnected). `examples/edu.rs` of this crate is such a driver.
//!
//! **Hot-plug.** A device joins an existing address space by [`Device::open_in`], and reaches at once all that is mapped in it. A space and
//! its mappings outlive its devices: the next device that joins has them.
//!
//! The pool of that domain lies where the device reaches it: otherwise each copy for a device of few address bits would take two system
//! calls.
//!
//! **For the process.** Mapped memory is locked, and counts for `RLIMIT_MEMLOCK`: the error of a map says how much. A child of `fork` gets
//! copies of mapped pages (Linux 5.12 or later), and the devices go on with the parent's. But the child has the files, too, so the mappings
//! stay until it ends or runs another program: the files are closed on `exec`. Until then a device that was released in the parent goes on,
//! and its unplug waits. The child must use no queue and drop no mapping of the parent's: with iommufd that would unmap the parent's
//! memory. When a process ends in any way, the kernel resets its devices, if it can, and removes all mappings.
//!
//! Before Linux 6.2, memory that a device only reads must have been written once before it is mapped: otherwise the kernel may pin a shared
//! zero page, which the device then reads always, whatever the process writes later.
//!
//! The kernel pins the pages of a mapped buffer until the mapping ends. If the process calls `munmap` on the buffer before, the device goes
//! on using these pages, and no other owner gets them; but a device that joins a container without devices gets the pages that are at these
//! addresses by then.

mod book;
mod calls;
mod device;
mod error;
mod interrupts;
mod ioctl;
mod iommufd;
mod limits;
mod mapper;
mod opened;
mod ranges;
mod registers;
mod scope;
mod space;
mod sysfs;
mod type1;

#[cfg(test)]
mod tests;

pub use device::Device;
pub use error::{InterruptError, OpenError};
pub use interrupts::{Interrupt, InterruptKind};
pub use mapper::KernelMapper;
pub use registers::Registers;
#[cfg(feature = "virtio-drivers")]
pub(crate) use scope::give_up;
pub use scope::{Scope, scope};
pub use space::{AddressSpace, Kind, Usage};

/// The types of queues over an [`AddressSpace`]: see [`portcullis::dma::Machine`].
pub type Machine = (KernelMapper, portcullis::std_platform::StdPlatform, crate::heap::Heap);
