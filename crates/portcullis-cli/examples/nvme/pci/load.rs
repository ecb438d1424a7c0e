//! Reads at random places, by jobs that poll, and what they take.

use std::collections::HashMap;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use portcullis::addr::{DmaSegment, PhysAddr};
use portcullis::dma::PoolBuffer;
use portcullis_linux::heap::HeapBuffer;
use portcullis_linux::vfio::{Device, Machine};

use super::{Ring, pattern};
use crate::machine::Result;

/// What is read.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Bytes of a read.
    pub len: u64,
    /// Reads that the disk has at once.
    pub depth: usize,
    pub reads: usize,
    pub block_bytes: u64,
    /// How many places there are, `len` bytes each.
    pub places: u64,
    /// Whether the data is known there.
    pub is_known: bool,
}

/// What maps the buffers of a job.
pub trait Data: Send {
    /// A buffer that is mapped.
    type Held: Send;

    /// Maps the next buffer: where it is for the disk, in one piece, and in memory.
    fn map(&mut self) -> Result<(Self::Held, DmaSegment, PhysAddr)>;

    /// Ends that. Returns how many buffers have come back.
    fn unmap(&mut self, held: Self::Held) -> Result<usize>;

    /// Has all buffers come back. Returns how many have.
    fn commit(&mut self) -> Result<usize>;

    /// The buffer that has come back last but for `before_last` others. What was copied comes back at once, before what waits for a batch.
    fn came(&self, before_last: usize) -> Option<&dyn Bytes>;

    /// Unmaps all that is mapped.
    fn close(self) -> Result<()>;
}

/// What a disk has read.
pub trait Bytes {
    /// Where it begins in memory.
    fn phys(&self) -> PhysAddr;

    /// Copies the bytes from `offset` on; `None` where some of them do not exist.
    fn read(&self, offset: usize, out: &mut [u8]) -> Option<()>;
}

impl Bytes for HeapBuffer {
    fn phys(&self) -> PhysAddr {
        self.phys()
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        self.read(offset, out)
    }
}

impl Bytes for PoolBuffer<Machine> {
    fn phys(&self) -> PhysAddr {
        self.phys()
    }

    fn read(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        self.read(offset, out)
    }
}

/// A job, whatever maps its buffers.
pub trait Job: Send {
    /// Reads by `plan`, and notes what each read takes. With `verifies` each byte is compared, or else the first and the last word of each
    /// read.
    fn read(&mut self, ring: &mut Ring, plan: &Plan, verifies: bool, samples: &mut Samples) -> Result<()>;

    /// Ends it, with nothing left mapped.
    fn end(self: Box<Self>) -> Result<()>;
}

/// Ticks of the CPU's counter that reads took.
#[derive(Debug, Default)]
pub struct Samples {
    /// Mapping and unmapping, copies included.
    mapping: Vec<u64>,
    /// From before the map to after the unmap.
    whole: Vec<u64>,
    /// How many of them may be noted without an allocation.
    room: usize,
}

impl Samples {
    fn new(room: usize) -> Self {
        Self { mapping: Vec::with_capacity(room), whole: Vec::with_capacity(room), room }
    }

    fn note(&mut self, mapping: u64, whole: u64) {
        if self.mapping.len() < self.room {
            self.mapping.push(mapping);
            self.whole.push(whole);
        }
    }
}

/// The CPU's counter. (A clock may take a system call: Linux has no other where the counters of CPUs may differ.)
fn ticks() -> u64 {
    // SAFETY: each x86-64 has it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// The longest that no read may end.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often completions are looked for until the clock is.
const SPINS: u32 = 1 << 16;

/// A read that the disk has.
struct Pending<H> {
    held: H,
    began: u64,
    mapping: u64,
}

impl<D: Data> Job for D {
    fn read(&mut self, ring: &mut Ring, plan: &Plan, verifies: bool, samples: &mut Samples) -> Result<()> {
        let mut pending: Vec<Option<Pending<D::Held>>> = (0..Ring::MOST).map(|_| None).collect();
        // Where each buffer's read is from, by the address of the buffer.
        let mut places = HashMap::with_capacity(8 * Ring::MOST);
        let (mut left, mut running) = (plan.reads, 0);
        let mut random = fastrand::Rng::new();
        let (mut spins, mut waits) = (0, None);
        while left > 0 || running > 0 {
            let has_more = left > 0 && running < plan.depth;
            while left > 0 && running < plan.depth {
                let place = random.u64(..plan.places);
                let began = ticks();
                let (held, segment, phys) = self.map()?;
                let mapping = ticks().saturating_sub(began);
                places.insert(phys, place);
                let id = ring.transfer(place * (plan.len / plan.block_bytes), false, [segment])?;
                let entry = pending.get_mut(usize::from(id)).ok_or("no such command")?;
                *entry = Some(Pending { held, began, mapping });
                (left, running) = (left - 1, running + 1);
            }
            if has_more {
                ring.ring();
            }
            while let Some((id, status)) = ring.poll()? {
                let done =
                    pending.get_mut(usize::from(id)).and_then(Option::take).ok_or("no such command")?;
                let completed = ticks();
                let count = self.unmap(done.held)?;
                let end = ticks();
                samples.note(done.mapping + end.saturating_sub(completed), end.saturating_sub(done.began));
                if status != 0 {
                    return Err(format!("a read ended with status {status:#x}").into());
                }
                running -= 1;
                (spins, waits) = (0, None);
                verify_back(self, count, &mut places, plan, verifies)?;
            }
            spins += 1;
            if spins == SPINS {
                spins = 0;
                if waits.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                    return Err("no read ends".into());
                }
            }
            std::hint::spin_loop();
        }
        let count = self.commit()?;
        verify_back(self, count, &mut places, plan, verifies)
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.close()
    }
}

