//! Domains and devices for the C shim: each domain is one of Linux's IOMMU domains, each device a [`DmaOps`].

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::mem::MaybeUninit;
use core::ptr;

use portcullis::SetupError;
use portcullis::addr::{
    DeviceId, Direction, DmaSegment, Iova, IovaRange, PageSize, PageSizes, PhysAddr, PhysSegment,
};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{
    self, DmaAttributes, DmaDomain, DmaMapError, DmaMask, DmaOps, DmaUnmapError, OpsConfig,
};
use portcullis::domain::{MapListError, PolicyError, UnmapError};
use portcullis::heap::Shared;
use portcullis::mapper::Geometry;

use crate::ffi::{self, DeviceConfig, DomainConfig, Policy, Segment, Usage};
use crate::mapper::LinuxMapper;
use crate::memory::{Memory, set_direct_map};
use crate::platform::{Kernel, Machine};

/// The types of the core's parameters here.
pub enum Linux {}

impl dma::Machine for Linux {
    type Mapper = LinuxMapper;
    type Platform = Machine;
    type Memory = Memory;
}

// The kernel's error codes.
const EIO: i32 = -5;
const ENOMEM: i32 = -12;
const EBUSY: i32 = -16;
const EINVAL: i32 = -22;
const ENOSPC: i32 = -28;
const ERANGE: i32 = -34;

/// The largest slot of a pool, the size of a large page, so that any threshold may be set while devices run. Its memory exists only while
/// it is used.
const LARGEST_SLOT: u64 = 2 << 20;

/// A pool buffer's idle time, and the period in which a pool learns its demand: longer than the five seconds between file systems' commits,
/// so that these find their buffers mapped.
const IDLE_NS: u64 = 10_000_000_000;

/// `struct pc_domain`.
pub struct Domain {
    kernel: Shared<Kernel>,
    domain: DmaDomain<Linux>,
}

/// `struct pc_device`.
pub type Device = DmaOps<Linux>;

fn config(policy: &Policy) -> OpsConfig {
    match policy.kind {
        ffi::LAZY => OpsConfig::Lazy { window_ns: policy.window_ns },
        ffi::BOUNCE => OpsConfig::Bounce { threshold: policy.threshold.min(LARGEST_SLOT) },
        ffi::AUTO => OpsConfig::Auto { threshold: policy.threshold.min(LARGEST_SLOT) },
        // Nothing is copied as a whole, except the ends of partial pages.
        _ if policy.ends != 0 => OpsConfig::Bounce { threshold: 0 },
        _ => OpsConfig::Strict,
    }
}

fn setup_error(error: &SetupError) -> i32 {
    match error {
        SetupError::OutOfMemory => ENOMEM,
        SetupError::BeyondReach { .. } | SetupError::Space(_) => ENOSPC,
        _ => EINVAL,
    }
}

fn map_error(error: &DmaMapError) -> i32 {
    match error {
        DmaMapError::List(
            MapListError::EmptyList | MapListError::EmptySegment { .. } | MapListError::Wraps { .. },
        ) => EINVAL,
        // Only with this error may devices reach the memory.
        DmaMapError::List(MapListError::Unconfirmed { .. }) => EIO,
        _ => ENOMEM,
    }
}

fn unmap_error(error: &DmaUnmapError) -> i32 {
    match error {
        DmaUnmapError::Busy { .. } => EBUSY,
        DmaUnmapError::OutOfRange { .. } => ERANGE,
        // Only with these errors may devices go on reaching the memory.
        DmaUnmapError::Unconfirmed { .. }
        | DmaUnmapError::StillMapped { .. }
        | DmaUnmapError::Unmap(UnmapError::Unconfirmed { .. } | UnmapError::StillMapped { .. }) => EIO,
        _ => EINVAL,
    }
}

/// The last address of the largest tables of any driver: 57 bits, by VT-d's five levels.
const MOST_LAST: u64 = (1 << 57) - 1;
/// That of four-level tables: each unit has these whose driver reports 64 bits.
const USUAL_LAST: u64 = (1 << 48) - 1;

