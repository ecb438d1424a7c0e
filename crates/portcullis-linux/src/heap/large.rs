//! Large blocks: on huge pages that the administrator has set aside, where there are some, else on transparent ones, else on small pages.

use std::ptr::{NonNull, null_mut};

/// Bytes of a huge page. (Of all that Linux has on x86-64, the smallest.)
pub(super) const HUGE: usize = 2 << 20;

/// The bytes that a block of `len` bytes takes, if it is large.
pub(super) fn bytes(len: usize) -> Option<usize> {
    if len >= HUGE { len.checked_next_multiple_of(HUGE) } else { None }
}

/// A zeroed block of `bytes` bytes, whole huge pages of them, that begins with one. Two to four system calls.
pub(super) fn alloc(bytes: usize) -> Option<NonNull<u8>> {
    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // Without `MAP_NORESERVE`, so that the pages are there, or this fails.
    if let Some(block) = map(bytes, how | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB) {
        return Some(block);
    }
    let all = map(bytes.checked_add(HUGE)?, how)?;
    let skip = all.as_ptr().align_offset(HUGE);
    // SAFETY: it is inside of the block, whose parts before and behind are unmapped: nobody has them.
    let block = unsafe {
        let block = all.add(skip);
        unmap(all, skip);
        unmap(block.add(bytes), HUGE - skip);
        block
    };
    // SAFETY: it is the block's. A kernel without transparent huge pages says so, and small ones will do.
    unsafe { libc::madvise(block.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
    Some(block)
}

fn map(bytes: usize, how: i32) -> Option<NonNull<u8>> {
    // SAFETY: it maps new memory where there is none.
    let block = unsafe { libc::mmap(null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, how, -1, 0) };
    if block == libc::MAP_FAILED { None } else { NonNull::new(block.cast()) }
}

/// # Safety
/// The bytes are mapped, and nobody uses them.
unsafe fn unmap(block: NonNull<u8>, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's promise. It fails where a mapping would be cut and the kernel has no room for another: then it stays.
        unsafe { libc::munmap(block.as_ptr().cast(), bytes) };
    }
}

/// # Safety
/// It is of one [`alloc`] of as many bytes, and nothing uses it.
pub(super) unsafe fn free(block: *mut u8, bytes: usize) {
    if let Some(block) = NonNull::new(block) {
        // SAFETY: the caller's promise.
        unsafe { unmap(block, bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_huge_page_and_more_are_large() {
        assert_eq!([bytes(HUGE - 1), bytes(HUGE), bytes(HUGE + 1)], [None, Some(HUGE), Some(2 * HUGE)]);
        assert_eq!(bytes(usize::MAX), None);
    }

    /// The line of a field, of the mapping that has this address.
    fn smaps(at: usize, field: &str) -> Option<String> {
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

    /// Set in the process that looks: nothing else maps anything there.
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
        let block = alloc(3 * HUGE).unwrap();
        let at = block.addr().get();
        assert_eq!(at % HUGE, 0);
        // SAFETY: it is the test's.
        let all = unsafe { std::slice::from_raw_parts_mut(block.as_ptr(), 3 * HUGE) };
        assert!(all.iter().all(|byte| *byte == 0));
        all.fill(7);
        // Set aside by the administrator (ht), or asked for (hg).
        let flags = smaps(at, "VmFlags").unwrap();
        assert!(flags.contains("ht") || flags.contains("hg"), "{flags}");
        // SAFETY: of the call above, and the slice is not used any more.
        unsafe { free(block.as_ptr(), 3 * HUGE) };
        for part in [0, HUGE, 3 * HUGE - 1] {
            assert_eq!(smaps(at + part, "VmFlags"), None, "{part:#x}");
        }
        assert!(alloc(usize::MAX - HUGE + 1).is_none());
    }
}
