//! Growing before the pool is full, by the timer; shrinking when it is idle, and when it is asked to.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::addr::{Direction, PhysAddr};
use portcullis::bounce::swiotlb::{Bounced, Constraints, Swiotlb, SwiotlbConfig};
use portcullis::dma::DmaMapError;
use portcullis::heap::{OutOfMemory, Weak};
use portcullis::platform::{CopyMemory, Frames, LocalCpu, Platform, PlatformEvents, Table};
use portcullis::std_platform::StdPlatform;
use portcullis_model::{Buffer, Memory};

use super::support::*;

const LEN: u64 = 2048;

fn some(pool: &Pool, bytes: u64) -> Vec<Bounced> {
    let phys = PhysAddr::new(0x1_0000_0000);
    (0..bytes / LEN)
        .map(|_| map(pool, phys, LEN, Direction::ToDevice, &Constraints::new()).unwrap())
        .collect()
}

fn end(pool: &Pool, live: impl IntoIterator<Item = Bounced>) {
    live.into_iter().for_each(|mapped| unmap(pool, mapped.phys, mapped.len).unwrap());
}

type Work = Box<dyn FnOnce() + Send>;

/// A machine of one CPU, which is lent so many times before something else is done first.
#[derive(Clone, Default)]
struct Interrupted(Arc<Mutex<(usize, Option<Work>)>>);

impl Interrupted {
    /// How often the CPU was lent since the last call. It is lent `turns` times more before `work` is done.
    fn after(&self, turns: usize, work: Option<Work>) -> usize {
        let (left, _) = std::mem::replace(&mut *self.0.lock().unwrap(), (turns, work));
        usize::MAX - left
    }
}

// SAFETY: one thread is the one CPU, and has not been lent it when other work is done.
unsafe impl Platform for Interrupted {
    fn cpus(&self) -> usize {
        1
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        let work = {
            let (left, work) = &mut *self.0.lock().unwrap();
            let is_now = *left == 0;
            *left = left.wrapping_sub(1);
            work.take_if(|_| is_now)
        };
        work.into_iter().for_each(|work| work());
        // SAFETY: of the implementation.
        f(Some(&unsafe { LocalCpu::new(0) }))
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, _: u64) {}
}

/// One has seen that there is an area too many, and passed over the last, which is in use. Then that is given back by another.
#[test]
fn two_that_trim_leave_as_much_as_is_to_stay() {
    let platform = Interrupted::default();
    let pool = Swiotlb::new(platform.clone(), Memory::new(16 << 20), &config()).unwrap();
    // Taking back what CPUs keep, where no area is to go.
    platform.after(usize::MAX, None);
    assert_eq!(pool.trim(), 0);
    let turns = platform.after(usize::MAX, None);
    let (phys, any) = (PhysAddr::new(0x1_0000_0000), Constraints::new());
    let map = || map(&pool, phys, AREA, Direction::ToDevice, &any).unwrap();
    let (first, second) = (map(), map());
    unmap(&pool, first.phys, AREA).unwrap();
    assert_eq!(pool.usage().capacity, 2 * AREA);
    let (other, freed) = (pool.clone(), Arc::new(AtomicU64::new(0)));
    let of_other = Arc::clone(&freed);
    let work = move || {
        unmap(&other, second.phys, AREA).unwrap();
        of_other.store(other.trim(), Ordering::Relaxed);
    };
    // Of four numbers, the highest first.
    platform.after(turns + 3, Some(Box::new(work)));
    assert_eq!(pool.trim() + freed.load(Ordering::Relaxed), AREA);
    assert_eq!((freed.load(Ordering::Relaxed), pool.usage().capacity), (AREA, AREA));
}

#[test]
fn it_grows_before_it_is_full() {
    let (platform, memory, pool) = machine(&config());
    platform.set_time(5);
    let frames = memory.frames_in_use();
    let live = some(&pool, AREA / 2);
    assert_eq!(platform.wakes(), []);
    let more = some(&pool, AREA * 3 / 8);
    assert_eq!(platform.wakes(), [5], "asked for once");
    assert_eq!(memory.frames_in_use(), frames, "not by who maps");
    pool.timer();
    assert_eq!(pool.usage().capacity, 2 * AREA);
    assert_eq!(platform.wakes(), [1_000_000_005], "and to be looked at when it may be idle");
    pool.timer();
    assert_eq!(pool.usage().capacity, 2 * AREA);
    end(&pool, live.into_iter().chain(more));
}

