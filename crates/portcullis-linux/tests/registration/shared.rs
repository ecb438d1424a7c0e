//! Threads that access the same bytes by safe calls: no length or offset is undefined behaviour, as Miri checks, and no thread loses
//! another's bytes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use portcullis::addr::{DeviceId, Direction, DomainId, PhysAddr};
use portcullis::bounce::PoolConfig;
use portcullis::dma::{CoherentMemory, Device, DmaMask, Machine, QueueConfig};
use portcullis::domain::{Domain, Policy};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue};
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::{CacheMaintenance, CopyMemory, Frames, Table};
use portcullis::std_platform::StdPlatform;
use portcullis_linux::heap::{Heap, HeapBuffer};

/// Enough for accesses to overlap; each is slow under Miri.
const TURNS: u8 = if cfg!(miri) { 10 } else { 200 };

struct NoHardware;

// SAFETY: there is no device.
unsafe impl InvalidationQueue for NoHardware {
    fn invalidate(&self, _: DomainId, _: Invalidation) -> Result<(), InvalidationError> {
        Ok(())
    }
}

struct NoCache;

// SAFETY: there is nothing to maintain.
unsafe impl CacheMaintenance for NoCache {
    fn line_bytes(&self) -> u64 {
        64
    }

    unsafe fn clean(&self, _: PhysAddr, _: u64) {}

    unsafe fn invalidate(&self, _: PhysAddr, _: u64) {}
}

/// The heap's frames, as a kernel's for non-coherent devices.
struct Uncached;

// SAFETY: the clauses are the heap's.
unsafe impl Frames for Uncached {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        Heap.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { Heap.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        const HEAP: &Heap = &Heap;
        // SAFETY: clause 1 is the caller's.
        unsafe { HEAP.table(frame) }
    }

    const UNCACHED: bool = true;
}

fn device() -> Device<impl Machine<Memory = Heap>> {
    let table = PageTable::new(Heap, VtdSecondStage::three_level()).unwrap();
    let pool = PoolConfig { threshold: 4096, class_bytes: 16 << 10, ..PoolConfig::default() };
    let builder = Domain::builder(table, NoHardware, DomainId(1)).policy(Policy::Strict).bounce(Heap, pool);
    let domain = builder.cache_maintenance(Arc::new(NoCache)).build(StdPlatform::with_cpus(2)).unwrap();
    domain.attach(DeviceId(0), DmaMask::BITS_64).unwrap()
}

/// Each byte of a word has one writing thread; two read, and one writes all of the next word.
#[test]
fn a_buffer_is_read_and_written_by_parts_on_many_threads() {
    let buffer = HeapBuffer::new(24).unwrap();
    thread::scope(|scope| {
        let buffer = &buffer;
        for at in [0, 1, 5] {
            scope.spawn(move || (1..=TURNS).for_each(|turn| buffer.write(at, &[turn]).unwrap()));
        }
        scope.spawn(|| (1..=TURNS).for_each(|turn| buffer.write(6, &[turn; 10]).unwrap()));
        for (at, len) in [(1, 1), (0, 8), (3, 17)] {
            scope.spawn(move || (0..TURNS).for_each(|_| buffer.read(at, &mut [0; 24][..len]).unwrap()));
        }
    });
    let mut all = [0; 24];
    buffer.read(0, &mut all).unwrap();
    for (at, byte) in all.into_iter().enumerate() {
        let is_written = [0, 1, 5].contains(&at) || (6..16).contains(&at);
        assert_eq!(byte, if is_written { TURNS } else { 0 }, "byte {at}");
    }
}

