//! Linux's own swiotlb, in a shared library that the user names.
//!
//! Linux has one pool for the whole machine, and so has the library: a subject sets it up anew, and no two can be in
//! use at once.

use std::ffi::{c_int, c_long, c_uint, c_ulong, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use portcullis::addr::Direction;

use super::memory::Buffers;
use super::subject::Subject;
use super::workload::{Case, SLOT, Shape};
use crate::lane::Lane;
use crate::rival::{self, RivalError};
use crate::runner::Failure;

type Init = unsafe extern "C" fn(c_uint, c_ulong);
type DeviceInit = unsafe extern "C" fn(*mut Device);
type Map = unsafe extern "C" fn(*mut Device, u64, usize, c_uint, c_int, c_ulong) -> u64;
type Unmap = unsafe extern "C" fn(*mut Device, u64, usize, c_int, c_ulong, *mut c_void);
type Find = unsafe extern "C" fn(*mut Device, u64, usize) -> c_long;
type Release = unsafe extern "C" fn(*mut Device, u64);

/// The parameters of a device, as the library lays them out.
#[repr(C)]
struct Parameters {
    max_segment_size: c_uint,
    min_align_mask: c_uint,
    segment_boundary_mask: c_ulong,
}

/// A device, as the library lays it out.
#[repr(C)]
struct Device {
    parameters: *const Parameters,
    /// The machine's pool, which begins with that of its memory that is there from the start.
    memory: *mut c_void,
    mask: *const u64,
    bus_limit: u64,
    skip_sync: bool,
}

static PARAMETERS: Parameters =
    Parameters { max_segment_size: 0, min_align_mask: 0, segment_boundary_mask: 0xffff_ffff };
static MASK: u64 = u64::MAX;

/// The library's functions. It is never closed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Library {
    init: Init,
    device_init: DeviceInit,
    map: Map,
    unmap: Unmap,
    find: Find,
    release: Release,
    /// CPUs that the library knows.
    cpus: usize,
}

impl Library {
    pub(crate) fn open(path: &Path) -> Result<Self, RivalError> {
        let library = rival::Library::open(path, "Linux's swiotlb")?;
        // SAFETY: these are the types that the library's functions and its variable have in C.
        unsafe {
            Ok(Self {
                init: library.get("peer_swiotlb_init")?,
                device_init: library.get("swiotlb_dev_init")?,
                map: library.get("swiotlb_tbl_map_single")?,
                unmap: library.get("__swiotlb_tbl_unmap_single")?,
                find: library.get("peer_find_slots")?,
                release: library.get("peer_release_slots")?,
                cpus: *library.get::<*const c_uint>("kshim_ncpu")? as usize,
            })
        }
    }
}

/// Whether somebody has set up the pool.
static IN_USE: AtomicBool = AtomicBool::new(false);

/// The machine's pool.
pub(crate) struct Linux {
    library: Library,
    case: Case,
}

impl Linux {
    /// `last_core` is the highest core that any thread runs on.
    pub(crate) fn new(
        library: &Library,
        case: &Case,
        last_core: Option<usize>,
        cores: usize,
    ) -> Result<Self, Failure> {
        if last_core.is_none_or(|core| core >= library.cpus) {
            let reason = format!("the library knows {} CPUs only", library.cpus);
            return Err(Failure::Unsupported(reason));
        }
        if IN_USE.swap(true, Ordering::AcqRel) {
            return Err(Failure::Unsupported("the library has one pool, which is in use".into()));
        }
        let subject = Self { library: *library, case: *case };
        let areas = case.threads.min(cores).next_power_of_two();
        // SAFETY: no other thread is in the library, and nothing that it had given out is in use any more: `IN_USE` was
        // false. An area for each CPU and a whole power of two of slots are what it asks for.
        unsafe { (library.init)(areas as c_uint, case.pool_bytes() / SLOT) };
        Ok(subject)
    }
}

impl Drop for Linux {
    fn drop(&mut self) {
        IN_USE.store(false, Ordering::Release);
    }
}

impl Subject for Linux {
    fn lane(self: Arc<Self>, _: usize, buffers: Arc<Buffers>) -> Result<Box<dyn Lane>, Failure> {
        // As Linux numbers them.
        let direction = match self.case.direction() {
            Direction::Bidirectional => 0,
            Direction::ToDevice => 1,
            Direction::FromDevice => 2,
        };
        let mut device = Box::new(Device {
            parameters: &raw const PARAMETERS,
            memory: ptr::null_mut(),
            mask: &raw const MASK,
            bus_limit: 0,
            skip_sync: false,
        });
        // SAFETY: the device is laid out as the library's, and no other code has it.
        unsafe { (self.library.device_init)(&raw mut *device) };
        let at = vec![0; self.case.buffers()];
        let slots_only = self.case.shape == Shape::Slot;
        Ok(match slots_only {
            true => Box::new(Mappings::<true> { pool: self, device, direction, buffers, at }),
            false => Box::new(Mappings::<false> { pool: self, device, direction, buffers, at }),
        })
    }

    fn reach(&self, address: u64) -> Option<u64> {
        Some(address)
    }

    fn settle(&self) -> Result<(), Failure> {
        // What is in use can be seen in no way that the library offers: all mappings were unmapped one by one.
        Ok(())
    }
}

/// A driver's mappings, or with `SLOTS` only their slots.
struct Mappings<const SLOTS: bool> {
    pool: Arc<Linux>,
    device: Box<Device>,
    direction: c_int,
    buffers: Arc<Buffers>,
    at: Vec<u64>,
}

