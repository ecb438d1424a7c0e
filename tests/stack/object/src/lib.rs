//! Each public call that a kernel makes of the core, as a function of its own: `make_..` for what makes something, `call_..` for all
//! others. Platform, mapper, memory and queue are functions of the kernel's, whose stack is its own affair.
#![no_std]
#![allow(
    clippy::missing_safety_doc,
    improper_ctypes,
    improper_ctypes_definitions,
    reason = "nothing calls them"
)]

extern crate alloc;

use alloc::vec::Vec;
use core::alloc::{GlobalAlloc, Layout};
use core::convert::Infallible;
use core::mem::MaybeUninit;

use portcullis::addr::{Iova, IovaRange, PageSize, PageSizes, Permissions};
use portcullis::dma::{
    CoherentMemory, Device, DmaAttributes, DmaDomain, DmaMapError, DmaMask, DmaOps, DmaUnmapError,
    DomainBuilder, Ended, OpsConfig, Queue, QueueConfig,
};
use portcullis::domain::{MapListError, PolicyError, UnmapError};
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::invalidation::{Gather, Invalidation, InvalidationError, InvalidationQueue};
use portcullis::mapper::{Geometry, Mapper, TableMapper};
use portcullis::pgtable::{Attributes, MapError, PageTable, Unmapped, VtdSecondStage};
use portcullis::platform::{CopyMemory, Frames, LocalCpu, Platform, PlatformEvents, PlatformNumber, Table};
use portcullis::prelude::*;

unsafe extern "C" {
    fn kernel_alloc(bytes: usize, align: usize) -> *mut u8;
    fn kernel_free(at: *mut u8);
    fn kernel_cpus() -> usize;
    fn kernel_enter() -> usize;
    fn kernel_leave();
    fn kernel_now() -> u64;
    fn kernel_wake(at: u64);
    fn kernel_listen(events: *const Weak<dyn PlatformEvents>) -> bool;
    fn kernel_frames(count: usize) -> u64;
    fn kernel_free_frames(first: u64, count: usize);
    fn kernel_map(first: u64, list: *const PhysSegment, count: usize, attributes: u32) -> bool;
    fn kernel_unmap(first: u64, len: u64) -> u64;
    fn kernel_sync(gather: *const Gather) -> bool;
    fn kernel_invalidate(invalidation: *const Invalidation) -> bool;
    fn kernel_stop() -> !;
}

struct Heap;

// SAFETY: the kernel's heap does what is asked.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller's.
        unsafe { kernel_alloc(layout.size(), layout.align()) }
    }

    unsafe fn dealloc(&self, at: *mut u8, _: Layout) {
        // SAFETY: as the caller's.
        unsafe { kernel_free(at) }
    }
}

#[global_allocator]
static HEAP: Heap = Heap;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: it does not return.
    unsafe { kernel_stop() }
}

#[derive(Clone)]
pub struct Cpus(PlatformNumber);

// SAFETY: the kernel's.
unsafe impl Platform for Cpus {
    fn cpus(&self) -> usize {
        // SAFETY: the kernel's.
        unsafe { kernel_cpus() }
    }

    fn number(&self) -> PlatformNumber {
        self.0
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        // SAFETY: interrupts are off.
        let cpu = unsafe { LocalCpu::new(kernel_enter()) };
        let result = f(Some(&cpu));
        // SAFETY: as above.
        unsafe { kernel_leave() };
        result
    }

    fn now_ns(&self) -> u64 {
        // SAFETY: the kernel's.
        unsafe { kernel_now() }
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        // SAFETY: the kernel's.
        if unsafe { kernel_listen(&raw const events) } { Ok(()) } else { Err(OutOfMemory) }
    }

    fn wake_at(&self, deadline_ns: u64) {
        // SAFETY: the kernel's.
        unsafe { kernel_wake(deadline_ns) }
    }
}

#[derive(Clone, Copy)]
pub struct Memory;

fn at(phys: PhysAddr) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(phys.get() as usize)
}

// SAFETY: the kernel's.
unsafe impl Frames for Memory {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        // SAFETY: the kernel's.
        let first = unsafe { kernel_frames(count) };
        (first != 0).then(|| PhysAddr::new(first))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the kernel's.
        unsafe { kernel_free_frames(first.get(), count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the kernel's.
        unsafe { &*at(frame).cast() }
    }
}

// SAFETY: the kernel's.
unsafe impl CopyMemory for Memory {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        // SAFETY: the kernel's.
        unsafe { core::ptr::copy_nonoverlapping(at(from), at(to), len as usize) }
    }

