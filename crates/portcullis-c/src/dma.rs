//! Mappings by address: of buffers, of lists, and of memory that driver and device share.

use std::ffi::{c_int, c_void};

use portcullis::addr::{Direction, DmaSegment, Iova, PhysSegment};
use portcullis::dma::{CoherentMemory, MapAttributes, UnmapAttributes};
use portcullis_linux::buffer::segment;
use portcullis_linux::heap::Heap;

use crate::device::{PortcullisDevice, Shared, device, place};
use crate::error::{Failed, PortcullisMemory, PortcullisNotMapped, Result, code};

/// What a device does to a buffer.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortcullisDirection {
    /// It reads it.
    PortcullisToDevice = 0,
    /// It writes it.
    PortcullisFromDevice = 1,
    /// Both.
    PortcullisBidirectional = 2,
}

#[inline]
pub(crate) fn direction(number: u32) -> Result<Direction> {
    match number {
        0 => Ok(Direction::ToDevice),
        1 => Ok(Direction::FromDevice),
        2 => Ok(Direction::Bidirectional),
        _ => Err(Failed::argument("this is none of the directions that portcullis_direction names")),
    }
}

/// A piece of a list, in memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PortcullisPiece {
    /// Its first byte.
    pub memory: *mut c_void,
    /// Its bytes.
    pub len: usize,
}

/// A piece of a list, as the device is told of it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PortcullisSegment {
    /// Its first address.
    pub iova: u64,
    /// Its bytes.
    pub len: u64,
}

/// Lets the device reach `len` bytes at `buffer`, or a copy of them, and writes the address for the device to `iova`. The device does to them
/// what `direction`, a portcullis_direction, says. A buffer that is mapped and not copied is mapped with the rest of its pages.
///
/// Until portcullis_unmap has succeeded the buffer stays where it is, and is not freed. What the device has written to a copy is in the buffer after a
/// portcullis_sync_for_cpu or the unmap. No thread touches the buffer while this function, a sync or the unmap runs.
///
/// A copy takes the copying; a mapping one system call. May allocate.
///
/// # Safety
/// `device` is open, `iova` may be written, and what is said of the buffer holds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_map(
    device: *const PortcullisDevice,
    buffer: *mut c_void,
    len: usize,
    direction: u32,
    iova: *mut u64,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let (device, place) = unsafe { (self::device(device)?, place(iova)?) };
        let (direction, PhysSegment { phys, len }) =
            (self::direction(direction)?, segment(buffer.cast(), len));
        // SAFETY: the caller's promise: it is its memory to open, and nothing else touches it meanwhile.
        let mapped = unsafe { device.ops.map(phys, len, direction, MapAttributes::default()) };
        place.put(mapped?.get());
        Ok(())
    })
}

/// Lets the device reach `count` pieces in one range of addresses. Writes at most `count` segments to `out`, which has room for as many, and how many
/// to `used`: these are what the device is told, as pieces that touch are one. The list ends as a whole, by portcullis_unmap of all addresses
/// from the first byte of the first segment to the last byte of the last, gaps included.
///
/// One system call for each run of memory. Allocates. Else as portcullis_map.
///
/// # Safety
/// As portcullis_map, for each piece; and `pieces`, `out` and `used` are what is said of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_map_list(
    device: *const PortcullisDevice,
    pieces: *const PortcullisPiece,
    count: usize,
    direction: u32,
    out: *mut PortcullisSegment,
    used: *mut usize,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let (device, used) = unsafe { (self::device(device)?, place(used)?) };
        if pieces.is_null() || out.is_null() {
            return Err(Failed::argument("the pieces or the segments are null"));
        }
        let direction = self::direction(direction)?;
        let (mut list, mut found) = (Vec::new(), Vec::new());
        list.try_reserve_exact(count)?;
        found.try_reserve_exact(count)?;
        // SAFETY: the caller's promise: there are as many.
        let pieces = unsafe { std::slice::from_raw_parts(pieces, count) };
        list.extend(pieces.iter().map(|piece| segment(piece.memory.cast(), piece.len)));
        found.resize(count, DmaSegment { iova: Iova::new(0), len: 0 });
        // SAFETY: as for `portcullis_map`, for each piece.
        let count = unsafe { device.ops.map_sg(&list, direction, MapAttributes::default(), &mut found) }?;
        for (index, segment) in found.iter().take(count).enumerate() {
            let segment = PortcullisSegment { iova: segment.iova.get(), len: segment.len };
            // SAFETY: the caller's promise: there is room for as many segments as pieces.
            unsafe { out.add(index).write(segment) };
        }
        used.put(count);
        Ok(())
    })
}

