//! The pool's memory: areas of slots, each with its bits under a lock of its own, and the metadata of its slots.
//!
//! Areas come and go, and their numbers and metadata are reused. Metadata is freed only with the pool. So a reader with a wrong address finds
//! metadata that records no such mapping, perhaps another area's, but never freed memory.

mod change;

use alloc::boxed::Box;
use core::ptr;

use super::bits::Bits;
use super::config::SwiotlbConfig;
use super::directory::{Directory, Leads};
use super::slot_meta::SlotMeta;
use crate::addr::PhysAddr;
use crate::heap::{OutOfMemory, slice};
use crate::percpu::CachePadded;
use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, Mutex, Ordering};

/// In place of a base, which is aligned: no area has this number; or it is being added or removed.
const ABSENT: u64 = u64::MAX;
const CHANGING: u64 = u64::MAX - 1;

/// An area's address and metadata. All CPUs read it; only growing and shrinking write it.
#[derive(Debug)]
struct Head {
    base: AtomicU64,
    /// The metadata of all slots of an area. Null until the number is first used, and never again.
    metadata: AtomicPtr<SlotMeta>,
}

/// The bits of an area's slots, and their number of free ones as a hint for searches.
#[derive(Debug)]
struct Space {
    free: AtomicUsize,
    bits: Mutex<Bits>,
}

#[derive(Debug)]
pub(super) struct Areas {
    heads: Box<[Head]>,
    spaces: Box<[CachePadded<Space>]>,
    directory: Directory<SlotMeta>,
    pub slot_shift: u32,
    area_shift: u32,
    /// The mask of an address's offset in its area.
    inside: u64,
    /// The highest address of an area that may be added.
    pub reach: u64,
    /// The least number of areas.
    pub min: usize,
    counts: CachePadded<Counts>,
}

/// Counters, which no fast path changes.
#[derive(Debug, Default)]
struct Counts {
    present: AtomicUsize,
    /// Area numbers are below this.
    end: AtomicUsize,
    /// Slots that are mapped or on a CPU's list.
    taken: AtomicU64,
    most_taken: AtomicU64,
}

/// A request for an *odd* run, which no list keeps: any number of slots, anywhere that the constraints allow.
pub(super) struct OddRun {
    pub slots: usize,
    /// The first slot of an area at which it may begin, and the distance between such slots.
    pub first: usize,
    pub step: usize,
    /// The bytes from the run's start to the mapping's.
    pub offset: u64,
}

impl Areas {
    pub fn new(config: &SwiotlbConfig, min: u64, max: u64) -> Result<Self, OutOfMemory> {
        let max = max as usize;
        let slots = (config.area_bytes / config.slot_bytes) as usize;
        let space = |_| {
            let bits = Mutex::new(Bits::all_taken(slots)?);
            Ok(CachePadded(Space { free: AtomicUsize::new(0), bits }))
        };
        let head = || Head { base: AtomicU64::new(ABSENT), metadata: AtomicPtr::new(ptr::null_mut()) };
        Ok(Self {
            heads: slice(max, |_| Ok(head()))?,
            spaces: slice(max, space)?,
            directory: Directory::new(max)?,
            slot_shift: config.slot_bytes.trailing_zeros(),
            area_shift: config.area_bytes.trailing_zeros(),
            inside: config.area_bytes - 1,
            reach: config.reach.get(),
            min: min as usize,
            counts: CachePadded::default(),
        })
    }

    #[inline]
    fn bits(&self) -> u32 {
        self.area_shift - self.slot_shift
    }

    #[inline]
    pub fn area_bytes(&self) -> u64 {
        1 << self.area_shift
    }

    pub fn present(&self) -> usize {
        self.counts.present.load(Ordering::Relaxed)
    }

    pub fn max(&self) -> usize {
        self.heads.len()
    }

    pub fn capacity(&self) -> u64 {
        (self.present() as u64) << self.bits()
    }