    unsafe fn zero(&self, place: PhysAddr, len: u64) {
        // SAFETY: the kernel's.
        unsafe { core::ptr::write_bytes(at(place), 0, len as usize) }
    }
}

/// A mapper by calls of the kernel's, as Linux's is.
pub struct ByCall(Geometry);

// SAFETY: the kernel's.
unsafe impl Mapper for ByCall {
    fn geometry(&self) -> &Geometry {
        &self.0
    }

    unsafe fn map<P: Platform>(
        &self,
        _: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        _: &mut Gather,
    ) -> Result<(), MapError> {
        for (phys, len) in list {
            let piece = PhysSegment { phys, len };
            let write = u32::from(attributes.permissions.allows(Permissions::WRITE));
            // SAFETY: the kernel's.
            if !unsafe { kernel_map(range.start().get(), &raw const piece, 1, write) } {
                return Err(MapError::OutOfMemory);
            }
        }
        Ok(())
    }

    fn unmap<P: Platform>(&self, _: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        // SAFETY: the kernel's.
        let bytes = unsafe { kernel_unmap(range.start().get(), range.len()) };
        gather.add(range);
        Unmapped { bytes, kept: 0, stale: range }
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        // SAFETY: the kernel's.
        if unsafe { kernel_sync(gather) } {
            Ok(())
        } else {
            Err(InvalidationError::TimedOut { waited_ns: 0 })
        }
    }
}

/// A unit whose queue is the kernel's.
pub struct Unit;

// SAFETY: the kernel's.
unsafe impl InvalidationQueue for Unit {
    fn invalidate(&self, _: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        // SAFETY: the kernel's.
        let done = unsafe { kernel_invalidate(&raw const invalidation) };
        if done { Ok(()) } else { Err(InvalidationError::TimedOut { waited_ns: 0 }) }
    }
}