#[test]
fn without_a_timer_who_finds_it_full_grows_it() {
    let (_, memory, pool) = machine(&config());
    let live = some(&pool, 4 * AREA);
    assert_eq!(pool.usage().capacity, 4 * AREA);
    end(&pool, live);
    assert_eq!((pool.trim(), pool.usage().capacity), (3 * AREA, AREA));
    assert_eq!(memory.frames_in_use() * 4096, AREA);
}

#[test]
fn what_is_idle_is_given_back_in_time() {
    let (platform, memory, pool) = machine(&config());
    let mut live = some(&pool, 3 * AREA);
    let asked = platform.wakes();
    assert!(asked.contains(&1_000_000_000), "{asked:?}");
    platform.set_time(999_999_999);
    pool.timer();
    assert_eq!(pool.usage().capacity, 4 * AREA, "grown further, and not looked at before its time");
    // Twice of what is mapped is kept.
    end(&pool, live.drain(AREA as usize / LEN as usize / 2..));
    platform.set_time(1_000_000_000);
    platform.wakes();
    pool.timer();
    assert_eq!(pool.usage().capacity, AREA);
    assert_eq!(pool.usage().mapped, AREA / 2);
    assert_eq!(platform.wakes(), [], "there is nothing more to give back");
    end(&pool, live);
    assert_eq!(memory.frames_in_use() * 4096, AREA);
}

/// To the slot, and never below what the pool begins with.
#[test]
fn an_idle_pool_keeps_twice_what_is_mapped_and_the_least() {
    for (least, mapped, kept) in [
        (1, 0, 1),
        (1, AREA / 2, 1),
        (1, AREA / 2 + LEN, 2),
        (1, AREA, 2),
        (3, AREA / 2, 3),
        (2, AREA + LEN, 3),
    ] {
        let config = SwiotlbConfig { min_bytes: least * AREA, max_bytes: 8 * AREA, ..config() };
        let (platform, memory, pool) = machine(&config);
        let mut live = some(&pool, 6 * AREA);
        pool.timer();
        end(&pool, live.drain((mapped / LEN) as usize..));
        platform.set_time(1_000_000_000);
        pool.timer();
        let usage = pool.usage();
        assert_eq!((usage.mapped, usage.capacity), (mapped, kept * AREA), "{least} {mapped:#x}");
        end(&pool, live);
        assert_eq!(memory.frames_in_use() * 4096, kept * AREA);
    }
}

/// A platform keeps the earliest deadline only.
#[test]
fn a_deadline_that_an_earlier_one_took_the_place_of_is_asked_for_again() {
    let (platform, _, pool) = machine(&config());
    let live = some(&pool, 2 * AREA);
    // For growth, as little was free; and, by whoever found the pool full, for a look at what is idle.
    assert_eq!(platform.wakes(), [0, 1_000_000_000]);
    platform.set_time(7);
    pool.timer();
    assert_eq!(platform.wakes(), [1_000_000_000]);
    end(&pool, live);
}

#[test]
fn an_area_in_use_stays() {
    let (platform, _, pool) = machine(&config());
    let live = some(&pool, 4 * AREA);
    // One mapping in each area stays.
    let mut kept: Vec<Bounced> = Vec::new();
    for mapped in live {
        if kept.iter().all(|kept| kept.phys.get() / AREA != mapped.phys.get() / AREA) {
            kept.push(mapped);
        } else {
            end(&pool, [mapped]);
        }
    }
    assert_eq!((kept.len(), pool.trim()), (4, 0));
    end(&pool, kept.pop());
    platform.run_on(3);
    assert_eq!(pool.trim(), AREA);
    end(&pool, kept);
    assert_eq!((pool.trim(), pool.usage().capacity), (2 * AREA, AREA));
}