// SAFETY: what the device points to is static and never changes, but for the machine's pool, which Linux uses on any CPU,
// with locks of its own.
unsafe impl<const SLOTS: bool> Send for Mappings<SLOTS> {}

impl<const SLOTS: bool> Lane for Mappings<SLOTS> {
    #[inline(always)]
    fn map(&mut self, index: usize) -> bool {
        let (buffer, bytes) = (self.buffers.at(index), self.buffers.bytes() as usize);
        let (library, device) = (&self.pool.library, &raw mut *self.device);
        let at = if SLOTS {
            // SAFETY: the library finds its area by the CPU it runs on, which `new` has seen that it knows: no thread of
            // the team leaves its core. The pool is set up as long as this is there.
            (unsafe { (library.find)(device, buffer, bytes) }) as u64
        } else {
            // SAFETY: as above; the buffer is memory of this process, whose addresses the library takes to be physical.
            unsafe { (library.map)(device, buffer, bytes, 0, self.direction, 0) }
        };
        self.at[index] = at;
        at != u64::MAX
    }

    #[inline(always)]
    fn unmap(&mut self, index: usize) -> bool {
        let (library, device, at) = (&self.pool.library, &raw mut *self.device, self.at[index]);
        if SLOTS {
            // SAFETY: `map` got the slots, which are given back once.
            unsafe { (library.release)(device, at) };
        } else {
            let (bytes, memory) = (self.buffers.bytes() as usize, self.device.memory);
            // SAFETY: as above; all memory of the pool was there from the start, and what describes that comes first in
            // what `memory` points to, as Linux's own inline function finds it.
            unsafe { (library.unmap)(device, at, bytes, self.direction, 0, memory) };
        }
        true
    }

    fn address(&self, index: usize) -> u64 {
        self.at[index]
    }
}

#[cfg(test)]
mod tests {
    use super::super::workload::Way;
    use super::*;
    use crate::rival::noted::{self, note};

    unsafe extern "C" fn init(areas: c_uint, slots: c_ulong) {
        note(format!("init {areas} {slots}"));
    }

    unsafe extern "C" fn device_init(_: *mut Device) {}

    unsafe extern "C" fn map(
        _: *mut Device,
        _: u64,
        bytes: usize,
        align: c_uint,
        way: c_int,
        more: c_ulong,
    ) -> u64 {
        note(format!("map {bytes} {align} {way} {more}"));
        if bytes == 5000 { u64::MAX } else { 0x7000 }
    }

    unsafe extern "C" fn unmap(
        _: *mut Device,
        at: u64,
        bytes: usize,
        way: c_int,
        more: c_ulong,
        _: *mut c_void,
    ) {
        note(format!("unmap {at:#x} {bytes} {way} {more}"));
    }

    unsafe extern "C" fn find(_: *mut Device, _: u64, bytes: usize) -> c_long {
        note(format!("find {bytes}"));
        0x9000
    }

    unsafe extern "C" fn release(_: *mut Device, at: u64) {
        note(format!("release {at:#x}"));
    }

    /// Linux numbers directions: 0 both, 1 to the device, 2 from it.
    #[test]
    fn the_library_is_given_what_linux_gives_it() {
        let library = Library { init, device_init, map, unmap, find, release, cpus: 4 };
        let case = |shape, way, threads| Case { shape, way, threads, depth: 1, crowded: false };
        let one = case(Shape::Swiotlb(3000), Some(Way::To), 3);
        for last_core in [Some(4), None] {
            let refused = Linux::new(&library, &one, last_core, 8).err();
            assert_eq!(refused, Some(Failure::Unsupported("the library knows 4 CPUs only".into())));
        }
        let calls = |case: Case, cores| {
            let linux = Arc::new(Linux::new(&library, &case, Some(3), cores).unwrap());
            let taken = Linux::new(&library, &case, Some(3), cores).err();
            assert_eq!(taken, Some(Failure::Unsupported("the library has one pool, which is in use".into())));
            let buffers = Arc::new(Buffers::new(case.buffers(), case.shape.bytes()).unwrap());
            let mut lane = Arc::clone(&linux).lane(0, buffers).unwrap();
            if lane.map(1) {
                assert!(lane.address(1) != 0 && lane.unmap(1));
            }
            assert_eq!((linux.reach(0x7000), linux.settle()), (Some(0x7000), Ok(())));
            noted::calls()
        };
        // An area for each thread that has a core; 64 MiB of slots of 2 KiB.
        assert_eq!(calls(one, 8), ["init 4 32768", "map 3000 0 1 0", "unmap 0x7000 3000 1 0"]);
        let from = case(Shape::Swiotlb(8192), Some(Way::From), 3);
        assert_eq!(calls(from, 2), ["init 2 32768", "map 8192 0 2 0", "unmap 0x7000 8192 2 0"]);
        let both = case(Shape::Swiotlb(1024), Some(Way::Both), 1);
        assert_eq!(calls(both, 2), ["init 1 32768", "map 1024 0 0 0", "unmap 0x7000 1024 0 0"]);
        assert_eq!(calls(case(Shape::Slot, None, 1), 2), ["init 1 32768", "find 2048", "release 0x9000"]);
        assert_eq!(
            calls(case(Shape::Swiotlb(5000), Some(Way::To), 1), 1),
            ["init 1 32768", "map 5000 0 1 0"]
        );
    }
}