/// The calls of a domain over one kind of mapper.
macro_rules! calls {
    ($machine:ident, $mapper:ty, $make:expr, $($of:ident),*) => {
        /// A machine's types.
        pub type $machine = ($mapper, Cpus, Memory);

        calls!(@ $machine, $make, $($of),*);
    };
    (@ $machine:ident, $make:expr, $domain:ident, $device:ident, $ops:ident, $queue:ident, $coherent:ident, $trim:ident,
        $map:ident, $map_sg:ident, $unmap:ident, $for_cpu:ident, $for_device:ident, $limits:ident, $config:ident, $usage:ident,
        $queue_map:ident, $queue_unmap:ident, $queue_commit:ident, $queue_sync:ident, $domain_map:ident,
        $domain_unmap:ident, $flush:ident, $reclaim:ident, $policy:ident, $timer:ident, $released:ident, $stats:ident,
        $end_queue:ident, $end_ops:ident, $end_device:ident, $end_domain:ident) => {
        #[unsafe(no_mangle)]
        pub fn $domain(cpus: &Cpus) -> Result<DmaDomain<$machine>, SetupError> {
            let make: fn() -> Result<_, SetupError> = $make;
            DomainBuilder::new(make()?).bounce(Memory, PoolConfig::default()).build(cpus.clone())
        }

        #[unsafe(no_mangle)]
        pub fn $device(domain: &DmaDomain<$machine>) -> Result<Device<$machine>, SetupError> {
            domain.attach(DeviceId(1), DmaMask::BITS_64)
        }

        #[unsafe(no_mangle)]
        pub fn $ops(
            device: &Device<$machine>,
            config: OpsConfig,
            place: &mut MaybeUninit<DmaOps<$machine>>,
        ) -> Result<(), SetupError> {
            device.ops_in(config, place).map(|_| ())
        }

        #[unsafe(no_mangle)]
        pub fn $queue(device: &Device<$machine>, config: QueueConfig) -> Result<Queue<$machine>, SetupError> {
            device.queue::<Infallible>(config)
        }

        #[unsafe(no_mangle)]
        pub fn $coherent(device: &Device<$machine>, out: &mut MaybeUninit<Result<(), MapListError>>) {
            out.write(CoherentMemory::new(device.dma(), Memory, 4096).map(drop));
        }

        #[unsafe(no_mangle)]
        pub fn $trim(domain: &DmaDomain<$machine>, out: &mut bool) {
            *out = domain.pool_usage().is_some_and(|usage| usage.bounced > 0);
        }

        #[unsafe(no_mangle)]
        pub unsafe fn $map(
            ops: &DmaOps<$machine>,
            piece: PhysSegment,
            direction: Direction,
            attributes: DmaAttributes,
        ) -> Result<Iova, DmaMapError> {
            // SAFETY: the caller's promise.
            unsafe { ops.map(piece.phys, piece.len, direction, attributes) }
        }

        #[unsafe(no_mangle)]
        pub unsafe fn $map_sg(
            ops: &DmaOps<$machine>,
            list: &[PhysSegment],
            direction: Direction,
            attributes: DmaAttributes,
            out: &mut [DmaSegment],
        ) -> Result<usize, DmaMapError> {
            // SAFETY: the caller's promise.
            unsafe { ops.map_sg(list, direction, attributes, out) }
        }

        #[unsafe(no_mangle)]
        pub unsafe fn $unmap(
            ops: &DmaOps<$machine>,
            iova: Iova,
            len: u64,
            attributes: DmaAttributes,
        ) -> Result<(), DmaUnmapError> {
            // SAFETY: the caller's promise.
            unsafe { ops.unmap(iova, len, attributes) }
        }

        #[unsafe(no_mangle)]
        pub unsafe fn $for_cpu(ops: &DmaOps<$machine>, iova: Iova, len: u64) -> Result<(), DmaUnmapError> {
            // SAFETY: the caller's promise.
            unsafe { ops.sync_for_cpu(iova, len) }
        }

        #[unsafe(no_mangle)]
        pub unsafe fn $for_device(ops: &DmaOps<$machine>, iova: Iova, len: u64) -> Result<(), DmaUnmapError> {
            // SAFETY: the caller's promise.
            unsafe { ops.sync_for_device(iova, len) }
        }

        #[unsafe(no_mangle)]
        pub fn $limits(ops: &DmaOps<$machine>, mask: u64, offsets: u64) -> Result<(), SetupError> {
            ops.set_limits(mask, offsets)
        }

        #[unsafe(no_mangle)]
        pub fn $config(ops: &DmaOps<$machine>, config: OpsConfig) -> bool {
            ops.set_config(config).is_ok()
        }

        #[unsafe(no_mangle)]
        pub fn $usage(ops: &DmaOps<$machine>) -> u64 {
            ops.usage().maps
        }

        #[unsafe(no_mangle)]
        pub unsafe fn $queue_map(
            queue: &mut Queue<$machine>,
            list: &[PhysSegment],
            direction: Direction,
            out: &mut [DmaSegment],
            made: &mut MaybeUninit<Result<(RawMapping, usize), DmaMapError>>,
        ) {
            // SAFETY: the caller's promise.
            made.write(unsafe { queue.map_raw(list, direction, out) });
        }

        #[unsafe(no_mangle)]
        pub fn $queue_unmap(queue: &mut Queue<$machine>, mapping: RawMapping) -> Option<bool> {
            queue.unmap_raw(mapping).ok().map(|ended| ended == Ended::Pending)
        }

        #[unsafe(no_mangle)]
        pub fn $queue_commit(queue: &mut Queue<$machine>) -> Option<usize> {
            queue.commit_raw().ok()
        }

        #[unsafe(no_mangle)]
        pub fn $queue_sync(queue: &mut Queue<$machine>, mapping: &RawMapping, len: u64) -> bool {
            queue.sync_raw_for_cpu(mapping, 0, len).is_ok() & queue.sync_raw_for_device(mapping, 0, len).is_ok()
        }

        #[unsafe(no_mangle)]
        pub unsafe fn $domain_map(
            domain: &DmaDomain<$machine>,
            list: &[PhysSegment],
            permissions: Permissions,
            out: &mut MaybeUninit<Result<IovaRange, MapListError>>,
        ) {
            // SAFETY: the caller's promise.
            out.write(unsafe { domain.space().map(list, permissions, Iova::new(u64::MAX)) });
        }

        #[unsafe(no_mangle)]
        pub fn $domain_unmap(domain: &DmaDomain<$machine>, range: IovaRange) -> Result<(), UnmapError> {
            domain.space().unmap(range).and_then(|()| domain.space().unmap_strictly(range))
        }

        #[unsafe(no_mangle)]
        pub fn $flush(domain: &DmaDomain<$machine>) -> bool {
            domain.space().flush().is_ok()
        }

        #[unsafe(no_mangle)]
        pub fn $reclaim(domain: &DmaDomain<$machine>) -> bool {
            domain.space().reclaim().is_ok()
        }

        #[unsafe(no_mangle)]
        pub fn $policy(domain: &DmaDomain<$machine>, policy: Policy) -> Result<(), PolicyError> {
            domain.space().set_policy(policy)
        }

        #[unsafe(no_mangle)]
        pub fn $timer(events: &dyn PlatformEvents, domain: &DmaDomain<$machine>) {
            PlatformEvents::timer(&**domain.space());
            events.timer();
        }

        #[unsafe(no_mangle)]
        pub fn $released(domain: &DmaDomain<$machine>, cpu: usize) {
            domain.space().cpu_released(cpu);
        }

        #[unsafe(no_mangle)]
        pub fn $stats(domain: &DmaDomain<$machine>) -> u64 {
            domain.space().stats().maps
        }

        #[unsafe(no_mangle)]
        pub unsafe fn $end_queue(queue: *mut Queue<$machine>) {
            // SAFETY: the caller's promise.
            unsafe { queue.drop_in_place() }
        }

        #[unsafe(no_mangle)]
        pub unsafe fn $end_ops(ops: *mut DmaOps<$machine>) {
            // SAFETY: the caller's promise.
            unsafe { ops.drop_in_place() }
        }

        #[unsafe(no_mangle)]
        pub unsafe fn $end_device(device: *mut Device<$machine>) {
            // SAFETY: the caller's promise.
            unsafe { device.drop_in_place() }
        }

        #[unsafe(no_mangle)]
        pub unsafe fn $end_domain(domain: *mut DmaDomain<$machine>) {
            // SAFETY: the caller's promise.
            unsafe { domain.drop_in_place() }
        }
    };
}