#[test]
fn without_memory_it_stays_as_it_is() {
    let (platform, memory, pool) = machine(&config());
    let mut live = some(&pool, AREA);
    let others: Vec<Buffer> = std::iter::from_fn(|| memory.buffer(AREA)).collect();
    let phys = PhysAddr::new(0x1_0000_0000);
    let failed = map(&pool, phys, LEN, Direction::ToDevice, &Constraints::new());
    let Err(DmaMapError::Pressure { capacity, limit, .. }) = failed else { panic!("{failed:?}") };
    assert_eq!((capacity, limit), (AREA, 4 * AREA));
    // The timer gets some.
    drop(others);
    pool.timer();
    live.extend(some(&pool, LEN));
    end(&pool, live);
    assert!(platform.wakes().contains(&0));
}

#[test]
fn devices_of_little_reach_have_areas_of_their_own_to_come_from() {
    let (platform, memory, pool) = machine(&config());
    // The first area is all that this device reaches.
    let reach = PhysAddr::new(memory.base().get() + AREA - 1);
    let near = Constraints::new().with_reach(reach);
    let far = some(&pool, 2 * AREA);
    let phys = memory.base();
    let mapped = || map(&pool, phys, LEN, Direction::ToDevice, &near);
    assert!(matches!(mapped(), Err(DmaMapError::Pressure { .. })));
    assert_eq!(pool.usage().capacity, 2 * AREA, "nothing was added that is of no use");
    let (reached, beyond): (Vec<Bounced>, Vec<Bounced>) = far.into_iter().partition(|far| far.phys <= reach);
    // The CPU's list has what the device does not reach on top.
    let first = reached[0];
    end(&pool, [first]);
    end(&pool, beyond.iter().copied());
    assert_eq!(mapped(), Ok(first));
    platform.run_on(1);
    end(&pool, reached);
}

/// Memory in two places, as that of most machines is: who does not say otherwise gets the higher.
struct Zones {
    low: Arc<Memory>,
    high: Arc<Memory>,
}

impl Zones {
    fn of(&self, at: PhysAddr) -> &Memory {
        if at < self.high.base() { &self.low } else { &self.high }
    }
}

// SAFETY: everything is passed on to the memory that has the address.
unsafe impl Frames for Zones {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.high.alloc(count).or_else(|| self.low.alloc(count))
    }

    fn alloc_within(&self, count: usize, last: PhysAddr) -> Option<PhysAddr> {
        self.high.alloc_within(count, last).or_else(|| self.low.alloc_within(count, last))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.of(first).free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        self.of(frame).table_at(frame)
    }
}

// SAFETY: as above; the buffers of this test and the pool's areas are each in one of the two.
unsafe impl CopyMemory for Zones {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        let mut bytes = vec![0; len as usize];
        self.of(from).read(from, &mut bytes).unwrap();
        self.of(to).write(to, &bytes).unwrap();
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        self.of(at).write(at, &vec![0; len as usize]).unwrap();
    }
}

#[test]
fn a_device_of_little_reach_gets_low_memory() {
    let memory = |base| Memory::with_base(PhysAddr::new(base), 16 << 20);
    let (low, high) = (memory(1 << 24), memory(1 << 32));
    let zones = Zones { low: Arc::clone(&low), high: Arc::clone(&high) };
    let pool = Swiotlb::new(Manual::default(), zones, &config()).unwrap();
    let buffer = high.buffer(LEN).unwrap();
    buffer.fill(7);
    let with = |constraints: Constraints| map(&pool, buffer.phys(), LEN, Direction::ToDevice, &constraints);
    let reach = PhysAddr::new(u32::MAX.into());
    let (any, near) =
        (with(Constraints::new()).unwrap(), with(Constraints::new().with_reach(reach)).unwrap());
    assert!(any.phys >= high.base() && near.phys < reach);
    assert_eq!(bytes(&low, near.phys, LEN), [7; LEN as usize]);
    let nowhere = with(Constraints::new().with_reach(PhysAddr::new((1 << 24) - 1)));
    assert!(matches!(nowhere, Err(DmaMapError::BeyondReach { .. })));
    [any, near].iter().for_each(|mapped| unmap(&pool, mapped.phys, LEN).unwrap());
    pool.trim();
    assert_eq!((low.frames_in_use(), pool.usage().capacity), (0, AREA));
    drop((pool, buffer));
    assert_eq!((high.frames_in_use(), low.bad_frees() + high.bad_frees()), (0, 0));
    // A pool for such devices only.
    let zones = Zones { low: Arc::clone(&low), high: Arc::clone(&high) };
    let pool = Swiotlb::new(Manual::default(), zones, &SwiotlbConfig { reach, ..config() }).unwrap();
    assert_eq!((low.frames_in_use() * 4096, high.frames_in_use()), (AREA, 0));
    drop(pool);
    assert_eq!(low.frames_in_use(), 0);
}

