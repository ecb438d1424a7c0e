//! An NVMe driver's queue pair. Commands name their data by pages (PRP entries), so the driver gives the controller a buffer of
//! several pieces page by page, and the controller relies on the offset in the first page. A command has room for two entries; where
//! the data has more pages, the second is the address of a list of the rest, in memory that driver and controller share. After each
//! command the controller runs it again, as a faulty one would, and changes nothing that the driver has read.

use std::error::Error;
use std::sync::Arc;

use portcullis::prelude::*;
use portcullis_model::{Buffer, Context, Iommu, IommuConfig, Memory};

const PAGE: u64 = 4096;
const BLOCK: u64 = 512;
const DEPTH: usize = 64;

/// A command in the submission queue.
struct Command {
    id: usize,
    writes: bool,
    block: u64,
    len: u64,
    /// The first page of the data, with an offset; and the second, or the list of all others, without.
    prps: [u64; 2],
}

/// A queue pair: a command's identifier is its place.
struct QueuePair<X: Machine, F: Frames, B: DmaBuffer> {
    device: Device<X>,
    queue: Queue<X, B>,
    /// A page for the list of each command. The submission and completion queues of a real driver are such memory, too.
    lists: CoherentMemory<F, X::Mapper, X::Platform>,
    commands: Vec<Option<Mapping<B>>>,
    /// Buffers whose commands are over, and which the controller reaches no more.
    done: Vec<B>,
}

impl<X: Machine, F: Frames, B: DmaBuffer> QueuePair<X, F, B> {
    fn new(device: &Device<X>, frames: F, config: QueueConfig) -> Result<Self, Box<dyn Error>> {
        let commands = (0..DEPTH).map(|_| None).collect();
        let lists = CoherentMemory::new(device.dma(), frames, DEPTH * PAGE as usize)?;
        Ok(Self { device: device.clone(), queue: device.queue(config)?, lists, commands, done: Vec::new() })
    }

    fn submit(&mut self, buffer: B, block: u64, writes: bool) -> Result<Command, Box<dyn Error>> {
        let id = self.commands.iter().position(Option::is_none).ok_or("the queue is full")?;
        let direction = if writes { Direction::ToDevice } else { Direction::FromDevice };
        let mapping = self.queue.map(buffer, direction)?;
        let mut pages = Vec::new();
        for segment in self.queue.segments(&mapping) {
            let end = segment.iova.get() + segment.len;
            let mut at = segment.iova.get();
            while at < end {
                pages.push(at);
                at = (at / PAGE + 1) * PAGE;
            }
        }
        let len = mapping.len();
        self.commands[id] = Some(mapping);
        let Some(prps) = self.prps(id, &pages) else {
            // A mapping that is dropped never ends.
            self.complete(id)?;
            return Err("a buffer that PRP entries cannot name".into());
        };
        Ok(Command { id, writes, block, len, prps })
    }

    /// The two entries of a command, whose list is in its page.
    fn prps(&self, id: usize, pages: &[u64]) -> Option<[u64; 2]> {
        let (first, rest) = pages.split_first()?;
        let list = id * PAGE as usize;
        if rest.len() * 8 > PAGE as usize || rest.iter().any(|page| page % PAGE != 0) {
            return None;
        }
        if let [] | [_] = rest {
            return Some([*first, rest.first().copied().unwrap_or(0)]);
        }
        let bytes: Vec<u8> = rest.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.lists.write(list, &bytes)?;
        // The controller is told of the command behind this, by a doorbell.
        self.device.dma().sync_for_device();
        Some([*first, self.lists.iova().get() + list as u64])
    }

    /// The completion queue says that a command is over.
    fn complete(&mut self, id: usize) -> Result<(), Box<dyn Error>> {
        let mapping = self.commands[id].take().ok_or("no such command")?;
        match self.queue.unmap(mapping) {
            Ok(Ended::Done(buffer)) => self.done.push(buffer),
            Ok(Ended::Pending) => {}
            Ok(Ended::Flushed(buffers)) => self.done.extend(buffers),
            Err(failed) => {
                // A mapping that comes back can end later. `unplug.rs` has all cases.
                self.commands[id] = failed.mapping;
                return Err(failed.error.into());
            }
        }
        Ok(())
    }
}

