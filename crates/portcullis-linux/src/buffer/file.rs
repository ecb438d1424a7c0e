//! Memory of a file, such as a memfd that another process has, too.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use memmap2::{MmapOptions, MmapRaw};
use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::dma::DmaBuffer;
use portcullis::platform::words;

/// Files that are mapped into this process: address, and offset.
static MAPPED: RwLock<Vec<Mapped>> = RwLock::new(Vec::new());
/// Their number: most programs have none, and skip the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

struct Mapped {
    start: u64,
    len: u64,
    offset: u64,
    file: Arc<OwnedFd>,
}

/// The file behind all of the `len` bytes at `address`, and the offset; `None` if there is none. The caller has a buffer there, which is
/// therefore counted.
pub(crate) fn file_at(address: u64, len: u64) -> Option<(Arc<OwnedFd>, u64)> {
    // Relaxed: the caller got its buffer from the thread that counted it.
    if COUNT.load(Ordering::Relaxed) == 0 {
        return None;
    }
    let mapped = MAPPED.read().unwrap_or_else(PoisonError::into_inner);
    let at = mapped.partition_point(|mapped| mapped.start <= address).checked_sub(1)?;
    let Mapped { start, len: all, offset, file } = mapped.get(at)?;
    let before = address - start;
    let is_inside = before.checked_add(len).is_some_and(|end| end <= *all);
    is_inside.then(|| (Arc::clone(file), offset + before))
}

/// Shared bytes of a memfd, or of another file in memory, as a mapping's buffer. iommufd since Linux 6.13 maps a file by its descriptor,
/// and an [`AddressSpace`](crate::vfio::AddressSpace) does so if it can; otherwise it maps the file's addresses in this process.
///
/// Every holder of the file may change the bytes at any time, as may a device, so the CPU copies them in and out by [words].
#[derive(Debug)]
pub struct FileBuffer {
    memory: MmapRaw,
    segment: PhysSegment,
}

// SAFETY:
// 1. The addresses are the process's.
// 2. The value owns the mapping of the file into this process, at a fixed address. Others reach the memory by their own mappings, like a
//    device.
// 3. Safe code reaches it only by words.
// 4. By words; `new` registers the frames as the heap's.
unsafe impl DmaBuffer for FileBuffer {
    fn segments(&self) -> &[PhysSegment] {
        std::slice::from_ref(&self.segment)
    }
}

impl FileBuffer {
    /// Maps `len` bytes of `file` from `offset` on, both multiples of 4 KiB. The file must stay at least as long: an access beyond its end
    /// raises a signal (`SIGBUS`). `F_SEAL_SHRINK` keeps a memfd from shrinking. Makes a few system calls and allocates.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` for a range that is not whole pages, or beyond the file's end; `OutOfMemory`.
    pub fn new(file: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
        let file = File::from(file.as_fd().try_clone_to_owned()?);
        let bytes = len as u64;
        if len == 0 || !(offset | bytes).is_multiple_of(super::super::heap::FRAME as u64) {
            return Err(invalid("a buffer of a file begins and ends with pages of 4 KiB, and has some"));
        }
        let has = file.metadata()?.len();
        if offset.checked_add(bytes).is_none_or(|end| end > has) {
            return Err(invalid("the file ends before the buffer does"));
        }
        // The kernel maps and unmaps whole huge pages.
        let whole = len.checked_next_multiple_of(page_of(&file)?).ok_or(io::ErrorKind::InvalidInput)?;
        let memory = MmapOptions::new().offset(offset).len(whole).map_raw(&file)?;
        let segment = super::segment(memory.as_mut_ptr(), len);
        let start = segment.phys.get();
        let mut mapped = MAPPED.write().unwrap_or_else(PoisonError::into_inner);
        mapped.try_reserve(1).map_err(|_| io::ErrorKind::OutOfMemory)?;
        crate::heap::adopt(start, len).ok_or(io::ErrorKind::OutOfMemory)?;
        let at = mapped.partition_point(|mapped| mapped.start < start);
        mapped.insert(at, Mapped { start, len: bytes, offset, file: Arc::new(file.into()) });
        COUNT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { memory, segment })
    }

    /// Address of the first byte in this process.
    pub fn phys(&self) -> PhysAddr {
        self.segment.phys
    }

    /// Its length in bytes.
    pub fn size(&self) -> usize {
        self.segment.len as usize
    }

    /// Copies the bytes from `offset` on to `out`; `None`, with nothing copied, if they are out of bounds. Each byte is an old or a new one
    /// if others write it meanwhile. O(`out.len()`); does not wait.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        words::read(self.words(), offset, out)
    }

    /// Copies `bytes` to the buffer from `offset` on; `None`, with nothing copied, if they are out of bounds. Changes no other byte.
    /// O(`bytes.len()`); does not wait.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        words::write(self.words(), offset, bytes)
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the pages are mapped until the value is dropped, aligned, and this process accesses them only by words.
        unsafe {
            std::slice::from_raw_parts(self.memory.as_mut_ptr().cast(), self.size() / size_of::<AtomicU64>())
        }
    }
}

