//! Races and failures in between the steps of an unmap that a fresh audit found: each test failed on the build before.
#![cfg(not(loom))]

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::addr::{DomainId, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::domain::{Domain, Policy};
use portcullis::heap::Shared;
use portcullis::invalidation::{InvalidationError, InvalidationQueue};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{AmdV1, Entry, Format, PageTable, VtdSecondStage};
use portcullis::platform::{Frames, Platform, Table};
use portcullis_model::{Context, Iommu, IommuConfig, Memory, TableFormat};

use crate::played::Played;
use crate::rig::{ANYWHERE, Clocked, DEVICE, Hooked, PAGE};

const BOTH: Permissions = Permissions::READ_WRITE;
const PHYS: u64 = 4 << 30;

type Hook = Arc<dyn Fn() + Send + Sync>;

/// Frames that call the test when the words of the frame that was allocated last are looked for, the `n`th time.
struct Watched {
    memory: Arc<Memory>,
    armed: AtomicU64,
    frame: AtomicU64,
    hook: Mutex<Option<Hook>>,
}

// SAFETY: all of it is the memory's.
unsafe impl Frames for Watched {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let frame = self.memory.alloc(count)?;
        self.frame.store(frame.get(), Ordering::Relaxed);
        Some(frame)
    }
    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.memory.free(first, count) }
    }
    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        if self.armed.load(Ordering::Relaxed) > 0
            && frame.get() == self.frame.load(Ordering::Relaxed)
            && self.armed.fetch_sub(1, Ordering::Relaxed) == 1
        {
            let hook = self.hook.lock().unwrap().take();
            if let Some(hook) = hook {
                hook();
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.memory.table(frame) }
    }
}

fn part(range: IovaRange, offset: u64, len: u64) -> IovaRange {
    IovaRange::new(range.start().checked_add(offset).unwrap(), len).unwrap()
}

/// A run's split that is not confirmed: the copy is emptied before anybody is let into the table again.
#[test]
fn a_page_beside_a_run_whose_split_fails_is_out_of_reach_after_its_strict_unmap() {
    const RUN: u64 = 64 << 10;
    let memory = Memory::new(16 << 20);
    let iommu = Iommu::new(IommuConfig { iotlb_entries: 1 << 12, ..IommuConfig::new(Arc::clone(&memory)) });
    let (queue, platform) = (Arc::new(Hooked::new(iommu.queue())), Clocked::new(2));
    let frames = Arc::new(Watched {
        memory: Arc::clone(&memory),
        armed: AtomicU64::new(0),
        frame: AtomicU64::new(0),
        hook: Mutex::default(),
    });
    let table =
        PageTable::for_cpus(Arc::clone(&frames), AmdV1::new(4, 3, 48).unwrap(), platform.cpus()).unwrap();
    iommu.attach(
        DEVICE,
        Context::Translated {
            domain: DomainId(1),
            root: table.root(),
            format: TableFormat::AmdV1 { levels: 4 },
        },
    );
    let root = table.root();
    let mapper = TableMapper::new(table, Arc::clone(&queue), DomainId(1), Vec::new());
    let domain = Domain::new(Played::new(Arc::clone(&platform)), mapper, Policy::Strict).unwrap();
    let list = [
        PhysSegment { phys: PhysAddr::new(PHYS), len: RUN },
        PhysSegment { phys: PhysAddr::new(PHYS + (1 << 30) + PAGE), len: PAGE },
        PhysSegment { phys: PhysAddr::new(PHYS + (2 << 30) + PAGE), len: PAGE },
    ];
    // SAFETY: the memory is the device's alone.
    let range = unsafe { domain.map(&list, BOTH, ANYWHERE) }.unwrap();
    let reaches = {
        let iommu = Arc::clone(&iommu);
        move |range: IovaRange| iommu.access(DEVICE, range.start(), 1, Permissions::WRITE).is_ok()
    };
    let (first, beside, other) =
        (part(range, 0, PAGE), part(range, RUN, PAGE), part(range, RUN + PAGE, PAGE));
    assert!(reaches(first) && reaches(beside) && reaches(other));
    // The hardware has nothing cached; while the split's own invalidation is under way it finds the copy.
    domain.flush().unwrap();
    let once = AtomicBool::new(false);
    let (walks, frames_too, closed) =
        (reaches.clone(), Arc::clone(&frames), Arc::new(AtomicBool::new(false)));
    let (tables, is_closed) = (Arc::clone(&memory), Arc::clone(&closed));
    let hook: Hook = Arc::new(move || {
        // The entry that leads to the table, two levels below the root: while it has both marks (AMD: bits 2:1 of an entry of
        // a table are ignored) other CPUs' unmaps wait, and are confirmed only after the copy was emptied.
        let entry = [4, 3, 2].iter().fold(root.get(), |table, level| {
            let index = first.start().get() >> (12 + 9 * (level - 1)) & 511;
            // SAFETY: tables of a domain that lives.
            let table = unsafe { tables.table(PhysAddr::new(table & 0xf_ffff_ffff_f000)) };
            table[index as usize].load(Ordering::Acquire)
        });
        is_closed.store(entry & 0b110 == 0b110, Ordering::Relaxed);
    });
    let unit = Arc::clone(&iommu);
    queue.set(move || {
        if !once.swap(true, Ordering::Relaxed) {
            assert!(walks(other), "the hardware walks the copy");
            unit.queue().fail_next(1, InvalidationError::Rejected { code: 9 });
            *frames_too.hook.lock().unwrap() = Some(Arc::clone(&hook));
            // From now on only the emptying looks for the copy's words.
            frames_too.armed.store(1, Ordering::Relaxed);
        }
    });
    assert!(domain.unmap_strictly(first).is_err(), "the split was not confirmed");
    queue.clear();
    assert!(frames.hook.lock().unwrap().is_none(), "the copy was emptied");
    assert!(closed.load(Ordering::Relaxed), "another CPU unmaps what the copy still translates");
    domain.unmap_strictly(beside).unwrap();
    assert!(!reaches(beside));
}