/// A queue that copies syncs parts of a mapping, while others read and write its buffer.
#[test]
fn a_mapping_is_synced_by_parts_while_its_buffer_is_used() {
    for (coherent, config) in
        [(true, QueueConfig::bounce()), (true, QueueConfig::auto(4, 4096)), (false, QueueConfig::bounce())]
    {
        // A queue that measures takes Miri half a minute.
        if cfg!(miri) && config != QueueConfig::bounce() {
            continue;
        }
        let device = device();
        let device = if coherent { device } else { device.not_coherent().unwrap() };
        let mut queue = device.queue(config).unwrap();
        let buffer = HeapBuffer::new(61).unwrap();
        buffer.write(0, &[7; 61]).unwrap();
        let mapping = queue.map(buffer, Direction::Bidirectional).unwrap();
        let whole = (0, 61);
        thread::scope(|scope| {
            let mapping = &mapping;
            for at in [1, 56] {
                scope.spawn(move || (0..TURNS).for_each(|_| mapping.buffer().read(at, &mut [0; 5]).unwrap()));
                scope
                    .spawn(move || (0..TURNS).for_each(|_| mapping.buffer().write(at + 2, &[7; 2]).unwrap()));
            }
            for _ in 0..TURNS {
                // For a non-coherent device, whole lines of the mapping.
                let parts = if coherent { [whole, (1, 3), (57, 4)] } else { [whole; 3] };
                for (offset, len) in parts {
                    queue.sync_for_cpu(mapping, offset, len).unwrap();
                    queue.sync_for_device(mapping, offset, len).unwrap();
                }
            }
        });
        let mut all = [0; 61];
        mapping.buffer().read(0, &mut all).unwrap();
        assert_eq!(all, [7; 61]);
        queue.unmap(mapping).unwrap().for_each(drop);
    }
}

/// Memory without atomic read-modify-writes, and memory with them.
#[test]
fn coherent_memory_is_read_and_written_by_parts_on_many_threads() {
    fn run<F: Frames>(device: &Device<impl Machine<Memory = Heap>>, frames: F) {
        let memory = CoherentMemory::new(device.dma(), frames, 4096).unwrap();
        thread::scope(|scope| {
            let memory = &memory;
            for at in [0, 3] {
                scope.spawn(move || (1..=TURNS).for_each(|turn| memory.write(at, &[turn]).unwrap()));
            }
            scope.spawn(|| (1..=TURNS).for_each(|turn| memory.write(4, &[turn; 6]).unwrap()));
            scope.spawn(|| (0..TURNS).for_each(|_| memory.read(2, &mut [0; 9]).unwrap()));
            let word = memory.word(0).unwrap();
            scope.spawn(|| (0..TURNS).for_each(|_| _ = word.load(Ordering::Relaxed)));
        });
        let mut all = [0; 12];
        memory.read(0, &mut all).unwrap();
        let all = all.map(|byte| byte == TURNS);
        assert_eq!(all, [true, false, false, true, true, true, true, true, true, true, false, false]);
        memory.free().unwrap();
    }
    let device = device();
    run(&device, Heap);
    run(&device, Uncached);
}

/// Two threads copy to, and wipe, bytes of one word each; and any access may go on beside a list that was mapped by number.
#[test]
fn copies_for_several_threads_keep_to_their_bytes() {
    let buffer = HeapBuffer::new(16).unwrap();
    let source = HeapBuffer::new(16).unwrap();
    source.write(0, &[9; 16]).unwrap();
    let (to, from) = (buffer.phys().get(), source.phys().get());
    thread::scope(|scope| {
        for (at, skip, len) in [(0, 0, 3), (3, 3, 5), (8, 1, 2), (10, 6, 6)] {
            scope.spawn(move || {
                for _ in 0..TURNS {
                    let (to, from) = (PhysAddr::new(to + at), PhysAddr::new(from + skip));
                    // SAFETY: clauses 1 and 2: bytes of the two buffers that no other thread copies.
                    unsafe {
                        Heap.zero(to, len);
                        Heap.copy(from, to, len);
                    }
                }
            });
        }
    });
    let mut all = [0; 16];
    buffer.read(0, &mut all).unwrap();
    assert_eq!(all, [9; 16]);

    // Eleven bytes; another thread owns the two at the ends.
    let mut bytes = [1_u8; 11];
    let [first, middle @ .., last] = &mut bytes;
    let at = PhysAddr::new(middle.as_mut_ptr().expose_provenance() as u64);
    thread::scope(|scope| {
        scope.spawn(|| (0..TURNS).for_each(|turn| (*first, *last) = (turn, turn)));
        for _ in 0..TURNS {
            // SAFETY: clauses 1 and 2: nine bytes of this thread, and nine of the buffer.
            unsafe { Heap.copy(PhysAddr::new(to), at, 9) };
        }
    });
    assert_eq!(bytes[1..10], [9; 9]);
}
