//! A queue pair: commands whose data is mapped already go to the controller, and completions come from it.

use super::alloc::sync::Arc;
use super::alloc::vec::Vec;
use core::sync::atomic::Ordering;

use portcullis::addr::{DmaSegment, Iova};
use portcullis::dma::{CoherentMemory, Device, Machine};
use portcullis::platform::Frames;
use portcullis_hw::Registers;

use super::{Controller, Namespace, NvmeError, PAGE, Result};

/// Entries of each ring: a frame of commands.
pub(super) const ENTRIES: usize = 64;
const COMMAND_WORDS: usize = 8;
const COMPLETION_WORDS: usize = 2;

const DOORBELLS: usize = 0x1000;

/// Commands.
pub(super) const WRITE: u8 = 0x01;
pub(super) const READ: u8 = 0x02;

/// Memory that rings are made of, of a machine.
type Memory<X, F> = CoherentMemory<F, <X as Machine>::Mapper, <X as Machine>::Platform>;

/// A command, but for its identifier and the address of its data.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Command {
    pub opcode: u8,
    pub namespace: u32,
    /// Words 10 and 11, and 12 with 13.
    pub arguments: [u64; 2],
}

/// A submission queue, its completion queue, and the pages of PRP lists, one for each command.
pub struct Ring<X: Machine, F: Frames, R: Registers> {
    number: u16,
    controller: Arc<Controller<R>>,
    namespace: Namespace,
    submission: Memory<X, F>,
    completion: Memory<X, F>,
    lists: Memory<X, F>,
    tail: usize,
    head: usize,
    /// The phase that a new completion has.
    phase: u64,
    /// The identifiers of commands that the controller has, a bit each.
    busy: u64,
    /// The pages of the command that is being made.
    pages: Vec<u64>,
}

impl<X: Machine, F: Frames + Clone, R: Registers> Ring<X, F, R> {
    /// Commands that the controller may have at once: a ring whose tail meets its head is empty.
    pub const MOST: usize = ENTRIES - 1;

    pub(super) fn new(
        number: u16,
        controller: Arc<Controller<R>>,
        device: &Device<X>,
        frames: &F,
        namespace: Namespace,
    ) -> Result<Self> {
        let memory = |bytes| CoherentMemory::new(device.dma(), frames.clone(), bytes);
        Ok(Self {
            number,
            controller,
            namespace,
            submission: memory(ENTRIES * COMMAND_WORDS * 8)?,
            completion: memory(ENTRIES * COMPLETION_WORDS * 8)?,
            lists: memory(ENTRIES * PAGE as usize)?,
            tail: 0,
            head: 0,
            phase: 1,
            busy: 0,
            pages: Vec::new(),
        })
    }

    /// Where the rings are for the controller: of commands, and of completions.
    pub(super) fn places(&self) -> (Iova, Iova) {
        (self.submission.iova(), self.completion.iova())
    }

    /// Puts a transfer of whole blocks from `block` on into the ring, to or from `data`, which is mapped: its identifier, which
    /// [`poll`](Self::poll) returns. The controller sees it at the next [`ring`](Self::ring).
    pub fn transfer(
        &mut self,
        block: u64,
        writes: bool,
        data: impl IntoIterator<Item = DmaSegment>,
    ) -> Result<u16> {
        let (mut len, mut follows) = (0_u64, true);
        self.pages.clear();
        for segment in data {
            // Between the first byte and the last the controller takes whole pages.
            let begins = len == 0 || segment.iova.get().is_multiple_of(PAGE);
            if !(begins && follows) {
                return Err(NvmeError::Blocks { len, block });
            }
            follows = segment.iova.get().wrapping_add(segment.len).is_multiple_of(PAGE);
            len = len.saturating_add(segment.len);
            let (mut at, end) = (segment.iova.get(), segment.iova.get().saturating_add(segment.len));
            while at < end {
                self.pages.push(at);
                at = (at / PAGE).saturating_add(1).saturating_mul(PAGE);
            }
        }
        let Namespace { block_bytes, blocks: most } = self.namespace;
        let wrong = NvmeError::Blocks { len, block };
        let blocks = len.checked_div(block_bytes).ok_or(wrong)?;
        let fits = block.checked_add(blocks).is_some_and(|end| end <= most);
        if !len.is_multiple_of(block_bytes) || !(1..=0x1_0000).contains(&blocks) || !fits {
            return Err(wrong);
        }
        let data = self.prps()?.ok_or(wrong)?;
        let opcode = if writes { WRITE } else { READ };
        self.submit(Command { opcode, namespace: 1, arguments: [block, blocks - 1] }, data)
    }