/// Compares what the last `count` buffers have.
fn verify_back(
    data: &impl Data,
    count: usize,
    places: &mut HashMap<PhysAddr, u64>,
    plan: &Plan,
    whole: bool,
) -> Result<()> {
    for before_last in (0..count).rev() {
        let buffer = data.came(before_last).ok_or("a buffer did not come back")?;
        let place = places.remove(&buffer.phys()).ok_or("a buffer came back twice")?;
        if !plan.is_known {
            continue;
        }
        let words = plan.len / 8;
        let step = if whole { 1 } else { (words - 1).max(1) };
        for word in (0..words).step_by(step as usize) {
            let mut bytes = [0; 8];
            buffer.read(word as usize * 8, &mut bytes).ok_or("too long")?;
            let (found, wanted) = (u64::from_le_bytes(bytes), pattern(place * words + word));
            if found != wanted {
                let at = place * plan.len;
                return Err(format!("word {word} of a read at {at:#x} is {found:#x}, not {wanted:#x}").into());
            }
        }
    }
    Ok(())
}

/// Has all jobs read at once, and returns what they noted. `around` is called before the first begins and after the last has ended.
fn all(
    jobs: &mut [Box<dyn Job>],
    rings: &mut [Ring],
    plan: &Plan,
    verifies: bool,
    mut around: impl FnMut(),
) -> Result<Vec<Samples>> {
    let barrier = Barrier::new(jobs.len() + 1);
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for (job, ring) in jobs.iter_mut().zip(rings) {
            let barrier = &barrier;
            threads.push(scope.spawn(move || {
                let mut samples = Samples::new(plan.reads);
                barrier.wait();
                barrier.wait();
                let read = job.read(ring, plan, verifies, &mut samples);
                barrier.wait();
                read.map(|()| samples)
            }));
        }
        // They wait before they read, and when they have.
        barrier.wait();
        around();
        barrier.wait();
        barrier.wait();
        around();
        let ends = threads.into_iter().map(|thread| thread.join().map_err(|_| "a job panicked")?);
        ends.collect()
    })
}

/// Reads, and compares each byte.
pub fn verify(jobs: &mut [Box<dyn Job>], rings: &mut [Ring], plan: &Plan) -> Result<()> {
    all(jobs, rings, plan, true, || ()).map(drop)
}

/// What reads took.
#[derive(Debug, Clone, Copy, Default)]
pub struct Figures {
    per_second: f64,
    /// Microseconds of a read: of half of them at the most, and of 99 in 100.
    half: f64,
    most: f64,
    /// Microseconds of a map and an unmap, copies included: of half of the reads at the most, and in the mean.
    mapping: f64,
    mean: f64,
    /// Microseconds of CPU time for a read, and how much of that is the kernel's.
    cpu: f64,
    kernel: f64,
    /// System calls that map and unmap, in all reads.
    calls: u64,
    reads: usize,
}

/// CPU time of the process, in microseconds: its own, and in the kernel.
fn cpu_us() -> Result<[f64; 2]> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: it writes the structure.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: it was zeroed, and then written.
    let usage = unsafe { usage.assume_init() };
    Ok([usage.ru_utime, usage.ru_stime].map(|time| time.tv_sec as f64 * 1e6 + time.tv_usec as f64))
}