fn new_domain(config: &DomainConfig) -> Result<Domain, i32> {
    let bounds = |first, last| IovaRange::from_bounds(Iova::new(first), Iova::new(last)).map_err(|_| EINVAL);
    let sizes = (12..48).filter(|shift| config.page_sizes >> shift & 1 == 1).filter_map(PageSize::from_shift);
    let page_sizes = sizes.fold(PageSizes::EMPTY, PageSizes::with);
    let mut reserved = Vec::new();
    reserved.try_reserve_exact(config.reserved_count).map_err(|_| ENOMEM)?;
    if config.reserved_count > 0 {
        // SAFETY: clause 1: the shim's list.
        let ranges = unsafe { core::slice::from_raw_parts(config.reserved, config.reserved_count) };
        for range in ranges {
            reserved.push(bounds(range.first, range.last)?);
        }
    }
    // AMD's driver reports all 64 bits, whatever the unit's tables can have: not every unit has more than four levels.
    let last = if config.last > MOST_LAST { USUAL_LAST } else { config.last };
    let geometry = Geometry { aperture: bounds(config.first, last)?, page_sizes, reserved };
    let kernel = Kernel::new(config.group).and_then(Shared::new).map_err(|_| ENOMEM)?;
    let mapper = LinuxMapper::new(config.group, geometry);
    // Every device that reaches 4 GiB reaches the pool.
    let pool = PoolConfig {
        threshold: LARGEST_SLOT,
        limit: Iova::new(DmaMask::BITS_32.last()),
        idle_ns: IDLE_NS,
        ..PoolConfig::default()
    };
    let builder = dma::DomainBuilder::new(mapper).bounce(Memory, pool);
    let domain = builder.build_as(Machine(kernel.clone())).map_err(|error| setup_error(&error))?;
    Ok(Domain { kernel, domain })
}

/// Makes a device in `place`.
fn new_device<'a>(
    domain: &Domain,
    of: &DeviceConfig,
    place: &'a mut MaybeUninit<Device>,
) -> Result<&'a mut Device, i32> {
    let device = domain.domain.attach(DeviceId(of.number), DmaMask::BITS_64);
    let device = device.map_err(|error| setup_error(&error))?;
    let device = if of.untrusted == 0 { device.trusted() } else { device };
    let ops = device.ops_in(config(&of.policy), place).map_err(|error| setup_error(&error))?;
    match ops.set_limits(of.mask, of.offset_mask) {
        Ok(()) => Ok(ops),
        Err(error) => {
            // SAFETY: it was made just now, and has no other user.
            unsafe { ptr::drop_in_place(ops) };
            Err(setup_error(&error))
        }
    }
}

/// Passes the result of `make` to the shim, without a copy on the stack.
fn give<T>(
    make: impl for<'a> FnOnce(&'a mut MaybeUninit<T>) -> Result<&'a mut T, i32>,
    out: *mut *mut T,
) -> i32 {
    let mut place = Vec::<T>::new();
    if place.try_reserve_exact(1).is_err() {
        return ENOMEM;
    }
    let empty = &mut place.spare_capacity_mut()[0];
    let at = empty.as_mut_ptr();
    match make(empty) {
        Ok(made) if ptr::from_ref(made) == at.cast_const() => {}
        Ok(_) => return EINVAL,
        Err(error) => return error,
    }
    // SAFETY: there is room for one, and `make` has returned a reference to the one that it wrote.
    unsafe { place.set_len(1) };
    let place: Box<[T]> = place.into_boxed_slice();
    // SAFETY: the shim's pointer. A slice of one has the layout of its element, so `take` may treat it as a box.
    unsafe { *out = Box::into_raw(place).cast() };
    0
}

/// Frees a value of `give`.
///
/// # Safety
/// 1. It is of `give`, and was not freed.
/// 2. Nothing uses it any more.
unsafe fn take<T>(given: *mut T) {
    // SAFETY: clauses 1 and 2.
    drop(unsafe { Box::from_raw(given) });
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn pc_init(direct_map: usize) {
    set_direct_map(direct_map);
}

/// See the header.
///
/// # Safety
/// 1. Both pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_domain_new(config: *const DomainConfig, out: *mut *mut Domain) -> i32 {
    // SAFETY: clause 1 is the caller's.
    let config = unsafe { &*config };
    give(|place| Ok(place.write(new_domain(config)?)), out)
}

