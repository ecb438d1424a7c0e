//! Borrowed buffers, mapped while a function runs.

use std::marker::PhantomData;

use portcullis::addr::{Direction, DmaSegment, Iova};
use portcullis::dma::{DmaBuffer, DmaMapError, Machine, Queue, RawMapping};
use portcullis::pgtable::MapError;

use super::mapper::KernelMapper;
use crate::buffer::segment;

/// Maps the caller's buffers, and ends all mappings before [`scope`] returns.
#[derive(Debug)]
pub struct Scope<'queue, 'buffers, X: Machine<Mapper = KernelMapper>, B: DmaBuffer> {
    queue: &'queue mut Queue<X, B>,
    open: Vec<RawMapping>,
    buffers: PhantomData<&'buffers mut [u8]>,
}

/// Calls `f` with a scope that maps borrowed buffers. When it returns, no device reaches any of them, and they have what their devices
/// wrote.
///
/// ```no_run
/// # use portcullis::dma::{DmaMapError, Queue};
/// # use portcullis_linux::vfio::{Machine, scope};
/// # fn read(queue: &mut Queue<Machine>, submit: impl Fn(u64), wait: impl Fn()) -> Result<(), DmaMapError> {
/// let mut block = [0; 512];
/// scope(queue, |scope| {
///     let iova = scope.map(&mut block)?;
///     submit(iova.get());
///     wait();
///     Ok::<_, DmaMapError>(())
/// })?;
/// // Here the caller owns the block again.
/// # Ok(())
/// # }
/// ```
///
/// Costs an unmap for each mapping, and a commit of the queue, with all its other pending unmaps. The process **aborts** if the kernel does
/// not remove a mapping, because the device would keep access to the caller's memory. If `f` panics, mappings end in the same way.
pub fn scope<'buffers, X, B, R>(
    queue: &mut Queue<X, B>,
    f: impl FnOnce(&mut Scope<'_, 'buffers, X, B>) -> R,
) -> R
where
    X: Machine<Mapper = KernelMapper>,
    B: DmaBuffer,
{
    f(&mut Scope { queue, open: Vec::new(), buffers: PhantomData })
}

impl<'buffers, X: Machine<Mapper = KernelMapper>, B: DmaBuffer> Scope<'_, 'buffers, X, B> {
    /// Lets the device read and write a buffer. Returns its first IOVA.
    ///
    /// # Errors
    /// As [`Queue::map_raw`], with nothing mapped. If devices may still reach the buffer, the process aborts.
    pub fn map(&mut self, buffer: &'buffers mut [u8]) -> Result<Iova, DmaMapError> {
        let len = buffer.len();
        self.enter(buffer.as_mut_ptr(), len, Direction::Bidirectional)
    }

    /// As [`map`](Self::map), but the device only writes. Bytes that it does not write may change.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_for_write(&mut self, buffer: &'buffers mut [u8]) -> Result<Iova, DmaMapError> {
        let len = buffer.len();
        self.enter(buffer.as_mut_ptr(), len, Direction::FromDevice)
    }

    /// As [`map`](Self::map), but the device only reads.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_for_read(&mut self, buffer: &'buffers [u8]) -> Result<Iova, DmaMapError> {
        self.enter(buffer.as_ptr(), buffer.len(), Direction::ToDevice)
    }

    fn enter(&mut self, first: *const u8, len: usize, direction: Direction) -> Result<Iova, DmaMapError> {
        self.open.try_reserve(1).map_err(|_| DmaMapError::List(MapError::OutOfMemory.into()))?;
        let list = [segment(first, len)];
        let mut out = [DmaSegment { iova: Iova::new(0), len: 0 }];
        // SAFETY: the memory is borrowed until the scope has ended the mapping, exclusively if the device may write: so no code accesses it
        // while the queue copies, or others only read, like the queue. It is the process's, and the mapper takes its addresses; an unmap of
        // that mapper takes effect at once, under every policy. Only this queue ends the mapping.
        let mapped = unsafe { self.queue.map_raw(&list, direction, &mut out) };
        let (mapping, _) = mapped.inspect_err(|error| {
            if error.may_be_reached() {
                give_up(error);
            }
        })?;
        let iova = mapping.iova();
        self.open.push(mapping);
        Ok(iova)
    }
}

/// Mappings end with the scope, however `f` ends.
impl<X: Machine<Mapper = KernelMapper>, B: DmaBuffer> Drop for Scope<'_, '_, X, B> {
    fn drop(&mut self) {
        for mapping in self.open.drain(..) {
            // The commit ends pending ones.
            if let Err(failed) = self.queue.unmap_raw(mapping)
                && !failed.waits
            {
                give_up(&failed.error);
            }
        }
        if let Err(error) = self.queue.commit_raw() {
            give_up(&error);
        }
    }
}

#[cold]
pub(crate) fn give_up(error: &dyn std::error::Error) -> ! {
    eprintln!(
        "portcullis: a device may still reach memory that was borrowed for it, so that this process ends: {error}"
    );
    std::process::abort()
}