/// VT-d's, whose `decode` lets the test do something when the armed thread meets a leaf of 2 MiB.
#[derive(Debug, Clone, Copy)]
struct Slow(VtdSecondStage);

std::thread_local! {
    /// Of each thread, and so of each test, its own: they run at once.
    static LATER: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

// SAFETY: all of it is VT-d's; it only takes its time.
unsafe impl Format for Slow {
    const GRANULE_SHIFT: u32 = VtdSecondStage::GRANULE_SHIFT;
    const MARK: u64 = VtdSecondStage::MARK;
    const SPLIT: u64 = VtdSecondStage::SPLIT;
    const PRESENT: u64 = VtdSecondStage::PRESENT;
    const KIND: u64 = VtdSecondStage::KIND;
    const BREAK_BEFORE_MAKE: bool = false;

    of_the_inner_format!();

    fn decode(&self, entry: u64, level: u32) -> Entry {
        let found = self.0.decode(entry, level);
        if level == 2 && matches!(found, Entry::Leaf { .. }) {
            let hook = LATER.take();
            if let Some(hook) = hook {
                hook();
            }
        }
        found
    }
}

type SlowTables = TableMapper<Arc<Memory>, Arc<dyn InvalidationQueue>, Slow>;

/// A domain of a page of 2 MiB, which the device may write to.
struct Large {
    memory: Arc<Memory>,
    platform: Arc<Clocked>,
    domain: Shared<Domain<SlowTables, Played>>,
    range: IovaRange,
    /// Asks whether the device reaches the first byte of a range.
    reaches: Arc<dyn Fn(IovaRange) -> bool + Send + Sync>,
}

fn large() -> Large {
    const LARGE: u64 = 2 << 20;
    let memory = Memory::new(16 << 20);
    let iommu = Iommu::new(IommuConfig { iotlb_entries: 1 << 12, ..IommuConfig::new(Arc::clone(&memory)) });
    let platform = Clocked::new(2);
    let format = Slow(VtdSecondStage::new(4, 3, 48).unwrap());
    let table = PageTable::for_cpus(Arc::clone(&memory), format, platform.cpus()).unwrap();
    iommu.attach(DEVICE, Context::SecondStage { domain: DomainId(1), root: table.root(), levels: 4 });
    let mapper = TableMapper::new(table, Arc::new(iommu.queue()) as _, DomainId(1), Vec::new());
    let domain = Domain::new(Played::new(Arc::clone(&platform)), mapper, Policy::Strict).unwrap();
    let list = [PhysSegment { phys: PhysAddr::new(PHYS), len: LARGE }];
    // SAFETY: the memory is the device's alone.
    let range = unsafe { domain.map(&list, BOTH, ANYWHERE) }.unwrap();
    let reaches =
        Arc::new(move |range: IovaRange| iommu.access(DEVICE, range.start(), 1, Permissions::WRITE).is_ok());
    Large { memory, platform, domain, range, reaches }
}

/// Safe code: one thread unmaps a range, another a part of it.
#[test]
fn a_large_page_that_is_unmapped_while_another_unmaps_a_part_of_it_is_out_of_reach() {
    let Large { memory, platform, domain, range, reaches } = large();
    let (first, second) = (part(range, 0, PAGE), part(range, PAGE, PAGE));
    assert!(reaches(first) && reaches(second));
    let (cpus, unmaps, walks) = (Arc::clone(&platform), Shared::downgrade(&domain), reaches.clone());
    let hook: Hook = Arc::new(move || {
        cpus.be(1);
        println!("the part: {:?}", unmaps.upgrade().unwrap().unmap_strictly(first));
        cpus.be(0);
        assert!(!walks(first) && walks(second), "the device goes on with the rest");
    });
    LATER.set(Some(hook));
    let whole = domain.unmap_strictly(range);
    println!("the whole: {whole:?}");
    let leaked = memory.frames_in_use() * PAGE - domain.mapper().table().table_bytes() as u64;
    println!("frames beyond what the table counts: {leaked}");
    let reached = reaches(second);
    let reach_first = reaches(first);
    let frames = Arc::clone(&memory);
    drop(domain);
    println!("frames in use after drop: {}", frames.frames_in_use());
    assert!(whole.is_err() || !reached && !reach_first, "Ok, and the device reaches it");
}

/// Safe code of somebody else: it unmaps its own range twice, at once. Whoever gets the addresses next is innocent.
#[test]
fn what_an_innocent_caller_unmaps_is_out_of_reach_though_the_last_owner_unmapped_twice_at_once() {
    let Large { platform, domain, range, reaches, .. } = large();
    let (first, second) = (part(range, 0, PAGE), part(range, PAGE, PAGE));
    let (unmaps, walks) = (Shared::downgrade(&domain), reaches.clone());
    let cpus = Arc::clone(&platform);
    let got = Arc::new(Mutex::new(None));
    let gets = Arc::clone(&got);
    let hook: Hook = Arc::new(move || {
        cpus.be(0);
        let domain = unmaps.upgrade().unwrap();
        domain.unmap_strictly(range).unwrap();
        // The CPU whose it was gets it, once this one has sent it home.
        let scattered: Vec<_> = (0..512_u64)
            .map(|page| PhysSegment { phys: PhysAddr::new(PHYS + (1 << 30) + 2 * page * PAGE), len: PAGE })
            .collect();
        let mut next = None;
        for _ in 0..4096 {
            // SAFETY: the memory is the device's alone.
            let new = unsafe { domain.map(&scattered, BOTH, ANYWHERE) };
            if new == Ok(range) || new.is_err() {
                next = new.ok();
                break;
            }
        }
        cpus.be(1);
        println!("the innocent one got it: {}", next.is_some());
        if next.is_some() {
            assert!(walks(first));
        }
        *gets.lock().unwrap() = next;
    });
    LATER.set(Some(hook));
    platform.be(1);
    println!("the second unmap of the first owner: {:?}", domain.unmap_strictly(range));
    let innocent = got.lock().unwrap().take().expect("the test works");
    let unmapped = domain.unmap_strictly(innocent);
    println!("the innocent one's unmap: {unmapped:?}; reached: {}", reaches(second));
    assert!(!reaches(second));
}

/// The platform panics once, as a CPU comes back, at its `turn`th time during an unmap of a part of a page. Whether another
/// CPU's unmap of what is beside it ends.
fn goes_on<X: Format>(format: X, tables: TableFormat, bytes: u64, turn: u64) -> (bool, bool) {
    let memory = Memory::new(16 << 20);
    let iommu = Iommu::new(IommuConfig { iotlb_entries: 1 << 12, ..IommuConfig::new(Arc::clone(&memory)) });
    let platform = Clocked::new(2);
    let table = PageTable::for_cpus(Arc::clone(&memory), format, platform.cpus()).unwrap();
    iommu.attach(DEVICE, Context::Translated { domain: DomainId(1), root: table.root(), format: tables });
    let mapper = TableMapper::new(
        table,
        Arc::new(iommu.queue()) as Arc<dyn InvalidationQueue>,
        DomainId(1),
        Vec::new(),
    );
    let domain = Domain::new(Played::new(Arc::clone(&platform)), mapper, Policy::Strict).unwrap();
    let list = [PhysSegment { phys: PhysAddr::new(PHYS), len: bytes }];
    // SAFETY: the memory is the device's alone.
    let range = unsafe { domain.map(&list, BOTH, ANYWHERE) }.unwrap();
    let turns = AtomicU64::new(0);
    platform.after_each_turn(move || {
        if turns.fetch_add(1, Ordering::Relaxed) + 1 == turn {
            panic!("the platform is moody");
        }
    });
    let unmap = std::panic::AssertUnwindSafe(|| domain.unmap_strictly(part(range, 0, PAGE)));
    let panicked = std::panic::catch_unwind(unmap).is_err();
    platform.after_each_turn(|| ());
    let (tell, told) = std::sync::mpsc::channel();
    let other = domain.clone();
    std::thread::spawn(move || {
        let _ = other.unmap_strictly(part(range, bytes - PAGE, PAGE));
        let _ = tell.send(());
    });
    let ended = told.recv_timeout(std::time::Duration::from_secs(60));
    assert_ne!(ended, Err(std::sync::mpsc::RecvTimeoutError::Disconnected));
    if ended.is_ok() {
        while Shared::owners(&domain) > 1 {
            std::thread::yield_now();
        }
        drop(domain);
        println!("turn {turn}: frames in use when all is gone: {}", memory.frames_in_use());
    }
    (panicked, ended.is_ok())
}

#[test]
fn a_platform_that_panics_while_a_page_is_split_stops_nobody_for_ever() {
    std::panic::set_hook(Box::new(|_| ()));
    let mut stuck = Vec::new();
    for turn in 1..14 {
        let fresh = |f: fn(u64) -> (bool, bool)| std::thread::spawn(move || f(turn)).join().unwrap();
        let amd = fresh(|turn| {
            goes_on(AmdV1::new(4, 3, 48).unwrap(), TableFormat::AmdV1 { levels: 4 }, 64 << 10, turn)
        });
        let arm = fresh(|turn| {
            let tables = portcullis_model::ArmTables::stage2(portcullis_model::Granule::Size4K, 48, 4);
            let arm = portcullis::pgtable::Arm::<12>::stage_2(48, 48).unwrap();
            goes_on(arm, TableFormat::Arm(tables), 64 << 10, turn)
        });
        stuck.extend(
            [("amd", amd), ("arm", arm)].iter().filter(|(_, (_, ended))| !ended).map(|(n, _)| (*n, turn)),
        );
        println!("turn {turn}: (panicked, another ended): amd {amd:?}, arm {arm:?}");
    }
    let _ = std::panic::take_hook();
    assert!(stuck.is_empty(), "for ever: {stuck:?}");
}
