//! Two CPUs map neighbouring pages of an empty table: each needs the same missing tables at the same time.

use std::sync::Mutex;

use ::loom::sync::Arc;
use ::loom::thread;
use portcullis::addr::{Iova, IovaRange, PageSize, PageSizes, Permissions, PhysAddr};
use portcullis::pgtable::PageTable;
use portcullis::platform::{FRAME_SIZE, Frames, Table};
use portcullis::sync::{AtomicU64, Ordering};

/// Words of a frame that the test uses.
const DIRTY: usize = 3;

/// Frames made of the model checker's atomics. The free list is a plain lock, as its own correctness is not
/// what is checked here.
struct LoomFrames {
    frames: Vec<Box<Table>>,
    free: Mutex<Vec<usize>>,
}

impl LoomFrames {
    /// Frames whose first words hold what looks like entries until they are allocated: a CPU that follows a
    /// pointer too early sees them.
    fn new(count: usize) -> Self {
        let dirt = |index| if index < DIRTY { 0xdead_0003 } else { 0 };
        let table = || Box::new(std::array::from_fn(|index| AtomicU64::new(dirt(index))));
        Self { frames: (0..count).map(|_| table()).collect(), free: Mutex::new((0..count).collect()) }
    }

    fn free_frames(&self) -> usize {
        self.free.lock().unwrap().len()
    }
}

// SAFETY: the indices of the free list are handed out one by one, and zeroed before.
unsafe impl Frames for LoomFrames {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        assert_eq!(count, 1);
        let index = self.free.lock().unwrap().pop()?;
        self.frames[index][..DIRTY].iter().for_each(|word| word.store(0, Ordering::Relaxed));
        Some(PhysAddr::new((index as u64 + 1) * FRAME_SIZE))
    }

    unsafe fn free(&self, first: PhysAddr, _count: usize) {
        self.free.lock().unwrap().push((first.get() / FRAME_SIZE - 1) as usize);
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        &self.frames[(frame.get() / FRAME_SIZE - 1) as usize]
    }
}

struct Shared(std::sync::Arc<LoomFrames>);

// SAFETY: passed on unchanged.
unsafe impl Frames for Shared {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.0.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: passed on unchanged.
        unsafe { self.0.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: passed on unchanged.
        unsafe { self.0.table(frame) }
    }
}

fn page(number: u64) -> IovaRange {
    IovaRange::new(Iova::new(number * FRAME_SIZE), FRAME_SIZE).unwrap()
}

fn memory(number: u64) -> PhysAddr {
    PhysAddr::new((0x100 + number) * FRAME_SIZE)
}

#[test]
fn racing_maps_share_the_tables_that_one_of_them_installs() {
    let mut model = ::loom::model::Builder::new();
    // Freeing the tables at the end reads each of their entries.
    model.max_branches = 20_000;
    model.check(|| {
        // Root, one middle and one leaf table are needed; each CPU may take two that it then gives back.
        let frames = std::sync::Arc::new(LoomFrames::new(5));
        let sizes = PageSizes::EMPTY.with(PageSize::SIZE_4K);
        let table = Arc::new(PageTable::new(Shared(std::sync::Arc::clone(&frames)), 3, sizes).unwrap());
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                table.map(page(1), memory(1), Permissions::READ, &mut None).unwrap();
                assert_eq!(table.translate(page(1).start()), Some((memory(1), Permissions::READ)));
                assert_eq!(table.unmap(page(1)).bytes, FRAME_SIZE);
            })
        };
        table.map(page(0), memory(0), Permissions::WRITE, &mut None).unwrap();
        assert_eq!(table.translate(page(0).start()), Some((memory(0), Permissions::WRITE)));
        other.join().unwrap();
        // The other's page came and went; ours is untouched, and only three tables are in use.
        assert_eq!(table.translate(page(0).start()), Some((memory(0), Permissions::WRITE)));
        assert_eq!(table.translate(page(1).start()), None);
        assert_eq!(frames.free_frames(), 2);
    });
}