/// See the header.
///
/// # Safety
/// 1. It is of `pc_domain_new`, and without devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_domain_free(domain: *mut Domain) {
    // SAFETY: 1 and 2: clause 1 is the caller's; the shim frees it once.
    unsafe { take(domain) };
}

/// See the header.
///
/// # Safety
/// 1. It is of `pc_domain_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_domain_timer(domain: *mut Domain) {
    // SAFETY: clause 1 is the caller's.
    unsafe { &*domain }.kernel.timer();
}

/// See the header.
///
/// # Safety
/// 1. It is of `pc_domain_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_domain_cpu_released(domain: *mut Domain, cpu: u32) {
    // SAFETY: clause 1 is the caller's.
    unsafe { &*domain }.kernel.cpu_released(cpu as usize);
}

/// See the header.
///
/// # Safety
/// 1. All three pointers are valid.
/// 2. The domain outlives the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_device_new(
    domain: *mut Domain,
    config: *const DeviceConfig,
    out: *mut *mut Device,
) -> i32 {
    // SAFETY: clause 1 is the caller's.
    let (domain, config) = unsafe { (&*domain, &*config) };
    give(|place| new_device(domain, config, place), out)
}

/// See the header.
///
/// # Safety
/// 1. It is of `pc_device_new`, and nothing uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_device_free(device: *mut Device) {
    // SAFETY: 1 and 2: clause 1 is the caller's.
    unsafe { take(device) };
}

fn direction(number: u32) -> Direction {
    match number {
        1 => Direction::ToDevice,
        2 => Direction::FromDevice,
        _ => Direction::Bidirectional,
    }
}

#[inline]
fn dma_attributes(attributes: u32) -> DmaAttributes {
    // The common case.
    if attributes == 0 {
        return DmaAttributes::default();
    }
    DmaAttributes {
        mmio: attributes & ffi::MMIO != 0,
        lasting: attributes & ffi::LASTING != 0,
        uncached: attributes & ffi::UNCACHED != 0,
        privileged: attributes & ffi::PRIVILEGED != 0,
        skip_copy: attributes & ffi::SKIP_COPY != 0,
    }
}

/// See the header.
///
/// # Safety
/// 1. The device exists.
/// 2. The memory is the caller's to open to it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_map(
    device: *const Device,
    phys: u64,
    len: u64,
    dir: u32,
    attributes: u32,
) -> u64 {
    // SAFETY: clauses 1 and 2 are the caller's.
    let mapped =
        unsafe { (*device).map(PhysAddr::new(phys), len, direction(dir), dma_attributes(attributes)) };
    match mapped {
        Ok(iova) => iova.get(),
        Err(error) if map_error(&error) == EIO => ffi::MAPPING_STAYS,
        Err(_) => ffi::MAPPING_ERROR,
    }
}

// The shim's lists have the core's layout.
const _: () = assert!(
    size_of::<Segment>() == size_of::<PhysSegment>() && size_of::<Segment>() == size_of::<DmaSegment>()
);
const _: () = assert!(
    align_of::<Segment>() == align_of::<PhysSegment>() && align_of::<Segment>() == align_of::<DmaSegment>()
);
const _: () = assert!(core::mem::offset_of!(PhysSegment, len) == core::mem::offset_of!(Segment, len));
const _: () = assert!(core::mem::offset_of!(DmaSegment, len) == core::mem::offset_of!(Segment, len));

