//! A disk of this machine that VFIO has. How fast it is read is measured by each way to map buffers: what maps and unmaps of each read
//! take, copies included, and how many system calls they make.

mod load;
mod ways;

use std::time::Instant;

use clap::{Args, ValueEnum};
use portcullis::bounce::pool::PoolConfig;
use portcullis::dma::{DmaMask, DomainBuilder, QueueConfig};
use portcullis::std_platform::StdPlatform;
use portcullis_hw::Registers;
use portcullis_linux::heap::{Heap, HeapBuffer};
use portcullis_linux::vfio::{self, Device, Machine};

use crate::driver::{self, Disk, Nvme, Transfer};
use crate::machine::Result;
use crate::now_ns;

use load::{Figures, Plan};

/// What a disk of this machine is asked for.
#[derive(Debug, Args)]
pub struct Options {
    /// A disk of this machine that VFIO has, like 0000:01:00.0: random reads are measured.
    #[arg(long = "pci", value_name = "DEVICE", conflicts_with_all = ["iommu", "policy"])]
    pub name: Option<String>,
    /// KiB of each read.
    #[arg(long, value_delimiter = ',', default_values_t = [4, 16, 64, 128], requires = "name")]
    kib: Vec<u64>,
    /// Reads that the disk has at once, for each job: 1 to 63.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=63), requires = "name")]
    depth: u16,
    /// Threads, each with rings and buffers of its own.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64), requires = "name")]
    jobs: u16,
    /// Reads of each job in a round.
    #[arg(long, default_value_t = 400, requires = "name")]
    reads: usize,
    /// Rounds, in which all ways take turns, each round in another order; of each figure the middle one is printed. One more comes first, which does
    /// not count.
    #[arg(long, default_value_t = 41, requires = "name")]
    rounds: usize,
    /// Ways to map buffers. One that is named twice shows how far two figures of the same differ.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Way::value_variants().to_vec(), requires = "name")]
    ways: Vec<Way>,
    /// Takes VFIO's type 1 where the kernel has iommufd, too.
    #[arg(long, requires = "name")]
    type1: bool,
    /// DESTROYS WHAT IS ON THE DISK: writes its first 64 MiB, so that all that is read can be verified.
    #[arg(long, requires = "name")]
    overwrite: bool,
}

/// A way to map the buffer of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Way {
    /// A map and an unmap for each read.
    Direct,
    /// A map for each read, and an unmap for many together.
    Ring,
    /// A copy, through a pool that stays mapped.
    Pool,
    /// No copy: each read has a buffer of the pool itself, which stays mapped (DPDK's mempool, SPDK's `iobuf`, Linux's `page_pool`).
    Mempool,
    /// What of ring and pool is cheaper, as measured when the queue is made.
    Auto,
    /// A cache of mappings, for buffers that come back.
    Cache,
    /// Buffers that are mapped in advance, all the time: what nothing can beat.
    Advance,
}

impl Way {
    fn name(self) -> String {
        self.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
    }
}

/// Bytes that are overwritten, and of each write.
const WRITTEN: u64 = 64 << 20;
const WRITE: u64 = 128 << 10;

