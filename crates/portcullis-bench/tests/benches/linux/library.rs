//! What stands in for the shared libraries with Linux's code: the same functions, as simple as can be. The tests compile
//! it (see `mod.rs`), as Linux's own is not part of this program. Where a call is not as Linux's code calls it, the call
//! fails, and so does the test.
//!
//! Each function has the contract of Linux's. The caller gives it a handle that the function's `new` or `init` has returned, and that no
//! `del` has ended; memory that it names is its own, and as long as it says.

#![cfg(not(empty))]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::ptr::null;
use std::sync::Mutex;

/// CPUs that the library knows.
// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub static kshim_ncpu: c_uint = if cfg!(without_cpus) { 0 } else { 4096 };

/// Live ranges of pages, by the first.
type Space = Mutex<BTreeMap<u64, u64>>;

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub extern "C" fn peer_iova_new() -> *mut Space {
    // `alloc_iova_fast` returns 0 where there is no room, so page 0 is never handed out.
    Box::into_raw(Box::new(Mutex::new(BTreeMap::from([(0, 1)]))))
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peer_iova_del(space: *mut Space) {
    // SAFETY: the caller's promise: the handle is live.
    drop(unsafe { Box::from_raw(space) });
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn alloc_iova_fast(
    space: *mut Space,
    pages: c_ulong,
    last: c_ulong,
    flush: bool,
) -> c_ulong {
    // SAFETY: the caller's promise: the handle is live.
    let mut live = unsafe { &*space }.lock().unwrap();
    // Every space of the benchmark ends at a power of two.
    if !flush || !(last + 1).is_power_of_two() {
        return 0;
    }
    let align = pages.next_power_of_two();
    let mut end = last + 1;
    for (first, len) in live.iter().rev() {
        let place = (end - pages) / align * align;
        if place >= first + len {
            live.insert(place, pages);
            return place;
        }
        end = *first;
        if end < pages {
            break;
        }
    }
    0
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_iova_fast(space: *mut Space, first: c_ulong, pages: c_ulong) {
    // SAFETY: the caller's promise: the handle is live.
    let mut live = unsafe { &*space }.lock().unwrap();
    // What is freed in another length stays, and the space runs full.
    if live.get(&first) == Some(&pages) {
        live.remove(&first);
    }
}

const FORMATS: [&std::ffi::CStr; 8] = [
    c"amdv1",
    c"arm s1 6.12",
    c"arm s1 new",
    c"arm s2 6.12",
    c"arm s2 new",
    c"riscv64",
    c"vtdss",
    c"x86_64",
];

/// Pages by their address: the memory that each leads to, and its size.
type Tables = Mutex<BTreeMap<u64, (u64, u64)>>;

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub extern "C" fn rival_pt_name(number: c_int) -> *const c_char {
    FORMATS.get(number as usize).map_or(null(), |name| name.as_ptr())
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub extern "C" fn rival_pt_new(number: c_int, flags: c_uint) -> *mut Tables {
    let name = FORMATS[number as usize].to_bytes();
    // AMD's and RISC-V's are for walkers that are coherent.
    let coherent_only = name == b"amdv1" || name == b"riscv64";
    if flags & !2 != 0 || flags == 2 && coherent_only {
        return std::ptr::null_mut();
    }
    Box::into_raw(Box::default())
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rival_pt_del(tables: *mut Tables) {
    // SAFETY: the caller's promise: the handle is live.
    drop(unsafe { Box::from_raw(tables) });
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rival_pt_map(
    tables: *mut Tables,
    iova: u64,
    phys: u64,
    page: usize,
    pages: usize,
) -> usize {
    // SAFETY: the caller's promise: the handle is live.
    let mut tables = unsafe { &*tables }.lock().unwrap();
    for at in (0..pages as u64).map(|number| number * page as u64) {
        if tables.insert(iova + at, (phys + at, page as u64)).is_some() {
            return at as usize;
        }
    }
    page * pages
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rival_pt_unmap(tables: *mut Tables, iova: u64, page: usize, pages: usize) -> usize {
    // SAFETY: the caller's promise: the handle is live.
    let mut tables = unsafe { &*tables }.lock().unwrap();
    let each = (0..pages as u64).map(|number| iova + number * page as u64);
    each.filter(|at| tables.remove(at).is_some_and(|(_, size)| size == page as u64)).count() * page
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rival_pt_iova_to_phys(tables: *mut Tables, iova: u64) -> u64 {
    // SAFETY: the caller's promise: the handle is live.
    let tables = unsafe { &*tables }.lock().unwrap();
    let below = tables.range(..=iova).next_back();
    below.filter(|(at, (_, size))| iova - **at < *size).map_or(0, |(at, (phys, _))| phys + (iova - at))
}

/// A pool's memory, and which of its slots of 2 KiB are taken.
struct Pool {
    memory: Vec<u64>,
    taken: Vec<bool>,
}

const SLOT: u64 = 2048;
static POOL: Mutex<Option<Pool>> = Mutex::new(None);
/// What a device holds of the pool once it has been set up.
static MARK: u8 = 0;

/// The beginning of Linux's device, as far as it is written here.
#[repr(C)]
pub struct Device {
    parameters: *const c_void,
    memory: *const u8,
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub extern "C" fn peer_swiotlb_init(areas: c_uint, slots: c_ulong) {
    // As Linux does, it wants a power of two of each.
    let is_right = areas.is_power_of_two() && slots.is_power_of_two();
    let slots = if is_right { slots } else { 0 };
    let (memory, taken) = (vec![0; (slots * SLOT / 8) as usize], vec![false; slots as usize]);
    *POOL.lock().unwrap() = Some(Pool { memory, taken });
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn swiotlb_dev_init(device: *mut Device) {
    // SAFETY: the caller's promise: the handle is live.
    unsafe { &mut *device }.memory = &raw const MARK;
}

impl Pool {
    fn start(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    fn take(&mut self, bytes: u64) -> Option<u64> {
        let count = bytes.div_ceil(SLOT) as usize;
        let first = self.taken.windows(count).position(|run| run.iter().all(|taken| !taken))?;
        self.taken[first..first + count].fill(true);
        Some(first as u64)
    }
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peer_find_slots(device: *mut Device, _: u64, bytes: usize) -> c_long {
    let mut pool = POOL.lock().unwrap();
    // SAFETY: the caller's promise: the device is there.
    let Some(pool) = pool.as_mut().filter(|_| unsafe { &*device }.memory == &raw const MARK) else { return -1 };
    pool.take(bytes as u64).map_or(-1, |slot| (pool.start() + slot * SLOT) as c_long)
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peer_release_slots(_: *mut Device, at: u64) {
    let mut pool = POOL.lock().unwrap();
    let pool = pool.as_mut().unwrap();
    let slot = (at - pool.start()) / SLOT;
    pool.taken[slot as usize] = false;
}

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn swiotlb_tbl_map_single(
    device: *mut Device,
    phys: u64,
    bytes: usize,
    align: c_uint,
    direction: c_int,
    attributes: c_ulong,
) -> u64 {
    if align != 0 || attributes != 0 || !(0..=2).contains(&direction) {
        return u64::MAX;
    }
    // SAFETY: the caller's promise.
    let at = unsafe { peer_find_slots(device, phys, bytes) };
    if at > 0 {
        // What the device does not write is to be there afterwards, so this is done in every direction.
        // SAFETY: the caller's buffer has `bytes` bytes at `phys`, and the slots found have as many, which are the pool's alone.
        unsafe { std::ptr::copy_nonoverlapping(phys as *const u8, at as *mut u8, bytes) };
        ORIGINALS.lock().unwrap().insert(at as u64, phys);
    }
    at as u64
}

/// The buffer that each copy is of.
static ORIGINALS: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

// SAFETY: no other function or static of a test's program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __swiotlb_tbl_unmap_single(
    _: *mut Device,
    at: u64,
    bytes: usize,
    direction: c_int,
    _: c_ulong,
    memory: *const u8,
) {
    let Some(original) = ORIGINALS.lock().unwrap().remove(&at) else { return };
    if direction != 1 && memory == &raw const MARK {
        // SAFETY: as for the copy there, which named this buffer.
        unsafe { std::ptr::copy_nonoverlapping(at as *const u8, original as *mut u8, bytes) };
    }
    let mut pool = POOL.lock().unwrap();
    let pool = pool.as_mut().unwrap();
    let first = ((at - pool.start()) / SLOT) as usize;
    pool.taken[first..first + (bytes as u64).div_ceil(SLOT) as usize].fill(false);
}
