//! A disk, past the page cache, so that each operation is DMA to and from the buffers here.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

use crate::Options;
use crate::numbers::{Random, differs, fill, mix};

/// What Linux calls `O_DIRECT`.
const DIRECT: i32 = if cfg!(target_arch = "aarch64") { 0o200_000 } else { 0o40_000 };

/// The unit in which a disk is written and checked.
const BLOCK: u64 = 4096;

/// The largest operation.
const LARGEST: u64 = 1 << 20;

/// Where a buffer may begin, beside the beginning of a page: what disks take.
const ALIGNED: usize = 512;

fn open(path: &str) -> Result<File, String> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(DIRECT);
    options.open(path).map_err(|error| format!("{path}: {error}"))
}

/// Memory of which a buffer takes a part that begins at a multiple of 512.
struct Memory(Vec<u8>);

impl Memory {
    fn new() -> Self {
        Self(vec![0; LARGEST as usize + 2 * BLOCK as usize])
    }

    /// `length` bytes that begin `offset` bytes behind the beginning of a page.
    fn part(&mut self, length: u64, offset: usize) -> &mut [u8] {
        let start = self.0.as_ptr().align_offset(BLOCK as usize) + offset;
        &mut self.0[start..start + length as usize]
    }
}

/// Until when a thread goes on.
#[derive(Clone, Copy)]
struct Until {
    end: Option<Instant>,
    operations: u64,
}

impl Until {
    fn reached(self, done: u64) -> bool {
        done >= self.operations || self.end.is_some_and(|end| Instant::now() >= end)
    }
}

/// What one thread has done.
#[derive(Default)]
struct Done {
    reads: u64,
    writes: u64,
    failed: u64,
}

/// Writes and reads at random, and checks each byte that is read.
pub fn check(options: &Options<'_>) -> Result<String, String> {
    let path = options.first()?;
    let threads = options.number("--threads", 1)?.clamp(1, 64);
    let seconds = options.number("--seconds", 0)?;
    let operations = options.number("--operations", if seconds == 0 { 100 } else { u64::MAX })?;
    let span = options.number("--span", 32)? << 20;
    let seed = mix(options.number("--seed", 1)?);
    let until =
        Until { end: (seconds > 0).then(|| Instant::now() + Duration::from_secs(seconds)), operations };
    let tolerant = options.has("--errors");
    let largest = options.number("--largest", LARGEST)?;
    if !largest.is_power_of_two() || !(BLOCK..=LARGEST).contains(&largest) {
        return Err(format!("{largest} bytes are no size of an operation"));
    }
    let part = span / threads / LARGEST * LARGEST;
    if part == 0 {
        return Err(format!("{span} bytes are too few for {threads} threads"));
    }
    let sums = std::thread::scope(|scope| {
        let work =
            |thread| move || one(path, (thread * part, part), largest, mix(seed ^ thread), until, tolerant);
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(work(thread))).collect();
        let ended =
            running.into_iter().map(|thread| thread.join().unwrap_or(Err("a thread died".to_owned())));
        ended.collect::<Result<Vec<_>, _>>()
    })?;
    let sum = |of: fn(&Done) -> u64| sums.iter().map(of).sum::<u64>();
    let (reads, writes, failed) = (sum(|done| done.reads), sum(|done| done.writes), sum(|done| done.failed));
    if reads == 0 || writes == 0 {
        return Err(format!("{path}: {reads} reads and {writes} writes succeeded, {failed} failed"));
    }
    Ok(format!("{reads} reads and {writes} writes right, {failed} failed"))
}

/// One thread: `length` bytes of the disk from `start` on are its own.
fn one(
    path: &str,
    (start, length): (u64, u64),
    largest: u64,
    seed: u64,
    until: Until,
    tolerant: bool,
) -> Result<Done, String> {
    let file = open(path)?;
    let mut memory = Memory::new();
    let mut random = Random::new(seed);
    // Of each block, the seed of what was last written there; none where nobody knows.
    let mut written: Vec<Option<u64>> = vec![None; (length / BLOCK) as usize];
    let mut done = Done::default();
    let mut count = 0;
    while !until.reached(count) {
        count += 1;
        // One block as often as the largest, and each power of two between them.
        let blocks = 1_u64 << random.below(u64::from((largest / BLOCK).ilog2()) + 1);
        let first = random.below(length / BLOCK - blocks + 1);
        let offset = [0, 0, ALIGNED, BLOCK as usize - ALIGNED][random.below(4) as usize];
        let buffer = memory.part(blocks * BLOCK, offset);
        let range = first as usize..(first + blocks) as usize;
        if random.below(2) == 0 {
            let version = mix(seed ^ count);
            for (block, piece) in buffer.chunks_exact_mut(BLOCK as usize).enumerate() {
                fill(piece, version, (first + block as u64) * BLOCK);
            }
            match file.write_all_at(buffer, start + first * BLOCK) {
                Ok(()) => {
                    done.writes += 1;
                    written[range].fill(Some(version));
                }
                Err(_) if tolerant => {
                    done.failed += 1;
                    written[range].fill(None);
                }
                Err(error) => return Err(format!("write of {blocks} blocks at {first}: {error}")),
            }
            continue;
        }
        // What the device does not write must not look right.
        buffer.fill(0xee);
        match file.read_exact_at(buffer, start + first * BLOCK) {
            Ok(()) => done.reads += 1,
            Err(_) if tolerant => {
                done.failed += 1;
                continue;
            }
            Err(error) => return Err(format!("read of {blocks} blocks at {first}: {error}")),
        }
        for (block, piece) in range.zip(buffer.chunks_exact(BLOCK as usize)) {
            let Some(version) = written[block] else { continue };
            if let Some(which) = differs(piece, version, block as u64 * BLOCK, written.len() as u64 * BLOCK) {
                return Err(format!("WRONG BYTES of {path} (thread from {start}): {which}"));
            }
        }
    }
    Ok(done)
}

/// Reads at random, and says how fast.
pub fn read(options: &Options<'_>) -> Result<String, String> {
    let path = options.first()?;
    let threads = options.number("--threads", 1)?.clamp(1, 64);
    let operations = options.number("--operations", 1000)?;
    let size = options.number("--size", BLOCK)?;
    let span = options.number("--span", 32)? << 20;
    if size == 0 || size > LARGEST || size % BLOCK != 0 {
        return Err(format!("{size} bytes are no size of a read"));
    }
    let began = Instant::now();
    std::thread::scope(|scope| {
        let work = |thread: u64| {
            move || {
                let file = open(path)?;
                let mut memory = Memory::new();
                let mut random = Random::new(thread);
                for _ in 0..operations {
                    let at = random.below(span / size) * size;
                    let buffer = memory.part(size, 0);
                    file.read_exact_at(buffer, at).map_err(|error| format!("read at {at}: {error}"))?;
                }
                Ok::<(), String>(())
            }
        };
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(work(thread))).collect();
        running.into_iter().try_for_each(|thread| thread.join().unwrap_or(Err("a thread died".to_owned())))
    })?;
    let (count, nanoseconds) = (u128::from(operations * threads), began.elapsed().as_nanos().max(1));
    Ok(format!("{count} reads, {} per second", count * 1_000_000_000 / nanoseconds))
}
