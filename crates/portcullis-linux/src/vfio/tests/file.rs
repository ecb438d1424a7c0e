//! Buffers of files: mapped by the file if the kernel can, else by their addresses in this process.

use std::fs::OpenOptions;

use portcullis::addr::{Iova, IovaRange, Permissions};
use portcullis::dma::DmaBuffer;
use portcullis::invalidation::Gather;
use portcullis::mapper::Mapper;
use portcullis::std_platform::StdPlatform;

use super::device::{NAME, iommufd, type1};
use super::fake::PAGE;
use super::kernel::Kernel;
use crate::buffer::FileBuffer;
use crate::vfio::Device;

/// The calls of a map of `pages` pages, from the second of a buffer on, at `0x10_0000`.
fn asked(kernel: &Kernel, device: &Device, buffer: &FileBuffer, pages: u64) -> (bool, Vec<String>) {
    kernel.asked();
    // SAFETY: no device reaches anything through a fake kernel.
    let mapper = unsafe { device.space().mapper() };
    let range = IovaRange::new(Iova::new(0x10_0000), pages * PAGE).unwrap();
    let phys = buffer.segments()[0].phys.checked_add(PAGE).unwrap();
    let (list, platform) = ([(phys, pages * PAGE)], StdPlatform::new());
    // SAFETY: as above.
    let mapped = unsafe { mapper.map(&platform, range, list, Permissions::READ.into(), &mut Gather::new()) };
    let asked = kernel.asked();
    if mapped.is_ok() {
        assert_eq!(mapper.unmap(&platform, range, &mut Gather::new()).bytes, pages * PAGE);
    }
    (mapped.is_ok(), asked)
}

fn file(kernel: &Kernel) -> std::fs::File {
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).open(kernel.path("dev/memory")).unwrap();
    file.set_len(8 * PAGE).unwrap();
    file
}

/// A process address as the kernel prints it.
fn halves(address: u64) -> String {
    format!("{:x}, {:x}", address as u32, address >> 32)
}

#[test]
fn iommufd_maps_a_buffer_by_its_file() {
    let kernel = iommufd();
    let device = Device::open(NAME).unwrap();
    let buffer = FileBuffer::new(file(&kernel), 2 * PAGE, 4 * PAGE as usize).unwrap();
    let by_file = "dev/iommu: IOAS_MAP_FILE [28, 5, 7] dev/memory [3000, 0, 2000, 0, 100000, 0]";
    assert_eq!(asked(&kernel, &device, &buffer, 2), (true, vec![by_file.to_owned()]));
    let address = buffer.segments()[0].phys.get() + PAGE;
    let by_address =
        |bytes| format!("dev/iommu: IOAS_MAP [28, 5, 7, 0, {}, {bytes:x}, 0, 100000, 0]", halves(address));
    // Older kernels have no such call, and no kernel maps all kinds of files.
    for code in [libc::ENOTTY, libc::EOPNOTSUPP, libc::EINVAL, libc::EBADF] {
        kernel.set(|state| state.fails = vec![("IOAS_MAP_FILE", code)]);
        assert_eq!(asked(&kernel, &device, &buffer, 2), (true, vec![by_file.to_owned(), by_address(0x2000)]));
    }
    kernel.set(|state| state.fails = vec![("IOAS_MAP_FILE", libc::ENOMEM)]);
    assert_eq!(asked(&kernel, &device, &buffer, 2), (false, vec![by_file.to_owned()]));
    // A range beyond the buffer is not the file's.
    kernel.set(|state| state.fails.clear());
    assert_eq!(asked(&kernel, &device, &buffer, 4), (true, vec![by_address(0x4000)]));
    // Nor is later memory at the same addresses.
    let at = buffer.segments()[0].phys.get();
    drop(buffer);
    assert!(crate::buffer::file::file_at(at, PAGE).is_none());
}

#[test]
fn type_1_maps_it_by_its_addresses() {
    let kernel = type1();
    let device = Device::open_type1(NAME).unwrap();
    let buffer = FileBuffer::new(file(&kernel), 0, 4 * PAGE as usize).unwrap();
    let address = halves(buffer.segments()[0].phys.get() + PAGE);
    let call = format!("dev/vfio/vfio: IOMMU_MAP_DMA [20, 1, {address}, 100000, 0, 2000, 0]");
    assert_eq!(asked(&kernel, &device, &buffer, 2), (true, vec![call]));
}
