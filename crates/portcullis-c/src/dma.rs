//! Mappings by address: of buffers and lists; and coherent memory.

use std::ffi::{c_int, c_void};

use portcullis::addr::{Direction, DmaSegment, Iova, PhysSegment};
use portcullis::dma::{CoherentMemory, DmaAttributes};
use portcullis_linux::buffer::segment;
use portcullis_linux::heap::Heap;

use crate::device::{PortcullisDevice, Shared, device, place};
use crate::error::{Failed, PortcullisMemory, PortcullisNotMapped, Result, code};

/// How a device accesses a buffer.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortcullisDirection {
    /// The device reads it.
    PortcullisToDevice = 0,
    /// The device writes it.
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

/// A piece of memory in a list.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PortcullisPiece {
    /// Its address.
    pub memory: *mut c_void,
    /// Its length in bytes.
    pub len: usize,
}

/// A piece of a list for the device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PortcullisSegment {
    /// Its IOVA.
    pub iova: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// Lets the device reach `len` bytes at `buffer`, or a copy of them, and writes the IOVA to `iova`. The device accesses them by
/// `direction`, a portcullis_direction. A buffer that is mapped instead of copied is mapped with the rest of its pages.
///
/// Until portcullis_unmap has succeeded the buffer is neither moved nor freed. The device's writes to a copy are in the buffer after a
/// portcullis_sync_for_cpu or the unmap. No thread accesses the buffer while this function, a sync or the unmap runs.
///
/// Costs the copy, or one system call for a mapping. May allocate.
///
/// # Safety
/// 1. `device` is open. 2. `iova` may be written. 3. The above holds for the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_map(
    device: *const PortcullisDevice,
    buffer: *mut c_void,
    len: usize,
    direction: u32,
    iova: *mut u64,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (device, place) = unsafe { (self::device(device)?, place(iova)?) };
        let (direction, PhysSegment { phys, len }) =
            (self::direction(direction)?, segment(buffer.cast(), len));
        // SAFETY: clause 3: it is the caller's memory to open, and no thread accesses it meanwhile.
        let mapped = unsafe { device.ops.map(phys, len, direction, DmaAttributes::default()) };
        place.put(mapped?.get());
        Ok(())
    })
}

/// Lets the device reach `count` pieces in one range of addresses. Writes at most `count` segments to `out`, which has room for as many,
/// and their number to `used`: these are for the device; adjacent pieces are merged. The list ends as a whole, by portcullis_unmap of all
/// addresses from the first byte of the first segment to the last byte of the last, including gaps.
///
/// One system call for each run of memory. Allocates. Otherwise as portcullis_map.
///
/// # Safety
/// 1. As portcullis_map, for each piece. 2. `pieces`, `out` and `used` are as described.
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
        // SAFETY: clauses 1 and 2 are the caller's.
        let (device, used) = unsafe { (self::device(device)?, place(used)?) };
        if pieces.is_null() || out.is_null() {
            return Err(Failed::argument("the pieces or the segments are null"));
        }
        let direction = self::direction(direction)?;
        let (mut list, mut found) = (Vec::new(), Vec::new());
        list.try_reserve_exact(count)?;
        found.try_reserve_exact(count)?;
        // SAFETY: clause 2: there are as many.
        let pieces = unsafe { std::slice::from_raw_parts(pieces, count) };
        list.extend(pieces.iter().map(|piece| segment(piece.memory.cast(), piece.len)));
        found.resize(count, DmaSegment { iova: Iova::new(0), len: 0 });
        // SAFETY: clause 1: as for `portcullis_map`, for each piece.
        let count = unsafe { device.ops.map_sg(&list, direction, DmaAttributes::default(), &mut found) }?;
        for (index, segment) in found.iter().take(count).enumerate() {
            let segment = PortcullisSegment { iova: segment.iova.get(), len: segment.len };
            // SAFETY: clause 2: there is room for as many segments as pieces.
            unsafe { out.add(index).write(segment) };
        }
        used.put(count);
        Ok(())
    })
}

