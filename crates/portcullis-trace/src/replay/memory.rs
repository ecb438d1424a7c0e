//! The bytes of the memory that a trace names, and of bounce buffers.
//!
//! A trace names pages scattered over all 52 bits of physical addresses. A directory of four levels finds the frame of an address; there is
//! one for each page that was ever [backed](TraceMemory::back), until it is [freed](TraceMemory::keep_only) again. The same directory finds
//! frames of bounce buffers, at addresses of their own: [`is_pool`].
//!
//! Cost: four dependent loads for each page of a copy, on top of the copy itself (`examples/copy_speed.rs` measures it). Memory: 4 KiB for
//! a page, 1 KiB for each 256 KiB, 32 KiB for each 512 MiB and 16 KiB for each 512 GiB with a page; in all its limit, at most
//! [`MOST_BYTES`].
#![allow(unsafe_code, reason = "the traits' signatures, and memory that is reached by its address")]

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames, Table};
use portcullis_model::Memory;

use super::live::pages;

/// The most memory of bytes, their directory and bounce buffers together: 4 GiB.
pub const MOST_BYTES: u64 = 4 << 30;

/// The addresses of bounce buffers' frames: the end of the 48 bits of the replay's tables, where no recorded machine has memory.
const POOL_START: u64 = 0xff00_0000_0000;

/// Preallocated frames of bounce buffers, 32 MiB of them, or a quarter of the limit.
const READY_FRAMES: u64 = 8192;

const PAGE_SHIFT: u32 = 12;
/// Small nodes below, where scattered pages would leave a large one empty, and large ones above, so that four levels suffice.
const LEAF_SHIFT: u32 = 6;
const LOWER_SHIFT: u32 = 11;
const UPPER_SHIFT: u32 = 10;
const TOP_SHIFT: u32 = 52 - PAGE_SHIFT - LEAF_SHIFT - LOWER_SHIFT - UPPER_SHIFT;

/// A page's frame: its words, and its address in its memory. Null and 0 without one.
#[derive(Default)]
struct Entry {
    table: AtomicPtr<Table>,
    frame: AtomicU64,
}

/// 256 KiB of addresses.
type Leaf = [Entry; 1 << LEAF_SHIFT];
/// 512 MiB of addresses.
type Lower = [OnceLock<Box<Leaf>>; 1 << LOWER_SHIFT];
/// 512 GiB of addresses.
type Upper = [OnceLock<Box<Lower>>; 1 << UPPER_SHIFT];

/// The index at each level of the entry of `page`; the top's may be out of range.
#[inline]
fn places(page: u64) -> (usize, usize, usize, usize) {
    let at = |shift: u32, bits: u32| (page >> shift) as usize & ((1 << bits) - 1);
    let (lower, upper) = (LEAF_SHIFT, LEAF_SHIFT + LOWER_SHIFT);
    let top = (page >> (upper + UPPER_SHIFT)) as usize;
    (top, at(upper, UPPER_SHIFT), at(lower, LOWER_SHIFT), at(0, LEAF_SHIFT))
}

/// A node of empty entries, made in place: it would be large for a stack.
fn node<T: Default, const N: usize>() -> Box<[T; N]> {
    let entries: Box<[T]> = (0..N).map(|_| T::default()).collect();
    entries.try_into().unwrap_or_else(|_| unreachable!("as many as were made"))
}

pub(super) fn pages_of(list: &[PhysSegment]) -> impl Iterator<Item = u64> {
    list.iter().flat_map(|part| {
        let last = part.phys.get().saturating_add(part.len.saturating_sub(1));
        part.phys.get() >> PAGE_SHIFT..=last >> PAGE_SHIFT
    })
}

/// Whether `phys` is an address of bounce buffers' frames.
pub(super) fn is_pool(phys: PhysAddr) -> bool {
    (POOL_START..POOL_START + MOST_BYTES).contains(&phys.get())
}