fn by_call() -> Result<ByCall, SetupError> {
    let aperture = IovaRange::new(Iova::new(1 << 20), 1 << 40).map_err(|_| SetupError::NoPageSize)?;
    let page_sizes = PageSizes::EMPTY.with(PageSize::SIZE_4K);
    Ok(ByCall(Geometry { aperture, page_sizes, reserved: Vec::new() }))
}

fn by_tables() -> Result<TableMapper<Memory, Unit>, SetupError> {
    let table = PageTable::new(Memory, VtdSecondStage::four_level())?;
    Ok(TableMapper::new(table, Unit, DomainId(1), Vec::new()))
}

calls!(
    Called,
    ByCall,
    by_call,
    make_domain_c,
    make_device_c,
    make_ops_c,
    make_queue_c,
    make_coherent_c,
    call_pool_usage_c,
    call_map_c,
    call_map_sg_c,
    call_unmap_c,
    call_sync_for_cpu_c,
    call_sync_for_device_c,
    call_set_limits_c,
    call_set_config_c,
    call_usage_c,
    call_queue_map_c,
    call_queue_unmap_c,
    call_queue_commit_c,
    call_queue_sync_c,
    call_domain_map_c,
    call_domain_unmap_c,
    call_flush_c,
    call_reclaim_c,
    call_set_policy_c,
    call_timer_c,
    call_cpu_released_c,
    call_stats_c,
    call_end_queue_c,
    call_end_ops_c,
    call_end_device_c,
    call_end_domain_c
);

calls!(
    Tabled, TableMapper<Memory, Unit>, by_tables, make_domain_t, make_device_t, make_ops_t, make_queue_t, make_coherent_t,
    call_pool_usage_t, call_map_t, call_map_sg_t, call_unmap_t, call_sync_for_cpu_t, call_sync_for_device_t, call_set_limits_t,
    call_set_config_t, call_usage_t, call_queue_map_t, call_queue_unmap_t, call_queue_commit_t, call_queue_sync_t,
    call_domain_map_t, call_domain_unmap_t, call_flush_t, call_reclaim_t, call_set_policy_t, call_timer_t, call_cpu_released_t,
    call_stats_t, call_end_queue_t, call_end_ops_t, call_end_device_t, call_end_domain_t
);