/// See the header.
///
/// # Safety
/// 1. The device exists.
/// 2. Both lists have `count` elements; the second may be written.
/// 3. The memory is the caller's to open to the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_map_sg(
    device: *const Device,
    list: *const Segment,
    count: usize,
    dir: u32,
    attributes: u32,
    out: *mut Segment,
) -> isize {
    // SAFETY: clause 2; a segment is two words in the same order here and there.
    let list = unsafe { core::slice::from_raw_parts(list.cast::<PhysSegment>(), count) };
    // SAFETY: clause 2; any two words are a segment.
    let out = unsafe { core::slice::from_raw_parts_mut(out.cast::<DmaSegment>(), count) };
    // SAFETY: clauses 1 and 3 are the caller's.
    match unsafe { (*device).map_sg(list, direction(dir), dma_attributes(attributes), out) } {
        Ok(written) => written as isize,
        Err(error) => map_error(&error) as isize,
    }
}

fn ended(result: Result<(), DmaUnmapError>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => unmap_error(&error),
    }
}

/// See the header.
///
/// # Safety
/// 1. The device exists.
/// 2. For an existing mapping, this is the only unmap, and no sync runs concurrently.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_unmap(device: *const Device, iova: u64, len: u64, attributes: u32) -> i32 {
    // SAFETY: clauses 1 and 2 are the caller's.
    ended(unsafe { (*device).unmap(Iova::new(iova), len, dma_attributes(attributes)) })
}

/// See the header.
///
/// # Safety
/// 1. The device exists.
/// 2. For an existing mapping, no unmap runs, and no other sync of these bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_sync_for_cpu(device: *const Device, iova: u64, len: u64) -> i32 {
    // SAFETY: clauses 1 and 2 are the caller's.
    ended(unsafe { (*device).sync_for_cpu(Iova::new(iova), len) })
}

/// See the header.
///
/// # Safety
/// As `pc_sync_for_cpu`, clauses 1 and 2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_sync_for_device(device: *const Device, iova: u64, len: u64) -> i32 {
    // SAFETY: clauses 1 and 2 are the caller's.
    ended(unsafe { (*device).sync_for_device(Iova::new(iova), len) })
}

/// See the header.
///
/// # Safety
/// 1. The device exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_set_limits(device: *const Device, mask: u64, offset_mask: u64) -> i32 {
    // SAFETY: clause 1 is the caller's.
    match unsafe { &*device }.set_limits(mask, offset_mask) {
        Ok(()) => 0,
        Err(error) => setup_error(&error),
    }
}

/// See the header.
///
/// # Safety
/// 1. Both pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_set_policy(device: *const Device, to: *const Policy) -> i32 {
    // SAFETY: clause 1 is the caller's.
    let (device, to) = unsafe { (&*device, &*to) };
    match device.set_config(config(to)) {
        Ok(()) => 0,
        Err(PolicyError::Setup(error)) => setup_error(&error),
        Err(_) => EIO,
    }
}

/// See the header.
///
/// # Safety
/// 1. The device exists, and no other call for it runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_unmap_all(device: *const Device) -> u64 {
    // SAFETY: clause 1 is the caller's; each device of a domain is a group of its own.
    match unsafe { (*device).unmap_all() } {
        Ok((_, bytes)) => bytes,
        // The hardware did not confirm the end of a remainder. Its size is not known.
        Err(_) => u64::MAX,
    }
}

/// See the header.
///
/// # Safety
/// 1. Both pointers are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pc_usage(device: *const Device, out: *mut Usage) {
    // SAFETY: clause 1 is the caller's.
    let (device, out) = unsafe { (&*device, &mut *out) };
    let usage = device.usage();
    let stats = device.domain().stats();
    *out = Usage {
        copies: usage.copies,
        copied_bytes: usage.copied_bytes,
        mapped: usage.maps.saturating_sub(usage.copies),
        flushes: stats.flushes,
        open_bytes: usage.open_bytes,
        open_mappings: usage.open_mappings(),
        exposed_bytes: usage.exposed_bytes,
        pool_bytes: usage.pool.map_or(0, |pool| pool.buffer_bytes),
        book_bytes: (stats.iova_memory
            + usage.book_bytes
            + usage.pool.map_or(0, |pool| pool.bookkeeping_bytes)) as u64,
        lost_bytes: stats.lost_iova_bytes,
    };
}