/// Memory of a trace's pages, and of bounce buffers. For one thread: copies are not atomic.
pub struct TraceMemory {
    /// Frames of the trace's pages.
    frames: Arc<Memory>,
    /// Frames of bounce buffers, at their own addresses.
    pool: Arc<Memory>,
    /// The limit of all of them with the directory, in bytes.
    most: u64,
    top: Box<[OnceLock<Box<Upper>>; 1 << TOP_SHIFT]>,
    /// The trace's pages with a frame.
    backed: Mutex<Vec<u64>>,
    /// Their number after the last [`keep_only`](Self::keep_only).
    kept: AtomicUsize,
    /// Bytes of the directory.
    directory: AtomicU64,
    peak_pool_frames: AtomicU64,
    strays: AtomicU64,
    /// Bytes that the library copied.
    copied: AtomicU64,
    /// A bounce buffer was refused because there was no room.
    refused: AtomicBool,
    /// Copies do nothing.
    broken: AtomicBool,
}

impl std::fmt::Debug for TraceMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let frames = self.frames.frames_in_use() + self.pool.frames_in_use();
        f.debug_struct("TraceMemory").field("frames", &frames).finish_non_exhaustive()
    }
}

impl TraceMemory {
    /// Empty memory, which takes up to `most` bytes, and never more than [`MOST_BYTES`].
    pub fn new(most: u64) -> Arc<Self> {
        let most = most.min(MOST_BYTES);
        let pool = Memory::with_base(PhysAddr::new(POOL_START), most);
        // A machine has its memory before it boots: the first buffers must not wait for it.
        let ready = READY_FRAMES.min(most / 4 / FRAME_SIZE) as usize;
        if let Some(first) = pool.alloc(ready) {
            pool.release(first, ready);
        }
        Arc::new(Self {
            frames: Memory::new(most),
            pool,
            most,
            top: node(),
            backed: Mutex::default(),
            kept: AtomicUsize::new(0),
            directory: AtomicU64::new(0),
            peak_pool_frames: AtomicU64::new(0),
            strays: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            refused: AtomicBool::new(false),
            broken: AtomicBool::new(false),
        })
    }

    /// Allocates a zeroed frame for each page of `list` without one; calls `fresh` with its number then. Returns whether there was enough
    /// memory; otherwise nothing has changed, or if the list names pages twice, nearly nothing.
    pub fn back(&self, list: &[PhysSegment], mut fresh: impl FnMut(u64)) -> bool {
        if !self.could_hold(list) {
            return false;
        }
        let bare =
            |page: &u64| self.entry(*page).is_none_or(|entry| entry.frame.load(Ordering::Relaxed) == 0);
        let missing = pages_of(list).filter(bare).count() as u64;
        // A quarter is reserved for bounce buffers.
        if missing > 0 && !self.has_room(missing + self.pages() / 4) {
            return false;
        }
        for page in pages_of(list).filter(bare) {
            let Some(frame) = self.frames.alloc(1) else { return false };
            if self.insert(page, frame, &self.frames).is_none() {
                self.frames.release(frame, 1);
                return false;
            }
            self.backed.lock().unwrap_or_else(PoisonError::into_inner).push(page);
            fresh(page);
        }
        true
    }

    /// Whether the whole memory would suffice for `list`. O(segments), however long they claim to be.
    pub(super) fn could_hold(&self, list: &[PhysSegment]) -> bool {
        pages(list) <= self.pages() / 4 * 3
    }

    /// Whether a search for unneeded pages is worthwhile: there are an eighth more than after the last one. So searches take no longer in
    /// total than allocating frames.
    pub(super) fn may_forget(&self) -> bool {
        let kept = self.kept.load(Ordering::Relaxed);
        self.backed.lock().unwrap_or_else(PoisonError::into_inner).len() > kept + kept / 8
    }

    /// Whether a bounce buffer was refused for lack of room since the last call.
    pub(super) fn was_refused(&self) -> bool {
        self.refused.swap(false, Ordering::Relaxed)
    }

    /// The most pages that fit.
    pub(super) fn pages(&self) -> u64 {
        self.most / FRAME_SIZE
    }

    /// Frees the bytes of all of the trace's pages that are not `is_needed`. O(pages).
    pub(super) fn keep_only(&self, is_needed: impl Fn(u64) -> bool) {
        let mut backed = self.backed.lock().unwrap_or_else(PoisonError::into_inner);
        backed.retain(|&page| {
            let needed = is_needed(page);
            if !needed && let Some(frame) = self.remove(page) {
                self.frames.release(frame, 1);
            }
            needed
        });
        self.kept.store(backed.len(), Ordering::Relaxed);
    }

