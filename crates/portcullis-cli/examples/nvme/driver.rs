//! A small NVMe driver: one admin and one I/O queue pair, polled, whose data goes by PRP entries.
//!
//! It needs no `std`, and names no IOMMU and no policy. Rings are coherent memory of the device; data is mapped by a queue of the device, which the
//! caller configures, so that choosing another way to protect it changes nothing here.
//!
//! Source: NVM Express Base Specification, Revision 2.0, section 3.1.3 "Controller Properties", chapter 3.5 "Controller
//! Initialization", 4.1.1 "Submission Queue Entry" and "Physical Region Page"; NVM Command Set Specification, Revision 1.0, chapter 3.

extern crate alloc;

use alloc::vec::{Drain, Vec};
use core::sync::atomic::Ordering;

use portcullis::SetupError;
use portcullis::addr::Direction;
use portcullis::dma::{
    CoherentMemory, Device, DmaBuffer, DmaMapError, DmaUnmapError, Ended, Machine, Mapping, Queue,
    QueueConfig,
};
use portcullis::domain::{MapListError, UnmapError};
use portcullis::platform::Frames;
use portcullis_hw::Registers;

/// What goes wrong.
#[derive(Debug, Clone, Copy, thiserror::Error)]
pub enum NvmeError {
    #[error("no NVMe controller answers, or it lacks what is needed: {what} (CAP is {capabilities:#x})")]
    Unfit { what: &'static str, capabilities: u64 },
    #[error("the controller has failed (CSTS is {status:#x})")]
    Failed { status: u32 },
    #[error("the controller did not {what} within {waited_ns} ns")]
    TimedOut { what: &'static str, waited_ns: u64 },
    #[error("command {opcode:#x} ended with status {status:#x}")]
    Status { opcode: u8, status: u64 },
    #[error("the controller completed a command that it was not given")]
    Stray,
    #[error("no namespace: {blocks} blocks of 2^{shift} bytes")]
    Namespace { blocks: u64, shift: u64 },
    #[error("{len} bytes at block {block} are no blocks of the disk, or too many for one command")]
    Blocks { len: u64, block: u64 },
    #[error("a queue cannot be made: {0}")]
    Setup(#[from] SetupError),
    #[error("memory cannot be mapped: {0}")]
    Memory(#[from] MapListError),
    #[error("memory cannot be freed: {0}")]
    Free(#[from] UnmapError),
    #[error("a buffer cannot be mapped: {0}")]
    Map(#[from] DmaMapError),
    #[error("a buffer does not come back: {0}")]
    Unmap(#[from] DmaUnmapError),
}

/// What is said of all that can fail.
pub type Result<T> = core::result::Result<T, NvmeError>;

/// Properties of the controller.
const CAP: usize = 0x00;
const CC: usize = 0x14;
const CSTS: usize = 0x1c;
const AQA: usize = 0x24;
const ASQ: usize = 0x28;
const ACQ: usize = 0x30;
const DOORBELLS: usize = 0x1000;

/// Controller configuration: on, with entries of 64 and 16 bytes and pages of 4 KiB.
const ON: u32 = 1 | 6 << 16 | 4 << 20;
const READY: u32 = 1;
const FATAL: u32 = 2;

/// Commands.
const CREATE_SUBMISSION: u8 = 0x01;
const CREATE_COMPLETION: u8 = 0x05;
const IDENTIFY: u8 = 0x06;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;

const PAGE: u64 = 4096;
/// Entries of each ring: a frame of commands.
const ENTRIES: usize = 64;
const COMMAND_WORDS: usize = 8;
const COMPLETION_WORDS: usize = 2;

/// Memory that rings are made of, of a machine.
type Memory<X, F> = CoherentMemory<F, <X as Machine>::Mapper, <X as Machine>::Platform>;

/// A submission queue, its completion queue, and the pages of PRP lists, one for each command.
struct Pair<X: Machine, F: Frames> {
    number: u16,
    submission: Memory<X, F>,
    completion: Memory<X, F>,
    lists: Memory<X, F>,
    tail: usize,
    head: usize,
    /// The phase that a new completion has.
    phase: u64,
}

/// A command, but for its identifier and the address of its data.
#[derive(Debug, Clone, Copy, Default)]
struct Command {
    opcode: u8,
    namespace: u32,
    /// Words 10 and 11, and 12 with 13.
    arguments: [u64; 2],
}

/// What a transfer asks for.
pub struct Transfer<B> {
    /// The first block.
    pub block: u64,
    /// To the disk, or from it.
    pub writes: bool,
    /// The data, whole blocks.
    pub buffer: B,
}

/// The controller, with its first namespace.
pub struct Nvme<X: Machine, F: Frames, R: Registers, B: DmaBuffer + Send + Sync> {
    registers: R,
    /// Bytes from one doorbell to the next.
    stride: usize,
    /// Nanoseconds since some fixed time, and how many the controller may take.
    now_ns: fn() -> u64,
    patience_ns: u64,
    admin: Pair<X, F>,
    io: Pair<X, F>,
    queue: Queue<X, B>,
    block_bytes: u64,
    blocks: u64,
}

impl<X: Machine, F: Frames + Clone, R: Registers, B: DmaBuffer + Send + Sync> Nvme<X, F, R, B> {
    /// Brings the controller up: its rings in memory of `frames`, its data by a queue of `config`.
    /// `now_ns` is a clock.
    pub fn start(
        registers: R,
        device: &Device<X>,
        frames: &F,
        config: QueueConfig,
        now_ns: fn() -> u64,
    ) -> Result<Self> {
        let capabilities = registers.read64(CAP);
        let unfit = |what| Err(NvmeError::Unfit { what, capabilities });
        if capabilities == u64::MAX {
            return unfit("an answer");
        }
        if capabilities >> 48 & 0xf != 0 {
            return unfit("pages of 4 KiB");
        }
        if ((capabilities & 0xffff) as usize) < ENTRIES - 1 {
            return unfit("rings of 64 entries");
        }
        let mut nvme = Self {
            stride: 4 << (capabilities >> 32 & 0xf),
            // In units of 500 ms.
            patience_ns: 500_000_000 * ((capabilities >> 24 & 0xff) + 1),
            now_ns,
            admin: Pair::new(0, device, frames)?,
            io: Pair::new(1, device, frames)?,
            queue: device.queue(config)?,
            block_bytes: 0,
            blocks: 0,
            registers,
        };
        nvme.registers.write32(CC, 0);
        nvme.wait_for(0)?;
        let sizes = (ENTRIES - 1) as u32;
        nvme.registers.write32(AQA, sizes << 16 | sizes);
        nvme.registers.write64(ASQ, nvme.admin.submission.iova().get());
        nvme.registers.write64(ACQ, nvme.admin.completion.iova().get());
        nvme.registers.write32(CC, ON);
        nvme.wait_for(READY)?;
        nvme.identify(device, frames)?;
        let ring = |iova: portcullis::addr::Iova| iova.get();
        let size = (ENTRIES as u64 - 1) << 16 | u64::from(nvme.io.number);
        // Physically contiguous; the submission queue's completions go to the queue of the same number.
        let create = [
            (CREATE_COMPLETION, 1, ring(nvme.io.completion.iova())),
            (CREATE_SUBMISSION, 1 | u64::from(nvme.io.number) << 16, ring(nvme.io.submission.iova())),
        ];
        for (opcode, flags, iova) in create {
            let command = Command { opcode, arguments: [size | flags << 32, 0], ..Command::default() };
            nvme.administrate(command, iova)?;
        }
        Ok(nvme)
    }

    fn wait_for(&self, ready: u32) -> Result<()> {
        let began = (self.now_ns)();
        loop {
            let status = self.registers.read32(CSTS);
            if status & FATAL != 0 {
                return Err(NvmeError::Failed { status });
            }
            if status & READY == ready {
                return Ok(());
            }
            self.check(began, "become ready, or stop,")?;
        }
    }

    /// Whether more may be waited for than since `began`.
    fn check(&self, began: u64, what: &'static str) -> Result<()> {
        let waited_ns = (self.now_ns)().saturating_sub(began);
        if waited_ns > self.patience_ns {
            return Err(NvmeError::TimedOut { what, waited_ns });
        }
        core::hint::spin_loop();
        Ok(())
    }

    /// Asks for the size of the first namespace.
    fn identify(&mut self, device: &Device<X>, frames: &F) -> Result<()> {
        let answer = CoherentMemory::new(device.dma(), frames.clone(), PAGE as usize)?;
        let command = Command { opcode: IDENTIFY, namespace: 1, ..Command::default() };
        self.administrate(command, answer.iova().get())?;
        let word = |index| answer.word(index).map_or(0, |word| word.load(Ordering::Acquire));
        self.blocks = word(0);
        // The format in use is one of 16, which follow from byte 128 on.
        let format = (word(3) >> 16 & 0xf) as usize;
        let shift = word(16 + format / 2) >> (format % 2 * 32 + 16) & 0xff;
        if self.blocks == 0 || !(9..=12).contains(&shift) {
            return Err(NvmeError::Namespace { blocks: self.blocks, shift });
        }
        self.block_bytes = 1 << shift;
        Ok(answer.free()?)
    }

    fn administrate(&mut self, command: Command, data: u64) -> Result<()> {
        let id = self.admin.submit(command, [data, 0])?;
        self.registers.write32(DOORBELLS, self.admin.tail as u32);
        let (answered, status) = self.completed(true)?;
        match (answered == id, status) {
            (true, 0) => Ok(()),
            (true, status) => Err(NvmeError::Status { opcode: command.opcode, status }),
            (false, _) => Err(NvmeError::Stray),
        }
    }

    /// Waits for a completion: of which command, and its status.
    fn completed(&mut self, admin: bool) -> Result<(usize, u64)> {
        let began = (self.now_ns)();
        loop {
            let pair = if admin { &mut self.admin } else { &mut self.io };
            if let Some(done) = pair.poll() {
                let doorbell = DOORBELLS + (usize::from(pair.number) * 2 + 1) * self.stride;
                self.registers.write32(doorbell, pair.head as u32);
                return Ok(done);
            }
            self.check(began, "complete a command")?;
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Blocks of the disk.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Carries the transfers out, as many at a time as the ring holds. When this returns, the controller reaches none of the
    /// buffers any more, by the policy in force, and they come back in the order in which they were ended.
    pub fn run(&mut self, transfers: Vec<Transfer<B>>) -> Result<Vec<B>> {
        let mut back = Vec::new();
        let mut left = transfers.into_iter().peekable();
        while left.peek().is_some() {
            let mut mapped: Vec<(usize, Mapping<B>)> = Vec::new();
            for transfer in left.by_ref().take(ENTRIES - 1) {
                mapped.push(self.begin(transfer)?);
            }
            // One doorbell for all of them.
            self.registers.write32(DOORBELLS + 2 * self.stride, self.io.tail as u32);
            while !mapped.is_empty() {
                let (id, status) = self.completed(false)?;
                let at = mapped.iter().position(|(of, _)| *of == id).ok_or(NvmeError::Stray)?;
                let (_, mapping) = mapped.swap_remove(at);
                self.end(mapping)?.for_each(|buffer| back.push(buffer));
                if status != 0 {
                    return Err(NvmeError::Status { opcode: READ, status });
                }
            }
            // The queue falls idle: nothing waits longer than this.
            back.extend(self.queue.commit()?);
        }
        Ok(back)
    }

    /// Maps a transfer's data and puts its command into the ring.
    fn begin(&mut self, transfer: Transfer<B>) -> Result<(usize, Mapping<B>)> {
        let Transfer { block, writes, buffer } = transfer;
        let direction = if writes { Direction::ToDevice } else { Direction::FromDevice };
        let mapping = self.queue.map(buffer, direction).map_err(|refused| refused.error)?;
        let blocks = mapping.len() / self.block_bytes;
        let fits = block.checked_add(blocks).is_some_and(|end| end <= self.blocks);
        if !mapping.len().is_multiple_of(self.block_bytes) || !(1..=0x1_0000).contains(&blocks) || !fits {
            let len = mapping.len();
            self.end(mapping)?.for_each(drop);
            return Err(NvmeError::Blocks { len, block });
        }
        let mut pages: Vec<u64> = Vec::new();
        for segment in self.queue.segments(&mapping) {
            let end = segment.iova.get() + segment.len;
            let mut at = segment.iova.get();
            while at < end {
                pages.push(at);
                at = (at / PAGE + 1) * PAGE;
            }
        }
        let Some(data) = self.io.prps(&pages) else {
            let len = mapping.len();
            self.end(mapping)?.for_each(drop);
            return Err(NvmeError::Blocks { len, block });
        };
        let opcode = if writes { WRITE } else { READ };
        let command = Command { opcode, namespace: 1, arguments: [block, blocks - 1] };
        Ok((self.io.submit(command, data)?, mapping))
    }

    /// Ends a mapping. A buffer that does not come back stays in the queue.
    fn end(&mut self, mapping: Mapping<B>) -> Result<Ended<B, Drain<'_, B>>> {
        self.queue.unmap(mapping).map_err(|failed| NvmeError::Unmap(failed.error))
    }

    /// Has the controller write the block `block` to `address`, whatever that is, as a broken driver or controller would: the
    /// status that it ends with.
    pub fn read_to(&mut self, block: u64, address: u64) -> Result<u64> {
        let command = Command { opcode: READ, namespace: 1, arguments: [block, 0] };
        self.io.submit(command, [address, 0])?;
        self.registers.write32(DOORBELLS + 2 * self.stride, self.io.tail as u32);
        Ok(self.completed(false)?.1)
    }

    /// Turns the controller off and gives its rings back.
    pub fn shut_down(self) -> Result<()> {
        self.registers.write32(CC, 0);
        self.wait_for(0)?;
        for pair in [self.admin, self.io] {
            for memory in [pair.submission, pair.completion, pair.lists] {
                memory.free()?;
            }
        }
        Ok(())
    }
}

impl<X: Machine, F: Frames + Clone> Pair<X, F> {
    fn new(number: u16, device: &Device<X>, frames: &F) -> Result<Self> {
        let memory = |bytes| CoherentMemory::new(device.dma(), frames.clone(), bytes);
        Ok(Self {
            number,
            submission: memory(ENTRIES * COMMAND_WORDS * 8)?,
            completion: memory(ENTRIES * COMPLETION_WORDS * 8)?,
            lists: memory(ENTRIES * PAGE as usize)?,
            tail: 0,
            head: 0,
            phase: 1,
        })
    }

    /// The two PRP fields of the next command: its page, both of two, or its first and the list of the rest.
    fn prps(&self, pages: &[u64]) -> Option<[u64; 2]> {
        match pages {
            [] => None,
            [first] => Some([*first, 0]),
            [first, second] => Some([*first, *second]),
            [first, rest @ ..] => {
                let list = self.tail * PAGE as usize;
                (rest.len() <= PAGE as usize / 8).then_some(())?;
                for (index, page) in rest.iter().enumerate() {
                    self.lists.write(list + index * 8, &page.to_le_bytes())?;
                }
                Some([*first, self.lists.iova().get() + list as u64])
            }
        }
    }

    /// Puts a command into the ring, whose identifier is its place. The doorbell is the caller's.
    fn submit(&mut self, command: Command, data: [u64; 2]) -> Result<usize> {
        let id = self.tail;
        let words = [
            u64::from(command.opcode) | (id as u64) << 16 | u64::from(command.namespace) << 32,
            0,
            0,
            data[0],
            data[1],
            command.arguments[0],
            command.arguments[1],
            0,
        ];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.submission.write(id * COMMAND_WORDS * 8, &bytes).ok_or(NvmeError::Stray)?;
        self.tail = (self.tail + 1) % ENTRIES;
        Ok(id)
    }

    /// The next completion, if it is there: of which command, and its status.
    fn poll(&mut self) -> Option<(usize, u64)> {
        let word = self.completion.word(self.head * COMPLETION_WORDS + 1)?.load(Ordering::Acquire);
        if word >> 48 & 1 != self.phase {
            return None;
        }
        self.head = (self.head + 1) % ENTRIES;
        if self.head == 0 {
            self.phase ^= 1;
        }
        Some(((word >> 32 & 0xffff) as usize, word >> 49))
    }
}
