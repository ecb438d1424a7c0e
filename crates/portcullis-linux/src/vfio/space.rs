//! An [`AddressSpace`] of the kernel's, which devices join and leave.

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

/// A kernel's interface to its IOMMU.
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

/// How full an address space is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Mappings that the kernel has.
    pub mappings: u64,
    /// The most that it takes; `None` where only memory limits them.
    pub most_mappings: Option<u64>,
    /// Bytes that are mapped. Their pages are locked in memory.
    pub bytes: u64,
    /// System calls that maps and unmaps have made since the space was opened.
    pub calls: u64,
}

/// The addresses of one or more devices of this process: an IOAS of iommufd, or a container of VFIO's type 1.
///
/// It is [a device's](super::Device::space), and others may [join](super::Device::open_in) it. It can be cloned; it ends, with all of its
/// mappings, when the last clone, device and mapper of it is gone, or when the process ends in whatever way.
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

    /// Opens a device in it, which reaches at once what is mapped.
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
                        // Where the kernel does not let it go, the container goes on with its group.
                        let _ = self.leave(container, &mut in_kernel, member);
                        Err(error)
                    }
                }
            }
        }
    }

    /// Closes a device of it, which reaches nothing any more then.
    ///
    /// # Errors
    /// As [`Container::remove`].
    pub(super) fn remove(&self, member: Member) -> io::Result<()> {
        match &self.kernel {
            // The kernel takes it out of the space by itself, and keeps the mappings.
            Kernel::Iommufd(_) => Ok(()),
            Kernel::Type1(container) => self.leave(container, &mut self.space.while_it_changes(), member),
        }
    }

    /// As [`remove`](Self::remove), for a device of this group that it has failed for.
    pub(super) fn remove_again(&self, group: u32) -> io::Result<()> {
        let Kernel::Type1(container) = &self.kernel else { return Ok(()) };
        let mut in_kernel = self.space.while_it_changes();
        if !container.remove_again(group)? {
            self.space.is_out(&mut in_kernel);
        }
        Ok(())
    }

    /// Asks what the kernel has let go of since a device left that another process had.
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

    /// The addresses that its devices can use, and the pages by which they are mapped.
    pub fn geometry(&self) -> &Geometry {
        self.space.geometry()
    }

    /// How full it is. Takes a lock.
    pub fn usage(&self) -> Usage {
        self.space.usage()
    }

    /// Which of the kernel's interfaces it is of.
    pub fn kind(&self) -> Kind {
        match self.kernel {
            Kernel::Iommufd(_) => Kind::Iommufd,
            Kernel::Type1(_) => Kind::Type1,
        }
    }

    /// What maps in it, for a [`Domain`](portcullis::domain::Domain). One domain has it: where there are two, one refuses what the other
    /// has mapped at the same addresses.
    ///
    /// # Safety
    /// 1. **Every address of memory is one of this process**, and not of the machine's memory: the pieces that buffers name
    ///    ([`DmaBuffer`](portcullis::dma::DmaBuffer)) to the domain of this mapper, and what its memory gives it
    ///    ([`Frames`](portcullis::platform::Frames)). [`Heap`](crate::heap::Heap) and [`HeapBuffer`](crate::heap::HeapBuffer) have such
    ///    addresses. Those of a simulated machine, or of a kernel's own memory, would open other memory of the process.
    /// 2. Where a buffer is mapped and not copied, its devices are trusted with the rest of its first and last page. A whole number of pages has no such rest, and
    ///    queues that [copy](portcullis::dma::QueueConfig::bounce) or [choose](portcullis::dma::QueueConfig::auto) open none.
    pub unsafe fn mapper(&self) -> KernelMapper {
        KernelMapper::new(Arc::clone(&self.space))
    }
}

/// Which of the kernel's interfaces an address space is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// iommufd.
    Iommufd,
    /// VFIO's type 1, version 2.
    Type1,
}
