//! Memory of a file: of a memfd, which another process has, too.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use memmap2::{MmapOptions, MmapRaw};
use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::dma::DmaBuffer;
use portcullis::platform::words;

/// Files that are mapped into this process: where, and from which offset on.
static MAPPED: RwLock<Vec<Mapped>> = RwLock::new(Vec::new());
/// How many there are: most programs have none, and do not take the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

struct Mapped {
    start: u64,
    len: u64,
    offset: u64,
    file: Arc<OwnedFd>,
}

/// The file that has all of the `len` bytes at `address`, and where in the file they are; `None` where there is none. Whoever asks has a buffer there, so
/// that it is counted.
pub(crate) fn file_at(address: u64, len: u64) -> Option<(Arc<OwnedFd>, u64)> {
    // Relaxed: whoever has a buffer got it from the thread that counted it.
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

/// Bytes of a memfd, or of another file in memory, that this process shares with others, for a mapping to own. iommufd since Linux 6.13 maps a file by its
/// descriptor, and an [`AddressSpace`](crate::vfio::AddressSpace) uses that where it can; elsewhere it maps where the file is in this process.
///
/// Whoever has the file may change the bytes at any time, as may a device, so the CPU copies them in and out by [words].
#[derive(Debug)]
pub struct FileBuffer {
    memory: MmapRaw,
    segment: PhysSegment,
}

// SAFETY: by clause of the trait:
// 1. The addresses are the process's.
// 2. The mapping of the file into this process is the value's own, and stays where it is. Others reach the memory behind it by mappings of theirs, and
//    by atomics or not, as a device does.
// 3. Safe code reaches it by words alone.
// 4. By words; they are frames that the heap counts as its own, as `new` tells it.
unsafe impl DmaBuffer for FileBuffer {
    fn segments(&self) -> &[PhysSegment] {
        std::slice::from_ref(&self.segment)
    }
}

impl FileBuffer {
    /// Maps `len` bytes of `file` from `offset` on, both in whole pages of 4 KiB. The file is to be as long, and to stay so: an access of bytes that it has lost ends the
    /// process by a signal (`SIGBUS`). A memfd with `F_SEAL_SHRINK` stays. Makes a few system calls and allocates.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` for what is no whole pages, or ends behind the file's end; `OutOfMemory`.
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
        // Of huge pages the kernel maps and unmaps whole ones.
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

    /// The address of the first byte in this process.
    pub fn phys(&self) -> PhysAddr {
        self.segment.phys
    }

    /// How many bytes it holds.
    pub fn size(&self) -> usize {
        self.segment.len as usize
    }

    /// Copies the bytes from `offset` on to `out`; `None`, with nothing copied, where some of them do not exist. While others write
    /// them, each byte is an old or a new one. O(`out.len()`); waits for nothing.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        words::read(self.words(), offset, out)
    }

    /// Copies `bytes` to the buffer from `offset` on, and changes no other; `None`, with nothing copied, where some of it does
    /// not exist. O(`bytes.len()`); waits for nothing.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        words::write(self.words(), offset, bytes)
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the pages are mapped until the value is dropped, aligned, and accessed by words alone in this process.
        unsafe {
            std::slice::from_raw_parts(self.memory.as_mut_ptr().cast(), self.size() / size_of::<AtomicU64>())
        }
    }
}

/// Bytes of the pages by which a file is mapped, of hugetlbfs; of others one, as the kernel rounds up by itself.
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
        // Before its addresses are somebody else's.
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

    /// Pages of the administrator's are set aside for this test where it may; where there are none, the mapping is refused.
    #[test]
    fn a_part_of_a_huge_page_goes_as_a_whole() {
        let pages = "/proc/sys/vm/nr_hugepages";
        let had: u64 = std::fs::read_to_string(pages).unwrap().trim().parse().unwrap();
        let is_changed = had == 0 && std::fs::write(pages, "1").is_ok();
        // SAFETY: it takes a text, and returns a file of this call's.
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
