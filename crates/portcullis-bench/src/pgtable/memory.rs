//! Memory for page tables: ordinary memory of this process, whose physical addresses are its own.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::atomic::AtomicU64;

use portcullis::addr::PhysAddr;
use portcullis::platform::{FRAME_SIZE, Frames, Table};

/// Takes each allocation from the process's allocator: tables are made before the clock starts. Finding one
/// costs nothing: its address is the pointer (as in Linux's code where that is measured beside).
///
/// Where `COHERENT` is false, changes are written back to memory, as for an IOMMU that does not look into the
/// caches. (No figure would show if they were not; a test counts the lines.)
#[derive(Debug, Clone, Copy)]
pub struct Memory<const COHERENT: bool>;

fn layout(count: usize) -> Option<Layout> {
    let frame = FRAME_SIZE as usize;
    let align = count.checked_next_power_of_two()?.checked_mul(frame)?;
    Layout::from_size_align(count.checked_mul(frame)?, align).ok().filter(|layout| layout.size() > 0)
}

// SAFETY: the process's allocator gives out aligned, zeroed memory that is the caller's alone until it is given
// back; addresses of 2^52 and above are refused. `table` is that memory.
unsafe impl<const COHERENT: bool> Frames for Memory<COHERENT> {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let layout = layout(count)?;
        // SAFETY: the layout's size is not 0.
        let memory = unsafe { alloc_zeroed(layout) };
        let address = memory.expose_provenance() as u64;
        if memory.is_null() || address >= 1 << 52 {
            if !memory.is_null() {
                // SAFETY: it was allocated above, with this layout.
                unsafe { dealloc(memory, layout) };
            }
            return None;
        }
        Some(PhysAddr::new(address))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        if let Some(layout) = layout(count) {
            // SAFETY: by the caller's promise `alloc` gave it out for the same count, and so with the same
            // layout, and no code uses it any more.
            unsafe { dealloc(std::ptr::with_exposed_provenance_mut(first.get() as usize), layout) };
        }
    }

    const COHERENT: bool = COHERENT;

    #[inline]
    fn clean(&self, words: &[AtomicU64]) {
        write_back(words);
    }

    #[inline]
    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: by the caller's promise it lies, at a multiple of the frame size, in what `alloc` gave out:
        // memory whose provenance was exposed there, that holds words (zeros at first) which are only accessed
        // as atomics, and that is not freed while the reference lives.
        unsafe { &*std::ptr::with_exposed_provenance::<Table>(frame.get() as usize) }
    }
}

/// Whether this machine can write cache lines back from here.
#[cfg(target_arch = "x86_64")]
pub(crate) fn can_write_back() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // Intel SDM volume 2, CPUID: leaf 7, EBX bit 23 is CLFLUSHOPT.
    // SAFETY: every x86-64 processor has the instruction.
    #[allow(unused_unsafe, reason = "these are safe functions since Rust 1.94")]
    unsafe {
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ebx & 1 << 23 != 0
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn can_write_back() -> bool {
    false
}

/// The first address of each cache line that has one of `words`.
#[cfg(target_arch = "x86_64")]
#[inline]
fn lines(words: &[AtomicU64]) -> std::iter::StepBy<std::ops::Range<usize>> {
    const LINE: usize = 64;
    let first = words.as_ptr() as usize & !(LINE - 1);
    let end = words.as_ptr_range().end as usize;
    (first..end).step_by(LINE)
}

/// Writes the cache lines of `words` back and waits for that, with the instructions that Linux uses: they also
/// drop the lines from the caches.
#[cfg(target_arch = "x86_64")]
#[inline]
fn write_back(words: &[AtomicU64]) {
    for line in lines(words) {
        #[cfg(all(test, target_os = "linux"))]
        tests::WRITTEN_BACK.set(tests::WRITTEN_BACK.get() + 1);
        // SAFETY: the line holds at least one of the words, so it is mapped; the instruction changes neither
        // memory as any thread sees it nor flags. `can_write_back` was asked before such memory was made.
        unsafe { std::arch::asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)) };
    }
    // SAFETY: every x86-64 processor has the instruction; it has no operands.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn write_back(_: &[AtomicU64]) {}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    use std::cell::Cell;

    use portcullis::addr::{Iova, IovaRange, Permissions};
    use portcullis::pgtable::{PageTable, VtdSecondStage};
    use portcullis::platform::Platform;
    use portcullis::std_platform::StdPlatform;

    use super::*;

    thread_local! {
        /// How many lines this thread has written back.
        pub static WRITTEN_BACK: Cell<usize> = const { Cell::new(0) };
    }

    #[repr(align(64))]
    struct Words([AtomicU64; 24]);

    #[test]
    fn each_line_with_a_word_is_written_back_once() {
        let words = Words(Default::default());
        let start = words.0.as_ptr() as usize;
        for (range, expected) in [
            (0..8, vec![0]),
            (7..8, vec![0]),
            (7..9, vec![0, 64]),
            (8..24, vec![64, 128]),
            (1..23, vec![0, 64, 128]),
        ] {
            let found: Vec<usize> = lines(&words.0[range.clone()]).map(|line| line - start).collect();
            assert_eq!(found, expected, "{range:?}");
        }
    }

    /// The word of a leaf, and nothing where tables are coherent.
    #[test]
    fn what_a_map_stores_is_written_back_where_tables_are_not_coherent() {
        if !can_write_back() {
            return;
        }
        let platform = StdPlatform::new();
        let (page, phys) = (IovaRange::new(Iova::new(0x1000), 4096).unwrap(), PhysAddr::new(0x5000));
        fn written<const COHERENT: bool>(platform: &StdPlatform, page: IovaRange, phys: PhysAddr) -> usize {
            let format = VtdSecondStage::new(4, 3, 48).unwrap();
            let table = PageTable::for_cpus(Memory::<COHERENT>, format, platform.cpus()).unwrap();
            // SAFETY: no device is behind these tables.
            let map = || unsafe { table.map(platform, page, phys, Permissions::READ_WRITE) }.unwrap();
            map();
            // SAFETY: as above.
            let unmapped = unsafe { table.unmap(platform, page, &mut |_| true) };
            assert_eq!(unmapped.bytes, page.len());
            let before = WRITTEN_BACK.get();
            // The tables are there already.
            map();
            WRITTEN_BACK.get() - before
        }
        assert_eq!(written::<false>(&platform, page, phys), 1);
        assert_eq!(written::<true>(&platform, page, phys), 0);
    }

    /// Linux lists what the processor has.
    #[test]
    fn lines_are_written_back_where_the_processor_has_the_instruction() {
        let Ok(about) = std::fs::read_to_string("/proc/cpuinfo") else { return };
        let flags = about.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
        assert_eq!(super::can_write_back(), flags.split_whitespace().any(|flag| flag == "clflushopt"));
    }
}