    /// The identifier of the next command.
    fn next(&self) -> Result<u16> {
        let id = self.busy.trailing_ones() as u16;
        if usize::from(id) < Self::MOST { Ok(id) } else { Err(NvmeError::Full(Self::MOST)) }
    }

    /// The two PRP fields of the next command: its page, both of two, or its first and the list of the rest.
    fn prps(&self) -> Result<Option<[u64; 2]>> {
        let list = usize::from(self.next()?) * PAGE as usize;
        Ok(match *self.pages.as_slice() {
            [] => None,
            [first] => Some([first, 0]),
            [first, second] => Some([first, second]),
            [_, ref rest @ ..] if rest.len() > PAGE as usize / 8 => None,
            [first, ref rest @ ..] => {
                let words = rest.iter().enumerate().map(|(index, page)| (list / 8 + index, page));
                for (index, page) in words {
                    let word = self.lists.word(index).ok_or(NvmeError::Stray)?;
                    // The doorbell orders it before the controller's look.
                    word.store(page.to_le(), Ordering::Relaxed);
                }
                Some([first, self.lists.iova().get() + list as u64])
            }
        })
    }

    /// Puts a command into the ring, and returns its identifier.
    pub(super) fn submit(&mut self, command: Command, data: [u64; 2]) -> Result<u16> {
        let id = self.next()?;
        let words = [
            u64::from(command.opcode) | u64::from(id) << 16 | u64::from(command.namespace) << 32,
            0,
            0,
            data[0],
            data[1],
            command.arguments[0],
            command.arguments[1],
            0,
        ];
        for (index, word) in words.into_iter().enumerate() {
            let place = self.submission.word(self.tail * COMMAND_WORDS + index).ok_or(NvmeError::Stray)?;
            place.store(word.to_le(), Ordering::Relaxed);
        }
        self.busy |= 1 << id;
        self.tail = (self.tail + 1) % ENTRIES;
        Ok(id)
    }

    /// Has the controller look at what was put into the ring.
    pub fn ring(&self) {
        let doorbell = DOORBELLS + usize::from(self.number) * 2 * self.controller.stride;
        self.controller.registers.write32(doorbell, self.tail as u32);
    }

    /// The next completion, if it is there: of which command, and its status.
    pub fn poll(&mut self) -> Result<Option<(u16, u64)>> {
        let at = self.head * COMPLETION_WORDS + 1;
        let word = self.completion.word(at).ok_or(NvmeError::Stray)?;
        let word = u64::from_le(word.load(Ordering::Acquire));
        if word >> 48 & 1 != self.phase {
            return Ok(None);
        }
        self.head = (self.head + 1) % ENTRIES;
        if self.head == 0 {
            self.phase ^= 1;
        }
        let doorbell = DOORBELLS + (usize::from(self.number) * 2 + 1) * self.controller.stride;
        self.controller.registers.write32(doorbell, self.head as u32);
        let id = (word >> 32 & 0xffff) as u16;
        let bit = 1_u64.checked_shl(id.into()).unwrap_or(0);
        if self.busy & bit == 0 {
            return Err(NvmeError::Stray);
        }
        self.busy &= !bit;
        Ok(Some((id, word >> 49)))
    }

    /// Waits for a completion, as long as the controller may take.
    pub fn wait(&mut self) -> Result<(u16, u64)> {
        let began = (self.controller.now_ns)();
        loop {
            if let Some(done) = self.poll()? {
                return Ok(done);
            }
            self.controller.check(began, "complete a command")?;
        }
    }

    /// Gives the memory back. The controller is off.
    pub(super) fn free(self) -> Result<()> {
        [self.submission, self.completion, self.lists].into_iter().try_for_each(|memory| Ok(memory.free()?))
    }
}
