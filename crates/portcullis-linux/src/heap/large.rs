//! Large blocks: on reserved huge pages, if there are some, else on transparent ones, else on small pages.

use std::ptr::{NonNull, null_mut};

/// Bytes of a huge page: the smallest of Linux on x86-64.
pub(super) const HUGE: usize = 2 << 20;

pub(super) fn bytes(len: usize) -> Option<usize> {
    if len >= HUGE { len.checked_next_multiple_of(HUGE) } else { None }
}

/// A zeroed block of `bytes` bytes, a multiple of [`HUGE`], aligned to `align`, a power of two, and to a huge page. Two to five system
/// calls.
pub(super) fn alloc(bytes: usize, align: usize) -> Option<NonNull<u8>> {
    let (align, how) = (align.max(HUGE), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // The kernel aligns a mapping of huge pages.
    if let Some(block) = within(bytes, align, align - HUGE, how | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB) {
        // SAFETY: the block is this call's. A cgroup limit may keep this process from reserved pages, and an access would raise `SIGBUS`:
        // so they are faulted in now, or not used. (Before Linux 5.14 they are not used.)
        if unsafe { libc::madvise(block.as_ptr().cast(), bytes, libc::MADV_POPULATE_WRITE) } == 0 {
            return Some(block);
        }
        // SAFETY: clause 1: mapped above, and not returned.
        unsafe { unmap(block, bytes) };
    }
    let block = within(bytes, align, align, how)?;
    // SAFETY: the block is this call's. A kernel without transparent huge pages returns an error, and small pages will do.
    unsafe { libc::madvise(block.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
    Some(block)
}

/// New memory of `bytes` bytes at a multiple of `align`, cut out of `more` additional bytes.
fn within(bytes: usize, align: usize, more: usize, how: i32) -> Option<NonNull<u8>> {
    let all = map(bytes.checked_add(more)?, how)?;
    let skip = all.as_ptr().align_offset(align);
    // SAFETY: at most `more` bytes are skipped, because the kernel's memory is page-aligned. Nothing uses the parts in front of and behind
    // the block, which are unmapped.
    unsafe {
        let block = all.add(skip);
        unmap(all, skip);
        unmap(block.add(bytes), more - skip);
        Some(block)
    }
}

fn map(bytes: usize, how: i32) -> Option<NonNull<u8>> {
    // SAFETY: it maps new memory at a free address.
    let block = unsafe { libc::mmap(null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, how, -1, 0) };
    if block == libc::MAP_FAILED { None } else { NonNull::new(block.cast()) }
}

/// # Safety
/// 1. The bytes are mapped, and nothing uses them.
unsafe fn unmap(block: NonNull<u8>, bytes: usize) {
    if bytes > 0 {
        // SAFETY: clause 1. It fails if it would split a mapping and the kernel has no room for another: then the memory stays.
        unsafe { libc::munmap(block.as_ptr().cast(), bytes) };
    }
}

/// # Safety
/// 1. The block is of one [`alloc`] of this many bytes, and nothing uses it.
pub(super) unsafe fn free(block: *mut u8, bytes: usize) {
    if let Some(block) = NonNull::new(block) {
        // SAFETY: clause 1.
        unsafe { unmap(block, bytes) };
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_huge_page_and_more_are_large() {
        assert_eq!([bytes(HUGE - 1), bytes(HUGE), bytes(HUGE + 1)], [None, Some(HUGE), Some(2 * HUGE)]);
        assert_eq!(bytes(usize::MAX), None);
    }

    /// The value of a field in the mapping at this address.
    pub(crate) fn smaps(at: usize, field: &str) -> Option<String> {
        let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        all.lines().find_map(|line| {
            if let Some((start, end)) = line.split_once(' ').and_then(|(range, _)| range.split_once('-')) {
                let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16));
                inside = start.is_ok_and(|start| start <= at) && end.is_ok_and(|end| at < end);
            }
            line.strip_prefix(field)
                .filter(|_| inside)
                .map(|rest| rest.trim_start_matches(':').trim().to_owned())
        })
    }

    /// Set in the child process of the test, which maps nothing else there.
    const ALONE: &str = "PORTCULLIS_TEST_ALONE";

    #[test]
    fn a_block_begins_with_a_huge_page_is_zero_and_goes_as_a_whole() {
        if std::env::var_os(ALONE).is_none() {
            let name = "heap::large::tests::a_block_begins_with_a_huge_page_is_zero_and_goes_as_a_whole";
            let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
            let out = alone.args(["--exact", name]).env(ALONE, "").output().unwrap();
            let said = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let block = alloc(3 * HUGE, 4 * HUGE).unwrap();
        let at = block.addr().get();
        assert_eq!(at % (4 * HUGE), 0);
        // SAFETY: allocated above.
        let all = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), 3 * HUGE) };
        assert!(all.iter().all(|byte| *byte == 0));
        all.fill(7);
        // Reserved (ht), or advised (hg).
        let flags = smaps(at, "VmFlags").unwrap();
        assert!(flags.contains("ht") || flags.contains("hg"), "{flags}");
        // SAFETY: clause 1: allocated above; the slice is no longer used.
        unsafe { free(block.as_ptr(), 3 * HUGE) };
        for part in [0, HUGE, 3 * HUGE - 1] {
            assert_eq!(smaps(at + part, "VmFlags"), None, "{part:#x}");
        }
        assert!(alloc(usize::MAX - HUGE + 1, HUGE).is_none());
    }
}
