//! Memory, mapper, queue and platform that do what they should, but for the call that is to go wrong.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use portcullis::addr::{DomainId, IovaRange, PhysAddr, PhysSegment};
use portcullis::heap::{OutOfMemory, Shared, Weak};
use portcullis::invalidation::{Costs, Gather, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::mapper::{Geometry, Mapper};
use portcullis::percpu::{Marks, Turn};
use portcullis::pgtable::{Attributes, MapError, Unmapped};
use portcullis::platform::{
    CacheMaintenance, CopyMemory, Frames, LocalCpu, Platform, PlatformEvents, PlatformNumber, Table,
};
use portcullis::sync::AtomicU64 as Word;
use portcullis_model::{Memory, Queue};

use crate::faults::{Call, Verdict};
use crate::hostile::Hostile;

pub const TIMED_OUT: InvalidationError = InvalidationError::TimedOut { waited_ns: 1 };
pub const REJECTED: InvalidationError = InvalidationError::Rejected { code: 1 };

fn answer(verdict: Verdict) -> Result<(), InvalidationError> {
    match verdict {
        Verdict::GoOn => Ok(()),
        Verdict::Fail => Err(TIMED_OUT),
        Verdict::Refuse => Err(REJECTED),
    }
}

/// Memory that is never handed out twice: what a device reaches of what was freed is found.
#[derive(Clone)]
pub struct Fr {
    pub memory: Arc<Memory>,
    pub hostile: Arc<Hostile>,
}

impl Fr {
    fn give(&self, call: Call, alloc: impl FnOnce() -> Option<PhysAddr>, count: usize) -> Option<PhysAddr> {
        self.hostile.look();
        let (verdict, late) = self.hostile.faults.enter(call);
        let first = if verdict == Verdict::GoOn { alloc() } else { None };
        first.inspect(|first| self.hostile.handed_out(*first, count));
        late.come();
        first
    }
}

// SAFETY: what works is the memory's; a frame that was freed is nobody's for ever.
unsafe impl Frames for Fr {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.give(Call::Alloc, || self.memory.alloc(count), count)
    }

    fn alloc_within(&self, count: usize, last: PhysAddr) -> Option<PhysAddr> {
        self.give(Call::AllocWithin, || self.memory.alloc_within(count, last), count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        let (_, late) = self.hostile.faults.enter(Call::Free);
        self.hostile.freed(&self.memory, first, count);
        late.come();
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        let (_, late) = self.hostile.faults.enter(Call::Table);
        late.come();
        self.hostile.used(frame);
        self.memory.table_at(frame)
    }
}

// SAFETY: it is the memory's.
unsafe impl CopyMemory for Fr {
    unsafe fn copy(&self, from: PhysAddr, to: PhysAddr, len: u64) {
        let (_, late) = self.hostile.faults.enter(Call::Copy);
        // SAFETY: the caller's promise is passed on.
        unsafe { self.memory.copy(from, to, len) };
        late.come();
    }

    unsafe fn zero(&self, at: PhysAddr, len: u64) {
        let (_, late) = self.hostile.faults.enter(Call::Zero);
        // SAFETY: the caller's promise is passed on.
        unsafe { self.memory.zero(at, len) };
        late.come();
    }
}

/// The same, for a walker that does not see what CPUs store.
#[derive(Clone)]
pub struct Incoherent(pub Fr);

// SAFETY: everything is passed on.
unsafe impl Frames for Incoherent {
    const COHERENT: bool = false;

    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.0.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.0.free(first, count) }
    }

    fn clean(&self, _: &[Word]) {
        let (_, late) = self.0.hostile.faults.enter(Call::Clean);
        late.come();
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.0.table(frame) }
    }
}

/// The caches of a machine whose devices are not coherent.
pub struct Ca(pub Arc<Hostile>);

// SAFETY: there are no caches.
unsafe impl CacheMaintenance for Ca {
    fn line_bytes(&self) -> u64 {
        64
    }

    unsafe fn clean(&self, phys: PhysAddr, _: u64) {
        let (_, late) = self.0.faults.enter(Call::CacheClean);
        self.0.cleaned(phys);
        late.come();
    }

    unsafe fn invalidate(&self, phys: PhysAddr, len: u64) {
        let (_, late) = self.0.faults.enter(Call::CacheInvalidate);
        self.0.invalidated(PhysSegment { phys, len });
        late.come();
    }
}

/// The unit's queue.
pub struct Qu {
    pub queue: Queue,
    pub hostile: Arc<Hostile>,
    pub costs: Costs,
}