#[test]
fn a_cpu_that_goes_leaves_nothing_behind() {
    let (platform, _, pool) = machine(&config());
    end(&pool, some(&pool, AREA / 4));
    assert!(pool.usage().kept > 0);
    pool.cpu_released(0);
    assert_eq!(pool.usage().kept, 0);
    let kept = || {
        end(&pool, some(&pool, AREA / 4));
        pool.usage().kept
    };
    // A CPU that has had nothing is no CPU less: the others keep their share, which is that of the CPUs that have.
    let before = kept();
    (1..4).for_each(|cpu| pool.cpu_released(cpu));
    assert_eq!(kept(), before);
    pool.cpu_released(0);
    platform.run_on(1);
    end(&pool, some(&pool, LEN));
    platform.run_on(0);
    assert!(kept() < before, "two share");
}

/// Memory that does not care how far a device reaches.
struct Careless(Arc<Memory>);

// SAFETY: all is the memory's, but for what is to be found out: `alloc_within` returns what is beyond.
unsafe impl Frames for Careless {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.0.alloc(count)
    }

    fn alloc_within(&self, count: usize, _: PhysAddr) -> Option<PhysAddr> {
        self.0.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.free(first, count) }
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        self.0.table_at(frame)
    }
}

// SAFETY: as above.
unsafe impl CopyMemory for Careless {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.copy(from, to, len) }
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.zero(at, len) }
    }
}

/// A device whose reach ends one byte before the last of an area does not get it, whatever the memory says.
#[test]
fn an_area_beyond_the_reach_is_given_back() {
    let frames = (AREA / 4096) as usize;
    let memory = Memory::new(16 << 20);
    let base = memory.alloc(frames).unwrap();
    // SAFETY: nobody has used them.
    unsafe { memory.free(base, frames) };
    for (reach, is_made) in [(base.get() + AREA - 2, false), (base.get() + AREA - 1, true)] {
        let config = SwiotlbConfig { reach: PhysAddr::new(reach), ..config() };
        let made = Swiotlb::new(Manual::default(), Careless(Arc::clone(&memory)), &config);
        assert_eq!((made.is_ok(), memory.frames_in_use() > 0), (is_made, is_made));
    }
}

#[test]
fn a_pool_that_goes_leaves_what_a_device_may_still_write() {
    let (_, memory, pool) = machine(&config());
    let live = some(&pool, 2 * AREA);
    end(&pool, live[1..].iter().copied());
    let handles = Arc::strong_count(&memory);
    drop(pool);
    assert_eq!(memory.frames_in_use() * 4096, AREA);
    assert!(memory.is_allocated(live[0].phys));
    assert_eq!(Arc::strong_count(&memory), handles, "the memory itself must not go while a device has some");
    let (_, memory, pool) = machine(&config());
    end(&pool, some(&pool, 2 * AREA));
    drop(pool);
    assert_eq!((memory.frames_in_use(), Arc::strong_count(&memory)), (0, 1));
}

/// The ready-made platform's timer, whenever it comes.
#[test]
fn the_timer_of_the_ready_made_platform() {
    let memory = Memory::new(16 << 20);
    let config = SwiotlbConfig { idle_ns: 1000, ..config() };
    let pool = Swiotlb::new(StdPlatform::new(), memory, &config).unwrap();
    let phys = PhysAddr::new(0x1_0000_0000);
    let live: Vec<Bounced> = (0..AREA / LEN)
        .map(|_| map(&pool, phys, LEN, Direction::ToDevice, &Constraints::new()).unwrap())
        .collect();
    while pool.usage().capacity == AREA {
        std::thread::yield_now();
    }
    live.iter().for_each(|mapped| unmap(&pool, mapped.phys, LEN).unwrap());
    while pool.usage().capacity > AREA {
        std::thread::yield_now();
    }
}