/// The page size of hugetlbfs; 1 for other files, because the kernel rounds up itself.
fn page_of(file: &File) -> io::Result<usize> {
    let mut about = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: it writes the structure.
    if unsafe { libc::fstatfs(file.as_raw_fd(), about.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was zeroed, and then written.
    let about = unsafe { about.assume_init() };
    Ok(if about.f_type == libc::HUGETLBFS_MAGIC {
        usize::try_from(about.f_bsize).unwrap_or(1).max(1)
    } else {
        1
    })
}

impl Drop for FileBuffer {
    fn drop(&mut self) {
        let start = self.segment.phys.get();
        // Before the addresses can be reused.
        crate::heap::disown(start, self.size());
        MAPPED.write().unwrap_or_else(PoisonError::into_inner).retain(|mapped| mapped.start != start);
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::FromRawFd;

    use super::*;

    fn file(len: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn two_buffers_of_a_file_have_the_same_bytes() {
        let file = file(4 * 4096);
        let (one, two) =
            (FileBuffer::new(&file, 0, 4 * 4096).unwrap(), FileBuffer::new(&file, 4096, 8192).unwrap());
        one.write(4096 + 10, b"hello").unwrap();
        let mut out = [0; 5];
        two.read(10, &mut out).unwrap();
        assert_eq!(&out, b"hello");
        assert_eq!((one.size(), two.size(), two.read(8190, &mut out)), (4 * 4096, 8192, None));
        assert_eq!(two.segments(), [PhysSegment { phys: two.phys(), len: 8192 }]);
        let at = two.phys().get();
        let found = |at, len| file_at(at, len).map(|(_, offset)| offset);
        assert_eq!([found(at, 8192), found(at + 4096, 4096)], [Some(4096), Some(8192)]);
        assert_eq!([found(at + 4096, 4097), found(at.wrapping_sub(1), 1), found(at, u64::MAX)], [None; 3]);
        drop(two);
        assert_eq!(found(at, 4096), None);
        assert_eq!(found(one.phys().get(), 4096), Some(0));
    }

    /// Uses reserved huge pages if the system has some; otherwise the mapping is refused.
    #[test]
    fn a_part_of_a_huge_page_goes_as_a_whole() {
        let pages = "/proc/sys/vm/nr_hugepages";
        let had: u64 = std::fs::read_to_string(pages).unwrap().trim().parse().unwrap();
        let is_changed = had == 0 && std::fs::write(pages, "1").is_ok();
        // SAFETY: it takes a string, and returns a new file.
        let file = unsafe {
            let file =
                libc::memfd_create(c"portcullis-huge".as_ptr(), libc::MFD_HUGETLB | libc::MFD_HUGE_2MB);
            assert!(file >= 0, "{}", io::Error::last_os_error());
            File::from_raw_fd(file)
        };
        file.set_len(2 << 20).unwrap();
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("memfd:portcullis-huge");
        match FileBuffer::new(&file, 0, 3 * 4096) {
            Ok(buffer) => {
                buffer.write(3 * 4096 - 2, &[1, 2]).unwrap();
                assert_eq!((buffer.size(), buffer.write(3 * 4096, &[1]), maps()), (3 * 4096, None, true));
                drop(buffer);
                assert!(!maps(), "it is still mapped");
            }
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOMEM), "{error}"),
        }
        if is_changed {
            let _ = std::fs::write(pages, "0");
        }
    }

    #[test]
    fn what_a_file_does_not_have_is_refused() {
        let file = file(2 * 4096);
        for (offset, len) in
            [(0, 0), (1, 4096), (0, 4095), (0, 3 * 4096), (4096, 8192), (u64::MAX - 4095, 4096)]
        {
            let kind = FileBuffer::new(&file, offset, len).unwrap_err().kind();
            assert_eq!(kind, io::ErrorKind::InvalidInput, "{offset}, {len}");
        }
    }
}
