//! Devices that a process drives by itself, and memory for them, by Linux's VFIO: over iommufd where the kernel has it, else over type 1.
//!
//! VFIO gives a process a device, and maps memory of the process for it by system calls, each of which pins pages. Under the core this is a
//! [`Mapper`](portcullis::mapper::Mapper) like others: queues, pools and rings stand on it, so that most I/O needs no system call.
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
//! // SAFETY: all memory is the process's: the heap's, and buffers on it.
//! let mapper = unsafe { disk.space().mapper() };
//! let pool = PoolConfig::default().reached_by(mask.last());
//! let domain = DomainBuilder::new(mapper).bounce(Heap, pool).build(StdPlatform::try_new()?)?;
//! let mut queue = domain.attach(disk.id(), mask)?.queue(QueueConfig::bounce())?;
//! disk.set_bus_master(true)?;
//!
//! let buffer = HeapBuffer::new(4096).ok_or("no memory")?;
//! let mapping = queue.map(buffer, Direction::FromDevice)?;
//! // mapping.iova() is what the device is told. It writes, and then:
//! let mut head = [0; 16];
//! queue.unmap(mapping)?.for_each(|buffer| buffer.read(0, &mut head).unwrap_or_default());
//! # Ok(())
//! # }
//! ```
//!
//! **Interrupts** are file descriptors: [`Device::interrupts`] turns on as many as are wanted, by MSI-X, MSI or INTx, and each
//! [`Interrupt`] is waited for by a thread, or by an event loop.
//!
//! **A device that is unplugged.** The kernel asks for it by an interrupt of its own ([`Device::unplug_request`]), and waits until the
//! process lets go of it. [`Device::release`] is the one call that does that: the device reaches no memory any more, its registers
//! have all bits set, and who waits for its interrupts is told. The buffers come back by the driver's queues, as always:
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
//! A driver that also waits for interrupts has a thread for the request, which releases the device: waits for interrupts end then, with an error of kind
//! [`NotConnected`](std::io::ErrorKind::NotConnected). `examples/edu.rs` of this crate is a whole driver of that kind.
//!
//! **A device that is plugged in** joins an address space that is there, by [`Device::open_in`], and reaches at once what is mapped in it.
//! A space outlives its devices, and what it has mapped, too: the next device that joins has that.
//!
//! The pool of that domain lies where the device reaches it: else each copy for a device of few address bits would take two system calls.
//!
//! **What a process must know.** Memory that is mapped is locked, and counts for `RLIMIT_MEMLOCK`: the error of a map says how much. A
//! child of `fork` gets copies of pages that are mapped (Linux 5.12 or later), and the devices go on with the parent's. But the child
//! has the files, too, so that what is mapped stays so until it ends or runs another program: they are closed on `exec`. Until then a
//! device that was released in the parent goes on, and its unplug waits. It must use no
//! queue and drop no mapping of the parent's: by iommufd that would unmap the parent's memory. When a process ends in whatever
//! way, the kernel resets its devices, where it knows how, and removes all that was mapped.
//!
//! Before Linux 6.2, memory that a device is only to read must have been written once before it is mapped: else the kernel may pin a
//! page of zeros that many share, and the device reads that for good, whatever the process writes later.
//!
//! The kernel keeps the pages of a mapped buffer until the mapping ends. If the process calls `munmap` on the buffer before, the device
//! goes on using these pages, and no one else gets them; but a device that joins a container without devices gets whatever is at
//! these addresses by then.

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

/// What queues over an [`AddressSpace`] stand on: see [`portcullis::dma::Machine`].
pub type Machine = (KernelMapper, portcullis::std_platform::StdPlatform, crate::heap::Heap);
