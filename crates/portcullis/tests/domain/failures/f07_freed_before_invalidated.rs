//! Failure 7: memory is freed, or given to somebody else, after its unmap and before the invalidation, so that a
//! device with a cached translation reaches what is another's by then.
//!
//! The memory itself tells: whoever frees it has the device try at that very moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use portcullis::addr::{Direction, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::{CoherentMemory, DmaBuffer, Ended, Mapping, QueueConfig};
use portcullis::domain::Policy;
use portcullis::invalidation::InvalidationError;
use portcullis::platform::{Frames, Table};
use portcullis::std_platform::StdPlatform;
use portcullis_model::open::Simulated;
use portcullis_model::{Buffer, Iommu, Memory};

use crate::played::Played;
use crate::queued::{QueueOf, end, queue};
use crate::rig::{self, DEVICE, LAZY_FOREVER, PAGE};

type Rig = rig::Rig<StdPlatform, portcullis_model::Queue>;
type Queue = QueueOf<rig::Mapper, Played, Watched>;

const TIMEOUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 1 };

/// What was freed, and what of it the device reached then.
#[derive(Default)]
struct Log {
    freed: AtomicU64,
    reached: AtomicU64,
}

/// The address at which memory is mapped, once it is known, and the device behind it.
struct Tries {
    iommu: Arc<Iommu>,
    iova: AtomicU64,
    log: Arc<Log>,
}

impl Tries {
    fn now(&self) {
        let iova = Iova::new(self.iova.load(Ordering::Relaxed));
        let reached = self.iommu.probe(DEVICE, iova, Permissions::WRITE).is_some();
        self.log.freed.fetch_add(1, Ordering::Relaxed);
        self.log.reached.fetch_add(reached.into(), Ordering::Relaxed);
    }
}

/// A buffer that has the device try when it is freed.
struct Watched {
    buffer: Buffer,
    tries: Tries,
}

// SAFETY: the list is that of the buffer, which is atomic memory of its own.
unsafe impl DmaBuffer for Watched {
    fn segments(&self) -> &[PhysSegment] {
        self.buffer.segments()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.tries.now();
    }
}

/// A mapped buffer whose translation the device has cached.
fn mapped(rig: &Rig, log: &Arc<Log>, queue: &mut Queue) -> Mapping<Watched> {
    let tries = Tries { iommu: Arc::clone(&rig.iommu), iova: AtomicU64::new(0), log: Arc::clone(log) };
    let watched = Watched { buffer: rig.memory.buffer(PAGE).unwrap(), tries };
    let mapping = queue.map(watched, Direction::Bidirectional).unwrap();
    mapping.buffer().tries.iova.store(mapping.iova().get(), Ordering::Relaxed);
    assert!(rig.reaches(mapping.iova()));
    mapping
}

/// What becomes of a mapping, by the queue that made it.
type Way = (&'static str, QueueConfig, fn(Queue, Mapping<Watched>));

/// Every way in which a buffer can come back, or be dropped.
const WAYS: [Way; 5] = [
    ("unmap", QueueConfig::direct(), |mut queue, mapping| drop(end(&mut queue, mapping))),
    ("unmap, and the end of the queue", QueueConfig::direct(), |mut queue, mapping| {
        if let Ok(ended) = queue.unmap(mapping) {
            ended.for_each(drop);
        }
    }),
    ("batch that is complete", QueueConfig::batched(1), |mut queue, mapping| {
        let Ok(Ended::Flushed(buffers)) = queue.unmap(mapping) else { panic!("one is a batch") };
        assert_eq!(buffers.count(), 1);
    }),
    ("batch that is committed", QueueConfig::batched(4), |mut queue, mapping| {
        assert!(matches!(queue.unmap(mapping), Ok(Ended::Pending)));
        assert_eq!(queue.commit().unwrap().count(), 1);
    }),
    ("batch that is dropped", QueueConfig::batched(4), |mut queue, mapping| {
        assert!(matches!(queue.unmap(mapping), Ok(Ended::Pending)));
    }),
];

#[test]
fn no_buffer_is_freed_while_the_device_reaches_it() {
    for (name, config, way) in WAYS {
        let log = Arc::new(Log::default());
        let counts = || (log.freed.load(Ordering::Relaxed), log.reached.load(Ordering::Relaxed));
        let run = |policy| {
            let rig = Rig::new(StdPlatform::new(), policy, |queue| queue);
            let mut queue = queue(&rig.device, config);
            let mapping = mapped(&rig, &log, &mut queue);
            way(queue, mapping);
        };
        run(Policy::Strict);
        assert_eq!(counts(), (1, 0), "{name}");
        // A batch is strict whatever the policy; the others are freed within the window, which is what lazy says.
        run(LAZY_FOREVER);
        assert_eq!(counts(), (2, u64::from(!name.starts_with("batch"))), "{name}");
    }
}

/// The same with hardware that does not answer: whatever is freed is freed after an invalidation, or not at all.
#[test]
fn nor_where_the_hardware_does_not_answer() {
    for failures in [1, 2, u64::MAX] {
        // The ways that do not unwrap.
        for (name, config, way) in [WAYS[1], WAYS[4]] {
            let rig = Rig::new(StdPlatform::new(), Policy::Strict, |queue| queue);
            let log = Arc::new(Log::default());
            let mut queue = queue(&rig.device, config);
            let mapping = mapped(&rig, &log, &mut queue);
            rig.iommu.queue().fail_next(failures, TIMEOUT);
            way(queue, mapping);
            assert_eq!(log.reached.load(Ordering::Relaxed), 0, "{name}");
            // What an unmap was not told the queue asks for once more as it ends; a batch is asked for then only.
            let asks = if name.starts_with("batch") { 1 } else { 2 };
            assert_eq!(log.freed.load(Ordering::Relaxed), u64::from(failures < asks), "{name}, {failures}");
        }
    }
}

/// Frames that have the device try when they are freed.
struct WatchedFrames(Arc<Memory>, Arc<Tries>);

// SAFETY: it is the software IOMMU's memory.
unsafe impl Simulated for WatchedFrames {}

// SAFETY: everything is passed on to the memory.
unsafe impl Frames for WatchedFrames {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.0.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        self.1.now();
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.table(frame) }
    }
}

#[test]
fn coherent_memory_is_freed_after_its_invalidation_under_every_policy() {
    for policy in [Policy::Strict, LAZY_FOREVER] {
        let rig = Rig::new(StdPlatform::new(), policy, |queue| queue);
        let log = Arc::new(Log::default());
        let iova = AtomicU64::new(0);
        let tries = Arc::new(Tries { iommu: Arc::clone(&rig.iommu), iova, log: Arc::clone(&log) });
        let frames = || WatchedFrames(Arc::clone(&rig.memory), Arc::clone(&tries));
        for freed in 1..=2 {
            let memory = CoherentMemory::new(&rig.device, frames(), 4096).unwrap();
            tries.iova.store(memory.iova().get(), Ordering::Relaxed);
            assert!(rig.reaches(memory.iova()));
            if freed == 1 {
                memory.free().unwrap()
            } else {
                drop(memory)
            }
            let counts = (log.freed.load(Ordering::Relaxed), log.reached.load(Ordering::Relaxed));
            assert_eq!(counts, (freed, 0), "{policy:?}");
        }
    }
}
