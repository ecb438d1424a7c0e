//! Queues, whose mappings end together.

use std::ffi::{c_int, c_void};

use portcullis::addr::{DmaSegment, Iova};
use portcullis::dma::{DmaUnmapError, Ended, NotUnmapped, Queue, QueueConfig, RawMapping};
use portcullis_linux::buffer::segment;
use portcullis_linux::vfio::Machine;

use crate::device::{PortcullisDevice, device, place};
use crate::dma::direction;
use crate::error::{
    Failed, PortcullisError, PortcullisNotEnded, PortcullisNotMapped, PortcullisReachable, PortcullisRefused,
    PortcullisWaits, Result, code, given,
};

/// How a queue lets its device reach buffers.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortcullisStrategy {
    /// Each buffer is mapped and unmapped individually.
    PortcullisDirect = 0,
    /// Each buffer is mapped individually, and buffers are unmapped in batches.
    PortcullisBatched = 1,
    /// As batched, with consecutive addresses, so that a batch of buffers in order is one system call.
    PortcullisRing = 2,
    /// Buffers are copied, through memory that stays mapped: no system call.
    PortcullisCopied = 3,
    /// The cheaper of ring and copied for each size, as measured when the queue is made and at run time.
    PortcullisCheaper = 4,
}

/// A queue of a device: one thread at a time uses it.
#[derive(Debug)]
pub struct PortcullisQueue {
    queue: Queue<Machine>,
    mappings: Mappings,
}

/// The queue's mappings. A mapping's number has its slot, and the slot's use count: so a stale number is detected.
#[derive(Debug, Default)]
struct Mappings {
    places: Vec<(u32, Option<Mapped>)>,
    free: Vec<u32>,
}

/// A live mapping, and its length: a raw one does not have that.
#[derive(Debug)]
struct Mapped {
    raw: RawMapping,
    len: u64,
}

impl Mapped {
    /// Checks that it has this part. A queue that copies nothing does not.
    fn has(&self, (offset, len): (u64, u64)) -> std::result::Result<(), DmaUnmapError> {
        let (iova, mapped) = (self.raw.iova(), self.len);
        match offset.checked_add(len) {
            Some(end) if end <= mapped => Ok(()),
            _ => Err(DmaUnmapError::OutOfRange { iova, offset, len, mapped }),
        }
    }
}

impl Mappings {
    fn make_room(&mut self) -> Result<()> {
        if self.free.is_empty() {
            self.places.try_reserve(1)?;
        }
        // For when all of them have ended.
        let wanted = self.places.len() + 1 - self.free.len();
        Ok(self.free.try_reserve(wanted)?)
    }

    /// Only after [`make_room`](Self::make_room).
    fn add(&mut self, mapping: Mapped) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            (self.places.len() - 1) as u32
        });
        let place = &mut self.places[index as usize];
        place.0 = place.0.wrapping_add(1);
        place.1 = Some(mapping);
        u64::from(place.0) << 32 | u64::from(index)
    }

    fn find(&mut self, number: u64) -> Result<&mut Option<Mapped>> {
        let place = self.places.get_mut(number as u32 as usize);
        let place = place.filter(|(used, mapping)| mapping.is_some() && u64::from(*used) == number >> 32);
        let none = || Failed::new(PortcullisNotMapped, "the queue has no such mapping, or it has ended");
        place.map(|(_, mapping)| mapping).ok_or_else(none)
    }
}

/// Mappings that a successful unmap has ended. `waiting` were pending before it.
fn over(ended: Ended<(), ()>, waiting: usize) -> usize {
    match ended {
        Ended::Pending => 0,
        Ended::Done(()) => 1,
        Ended::Flushed(()) => waiting + 1,
    }
}

/// The state of a mapping after a failed unmap.
fn left_by<T>(failed: &NotUnmapped<T>) -> PortcullisError {
    match (&failed.mapping, failed.waits) {
        (Some(_), _) => PortcullisNotEnded,
        (None, true) => PortcullisWaits,
        (None, false) => PortcullisReachable,
    }
}