/// The word that is written at a place of the disk, in words.
fn pattern(word: u64) -> u64 {
    (word + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The registers of a controller that VFIO has.
struct Bar(vfio::Registers);

// SAFETY: they are those of the controller's BAR 0, which the process has mapped as VFIO gives it: each access is of its width, volatile,
// and x86-64 makes accesses of such memory in the order of the program, a write after all stores and loads before it; `vfio::Registers` keeps
// the compiler to that order, too. That goes from one CPU to another as the memory between them does. Beyond the registers nothing is
// written, and reads return ones. The one driver of the device, which no other process has, is made of this value.
unsafe impl Registers for Bar {
    fn read32(&self, offset: usize) -> u32 {
        self.0.read32(offset).unwrap_or(u32::MAX)
    }

    fn write32(&self, offset: usize, value: u32) {
        self.0.write32(offset, value).unwrap_or_default();
    }

    fn read64(&self, offset: usize) -> u64 {
        self.0.read64(offset).unwrap_or(u64::MAX)
    }

    fn write64(&self, offset: usize, value: u64) {
        self.0.write64(offset, value).unwrap_or_default();
    }
}

/// The rings of a job.
type Ring = driver::Ring<Machine, Heap, Bar>;

/// Opens the disk, and measures it.
pub fn run(name: &str, options: &Options) -> Result<()> {
    let began = Instant::now();
    let node = if options.type1 { Device::open_type1(name)? } else { Device::open(name)? };
    // SAFETY: all memory is the process's: the heap's, and buffers on it.
    let mapper = unsafe { node.space().mapper() };
    // A pool that gives up what waits for a second would map again at times.
    let pool = PoolConfig { idle_ns: u64::MAX, ..PoolConfig::default() };
    let domain = DomainBuilder::new(mapper).bounce(Heap, pool).build_as::<Machine>(StdPlatform::new())?;
    // The controller counts on offsets in pages.
    let device = domain.attach(node.id(), DmaMask::BITS_64)?.keeping_offsets(4095);
    node.set_bus_master(true)?;
    // One more pair, which writes.
    let mut nvme = Nvme::start(Bar(node.bar(0)?), &device, &Heap, options.jobs + 1, now_ns)?;
    println!(
        "{name} by {:?}: {} blocks of {} bytes, up after {} ms",
        node.space().kind(),
        nvme.blocks(),
        nvme.block_bytes(),
        began.elapsed().as_millis()
    );
    let mut rings = (0..options.jobs).map(|_| nvme.queue_pair()).collect::<driver::Result<Vec<_>>>()?;
    let mut bytes = nvme.blocks() * nvme.block_bytes();
    let mut disk = nvme.disk(QueueConfig::direct())?;
    if options.overwrite {
        bytes = bytes.min(WRITTEN) / WRITE * WRITE;
        write(&mut disk, nvme.block_bytes(), bytes)?;
        println!("written: the first {} MiB", bytes >> 20);
    }
    println!("{}", Figures::TITLES);
    for &kib in &options.kib {
        let plan = Plan {
            len: kib << 10,
            depth: options.depth.into(),
            reads: options.reads,
            block_bytes: nvme.block_bytes(),
            places: bytes / (kib << 10).max(1),
            is_known: options.overwrite,
        };
        if plan.places == 0 || plan.len == 0 {
            return Err(format!("reads of {kib} KiB do not fit on the disk").into());
        }
        let mut ways = Vec::new();
        for &way in &options.ways {
            let made = rings.iter().map(|_| ways::make(way, &device, &plan)).collect::<Result<Vec<_>>>()?;
            ways.push((way, made, Vec::new()));
        }
        if options.overwrite {
            let whole = Plan { reads: 64.max(2 * plan.depth), ..plan };
            for (way, jobs, _) in &mut ways {
                load::verify(jobs, &mut rings, &whole).map_err(|error| format!("{}: {error}", way.name()))?;
            }
            println!("verified: {} reads of {kib} KiB, each byte", whole.reads * ways.len() * rings.len());
        }
        for (_, jobs, _) in &mut ways {
            load::measure(jobs, &mut rings, &plan, &node)?;
        }
        for round in 0..options.rounds {
            for index in order(round, ways.len()) {
                let (_, jobs, figures) = &mut ways[index];
                figures.push(load::measure(jobs, &mut rings, &plan, &node)?);
            }
        }
        let bound = ways.iter().find(|(way, ..)| *way == Way::Advance).map(|(.., figures)| figures.clone());
        for (way, jobs, figures) in ways {
            println!("{}", Figures::row_of(&figures, &way.name(), kib, bound.as_deref()));
            jobs.into_iter().try_for_each(|job| job.end())?;
        }
    }
    rings.push(disk.into_ring());
    Ok(nvme.shut_down(rings)?)
}

/// The order of `count` ways in a round: each is first in turn, and each comes after another one than in the round before.
fn order(round: usize, count: usize) -> impl Iterator<Item = usize> {
    let turned = move |place: usize| (place + round / 2) % count;
    (0..count).map(move |place| turned(if round.is_multiple_of(2) { place } else { count - 1 - place }))
}

/// Writes the disk's first `bytes`.
fn write(disk: &mut Disk<Machine, Heap, Bar, HeapBuffer>, block_bytes: u64, bytes: u64) -> Result<()> {
    for at in (0..bytes).step_by(WRITE as usize * 32) {
        let mut transfers = Vec::new();
        for at in (at..bytes.min(at + 32 * WRITE)).step_by(WRITE as usize) {
            let buffer = HeapBuffer::new(WRITE as usize).ok_or("no memory")?;
            let words: Vec<u8> =
                (at / 8..(at + WRITE) / 8).flat_map(|word| pattern(word).to_le_bytes()).collect();
            buffer.write(0, &words).ok_or("too long")?;
            transfers.push(Transfer { block: at / block_bytes, writes: true, buffer });
        }
        disk.run(transfers)?;
    }
    Ok(())
}