/// Ends the mapping of `len` bytes at `iova`. When it has succeeded the device does not reach the buffer, and the buffer has what the device wrote.
///
/// It may be called while the device is still working, as after a transfer that failed: the device reaches the buffer no more.
///
/// PORTCULLIS_NOT_MAPPED says that no such mapping of this device is there, or that it has another length: nothing is changed. After
/// PORTCULLIS_REACHABLE the mapping is over, but the memory must not be used again or freed: the kernel has not taken it back.
///
/// A copy takes the copying; a mapping one system call. Allocates nothing.
///
/// # Safety
/// `device` is open, and no other call for this mapping runs at the same time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_unmap(device: *const PortcullisDevice, iova: u64, len: u64) -> c_int {
    code(|| {
        // SAFETY: the caller's promise, and that of the map.
        let ended =
            unsafe { self::device(device)?.ops.unmap(Iova::new(iova), len, UnmapAttributes::default()) };
        Ok(ended?)
    })
}

/// Lets the CPU see what the device has written to `len` bytes at `iova`, anywhere inside of a mapping, which goes on. No system call; a copy
/// takes the copying.
///
/// # Safety
/// As portcullis_unmap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_sync_for_cpu(
    device: *const PortcullisDevice,
    iova: u64,
    len: u64,
) -> c_int {
    // SAFETY: the caller's promise, and that of the map.
    code(|| unsafe { Ok(self::device(device)?.ops.sync_for_cpu(Iova::new(iova), len)?) })
}

/// Lets the device see what the CPU has written to `len` bytes at `iova`, anywhere inside of a mapping. No system call; a copy takes the copying.
/// For a device that only writes it copies nothing.
///
/// # Safety
/// As portcullis_unmap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_sync_for_device(
    device: *const PortcullisDevice,
    iova: u64,
    len: u64,
) -> c_int {
    // SAFETY: the caller's promise, and that of the map.
    code(|| unsafe { Ok(self::device(device)?.ops.sync_for_device(Iova::new(iova), len)?) })
}

/// Ends all mappings of the device that portcullis_map and portcullis_map_list have made, without copying anything to the buffers: for a device that was reset
/// or is gone. Writes to `count`, unless it is null, how many there were.
///
/// # Safety
/// `device` is open, and no other call for its mappings runs at the same time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_unmap_all(device: *const PortcullisDevice, count: *mut u64) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let left = unsafe { self::device(device)?.ops.unmap_all() }?;
        // SAFETY: the caller's promise.
        if let Ok(count) = unsafe { place(count) } {
            count.put(left.mappings);
        }
        Ok(())
    })
}

/// Allocates `len` zeroed bytes, in whole pages, that driver and device share until portcullis_free: for descriptor rings, and for buffers that are used
/// again and again. Writes where they are for the CPU to `memory`, and for the device to `iova`. The device reads and writes them at any time,
/// so the driver's accesses are atomic or volatile. One system call.
///
/// # Safety
/// `device` is open, and `memory` and `iova` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_alloc(
    device: *const PortcullisDevice,
    len: usize,
    memory: *mut *mut c_void,
    iova: *mut u64,
) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let (device, memory, iova) = unsafe { (self::device(device)?, place(memory)?, place(iova)?) };
        let shared = CoherentMemory::new(device.attached.dma(), Heap, len)?;
        let at = shared.as_ptr().ok_or_else(|| Failed::new(PortcullisMemory, "the memory is in pieces"))?;
        let mut all = device.shared();
        all.try_reserve(1)?;
        iova.put(shared.iova().get());
        memory.put(at.as_ptr().cast());
        all.push(shared);
        Ok(())
    })
}

/// Frees memory of portcullis_alloc. When it has succeeded the device does not reach it. PORTCULLIS_NOT_MAPPED says that this is no such
/// memory, or was freed: nothing is changed. After PORTCULLIS_REACHABLE it is never freed. One system call.
///
/// # Safety
/// `device` is open, and nothing uses the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_free(device: *const PortcullisDevice, memory: *mut c_void) -> c_int {
    code(|| {
        // SAFETY: the caller's promise.
        let mut all = unsafe { self::device(device) }?.shared();
        let is_it = |shared: &Shared| shared.as_ptr().is_some_and(|at| at.as_ptr().cast() == memory);
        let found = all.iter().position(is_it).map(|index| all.swap_remove(index));
        drop(all);
        let none =
            || Failed::new(PortcullisNotMapped, "portcullis_alloc gave no such memory, or it was freed");
        Ok(found.ok_or_else(none)?.free()?)
    })
}