/// # Safety
/// 1. It is null, or of `portcullis_queue_new`.
/// 2. While the reference lives the caller does not free it, and no other thread uses it.
unsafe fn queue<'a>(queue: *mut PortcullisQueue) -> Result<&'a mut PortcullisQueue> {
    // SAFETY: clauses 1 and 2.
    unsafe { queue.as_mut() }.ok_or_else(|| Failed::argument("the queue is null"))
}

/// Makes a queue of a device, by a portcullis_strategy. A ring (and PORTCULLIS_CHEAPER) is for up to `descriptors` buffers at once, each of
/// which touches pages of `bytes` bytes, 4096 for one within a page; for the other strategies both are 0. `batch` buffers end together: 1
/// to 256, or 0 for 32, and 64 for the strategies with a ring; PORTCULLIS_DIRECT and PORTCULLIS_COPIED have no batches, and accept only 0.
///
/// Writes the queue to `out`: portcullis_queue_free frees it. PORTCULLIS_CHEAPER measures for some milliseconds.
///
/// # Safety
/// 1. `device` is open, and stays so until the queue is freed. 2. `out` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_queue_new(
    device: *const PortcullisDevice,
    strategy: u32,
    descriptors: u32,
    bytes: u64,
    batch: usize,
    out: *mut *mut PortcullisQueue,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (device, out) = unsafe { (self::device(device)?, place(out)?) };
        let config = match strategy {
            0 => QueueConfig::direct(),
            1 => QueueConfig::batched(QueueConfig::BATCH),
            2 => QueueConfig::ring(descriptors, bytes),
            3 => QueueConfig::bounce(),
            4 => QueueConfig::auto(descriptors, bytes),
            _ => {
                return Err(Failed::argument(
                    "this is none of the strategies that portcullis_strategy names",
                ));
            }
        };
        let config = if batch == 0 { config } else { config.batch(batch) };
        let queue = device.attached.queue(config).map_err(|error| Failed::new(PortcullisRefused, error))?;
        out.put(given(PortcullisQueue { queue, mappings: Mappings::default() })?);
        Ok(())
    })
}

/// Frees a queue, or does nothing if `queue` is null. Commits pending unmaps, and ends remaining mappings.
///
/// After PORTCULLIS_REACHABLE the memory of pending or mapped buffers must be neither reused nor freed.
///
/// # Safety
/// 1. `queue` is null, or of portcullis_queue_new. 2. It is not used at the same time or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_queue_free(queue: *mut PortcullisQueue) -> c_int {
    if queue.is_null() {
        return 0;
    }
    // SAFETY: by clauses 1 and 2 it is of `portcullis_queue_new`, and ends once.
    let mut queue = unsafe { Box::from_raw(queue) };
    code(move || {
        let PortcullisQueue { queue, mappings } = &mut *queue;
        let mut ended = Ok(());
        for mapping in mappings.places.drain(..).filter_map(|(_, mapping)| mapping) {
            if let Err(failed) = queue.unmap_raw(mapping.raw)
                && !failed.waits
            {
                ended = Err(Failed::from(failed.error));
            }
        }
        queue.commit_raw()?;
        ended
    })
}

/// Lets the queue's device reach `len` bytes at `buffer`, or a copy of them, as portcullis_map does. Writes the IOVA to `iova`, and the
/// number of the mapping to `mapping`.
///
/// Until a function has returned the buffer to the driver, it is neither moved nor freed.
///
/// # Safety
/// 1. As portcullis_map. 2. No other thread uses the queue during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_queue_map(
    queue: *mut PortcullisQueue,
    buffer: *mut c_void,
    len: usize,
    direction: u32,
    iova: *mut u64,
    mapping: *mut u64,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (queue, iova, mapping) = unsafe { (self::queue(queue)?, place(iova)?, place(mapping)?) };
        let (direction, list) = (self::direction(direction)?, [segment(buffer.cast(), len)]);
        queue.mappings.make_room()?;
        let mut out = [DmaSegment { iova: Iova::new(0), len: 0 }];
        // SAFETY: clauses 1 and 2, and those of the later calls, are the caller's.
        let (mapped, _) = unsafe { queue.queue.map_raw(&list, direction, &mut out) }?;
        iova.put(mapped.iova().get());
        mapping.put(queue.mappings.add(Mapped { raw: mapped, len: len as u64 }));
        Ok(())
    })
}

