//! Failure 18: one lock is held across a hardware wait, so that all CPUs wait for one.
//!
//! The hardware here works until another CPU has done everything there is to do, in the same domain. Whatever waits
//! for a lock that the first CPU holds never comes back: the hardware gives up after half a minute, and says what it
//! was. (That time decides only how long a failure takes.)

use std::cell::Cell;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use portcullis::addr::{Direction, DomainId, Iova, PageSize, PhysAddr, PhysSegment};
use portcullis::dma::{DmaDevice, Ended, QueueConfig, RawBatch, StrictRing, StrictRingConfig};
use portcullis::domain::Policy;
use portcullis::heap::{self, OutOfMemory};
use portcullis::invalidation::{
    Invalidation, InvalidationError, InvalidationQueue, QUEUE_ENTRIES, SharedQueue,
};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};
use portcullis::std_platform::StdPlatform;
use portcullis_model::Queue;
use portcullis_model::open::{OpenDevice, OpenDomain, OpenRing};

use crate::queued;
use crate::rig::{self, ANYWHERE, Hooked, LAZY_FOREVER, PAGE, page};

/// Threads, each of which knows whether it holds a CPU.
#[derive(Clone)]
struct Watched(StdPlatform);

thread_local! {
    static IN_CPU: Cell<bool> = const { Cell::new(false) };
    /// For this thread every window has ended.
    static LATE: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: CPUs are `StdPlatform`'s, and lent by it.
unsafe impl Platform for Watched {
    fn cpus(&self) -> usize {
        self.0.cpus()
    }

    fn number(&self) -> PlatformNumber {
        self.0.number()
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        assert!(!IN_CPU.replace(true), "a CPU inside a CPU");
        let result = self.0.with_cpu(f);
        IN_CPU.set(false);
        result
    }

    fn now_ns(&self) -> u64 {
        if LATE.get() { u64::MAX } else { self.0.now_ns() }
    }

    fn fence_all(&self) {
        self.0.fence_all();
    }

    fn register(&self, events: heap::Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.0.register(events)
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.0.wake_at(deadline_ns);
    }
}

type Rig<Q> = rig::Rig<Watched, Q>;

/// What the hardware waits for.
struct Work {
    armed: AtomicBool,
    asks: Mutex<Sender<()>>,
    answers: Mutex<Receiver<()>>,
    /// What the other CPU does now.
    doing: Mutex<&'static str>,
    waits: AtomicU64,
}

impl Work {
    /// Called while the hardware works.
    fn wait(&self) {
        assert!(!IN_CPU.get(), "a CPU is held while hardware works");
        if !self.armed.swap(false, Ordering::SeqCst) {
            return;
        }
        self.asks.lock().unwrap().send(()).unwrap();
        let answer = self.answers.lock().unwrap().recv_timeout(Duration::from_secs(30));
        assert!(answer.is_ok(), "{:?} waits for a CPU that waits for hardware", self.doing.lock().unwrap());
        self.waits.fetch_add(1, Ordering::SeqCst);
    }
}

/// Something to do, with its name.
type Step = (&'static str, Box<dyn FnMut() + Send>);

/// Everything that another CPU may want meanwhile. Where waits are shared, a CPU that asks hardware for something
/// waits for its turn, as it must: then only what asks for nothing is in the list.
fn everything<Q: InvalidationQueue>(rig: &Rig<Q>, alone: bool) -> Vec<Step> {
    let (domain, device) = (rig.domain.clone(), rig.device.clone());
    let lazily = DmaDevice::new(domain.clone(), u64::MAX).unwrap();
    lazily.set_policy(Some(LAZY_FOREVER)).unwrap();
    let (other, other_device) = rig.another(9, LAZY_FOREVER);
    let mut ring = StrictRing::new(&device, StrictRingConfig::new(1024, PAGE, 256)).unwrap();
    let memory = Arc::clone(&rig.memory);
    let map = {
        let domain = domain.clone();
        move || domain.open(&[page(1)], Direction::Bidirectional.permissions(), ANYWHERE).unwrap()
    };
    let mut all: Vec<Step> = Vec::new();
    let mut add = |name, step: Box<dyn FnMut() + Send>| all.push((name, step));
    let one = lazily.clone();
    add(
        "map and unmap lazily",
        Box::new(move || {
            // Enough for turns in the space behind the lists, too few to fill a queue.
            let iovas: Vec<_> = (0..4)
                .map(|number| one.open_single(page(number).phys, PAGE, Direction::ToDevice).unwrap())
                .collect();
            iovas.into_iter().for_each(|iova| one.unmap_single(iova, PAGE).unwrap());
        }),
    );
    let nic = queued::nic(&domain, u64::MAX);
    nic.dma().set_policy(Some(LAZY_FOREVER)).unwrap();
    let mut queue = nic.queue(QueueConfig::direct()).unwrap();
    add(
        "map and unmap a buffer",
        Box::new(move || {
            let mapping = queue.map(memory.buffer(100).unwrap(), Direction::FromDevice).unwrap();
            drop(queued::end(&mut queue, mapping));
        }),
    );
    let (one, all_pages) = (domain.clone(), map.clone());
    add(
        "translate",
        Box::new(move || {
            let range = all_pages();
            let phys = one.mapper().table().iova_to_phys(&Watched(StdPlatform::with_cpus(1)), range.start());
            assert_eq!(phys, Some(page(1).phys));
            let table = one.mapper().table();
            assert!(
                table
                    .entries(&Watched(StdPlatform::with_cpus(1)), table.aperture())
                    .any(|leaf| leaf.range.contains(range.start()))
            );
        }),
    );
    let one = domain.clone();
    add(
        "ask for counts and exposure",
        Box::new(move || {
            let (stats, exposure) = (one.stats(), one.exposure());
            assert!(stats.taken_iova_bytes > 0 && stats.maps > 0 && exposure.longest_stale_ns < u64::MAX);
        }),
    );
    let (one, two, mut window_ns) = (domain.clone(), lazily.clone(), 1 << 62);
    add(
        "weaken the policies",
        Box::new(move || {
            // Longer each time: what is as strict as before is flushed for.
            window_ns += 1;
            one.set_policy(Policy::Lazy { window_ns }).unwrap();
            two.set_policy(Some(Policy::Lazy { window_ns })).unwrap();
        }),
    );
    add(
        "map and unmap in a ring",
        Box::new(move || {
            let mapping = ring.open(&[page(3)], Direction::Bidirectional).unwrap();
            assert_eq!(ring.unmap(mapping).unwrap(), Ended::Pending);
        }),
    );
    let one = device.clone();
    add(
        "make a ring",
        Box::new(move || {
            assert!(StrictRing::new(&one, StrictRingConfig::new(64, PAGE, 8)).unwrap().commit().is_ok());
        }),
    );
    let (one, mut batch) = (device.clone(), RawBatch::new(&device, 256).unwrap());
    add(
        "unmap into a batch",
        Box::new(move || {
            let iova = one.open_single(page(5).phys, PAGE, Direction::Bidirectional).unwrap();
            one.unmap_single_in(&mut batch, iova, PAGE).unwrap();
        }),
    );
    let one = other_device.clone();
    add(
        "map in another domain",
        Box::new(move || {
            let iova = one.open_single(page(5).phys, PAGE, Direction::Bidirectional).unwrap();
            one.unmap_single(iova, PAGE).unwrap();
        }),
    );
    if !alone {
        return all;
    }
    let mut add = |name, step: Box<dyn FnMut() + Send>| all.push((name, step));
    let (one, range) = (domain.clone(), map);
    add(
        "unmap strictly, and flush",
        Box::new(move || {
            one.unmap_strictly(range()).unwrap();
            one.flush().unwrap();
        }),
    );
    add(
        "change another domain's policy",
        Box::new(move || {
            other.set_policy(Policy::Strict).unwrap();
            other.set_policy(LAZY_FOREVER).unwrap();
        }),
    );
    let one = domain.clone();
    add("reclaim", Box::new(move || _ = one.reclaim().unwrap()));
    add(
        "change the policy",
        Box::new(move || {
            domain.set_policy(Policy::Strict).unwrap();
            device.set_policy(Some(Policy::Strict)).unwrap();
            device.set_policy(None).unwrap();
        }),
    );
    all
}

/// Everything that may wait for hardware, under a policy.
type Wait<Q> = (&'static str, Policy, fn(&Rig<Q>));

fn one<Q: InvalidationQueue>(rig: &Rig<Q>) -> Iova {
    rig.device.open_single(page(2).phys, PAGE, Direction::Bidirectional).unwrap()
}

fn waits<Q: InvalidationQueue>() -> Vec<Wait<Q>> {
    vec![
        ("unmap", Policy::Strict, |rig| rig.device.unmap_single(one(rig), PAGE).unwrap()),
        ("unmap of a buffer", Policy::Strict, |rig| {
            let mut queue = queued::direct(&rig.device);
            let mapping = queue.map(rig.memory.buffer(1).unwrap(), Direction::FromDevice).unwrap();
            drop(queued::end(&mut queue, mapping));
        }),
        ("end of a queue", Policy::Strict, |rig| {
            let mut queue = queued::queue(&rig.device, QueueConfig::batched(4));
            let mapping = queue.map(rig.memory.buffer(1).unwrap(), Direction::FromDevice).unwrap();
            assert!(matches!(queue.unmap(mapping), Ok(Ended::Pending)));
        }),
        ("flush", LAZY_FOREVER, |rig| rig.domain.flush().unwrap()),
        ("unmap with a full queue", LAZY_FOREVER, |rig| {
            let iovas: Vec<_> = (0..=QUEUE_ENTRIES).map(|_| one(rig)).collect();
            iovas.into_iter().for_each(|iova| rig.device.unmap_single(iova, PAGE).unwrap());
        }),
        ("timer", LAZY_FOREVER, |rig| {
            rig.device.unmap_single(one(rig), PAGE).unwrap();
            LATE.set(true);
            PlatformEvents::timer(&*rig.domain);
            LATE.set(false);
        }),
        ("a CPU that goes", LAZY_FOREVER, |rig| {
            rig.device.unmap_single(one(rig), PAGE).unwrap();
            let flushes = rig.domain.stats().flushes;
            // Nothing of this one waits.
            PlatformEvents::cpu_released(&*rig.domain, 5);
            assert_eq!(rig.domain.stats().flushes, flushes);
            // This thread was the platform's first.
            PlatformEvents::cpu_released(&*rig.domain, 0);
        }),
        ("change of policy", LAZY_FOREVER, |rig| rig.domain.set_policy(Policy::Strict).unwrap()),
        ("change of a device's policy", LAZY_FOREVER, |rig| {
            rig.device.set_policy(Some(Policy::Strict)).unwrap();
        }),
        ("commit of a batch", Policy::Strict, |rig| {
            let mut batch = RawBatch::new(&rig.device, 4).unwrap();
            rig.device.unmap_single_in(&mut batch, one(rig), PAGE).unwrap();
            assert_eq!(batch.commit(), Ok(1));
        }),
        ("commit of a ring", Policy::Strict, |rig| {
            let mut ring = StrictRing::new(&rig.device, StrictRingConfig::new(64, PAGE, 1)).unwrap();
            let mapping = ring.open(&[page(3)], Direction::Bidirectional).unwrap();
            assert_eq!(ring.unmap(mapping).unwrap(), Ended::Flushed(()));
        }),
        ("reclaim", LAZY_FOREVER, |rig| {
            let size = PageSize::SIZE_2M.bytes();
            let list: Vec<_> = (0..size / PAGE).map(|number| page(2 * number)).collect();
            let range = rig.domain.open(&list, Direction::ToDevice.permissions(), ANYWHERE).unwrap();
            rig.domain.unmap(range).unwrap();
            assert!(rig.domain.reclaim().unwrap() > 0);
        }),
        ("map that is refused half-way", Policy::Strict, |rig| {
            let list = [page(0), PhysSegment { phys: PhysAddr::new(1 << 52), len: PAGE }];
            rig.domain.open(&list, Direction::ToDevice.permissions(), ANYWHERE).unwrap_err();
        }),
        ("map in a space that is exhausted", LAZY_FOREVER, |rig| {
            let map = || rig.domain.open(&[page(0)], Direction::ToDevice.permissions(), Iova::new(0xf_ffff));
            let ranges: Vec<_> = std::iter::from_fn(|| map().ok()).take(128).collect();
            ranges.into_iter().for_each(|range| rig.domain.unmap(range).unwrap());
            assert!((0..128).all(|_| map().is_ok()));
        }),
    ]
}

/// Each of `waits`, while another CPU does everything else.
fn run<Q: InvalidationQueue>(alone: bool, wrap: impl Fn(Queue, Arc<Work>) -> Q) {
    for (name, policy, wait) in waits::<Q>() {
        let ((asks, asked), (answers, answered)) = (channel(), channel());
        let work = Arc::new(Work {
            armed: AtomicBool::new(false),
            asks: Mutex::new(asks),
            answers: Mutex::new(answered),
            doing: Mutex::new("nothing"),
            waits: AtomicU64::new(0),
        });
        let rig = Rig::new(Watched(StdPlatform::new()), policy, |queue| wrap(queue, Arc::clone(&work)));
        let mut steps = everything(&rig, alone);
        // Reclaims of one page table wait for each other.
        steps.retain(|(step, _)| (*step, name) != ("reclaim", "reclaim"));
        // Everything once before, so that it is known to work when nobody waits.
        steps.iter_mut().for_each(|(_, step)| step());
        rig.domain.set_policy(policy).unwrap();
        let other = std::thread::spawn({
            let work = Arc::downgrade(&work);
            move || {
                for () in asked {
                    for (name, step) in &mut steps {
                        *work.upgrade().expect("it asks").doing.lock().unwrap() = name;
                        step();
                    }
                    answers.send(()).unwrap();
                }
            }
        });
        work.armed.store(true, Ordering::SeqCst);
        wait(&rig);
        assert_eq!(work.waits.load(Ordering::SeqCst), 1, "{name}: nothing was waited for");
        // The other thread ends when nobody can ask any more.
        *work.asks.lock().unwrap() = channel().0;
        other.join().unwrap_or_else(|_| panic!("{name}: the other CPU failed"));
    }
}

#[test]
fn other_cpus_do_everything_while_one_waits_for_hardware() {
    run(true, |queue, work| {
        let hooked = Hooked::new(queue);
        hooked.set(move || work.wait());
        hooked
    });
}

#[test]
fn the_same_where_waits_are_shared() {
    run(false, |queue, work| {
        let hooked = Hooked::new(queue);
        hooked.set(move || work.wait());
        SharedQueue::new(hooked)
    });
}

/// Hardware that looks at the locks of the queue above it while it works.
#[derive(Debug, Default)]
struct Looks {
    above: OnceLock<Weak<SharedQueue<Looks>>>,
    looked: AtomicU64,
}

// SAFETY: no hardware is behind it, so nothing is reached through it.
unsafe impl InvalidationQueue for Looks {
    fn invalidate(&self, _: DomainId, _: Invalidation) -> Result<(), InvalidationError> {
        let above = self.above.get().and_then(Weak::upgrade).unwrap();
        assert!(!is_held(&above), "{above:?}");
        self.looked.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// A lock that somebody holds shows itself as such.
fn is_held(locks: &impl Debug) -> bool {
    format!("{locks:?}").contains("<locked>")
}

/// Whoever comes while a batch is under way waits for it, as it must, but adds itself to the next one meanwhile.
#[test]
fn a_queue_that_is_shared_can_be_joined_while_hardware_works() {
    let lock = portcullis::sync::Mutex::new(0);
    let held = lock.lock();
    assert!(is_held(&lock), "this test sees nothing");
    drop(held);
    assert!(!is_held(&lock));
    let shared = Arc::new(SharedQueue::new(Looks::default()));
    shared.queue().above.set(Arc::downgrade(&shared)).unwrap();
    shared.invalidate(DomainId(1), Invalidation::Domain).unwrap();
    assert_eq!(shared.queue().looked.load(Ordering::Relaxed), 1);
}