    /// The slots that are mapped or on lists, and their peak.
    pub fn taken(&self) -> (u64, u64) {
        (self.counts.taken.load(Ordering::Relaxed), self.counts.most_taken.load(Ordering::Relaxed))
    }

    /// Whether less than a quarter is free, so that the pool should grow.
    pub fn is_low(&self) -> bool {
        let capacity = self.capacity();
        self.taken().0 > capacity - capacity / 4
    }

    #[inline]
    fn metadata(&self, area: usize) -> Option<&[SlotMeta]> {
        let metadata = self.heads.get(area)?.metadata.load(Ordering::Acquire);
        // SAFETY: a non-null pointer is to the metadata of all slots of an area, allocated until `self` is dropped, and used by shared
        // reference only.
        (!metadata.is_null()).then(|| unsafe { core::slice::from_raw_parts(metadata, 1 << self.bits()) })
    }

    /// The metadata of the slot that contains `phys`. If another area takes the place of that slot's meanwhile, it may be another address's metadata.
    pub fn locate(&self, phys: PhysAddr) -> Option<&SlotMeta> {
        self.metadata_of(self.directory.find(phys.get() >> self.area_shift)?, phys)
    }

    /// The fast path of [`locate`](Self::locate): `None` also where a lookup takes more than a few instructions.
    #[inline]
    pub fn locate_fast(&self, phys: PhysAddr) -> Option<&SlotMeta> {
        self.metadata_of(self.directory.find_fast(phys.get() >> self.area_shift)?, phys)
    }

    #[inline]
    fn metadata_of(&self, area: Leads<SlotMeta>, phys: PhysAddr) -> Option<&SlotMeta> {
        let index = (phys.get() & self.inside) >> self.slot_shift;
        // SAFETY: only `add` gives the directory pointers: each is to the metadata of all slots of an area, allocated until `self` is
        // dropped and used by shared reference only; and the index is less than the number of slots.
        (!area.to.is_null()).then(|| unsafe { &*area.to.add(index as usize) })
    }

    /// Takes runs of 2^`order` slots from one area that ends at `reach` at the most, and fills `out` from the front. Begins with the area `prefer`.
    /// Returns the number of runs: fewer than fit into `out` if no area has that many.
    ///
    /// Takes one lock, if the first area has any. O(areas + slots of an area / 64).
    pub fn take_runs<'a>(
        &'a self,
        prefer: usize,
        order: u32,
        reach: u64,
        out: &mut [Option<&'a SlotMeta>],
    ) -> usize {
        let mut count = 0;
        for area in self.from(prefer) {
            self.look_at(area, reach, 1 << order, |metadata, bits| {
                bits.take_runs(order, out.len(), |index| {
                    out[count] = set_run(metadata, index, 1 << order);
                    count += 1;
                });
                count << order
            });
            if count > 0 {
                break;
            }
        }
        count
    }

    /// Takes an odd run from the area number `area`. Takes one lock, if the area has that many free slots. O(slots of the area).
    pub fn take_odd(&self, area: usize, reach: u64, run: &OddRun) -> Option<&SlotMeta> {
        let mut taken = None;
        self.look_at(area, reach, run.slots, |metadata, bits| {
            let Some(index) = bits.take_odd(run.slots, run.first, run.step) else { return 0 };
            taken = set_run(metadata, index, run.slots);
            run.slots
        });
        taken.inspect(|meta| meta.set_odd_slots(run.slots))
    }

    /// All area numbers, beginning with `prefer`.
    pub fn from(&self, prefer: usize) -> impl Iterator<Item = usize> + use<> {
        let end = self.counts.end.load(Ordering::Acquire);
        (0..end).map(move |step| (prefer + step) % end)
    }

