//! A disk whose data a queue of the device maps, for each transfer.

use super::alloc::vec::{Drain, Vec};

use portcullis::addr::{Direction, DmaSegment, Iova};
use portcullis::dma::{DmaBuffer, Ended, Machine, Mapping, Queue};
use portcullis::platform::Frames;
use portcullis_hw::Registers;

use super::ring::{READ, Ring, WRITE};
use super::{NvmeError, Result};

/// What a transfer asks for.
pub struct Transfer<B> {
    /// The first block.
    pub block: u64,
    /// To the disk, or from it.
    pub writes: bool,
    /// The data, whole blocks.
    pub buffer: B,
}

/// A queue pair, and what maps its data.
pub struct Disk<X: Machine, F: Frames, R: Registers, B: DmaBuffer + Send + Sync> {
    queue: Queue<X, B>,
    ring: Ring<X, F, R>,
}

impl<X: Machine, F: Frames + Clone, R: Registers, B: DmaBuffer + Send + Sync> Disk<X, F, R, B> {
    pub(super) fn new(queue: Queue<X, B>, ring: Ring<X, F, R>) -> Self {
        Self { queue, ring }
    }

    /// Its queue pair, when it is done.
    pub fn into_ring(self) -> Ring<X, F, R> {
        self.ring
    }

    /// Carries the transfers out, as many at a time as the ring holds. When this returns, the controller reaches none of the
    /// buffers any more, by the policy in force, and they come back in the order in which they were ended. After an error the buffers of
    /// commands that are under way are leaked, as the controller may still reach them.
    pub fn run(&mut self, transfers: Vec<Transfer<B>>) -> Result<Vec<B>> {
        let mut back = Vec::new();
        let mut left = transfers.into_iter().peekable();
        while left.peek().is_some() {
            // After an error this has the mappings that the controller may still use. The drop leaves each of them open, and its buffer is never
            // used again. A driver that goes on keeps the mappings, resets the controller, and then ends them by `Queue::unmap_all`.
            let mut mapped = Vec::new();
            self.run_some(left.by_ref(), &mut mapped, &mut back)?;
        }
        Ok(back)
    }

    /// Carries out as many transfers as the ring holds. After an error, what has not ended is in `mapped`.
    fn run_some(
        &mut self,
        transfers: impl Iterator<Item = Transfer<B>>,
        mapped: &mut Vec<(u16, bool, Mapping<B>)>,
        back: &mut Vec<B>,
    ) -> Result<()> {
        for transfer in transfers.take(Ring::<X, F, R>::MOST) {
            mapped.push(self.begin(transfer)?);
        }
        // One doorbell for all of them.
        self.ring.ring();
        while !mapped.is_empty() {
            let (id, status) = self.ring.wait()?;
            let at = mapped.iter().position(|(of, ..)| *of == id).ok_or(NvmeError::Stray)?;
            let (_, writes, mapping) = mapped.swap_remove(at);
            self.end(mapping)?.for_each(|buffer| back.push(buffer));
            if status != 0 {
                return Err(NvmeError::Status { opcode: if writes { WRITE } else { READ }, status });
            }
        }
        // The queue falls idle: nothing waits longer than this.
        back.extend(self.queue.commit()?);
        Ok(())
    }

    /// Maps a transfer's data and puts its command into the ring.
    fn begin(&mut self, transfer: Transfer<B>) -> Result<(u16, bool, Mapping<B>)> {
        let Transfer { block, writes, buffer } = transfer;
        let direction = if writes { Direction::ToDevice } else { Direction::FromDevice };
        let mapping = self.queue.map(buffer, direction).map_err(|refused| refused.error)?;
        match self.ring.transfer(block, writes, self.queue.segments(&mapping)) {
            Ok(id) => Ok((id, writes, mapping)),
            Err(error) => {
                self.end(mapping)?.for_each(drop);
                Err(error)
            }
        }
    }

    /// Ends a mapping. A buffer that does not come back stays in the queue.
    fn end(&mut self, mapping: Mapping<B>) -> Result<Ended<B, Drain<'_, B>>> {
        self.queue.unmap(mapping).map_err(|failed| NvmeError::Unmap(failed.error))
    }

    /// Has the controller write the `len` bytes of blocks from `block` on to `address`, whatever that is, as a broken driver or
    /// controller would: the status that it ends with.
    pub fn read_to(&mut self, block: u64, address: Iova, len: u64) -> Result<u64> {
        self.ring.transfer(block, false, [DmaSegment { iova: address, len }])?;
        self.ring.ring();
        Ok(self.ring.wait()?.1)
    }
}