// SAFETY: the unit's queue does what it says; a request that goes wrong is answered by an error or a panic.
unsafe impl InvalidationQueue for Qu {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.hostile.look();
        let (verdict, late) = self.hostile.faults.enter(Call::Submit);
        answer(verdict)?;
        let result = InvalidationQueue::submit(&self.queue, requests);
        late.come();
        result
    }

    fn costs(&self) -> Costs {
        self.costs
    }
}

/// A mapper, whichever.
pub struct Ma<M> {
    pub inner: M,
    pub hostile: Arc<Hostile>,
}

impl<M> Ma<M> {
    /// One of the calls that may say that they have not done it.
    fn quickly(&self, call: Call, go_on: impl FnOnce() -> bool) -> bool {
        let (verdict, late) = self.hostile.faults.enter(call);
        let done = verdict == Verdict::GoOn && go_on();
        self.hostile.look();
        late.come();
        done
    }
}

// SAFETY: everything is passed on, or answered by an error or a panic; what was entered is removed again and gathered.
unsafe impl<M: Mapper> Mapper for Ma<M> {
    const IS_QUICK: bool = M::IS_QUICK;
    const REMOVES_WHOLES: bool = M::REMOVES_WHOLES;

    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn costs(&self) -> Costs {
        self.inner.costs()
    }

    fn set_cpus(&mut self, cpus: usize) -> Result<(), OutOfMemory> {
        self.inner.set_cpus(cpus)
    }

    unsafe fn map<P: Platform>(
        &self,
        platform: &P,
        range: IovaRange,
        list: impl IntoIterator<Item = (PhysAddr, u64)>,
        attributes: Attributes,
        gather: &mut Gather,
    ) -> Result<(), MapError> {
        self.hostile.knows(range);
        let (verdict, late) = self.hostile.faults.enter(Call::Map);
        match verdict {
            Verdict::GoOn => {}
            Verdict::Fail => return Err(MapError::OutOfMemory),
            Verdict::Refuse => {
                // SAFETY: the caller's promise is passed on.
                unsafe { self.inner.map(platform, range, list, attributes, gather) }?;
                self.hostile.look();
                let _ = self.inner.unmap(platform, range, gather);
                return Err(MapError::OutOfMemory);
            }
        }
        // SAFETY: the caller's promise is passed on.
        let result = unsafe { self.inner.map(platform, range, list, attributes, gather) };
        self.hostile.look();
        late.come();
        result
    }

    fn marks<P: Platform>(&self, platform: &P) -> Option<&Shared<Marks>> {
        self.inner.marks(platform)
    }

    unsafe fn map_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        phys: PhysAddr,
        attributes: Attributes,
    ) -> bool {
        self.hostile.knows(range);
        // SAFETY: the caller's promise is passed on.
        self.quickly(Call::MapAtHand, || unsafe { self.inner.map_fast(turn, range, phys, attributes) })
    }

    unsafe fn map_list_fast(
        &self,
        turn: &Turn<'_>,
        range: IovaRange,
        list: impl ExactSizeIterator<Item = (PhysAddr, u64)> + Clone,
        attributes: Attributes,
    ) -> bool {
        self.hostile.knows(range);
        // SAFETY: the caller's promise is passed on.
        self.quickly(Call::MapAtHand, || unsafe { self.inner.map_list_fast(turn, range, list, attributes) })
    }

    fn unmap_fast(&self, turn: &Turn<'_>, range: IovaRange) -> bool {
        self.hostile.look();
        self.quickly(Call::UnmapAtHand, || self.inner.unmap_fast(turn, range))
    }

    fn sync_range(&self, range: IovaRange) -> Result<(), InvalidationError> {
        self.hostile.look();
        let (verdict, late) = self.hostile.faults.enter(Call::Sync);
        answer(verdict)?;
        let result = self.inner.sync_range(range);
        late.come();
        result
    }

    fn unmap<P: Platform>(&self, platform: &P, range: IovaRange, gather: &mut Gather) -> Unmapped {
        self.hostile.look();
        let (_, late) = self.hostile.faults.enter(Call::Unmap);
        let unmapped = self.inner.unmap(platform, range, gather);
        self.hostile.look();
        late.come();
        unmapped
    }

    fn sync(&self, gather: &Gather) -> Result<(), InvalidationError> {
        self.hostile.look();
        let (verdict, late) = self.hostile.faults.enter(Call::Sync);
        answer(verdict)?;
        let result = self.inner.sync(gather);
        late.come();
        result
    }

    fn reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        let (verdict, late) = self.hostile.faults.enter(Call::Reclaim);
        answer(verdict)?;
        let result = self.inner.reclaim(platform);
        late.come();
        result
    }

    fn try_reclaim<P: Platform>(&self, platform: &P) -> Result<usize, InvalidationError> {
        let (verdict, late) = self.hostile.faults.enter(Call::Reclaim);
        answer(verdict)?;
        let result = self.inner.try_reclaim(platform);
        late.come();
        result
    }
}