    /// Reads bytes at `at`, across any number of pages. Leaves bytes of pages without a frame unchanged, and counts each such page as a
    /// [stray](Self::strays).
    pub(super) fn read(&self, at: PhysAddr, bytes: &mut [u8]) {
        let mut rest = bytes;
        self.each(at, rest.len() as u64, |phys, len| {
            let (piece, after) = std::mem::take(&mut rest).split_at_mut(len as usize);
            rest = after;
            let (memory, at) = self.frame(phys)?;
            memory.read(at, piece).ok()
        });
    }

    /// Writes bytes at `at`, like [`read`](Self::read).
    pub(super) fn write(&self, at: PhysAddr, bytes: &[u8]) {
        let mut rest = bytes;
        self.each(at, rest.len() as u64, |phys, len| {
            let (piece, after) = rest.split_at(len as usize);
            rest = after;
            let (memory, at) = self.frame(phys)?;
            memory.write(at, piece).ok()
        });
    }

    /// Accesses to missing memory, and invalid frees: mistakes of the library, or of the replay.
    pub(super) fn strays(&self) -> u64 {
        self.strays.load(Ordering::Relaxed) + self.pool.bad_frees()
    }

    /// Bytes [copied](CopyMemory::copy) so far.
    pub(super) fn copied_bytes(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// The most bytes of bounce buffers.
    pub(super) fn peak_pool_bytes(&self) -> u64 {
        self.peak_pool_frames.load(Ordering::Relaxed) * FRAME_SIZE
    }

    /// From now on copies do nothing, as with a broken library.
    pub(super) fn break_copies(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    /// Calls `part` with each piece of `len` bytes at `at` in one page; `None` counts it as a stray.
    fn each(&self, at: PhysAddr, len: u64, mut part: impl FnMut(u64, u64) -> Option<()>) {
        let mut done = 0;
        while done < len {
            let phys = at.get().wrapping_add(done);
            let count = (FRAME_SIZE - phys % FRAME_SIZE).min(len - done);
            if part(phys, count).is_none() {
                self.strays.fetch_add(1, Ordering::Relaxed);
            }
            done += count;
        }
    }

    #[inline]
    fn entry(&self, page: u64) -> Option<&Entry> {
        let (top, upper, lower, leaf) = places(page);
        Some(&self.top.get(top)?.get()?[upper].get()?[lower].get()?[leaf])
    }

    #[inline]
    fn words(&self, phys: u64) -> Option<&Table> {
        let words = self.entry(phys >> PAGE_SHIFT)?.table.load(Ordering::Acquire);
        // SAFETY: null, or the words of a frame of `frames` or `pool`, which keep the memory of their frames, allocated or not, for as long
        // as they live; and `self` owns them.
        unsafe { words.as_ref() }
    }

    /// The place of the byte at `phys`.
    fn frame(&self, phys: u64) -> Option<(&Memory, PhysAddr)> {
        let frame = self.entry(phys >> PAGE_SHIFT)?.frame.load(Ordering::Relaxed);
        let memory = if is_pool(PhysAddr::new(phys)) { &self.pool } else { &self.frames };
        (frame != 0).then(|| (&**memory, PhysAddr::new(frame + phys % FRAME_SIZE)))
    }

    /// Maps `page` to `frame` of `memory`; `None` if there is no such page.
    fn insert(&self, page: u64, frame: PhysAddr, memory: &Memory) -> Option<()> {
        let count = |bytes: usize| self.directory.fetch_add(bytes as u64, Ordering::Relaxed);
        let (top, upper, lower, leaf) = places(page);
        let uppers = self.top.get(top)?.get_or_init(|| {
            count(size_of::<Upper>());
            node()
        });
        let lowers = uppers[upper].get_or_init(|| {
            count(size_of::<Lower>());
            node()
        });
        let leaves = lowers[lower].get_or_init(|| {
            count(size_of::<Leaf>());
            node()
        });
        let entry = &leaves[leaf];
        entry.frame.store(frame.get(), Ordering::Relaxed);
        entry.table.store(ptr::from_ref(memory.table_at(frame)).cast_mut(), Ordering::Release);
        Some(())
    }

    /// Unmaps `page`, and returns its frame.
    fn remove(&self, page: u64) -> Option<PhysAddr> {
        let entry = self.entry(page)?;
        entry.table.store(ptr::null_mut(), Ordering::Relaxed);
        let frame = entry.frame.swap(0, Ordering::Relaxed);
        (frame != 0).then(|| PhysAddr::new(frame))
    }

    /// Whether `count` frames more are within the limit.
    fn has_room(&self, count: u64) -> bool {
        let frames = self.frames.frames_in_use() + self.pool.frames_in_use();
        let pages = frames + self.directory.load(Ordering::Relaxed).div_ceil(FRAME_SIZE);
        pages.saturating_add(count) <= self.pages()
    }
}

// SAFETY: 1 and 2: the frames are `pool`'s, found at its addresses for as long as they are allocated. 3: `self` owns the pool. 4: the
// defaults are true of it.
unsafe impl Frames for TraceMemory {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        if !self.has_room(count as u64) {
            self.refused.store(true, Ordering::Relaxed);
            return None;
        }
        let first = self.pool.alloc(count)?;
        for frame in (first.get()..).step_by(FRAME_SIZE as usize).take(count) {
            // An address that the directory covers.
            self.insert(frame >> PAGE_SHIFT, PhysAddr::new(frame), &self.pool)?;
        }
        self.peak_pool_frames.fetch_max(self.pool.frames_in_use(), Ordering::Relaxed);
        Some(first)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        for frame in (first.get()..).step_by(FRAME_SIZE as usize).take(count) {
            self.remove(frame >> PAGE_SHIFT);
        }
        self.pool.release(first, count);
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        self.pool.table_at(frame)
    }
}

// SAFETY: 1 and 2: each piece is accessed at its place in the directory; a piece without one is a stray. 3 and 4: one thread runs a replay,
// with its drivers and its devices; no mapping owns a buffer.
unsafe impl CopyMemory for TraceMemory {
    #[inline]
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        // One thread replays, so nothing is lost between the load and the store.
        self.copied.store(self.copied_bytes() + len, Ordering::Relaxed);
        let mut done = if self.broken.load(Ordering::Relaxed) { len } else { 0 };
        while done < len {
            let (from, to) = (from.get().wrapping_add(done), to.get().wrapping_add(done));
            let (here, there) = (from % FRAME_SIZE, to % FRAME_SIZE);
            let count = (FRAME_SIZE - here.max(there)).min(len - done);
            if let (Some(source), Some(target)) = (self.words(from), self.words(to)) {
                // SAFETY: both pieces lie inside their frames, and do not overlap by the caller's clause 1. Only this thread accesses them:
                // it runs the replay, with its drivers and its devices. Words are atomics, so they may be written through a shared
                // reference.
                unsafe {
                    let source = ptr::from_ref(source).cast::<u8>().add(here as usize);
                    let target = ptr::from_ref(target).cast_mut().cast::<u8>().add(there as usize);
                    ptr::copy_nonoverlapping(source, target, count as usize);
                }
            } else {
                self.strays.fetch_add(1, Ordering::Relaxed);
            }
            done += count;
        }
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        self.each(at, len, |phys, count| {
            let target = ptr::from_ref(self.words(phys)?).cast_mut().cast::<u8>();
            // SAFETY: as for `copy`.
            unsafe { ptr::write_bytes(target.add((phys % FRAME_SIZE) as usize), 0, count as usize) };
            Some(())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAR: u64 = 0xf_1234_5678_9f00;

    fn part(phys: u64, len: u64) -> PhysSegment {
        PhysSegment { phys: PhysAddr::new(phys), len }
    }

    #[test]
    fn copies_find_every_byte_and_nothing_beside_it() {
        let memory = TraceMemory::new(MOST_BYTES);
        // Far apart, unaligned, across pages, and across nodes of the directory.
        let buffer = memory.alloc(4).unwrap().get();
        for (from, to, len) in [
            (FAR, buffer + 5, 9000),
            (0xfff, buffer, 1),
            (0x1f_ffff_fff8, buffer + 4095, 4099),
            (buffer + 1, FAR, 8191),
        ] {
            assert!(memory.back(&[part(from - 1, len + 2), part(to - 1, len + 2)], |_| ()));
            let bytes: Vec<u8> = (0..len).map(|at| (at % 251 + 1) as u8).collect();
            memory.write(PhysAddr::new(from), &bytes);
            memory.write(PhysAddr::new(to - 1), &vec![0; len as usize + 2]);
            // SAFETY: clauses 1 and 2: all of it was backed just now, and is this thread's.
            unsafe { memory.copy(PhysAddr::new(from), PhysAddr::new(to), len) };
            let mut found = vec![7; len as usize + 2];
            memory.read(PhysAddr::new(to - 1), &mut found);
            assert_eq!((found[0], found[found.len() - 1]), (0, 0), "{len} bytes");
            assert!(found[1..=len as usize] == bytes[..], "{len} bytes");
            // SAFETY: as above.
            unsafe { memory.zero(PhysAddr::new(to), len - 1) };
            memory.read(PhysAddr::new(to), &mut found[..len as usize]);
            assert!(found[..len as usize - 1].iter().all(|byte| *byte == 0));
            assert_eq!(found[len as usize - 1], bytes[len as usize - 1]);
        }
        assert_eq!(memory.strays(), 0);
    }

    /// Bounce buffers have the rest.
    #[test]
    fn three_quarters_are_for_the_bytes_of_mappings() {
        let memory = TraceMemory::new(64 << 12);
        let could_hold = |pages: u64| memory.could_hold(&[part(FAR & !0xfff, pages << 12)]);
        assert_eq!([0, 47, 48, 49].map(could_hold), [true, true, true, false]);
        assert!(!memory.could_hold(&[part(FAR & !0xfff, 47 << 12), part(0x2000, 2 << 12)]));
    }

    #[test]
    fn what_is_let_go_of_is_gone_and_its_room_free_again() {
        let memory = TraceMemory::new(MOST_BYTES);
        let mut fresh = Vec::new();
        assert!(memory.back(&[part(0x1800, 0x2000), part(FAR, 1)], |page| fresh.push(page)));
        assert_eq!(fresh, [1, 2, 3, FAR >> 12]);
        assert!(memory.back(&[part(0x1000, 0x3000)], |_| panic!("they have frames")));
        let all = memory.frames.frames_in_use();
        memory.write(PhysAddr::new(0x2000), &[9]);
        memory.keep_only(|page| page == 2);
        assert_eq!(memory.frames.frames_in_use(), all - 3);
        let mut byte = [1];
        memory.read(PhysAddr::new(0x2000), &mut byte);
        assert_eq!((byte, memory.strays()), ([9], 0));
        memory.read(PhysAddr::new(FAR), &mut byte);
        assert_eq!((byte, memory.strays()), ([9], 1), "there is nothing to be read");
        // As after a free.
        let buffer = memory.alloc(2).unwrap();
        // SAFETY: clauses 1 and 2: allocated above, and no longer used.
        unsafe { memory.free(buffer, 2) };
        assert_eq!(memory.peak_pool_bytes(), 2 * FRAME_SIZE);
        // SAFETY: clauses 1 and 2: simulated memory of this thread, existing or not.
        unsafe { memory.copy(PhysAddr::new(0x2000), buffer, 1) };
        assert_eq!(memory.strays(), 2);
    }

    #[test]
    fn what_cannot_fit_takes_nothing() {
        let memory = TraceMemory::new(MOST_BYTES);
        // As long as a trace may claim.
        for len in [MOST_BYTES + 1, 1 << 52, u64::MAX] {
            assert!(!memory.back(&[part(0, len)], |_| panic!("not one page")));
        }
        assert!(!memory.back(&[part(0, MOST_BYTES), part(1 << 40, 1)], |_| panic!("not one page")));
        assert_eq!(memory.frames.frames_in_use(), 0);
        assert!(memory.alloc((MOST_BYTES / FRAME_SIZE) as usize + 1).is_none());
    }
}