/// Has all jobs read, a quarter of the reads before it counts.
pub fn measure(
    jobs: &mut [Box<dyn Job>],
    rings: &mut [Ring],
    plan: &Plan,
    device: &Device,
) -> Result<Figures> {
    // Enough that each buffer was used.
    let warm = Plan { reads: (plan.reads / 4).max(8 * plan.depth), ..*plan };
    all(jobs, rings, &warm, false, || ())?;
    let mut marks = Vec::new();
    let samples = all(jobs, rings, plan, false, || {
        marks.push((Instant::now(), ticks(), cpu_us(), device.space().usage().calls));
    })?;
    let mut marks = marks.into_iter();
    let (Some(first), Some(last)) = (marks.next(), marks.next()) else { return Err("no marks".into()) };
    let took = last.0.duration_since(first.0);
    let us_per_tick = took.as_secs_f64() * 1e6 / last.1.saturating_sub(first.1).max(1) as f64;
    let sorted = |of: fn(&Samples) -> &[u64]| {
        let mut all: Vec<u64> = samples.iter().flat_map(|samples| of(samples).iter().copied()).collect();
        all.sort_unstable();
        all
    };
    let (mapping, whole) = (sorted(|samples| &samples.mapping), sorted(|samples| &samples.whole));
    let at = |sorted: &[u64], percent: usize| {
        sorted
            .get((sorted.len().saturating_sub(1)) * percent / 100)
            .map_or(0.0, |&ticks| ticks as f64 * us_per_tick)
    };
    let reads = whole.len();
    let each = |sum: f64| sum / reads.max(1) as f64;
    let ([own, kernel], [own_before, kernel_before]) = (last.2?, first.2?);
    Ok(Figures {
        per_second: reads as f64 / took.as_secs_f64(),
        half: at(&whole, 50),
        most: at(&whole, 99),
        mapping: at(&mapping, 50),
        mean: each(mapping.iter().sum::<u64>() as f64 * us_per_tick),
        cpu: each(own + kernel - own_before - kernel_before),
        kernel: each(kernel - kernel_before),
        calls: last.3 - first.3,
        reads,
    })
}

impl Figures {
    pub const TITLES: &str = "way        KiB  reads/s  us each: 50 %    99 %  map+unmap: 50 %    mean  CPU time  kernel's  calls    of  % of advance: 50 %   25 %   75 %  fastest tenth: reads/s  % of advance's";

    /// Of each figure the middle one; of calls the most.
    fn middle(all: &[Self]) -> Self {
        let middle = |of: fn(&Self) -> f64| {
            let mut values: Vec<f64> = all.iter().map(of).collect();
            values.sort_unstable_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(0.0)
        };
        Self {
            per_second: middle(|one| one.per_second),
            half: middle(|one| one.half),
            most: middle(|one| one.most),
            mapping: middle(|one| one.mapping),
            mean: middle(|one| one.mean),
            cpu: middle(|one| one.cpu),
            kernel: middle(|one| one.kernel),
            calls: all.iter().map(|one| one.calls).max().unwrap_or(0),
            reads: all.iter().map(|one| one.reads).max().unwrap_or(0),
        }
    }

    /// Reads a second in percent of the bound's in the same round: in half of the rounds at the most, in a quarter, and in three. Then the same of the
    /// fastest tenth of the rounds of each, which other programs have disturbed least.
    fn part_of(all: &[Self], bound: &[Self]) -> [f64; 4] {
        let in_round = |(one, bound): (&Self, &Self)| 100.0 * one.per_second / bound.per_second;
        let mut parts: Vec<f64> = all.iter().zip(bound).map(in_round).collect();
        parts.sort_unstable_by(f64::total_cmp);
        let [half, low, high] =
            [2, 1, 3].map(|quarters| parts.get(parts.len() * quarters / 4).copied().unwrap_or(0.0));
        [half, low, high, 100.0 * Self::fastest(all) / Self::fastest(bound)]
    }

    /// Reads a second that one round in ten reaches.
    fn fastest(all: &[Self]) -> f64 {
        let mut speeds: Vec<f64> = all.iter().map(|one| one.per_second).collect();
        speeds.sort_unstable_by(f64::total_cmp);
        speeds.get(speeds.len() * 9 / 10).copied().unwrap_or(0.0)
    }

    /// The line of the table for all rounds of a way.
    pub fn row_of(all: &[Self], way: &str, kib: u64, bound: Option<&[Self]>) -> String {
        let part = bound.map(|bound| Self::part_of(all, bound));
        let part = part.map_or(["-"; 4].map(str::to_owned), |part| part.map(|part| format!("{part:.1}")));
        let ([half, low, high, fast], fastest) = (part, Self::fastest(all));
        let row = Self::middle(all).row(way, kib);
        format!("{row} {half:>19} {low:>6} {high:>6} {fastest:>23.0} {fast:>14}")
    }

    /// Its beginning.
    fn row(&self, way: &str, kib: u64) -> String {
        format!(
            "{way:9} {kib:4} {:8.0} {:14.1} {:7.1} {:16.2} {:7.2} {:9.1} {:9.1} {:6} {:5}",
            self.per_second,
            self.half,
            self.most,
            self.mapping,
            self.mean,
            self.cpu,
            self.kernel,
            self.calls,
            self.reads
        )
    }
}