/// The controller.
struct Controller {
    iommu: Arc<Iommu>,
    id: DeviceId,
    disk: Vec<u8>,
}

impl Controller {
    fn run(&mut self, command: &Command) -> Result<(), Box<dyn Error>> {
        let mut at = (command.block * BLOCK) as usize;
        let mut left = command.len;
        let [first, second] = command.prps;
        let others = left.saturating_sub(PAGE - first % PAGE).div_ceil(PAGE);
        let mut pages = vec![first];
        if others > 1 {
            let mut list = vec![0; others as usize * 8];
            self.iommu.dma_read(self.id, Iova::new(second), &mut list)?;
            pages.extend(list.as_chunks().0.iter().copied().map(u64::from_le_bytes));
        } else if others == 1 {
            pages.push(second);
        }
        for page in pages {
            let len = left.min(PAGE - page % PAGE);
            let bytes = &mut self.disk[at..at + len as usize];
            if command.writes {
                self.iommu.dma_read(self.id, Iova::new(page), bytes)?;
            } else {
                self.iommu.dma_write(self.id, Iova::new(page), bytes)?;
            }
            (at, left) = (at + len as usize, left - len);
        }
        Ok(())
    }
}

fn run(name: &str, config: QueueConfig) -> Result<(), Box<dyn Error>> {
    let memory = Memory::new(64 << 20);
    let iommu = Iommu::new(IommuConfig::new(Arc::clone(&memory)));
    let (id, disk) = (DomainId(2), DeviceId(4));
    let platform = StdPlatform::new();
    let table = PageTable::new(Arc::clone(&memory), VtdSecondStage::four_level())?;
    iommu.attach(disk, Context::SecondStage { domain: id, root: table.root(), levels: 4 });
    let domain = Domain::builder(table, iommu.queue(), id)
        .bounce(Arc::clone(&memory), PoolConfig::default())
        .build(platform)?;
    // What is copied keeps its offset in a page.
    let device = domain.attach(disk, DmaMask::BITS_64)?.keeping_offsets(PAGE - 1);

    let mut pair: QueuePair<_, _, Buffer> = QueuePair::new(&device, Arc::clone(&memory), config)?;
    let mut controller = Controller { iommu: Arc::clone(&iommu), id: disk, disk: vec![0; 1 << 20] };
    for (number, len) in [BLOCK, PAGE, 3 * PAGE, 9 * BLOCK, 64 << 10].into_iter().cycle().take(40).enumerate()
    {
        let block = number as u64 % 8 * 128;
        let byte = number as u8 + 1;
        let written = memory.buffer(len).ok_or("no memory")?;
        written.write(0, &vec![byte; len as usize])?;
        let command = pair.submit(written, block, true)?;
        controller.run(&command)?;
        pair.complete(command.id)?;
        let read = memory.buffer(len).ok_or("no memory")?;
        let command = pair.submit(read, block, false)?;
        controller.run(&command)?;
        pair.complete(command.id)?;
        // A polled driver: nothing waits longer than one turn.
        pair.done.extend(pair.queue.commit()?);
        for buffer in pair.done.drain(..) {
            let mut bytes = vec![0; len as usize];
            buffer.read(0, &mut bytes)?;
            assert!(bytes.iter().all(|found| *found == byte));
        }
        // The command again, as a controller with a fault would: it changes nothing that is the driver's.
        let _ = controller.run(&command);
    }
    println!("{name:<8} {:>20}", iommu.stats().waits);
    Ok(())
}

/// The same by each strategy.
///
/// # Errors
/// What did not work.
pub fn main() -> Result<(), Box<dyn Error>> {
    println!("40 writes and 40 reads of 512 bytes to 64 KiB by each strategy");
    println!("         waits for the IOMMU");
    run("direct", QueueConfig::direct())?;
    run("batched", QueueConfig::batched(16))?;
    run("ring", QueueConfig::ring(256, PAGE).batch(16))?;
    run("bounce", QueueConfig::bounce())?;
    run("auto", QueueConfig::auto(256, PAGE).batch(16))?;
    println!("(Most waits of auto are of its measuring, when a queue is made.)");
    Ok(())
}