    /// Calls `take` with an area's metadata and bits, if the area may have `least` free slots. `take` returns the number of slots that it took.
    fn look_at<'a>(
        &'a self,
        area: usize,
        reach: u64,
        least: usize,
        take: impl FnOnce(&'a [SlotMeta], &mut Bits) -> usize,
    ) {
        let (space, metadata) = (&self.spaces[area], self.metadata(area));
        let Some(metadata) = metadata.filter(|_| space.free.load(Ordering::Relaxed) >= least) else { return };
        let mut bits = space.bits.lock();
        // Under the lock: an area that is removed has no free slots, so the base is that of the slots to be taken.
        if reach < self.reach && !self.is_within(area, reach) {
            return;
        }
        let slots = take(metadata, &mut bits);
        if slots > 0 {
            space.free.store(bits.free, Ordering::Relaxed);
            // Under the lock: otherwise the free of these slots could be counted first.
            let before = self.counts.taken.fetch_add(slots as u64, Ordering::Relaxed);
            self.counts.most_taken.fetch_max(before + slots as u64, Ordering::Relaxed);
        }
    }

    /// Whether a device that reaches addresses up to `reach` reaches all of the area that contains `address`.
    pub fn is_reached(&self, address: u64, reach: u64) -> bool {
        address | self.inside <= reach
    }

    /// As [`is_reached`](Self::is_reached), for the area number `area`.
    pub fn is_within(&self, area: usize, reach: u64) -> bool {
        let base = self.heads[area].base.load(Ordering::Relaxed);
        base < CHANGING && self.is_reached(base, reach)
    }

    /// Whether such a device reaches any area.
    pub fn any_within(&self, reach: u64) -> bool {
        (0..self.counts.end.load(Ordering::Acquire)).any(|area| self.is_within(area, reach))
    }

    /// Takes back runs of `slots` slots each. Takes a lock for each change of area; O(1) for a run, plus O(slots / 64).
    pub fn give<'a>(&self, runs: impl IntoIterator<Item = &'a SlotMeta>, slots: usize) {
        let mut held = None;
        for meta in runs {
            meta.clear();
            let address = meta.address();
            let index = (address & self.inside) >> self.slot_shift;
            // The area is there: some of its slots were taken until now.
            let Some(Leads { area, .. }) = self.directory.find(address >> self.area_shift) else { continue };
            let space = &self.spaces[area];
            // Release the last area's lock first: no caller holds two.
            let mut bits = match held.take() {
                Some((same, bits)) if same == area => bits,
                other => {
                    drop(other);
                    space.bits.lock()
                }
            };
            bits.give(index as usize, slots);
            space.free.store(bits.free, Ordering::Relaxed);
            self.counts.taken.fetch_sub(slots as u64, Ordering::Relaxed);
            held = Some((area, bits));
        }
    }

    /// Bytes of heads, bits and directory, for as many areas as there may be, and of slots' metadata, for each number that was ever an area's.
    pub fn metadata_bytes(&self) -> usize {
        let metadata =
            self.heads.iter().filter(|head| !head.metadata.load(Ordering::Relaxed).is_null()).count();
        let of_all = size_of_val(&*self.heads) + size_of_val(&*self.spaces) + self.directory.bytes();
        let bits = (self.max() << self.bits()) / 8;
        (metadata << self.bits()) * size_of::<SlotMeta>() + of_all + bits
    }
}

/// Records that the slots from `first` on are one run. Returns the first slot's metadata.
fn set_run(metadata: &[SlotMeta], first: usize, slots: usize) -> Option<&SlotMeta> {
    let run = metadata.get(first..first.checked_add(slots)?)?;
    let (first, inside) = run.split_first()?;
    (1..).zip(inside).for_each(|(distance, meta)| meta.inside(distance));
    Some(first)
}

impl Drop for Areas {
    fn drop(&mut self) {
        for head in &self.heads {
            let metadata = head.metadata.swap(ptr::null_mut(), Ordering::Acquire);
            if !metadata.is_null() {
                let metadata = ptr::slice_from_raw_parts_mut(metadata, 1 << self.bits());
                // SAFETY: it came from `Box::into_raw` of a slice of this length. `self` is being dropped, so no reference is left.
                drop(unsafe { Box::from_raw(metadata) });
            }
        }
    }
}