/// Ends the mapping of `len` bytes at `iova`. After success the device does not reach the buffer, which has the device's writes.
///
/// It may be called while the device is still working, such as after a failed transfer: the device no longer reaches the buffer.
///
/// PORTCULLIS_NOT_MAPPED: this device has no such mapping, or it has another length; nothing has changed. After PORTCULLIS_REACHABLE the
/// mapping is over, but the memory must be neither reused nor freed: the kernel has not removed the mapping.
///
/// Costs the copy, or one system call for a mapping. Does not allocate.
///
/// # Safety
/// 1. `device` is open. 2. No other call for this mapping runs at the same time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_unmap(device: *const PortcullisDevice, iova: u64, len: u64) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2, and clause 3 of the map, are the caller's.
        let ended =
            unsafe { self::device(device)?.ops.unmap(Iova::new(iova), len, DmaAttributes::default()) };
        Ok(ended?)
    })
}

/// Shows the CPU the device's writes to `len` bytes at `iova`, anywhere inside a mapping, which continues. No system call; costs the copy.
///
/// # Safety
/// As portcullis_unmap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_sync_for_cpu(
    device: *const PortcullisDevice,
    iova: u64,
    len: u64,
) -> c_int {
    // SAFETY: clauses 1 and 2 of `portcullis_unmap`, and clause 3 of the map, are the caller's.
    code(|| unsafe { Ok(self::device(device)?.ops.sync_for_cpu(Iova::new(iova), len)?) })
}

/// Shows the device the CPU's writes to `len` bytes at `iova`, anywhere inside a mapping. No system call; costs the copy. Copies nothing
/// for a device that only writes it.
///
/// # Safety
/// As portcullis_unmap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_sync_for_device(
    device: *const PortcullisDevice,
    iova: u64,
    len: u64,
) -> c_int {
    // SAFETY: clauses 1 and 2 of `portcullis_unmap`, and clause 3 of the map, are the caller's.
    code(|| unsafe { Ok(self::device(device)?.ops.sync_for_device(Iova::new(iova), len)?) })
}

/// Ends all of the device's mappings by portcullis_map and portcullis_map_list, without copying to the buffers: for a device that was reset
/// or is gone. Writes their number to `count`, unless it is null.
///
/// # Safety
/// 1. `device` is open. 2. No other call for its mappings runs at the same time. 3. `count` is null, or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_unmap_all(device: *const PortcullisDevice, count: *mut u64) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (mappings, _) = unsafe { self::device(device)?.ops.unmap_all() }?;
        // SAFETY: clause 3 is the caller's.
        if let Ok(count) = unsafe { place(count) } {
            count.put(mappings);
        }
        Ok(())
    })
}

/// Allocates `len` zeroed bytes, in whole pages, of coherent memory until portcullis_free: for descriptor rings, and for long-lived
/// buffers. Writes its address for the CPU to `memory`, and its IOVA to `iova`. The device accesses it at any time, so the driver's
/// accesses are atomic or volatile. One system call.
///
/// # Safety
/// 1. `device` is open. 2. `memory` and `iova` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_alloc(
    device: *const PortcullisDevice,
    len: usize,
    memory: *mut *mut c_void,
    iova: *mut u64,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
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

/// Frees memory of portcullis_alloc. After success the device does not reach it. PORTCULLIS_NOT_MAPPED: it is no such memory, or was freed;
/// nothing has changed. After PORTCULLIS_REACHABLE it is never freed. One system call.
///
/// # Safety
/// 1. `device` is open. 2. Nothing uses the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_free(device: *const PortcullisDevice, memory: *mut c_void) -> c_int {
    code(|| {
        // SAFETY: clause 1 is the caller's.
        let mut all = unsafe { self::device(device) }?.shared();
        let is_it = |shared: &Shared| shared.as_ptr().is_some_and(|at| at.as_ptr().cast() == memory);
        let found = all.iter().position(is_it).map(|index| all.swap_remove(index));
        drop(all);
        let none =
            || Failed::new(PortcullisNotMapped, "portcullis_alloc gave no such memory, or it was freed");
        Ok(found.ok_or_else(none)?.free()?)
    })
}