/// Ends a mapping, or adds it to its batch. Writes to `ended` how many mappings of the queue this call has ended, whose buffers are the
/// driver's again: 0 while this one is pending; 1 for it alone, with strategies without batches; or its whole batch: all pending ones, in
/// the order of their unmaps.
///
/// PORTCULLIS_NOT_MAPPED: the queue has no such mapping, and nothing has changed. PORTCULLIS_WAITS: it is pending until the next successful
/// commit. PORTCULLIS_NOT_ENDED: it can be unmapped again. PORTCULLIS_REACHABLE: its memory must be neither reused nor freed.
///
/// # Safety
/// 1. No other thread uses the queue during the call. 2. `ended` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_queue_unmap(
    queue: *mut PortcullisQueue,
    mapping: u64,
    ended: *mut usize,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (queue, ended) = unsafe { (self::queue(queue)?, place(ended)?) };
        let waiting = queue.queue.waiting();
        let found = queue.mappings.find(mapping)?;
        let Some(Mapped { raw, len }) = found.take() else { return Ok(()) };
        match queue.queue.unmap_raw(raw) {
            Ok(done) => ended.put(over(done, waiting)),
            Err(failed) => {
                let code = left_by(&failed);
                let text = failed.error;
                *found = failed.mapping.map(|raw| Mapped { raw, len });
                if found.is_none() {
                    queue.mappings.free.push(mapping as u32);
                }
                return Err(Failed::new(code, text));
            }
        }
        queue.mappings.free.push(mapping as u32);
        Ok(())
    })
}

/// Ends all pending mappings, for a queue that becomes idle. Writes their number to `ended`.
///
/// After PORTCULLIS_WAITS all of them stay pending, and can be committed again.
///
/// # Safety
/// 1. No other thread uses the queue during the call. 2. `ended` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_queue_commit(queue: *mut PortcullisQueue, ended: *mut usize) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let (queue, ended) = unsafe { (self::queue(queue)?, place(ended)?) };
        let committed = queue.queue.commit_raw().map_err(|error| Failed::new(PortcullisWaits, error));
        ended.put(committed?);
        Ok(())
    })
}

/// Syncs a part of a mapping of the queue's by `how`.
///
/// # Safety
/// As [`queue`], clauses 1 and 2.
unsafe fn sync(
    queue: *mut PortcullisQueue,
    mapping: u64,
    part: (u64, u64),
    how: fn(&Queue<Machine>, &RawMapping, u64, u64) -> std::result::Result<(), DmaUnmapError>,
) -> c_int {
    code(|| {
        // SAFETY: clauses 1 and 2 are the caller's.
        let PortcullisQueue { queue, mappings } = unsafe { self::queue(queue) }?;
        let Some(mapped) = mappings.find(mapping)? else { return Ok(()) };
        mapped.has(part)?;
        Ok(how(queue, &mapped.raw, part.0, part.1)?)
    })
}

/// Shows the CPU the device's writes to `len` bytes of a mapping, from `offset` on.
///
/// A part outside the mapping is an error with every strategy, and nothing is copied.
///
/// # Safety
/// 1. No other thread uses the queue during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_queue_sync_for_cpu(
    queue: *mut PortcullisQueue,
    mapping: u64,
    offset: u64,
    len: u64,
) -> c_int {
    // SAFETY: clause 1 is the caller's.
    unsafe { sync(queue, mapping, (offset, len), Queue::sync_raw_for_cpu) }
}

/// Shows the device the CPU's writes to `len` bytes of a mapping, from `offset` on.
///
/// A part outside the mapping is an error with every strategy, and nothing is copied.
///
/// # Safety
/// 1. No other thread uses the queue during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn portcullis_queue_sync_for_device(
    queue: *mut PortcullisQueue,
    mapping: u64,
    offset: u64,
    len: u64,
) -> c_int {
    // SAFETY: clause 1 is the caller's.
    unsafe { sync(queue, mapping, (offset, len), Queue::sync_raw_for_device) }
}