/// One thread that is any CPU, with a clock and a timer of its own.
#[derive(Clone)]
pub struct Pl(Arc<State>);

struct State {
    hostile: Arc<Hostile>,
    cpus: usize,
    number: PlatformNumber,
    cpu: AtomicUsize,
    /// While a CPU, or none, is lent.
    is_lent: AtomicBool,
    now_ns: AtomicU64,
    deadline: Mutex<Option<u64>>,
    listeners: Mutex<Vec<Weak<dyn PlatformEvents>>>,
}

impl Pl {
    pub fn new(hostile: Arc<Hostile>, cpus: usize) -> Self {
        let (cpu, now_ns) = (AtomicUsize::new(0), AtomicU64::new(1));
        let (deadline, listeners) = (Mutex::default(), Mutex::default());
        let number = PlatformNumber::new();
        let is_lent = AtomicBool::new(false);
        Self(Arc::new(State { hostile, cpus, number, cpu, is_lent, now_ns, deadline, listeners }))
    }

    /// From now on the caller is this CPU.
    pub fn be(&self, cpu: usize) {
        self.0.cpu.store(cpu, Ordering::Relaxed);
    }

    fn listeners(&self) -> Vec<Shared<dyn PlatformEvents>> {
        self.0.listeners.lock().unwrap().iter().filter_map(Weak::upgrade).collect()
    }

    /// `ns` go by. Timers that were asked for until then come, each at its time.
    pub fn pass(&self, ns: u64) {
        let end = self.0.now_ns.load(Ordering::Relaxed) + ns;
        for turn in 0.. {
            assert!(turn < 1000, "a timer that comes for ever");
            let Some(due) = self.0.deadline.lock().unwrap().take_if(|due| *due <= end) else { break };
            self.0.now_ns.fetch_max(due, Ordering::Relaxed);
            self.listeners().iter().for_each(|listener| listener.timer());
        }
        self.0.now_ns.store(end, Ordering::Relaxed);
    }

    /// The CPU `cpu` is gone.
    pub fn release(&self, cpu: usize) {
        self.listeners().iter().for_each(|listener| listener.cpu_released(cpu));
    }
}

/// Ends the lending of a CPU, also where the closure panics.
struct Lent<'a> {
    is_lent: &'a AtomicBool,
    is_first: bool,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.is_lent.store(!self.is_first, Ordering::Relaxed);
    }
}

// SAFETY: one thread is all CPUs, one after the other, and its fences are full ones.
unsafe impl Platform for Pl {
    fn cpus(&self) -> usize {
        let (_, late) = self.0.hostile.faults.enter(Call::Cpus);
        late.come();
        self.0.cpus
    }

    fn number(&self) -> PlatformNumber {
        self.0.number
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        let (verdict, late) = self.0.hostile.faults.enter(Call::WithCpu);
        // SAFETY: one thread is all CPUs, so nobody else has it.
        let cpu = unsafe { LocalCpu::new(self.0.cpu.load(Ordering::Relaxed)) };
        let is_first = !self.0.is_lent.swap(true, Ordering::Relaxed);
        if !is_first {
            self.0.hostile.asked_twice();
        }
        let lent = Lent { is_lent: &self.0.is_lent, is_first };
        let result = f((verdict == Verdict::GoOn && is_first).then_some(&cpu));
        drop(lent);
        late.come();
        result
    }

    fn now_ns(&self) -> u64 {
        let (_, late) = self.0.hostile.faults.enter(Call::NowNs);
        late.come();
        self.0.now_ns.load(Ordering::Relaxed)
    }

    fn fence_all(&self) {
        let (_, late) = self.0.hostile.faults.enter(Call::FenceAll);
        late.come();
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        let (_, late) = self.0.hostile.faults.enter(Call::Register);
        self.0.listeners.lock().unwrap().push(events);
        late.come();
        Ok(())
    }

    fn wake_at(&self, deadline_ns: u64) {
        let (_, late) = self.0.hostile.faults.enter(Call::WakeAt);
        {
            let mut deadline = self.0.deadline.lock().unwrap();
            *deadline = Some(deadline.map_or(deadline_ns, |earlier| earlier.min(deadline_ns)));
        }
        late.come();
    }
}
