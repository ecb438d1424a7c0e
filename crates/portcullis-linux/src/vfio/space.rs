//! A kernel [`AddressSpace`], which devices join and leave.

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;

use portcullis::mapper::Geometry;

use super::calls::Calls;
use super::error::OpenError;
use super::ioctl::code;
use super::iommufd::{Iommufd, bind};
use super::mapper::{KernelMapper, Space};
use super::ranges::Ranges;
use super::sysfs::Place;
use super::type1::Container;

/// The kernel's interface.
#[derive(Debug, Clone)]
pub(super) enum Kernel {
    Iommufd(Arc<Iommufd>),
    Type1(Arc<Container>),
}

/// A device in an address space.
#[derive(Debug)]
pub(super) struct Member {
    pub file: File,
    /// The number of its group, in a container.
    pub group: Option<u32>,
}

/// The usage of an address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Mappings that the kernel has.
    pub mappings: u64,
    /// The most mappings; `None` if only memory limits them.
    pub most_mappings: Option<u64>,
    /// Mapped bytes. Their pages are locked in memory.
    pub bytes: u64,
    /// System calls of maps and unmaps since the space was opened.
    pub calls: u64,
}

/// The addresses of one or more devices of this process: an IOAS of iommufd, or a container of VFIO's type 1.
///
/// It is [a device's](super::Device::space), and others may [join](super::Device::open_in) it. Clones share it; it ends, with all its
/// mappings, when the last clone, device and mapper is gone, or when the process ends in any way.
///
/// A child of `fork` has the file, too: mappings then live until both have ended.
#[derive(Clone)]
pub struct AddressSpace {
    pub(super) kernel: Kernel,
    space: Arc<Space>,
}

impl fmt::Debug for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

impl AddressSpace {
    pub(super) fn new(kernel: Kernel, ranges: &Ranges) -> Result<Self, OpenError> {
        let calls: Arc<dyn Calls> = match &kernel {
            Kernel::Iommufd(iommufd) => Arc::clone(iommufd) as _,
            Kernel::Type1(container) => Arc::clone(container) as _,
        };
        Ok(Self { kernel, space: Arc::new(Space::new(calls, ranges).ok_or(OpenError::NoAddresses)?) })
    }

    /// Opens a device in it, which reaches all mappings at once.
    pub(super) fn add(&self, place: &Place) -> Result<Member, OpenError> {
        let other = || OpenError::OtherAddresses { name: place.name().to_owned() };
        let fits = |ranges: io::Result<Ranges>| match ranges {
            Ok(ranges) if ranges.allow(self.geometry()) => Ok(()),
            Ok(_) => Err(other()),
            Err(error) => Err(OpenError::call("the ranges of addresses", error)),
        };
        match &self.kernel {
            Kernel::Iommufd(kernel) => {
                let file = bind(kernel, place)?;
                kernel.attach(&file).map_err(|error| match code(&error) {
                    libc::EADDRINUSE | libc::EINVAL => other(),
                    _ => OpenError::call("VFIO_DEVICE_ATTACH_IOMMUFD_PT", error),
                })?;
                fits(kernel.ranges())?;
                Ok(Member { file, group: None })
            }
            Kernel::Type1(container) => {
                let mut in_kernel = self.space.while_it_changes();
                self.find_out(container, &mut in_kernel);
                let added = container.add(place);
                let (file, group) = added.inspect_err(|_| self.find_out(container, &mut in_kernel))?;
                let again = |code| {
                    OpenError::call(
                        "mapping again what the address space has",
                        io::Error::from_raw_os_error(code),
                    )
                };
                let joined = fits(container.ranges());
                let joined = joined.and_then(|()| self.space.is_in(&mut in_kernel).map_err(again));
                let member = Member { file, group: Some(group) };
                match joined {
                    Ok(()) => Ok(member),
                    Err(error) => {
                        // If the kernel does not release it, the container keeps its group.
                        let _ = self.leave(container, &mut in_kernel, member);
                        Err(error)
                    }
                }
            }
        }
    }

    /// Closes a device, which then no longer reaches anything.
    ///
    /// # Errors
    /// As [`Container::remove`].
    pub(super) fn remove(&self, member: Member) -> io::Result<()> {
        match &self.kernel {
            // The kernel detaches it, and keeps the mappings.
            Kernel::Iommufd(_) => Ok(()),
            Kernel::Type1(container) => self.leave(container, &mut self.space.while_it_changes(), member),
        }
    }

    /// Repeats a [`remove`](Self::remove) that failed for a device of this group.
    pub(super) fn remove_again(&self, group: u32) -> io::Result<()> {
        let Kernel::Type1(container) = &self.kernel else { return Ok(()) };
        let mut in_kernel = self.space.while_it_changes();
        if !container.remove_again(group)? {
            self.space.is_out(&mut in_kernel);
        }
        Ok(())
    }

    /// Updates groups that the kernel may have released since a device left that another process had.
    fn find_out(&self, container: &Container, in_kernel: &mut bool) {
        if !container.has_group() {
            self.space.is_out(in_kernel);
        }
    }

    fn leave(&self, container: &Container, in_kernel: &mut bool, member: Member) -> io::Result<()> {
        let Member { file, group } = member;
        drop(file);
        if let Some(group) = group
            && !container.remove(group)?
        {
            self.space.is_out(in_kernel);
        }
        Ok(())
    }

    /// The addresses and page sizes of its devices.
    pub fn geometry(&self) -> &Geometry {
        self.space.geometry()
    }

    /// Its usage. Takes a lock.
    pub fn usage(&self) -> Usage {
        self.space.usage()
    }

    /// Its kernel interface.
    pub fn kind(&self) -> Kind {
        match self.kernel {
            Kernel::Iommufd(_) => Kind::Iommufd,
            Kernel::Type1(_) => Kind::Type1,
        }
    }

    /// A mapper for a [`Domain`](portcullis::domain::Domain). Use it in one domain: each of two refuses addresses that the other has
    /// mapped.
    ///
    /// # Safety
    /// 1. **Every memory address is one of this process**, not one of the machine: the pieces that buffers
    ///    ([`DmaBuffer`](portcullis::dma::DmaBuffer)) pass to the domain of this mapper, and what its memory
    ///    ([`Frames`](portcullis::platform::Frames)) allocates. [`Heap`](crate::heap::Heap) and [`HeapBuffer`](crate::heap::HeapBuffer)
    ///    have such addresses. Those of a simulated machine, or of a kernel's own memory, would open other memory of the process.
    /// 2. If a buffer is mapped instead of copied, the caller trusts its devices with the rest of its first and last page. Whole pages have
    ///    no rest, and queues that [copy](portcullis::dma::QueueConfig::bounce) or [choose](portcullis::dma::QueueConfig::auto) open none.
    pub unsafe fn mapper(&self) -> KernelMapper {
        KernelMapper::new(Arc::clone(&self.space))
    }
}

/// The kernel interface of an address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// iommufd.
    Iommufd,
    /// VFIO's type 1, version 2.
    Type1,
}