/// One thread may make a queue, and another use it.
const _: () = {
    const fn is_sent<T: Send>() {}
    is_sent::<PortcullisQueue>();
};

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use portcullis::addr::{DeviceId, Direction, DomainId, PhysAddr, PhysSegment};
    use portcullis::dma::DmaMask;
    use portcullis::domain::Domain;
    use portcullis::invalidation::InvalidationError;
    use portcullis::pgtable::{PageTable, VtdSecondStage};
    use portcullis::std_platform::StdPlatform;
    use portcullis_model::{Iommu, IommuConfig, Memory};

    use super::*;

    /// A page mapped by a queue of the software IOMMU.
    fn mapped() -> Mapped {
        let memory = Memory::new(1 << 20);
        let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
        let table = PageTable::for_cpus(memory, VtdSecondStage::four_level(), 1).expect("a table");
        let domain = Domain::builder(table, iommu.queue(), DomainId(1)).build(StdPlatform::with_cpus(1));
        let device = domain.expect("a domain").attach(DeviceId(1), DmaMask::BITS_64).expect("a device");
        let mut queue: Queue<_> = device.queue(QueueConfig::direct()).expect("a queue");
        let list = [PhysSegment { phys: PhysAddr::new(0x1000), len: 0x1000 }];
        let mut out = [DmaSegment { iova: Iova::new(0), len: 0 }];
        // SAFETY: no device reaches anything.
        let (raw, _) = unsafe { queue.map_raw(&list, Direction::ToDevice, &mut out) }.expect("a mapping");
        Mapped { raw, len: 0x1000 }
    }

    #[test]
    fn a_number_that_is_out_of_date_is_no_other_mapping_s() {
        let mut mappings = Mappings::default();
        let add = |mappings: &mut Mappings| {
            assert!(mappings.make_room().is_ok());
            mappings.add(mapped())
        };
        let numbers = [(); 3].map(|()| add(&mut mappings));
        assert_eq!(numbers.map(|number| number as u32), [0, 1, 2]);
        assert!(numbers.iter().all(|number| mappings.find(*number).is_ok()));
        let (old, mut now) = (numbers[1], numbers[1]);
        for _ in 0..3 {
            assert!(mappings.find(now).is_ok_and(|place| place.take().is_some()));
            mappings.free.push(now as u32);
            assert!(mappings.find(now).is_err());
            now = add(&mut mappings);
            assert_eq!(
                (now as u32, now == old, mappings.places.len()),
                (1, false, 3),
                "the place that was free"
            );
            assert!(mappings.find(old).is_err() && mappings.find(now).is_ok());
        }
        for none in [0, 3, numbers[0] + (1 << 32), u64::MAX] {
            assert!(mappings.find(none).is_err(), "{none:#x}");
        }
    }

    #[test]
    fn a_part_is_of_the_mapping_or_an_error() {
        let mapped = mapped();
        for part in [(0, 0), (0, 0x1000), (0xfff, 1), (0x1000, 0)] {
            assert_eq!(mapped.has(part), Ok(()), "{part:?}");
        }
        for part in [(0, 0x1001), (0x1000, 1), (0x1001, 0), (1, u64::MAX), (u64::MAX, 1)] {
            let (iova, (offset, len)) = (mapped.raw.iova(), part);
            let wanted = DmaUnmapError::OutOfRange { iova, offset, len, mapped: 0x1000 };
            assert_eq!(mapped.has(part), Err(wanted), "{part:?}");
        }
    }

    #[test]
    fn what_an_unmap_comes_to_is_said_in_numbers() {
        let ended = [Ended::Pending, Ended::Done(()), Ended::Flushed(())].map(|ended| over(ended, 4));
        assert_eq!(ended, [0, 1, 5]);
        let error = DmaUnmapError::Unconfirmed { error: InvalidationError::Rejected { code: 5 } };
        let left = |mapping: Option<()>, waits| left_by(&NotUnmapped { mapping, waits, error });
        assert_eq!(left(Some(()), false), PortcullisNotEnded);
        assert_eq!([left(None, true), left(None, false)], [PortcullisWaits, PortcullisReachable]);
    }
}
