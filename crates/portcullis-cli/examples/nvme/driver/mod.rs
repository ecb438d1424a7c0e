//! A small NVMe driver: an admin queue pair, and I/O queue pairs, polled, whose data goes by PRP entries.
//!
//! It needs no `std`, and names no IOMMU and no policy. Rings are coherent memory of the device. A [`Disk`] maps data by a queue of the
//! device, which the caller configures, so that choosing another way to protect it changes nothing here; below it, [`Ring`] takes
//! addresses that are mapped already.
//!
//! Source: NVM Express Base Specification, Revision 2.0, section 3.1.3 "Controller Properties", chapter 3.5 "Controller
//! Initialization", 4.1.1 "Submission Queue Entry" and "Physical Region Page", 5.27.1.5 "Number of Queues"; NVM Command Set Specification,
//! Revision 1.0, chapter 3.

extern crate alloc;

mod disk;
mod ring;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;

use portcullis::SetupError;
use portcullis::dma::{CoherentMemory, Device, DmaBuffer, DmaMapError, DmaUnmapError, Machine, QueueConfig};
use portcullis::domain::{MapListError, UnmapError};
use portcullis::platform::Frames;
use portcullis_hw::Registers;

pub use disk::{Disk, Transfer};
pub use ring::Ring;
use ring::{Command, ENTRIES};

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
    #[error(
        "the blocks of the namespace have {bytes} bytes of metadata, which this driver does not transfer: format it without"
    )]
    Metadata { bytes: u64 },
    #[error("{len} bytes at block {block} are no blocks of the disk, or too many for one command")]
    Blocks { len: u64, block: u64 },
    #[error("all {0} commands of the ring are in use")]
    Full(usize),
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

/// Controller configuration: on, with entries of 64 and 16 bytes and pages of 4 KiB.
const ON: u32 = 1 | 6 << 16 | 4 << 20;
const READY: u32 = 1;
const FATAL: u32 = 2;

/// Commands.
const CREATE_SUBMISSION: u8 = 0x01;
const CREATE_COMPLETION: u8 = 0x05;
const IDENTIFY: u8 = 0x06;
const SET_FEATURES: u8 = 0x09;

/// The feature "Number of Queues".
const NUMBER_OF_QUEUES: u64 = 0x07;

const PAGE: u64 = 4096;

/// What all queue pairs of a controller share.
struct Controller<R> {
    registers: R,
    /// Bytes from one doorbell to the next.
    stride: usize,
    /// Nanoseconds since some fixed time, and how many the controller may take.
    now_ns: fn() -> u64,
    patience_ns: u64,
}

impl<R: Registers> Controller<R> {
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
}

/// The first namespace.
#[derive(Debug, Clone, Copy, Default)]
struct Namespace {
    block_bytes: u64,
    blocks: u64,
}

/// A controller.
pub struct Nvme<X: Machine, F: Frames, R: Registers> {
    controller: Arc<Controller<R>>,
    device: Device<X>,
    frames: F,
    admin: Ring<X, F, R>,
    namespace: Namespace,
    /// I/O queue pairs that were made, and how many there may be.
    made: u16,
    most: u16,
}

impl<X: Machine, F: Frames + Clone, R: Registers> Nvme<X, F, R> {
    /// Brings the controller up, its rings in memory of `frames`, for up to `queues` I/O queue pairs, at least one. `now_ns` is a clock.
    pub fn start(
        registers: R,
        device: &Device<X>,
        frames: &F,
        queues: u16,
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
        let controller = Arc::new(Controller {
            stride: 4 << (capabilities >> 32 & 0xf),
            // In units of 500 ms.
            patience_ns: 500_000_000 * ((capabilities >> 24 & 0xff) + 1),
            now_ns,
            registers,
        });
        let mut nvme = Self {
            admin: Ring::new(0, Arc::clone(&controller), device, frames, Namespace::default())?,
            controller,
            device: device.clone(),
            frames: frames.clone(),
            namespace: Namespace::default(),
            made: 0,
            most: queues.max(1),
        };
        let registers = &nvme.controller.registers;
        registers.write32(CC, 0);
        nvme.controller.wait_for(0)?;
        let sizes = (ENTRIES - 1) as u32;
        let (submission, completion) = nvme.admin.places();
        registers.write32(AQA, sizes << 16 | sizes);
        registers.write64(ASQ, submission.get());
        registers.write64(ACQ, completion.get());
        registers.write32(CC, ON);
        nvme.controller.wait_for(READY)?;
        nvme.identify()?;
        let count = u64::from(nvme.most - 1);
        let arguments = [NUMBER_OF_QUEUES | (count << 16 | count) << 32, 0];
        nvme.administrate(Command { opcode: SET_FEATURES, arguments, ..Command::default() }, 0)?;
        Ok(nvme)
    }

    /// Asks for the size of the first namespace.
    fn identify(&mut self) -> Result<()> {
        let answer = CoherentMemory::new(self.device.dma(), self.frames.clone(), PAGE as usize)?;
        let command = Command { opcode: IDENTIFY, namespace: 1, ..Command::default() };
        self.administrate(command, answer.iova().get())?;
        let word = |index| answer.word(index).map_or(0, |word| word.load(Ordering::Acquire));
        let blocks = word(0);
        // The format in use is one of 16, which follow from byte 128 on.
        let format = (word(3) >> 16 & 0xf) as usize;
        let word = word(16 + format / 2) >> (format % 2 * 32);
        let (metadata, shift) = (word & 0xffff, word >> 16 & 0xff);
        if metadata != 0 {
            return Err(NvmeError::Metadata { bytes: metadata });
        }
        if blocks == 0 || !(9..=12).contains(&shift) {
            return Err(NvmeError::Namespace { blocks, shift });
        }
        self.namespace = Namespace { block_bytes: 1 << shift, blocks };
        Ok(answer.free()?)
    }

    fn administrate(&mut self, command: Command, data: u64) -> Result<()> {
        let id = self.admin.submit(command, [data, 0])?;
        self.admin.ring();
        let (answered, status) = self.admin.wait()?;
        match (answered == id, status) {
            (true, 0) => Ok(()),
            (true, status) => Err(NvmeError::Status { opcode: command.opcode, status }),
            (false, _) => Err(NvmeError::Stray),
        }
    }

    /// Makes the next I/O queue pair.
    pub fn queue_pair(&mut self) -> Result<Ring<X, F, R>> {
        if self.made == self.most {
            return Err(NvmeError::Full(self.most.into()));
        }
        let number = self.made + 1;
        let pair =
            Ring::new(number, Arc::clone(&self.controller), &self.device, &self.frames, self.namespace)?;
        let (submission, completion) = pair.places();
        let size = (ENTRIES as u64 - 1) << 16 | u64::from(number);
        // Physically contiguous, without interrupts; the submission queue's completions go to the queue of the same number.
        let create = [
            (CREATE_COMPLETION, 1, completion),
            (CREATE_SUBMISSION, 1 | u64::from(number) << 16, submission),
        ];
        for (opcode, flags, place) in create {
            let command = Command { opcode, arguments: [size | flags << 32, 0], ..Command::default() };
            self.administrate(command, place.get())?;
        }
        self.made = number;
        Ok(pair)
    }

    /// A queue pair whose data goes by a queue of `config`.
    pub fn disk<B: DmaBuffer + Send + Sync>(&mut self, config: QueueConfig) -> Result<Disk<X, F, R, B>> {
        Ok(Disk::new(self.device.queue(config)?, self.queue_pair()?))
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> u64 {
        self.namespace.block_bytes
    }

    /// Blocks of the disk.
    pub fn blocks(&self) -> u64 {
        self.namespace.blocks
    }

    /// Turns the controller off and gives its rings back: its own, and those of `pairs`.
    pub fn shut_down(self, pairs: Vec<Ring<X, F, R>>) -> Result<()> {
        self.controller.registers.write32(CC, 0);
        self.controller.wait_for(0)?;
        pairs.into_iter().chain([self.admin]).try_for_each(Ring::free)
    }
}
