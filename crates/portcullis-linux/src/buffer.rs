//! Buffers of a program: [`AnyBuffer`], for existing buffers, and [`FileBuffer`], for memory that several processes share.

use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit};

use embedded_dma::{ReadBuffer, WriteBuffer};
use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::dma::DmaBuffer;

#[cfg(target_os = "linux")]
pub use file::FileBuffer;
#[cfg(target_os = "linux")]
pub(crate) mod file;

/// Memory of this process, for maps by number in a domain that uses process addresses. O(1).
pub fn segment(first: *const u8, len: usize) -> PhysSegment {
    PhysSegment { phys: PhysAddr::new(first.expose_provenance() as u64), len: len as u64 }
}

/// A mapping's buffer of any type that keeps its address when it is moved: a `Vec<u8>`, a `Box<[u64]>`, a `&'static mut [u8]`, or another
/// type that implements [`WriteBuffer`] and [`ReadBuffer`] of the crate `embedded-dma`, because devices may do both.
///
/// ```
/// use portcullis::dma::DmaBuffer;
/// use portcullis_linux::buffer::AnyBuffer;
///
/// let buffer = AnyBuffer::new(vec![7_u8; 2000]);
/// assert_eq!(buffer.segments()[0].len, 2000);
/// // A queue maps it, the device reads and writes it, and an unmap returns it. Then:
/// // SAFETY: clause 1: no device has it.
/// let vec = unsafe { buffer.into_inner() };
/// assert_eq!(vec, [7; 2000]);
/// ```
///
/// Uninitialised memory is no buffer: a device or a copy would read it.
///
/// ```compile_fail
/// # use portcullis_linux::buffer::AnyBuffer;
/// AnyBuffer::new(Box::new(std::mem::MaybeUninit::<[u8; 512]>::uninit()));
/// ```
///
/// Its contents cannot be accessed here, because a device may change them at any time. Such a buffer shares pages with other memory: a
/// queue that [copies](portcullis::dma::QueueConfig::bounce), or [chooses](portcullis::dma::QueueConfig::auto), protects that, and any
/// other queue opens it to the device, as [`AddressSpace::mapper`](crate::vfio::AddressSpace::mapper) says.
pub struct AnyBuffer<B: WriteBuffer + ReadBuffer + 'static> {
    // These wrappers keep the compiler from assuming that a box inside is the only writer of its memory.
    buffer: ManuallyDrop<MaybeUninit<B>>,
    segment: PhysSegment,
}

// SAFETY:
// 1. The addresses are the process's.
// 2. `WriteBuffer` returns the same memory until the buffer is used mutably or dropped, which only happens when this is taken apart or
//    dropped; and the memory is the buffer's alone, because it may be written.
// 3. Safe code cannot access it: `into_inner` is unsafe. It can drop it, which frees the memory: under a policy that is not strict, over a
//    mapper whose unmaps are deferred, the domain's maker answers for that, as for each buffer that an unmap returns.
// 4. Safe code with a reference reaches none of the bytes.
unsafe impl<B: WriteBuffer + ReadBuffer + 'static> DmaBuffer for AnyBuffer<B> {
    fn segments(&self) -> &[PhysSegment] {
        std::slice::from_ref(&self.segment)
    }
}

impl<B: WriteBuffer + ReadBuffer + 'static> AnyBuffer<B> {
    /// Wraps a buffer. A map refuses an empty one. O(1); does not allocate.
    pub fn new(buffer: B) -> Self {
        let mut buffer = MaybeUninit::new(buffer);
        // SAFETY: it is initialised, and from now on only used by the pointer, until it is taken out.
        let (first, words) = unsafe { buffer.assume_init_mut().write_buffer() };
        let len = words.saturating_mul(size_of::<<B as WriteBuffer>::Word>());
        Self { buffer: ManuallyDrop::new(buffer), segment: segment(first.cast(), len) }
    }

    /// Returns the buffer. O(1).
    ///
    /// # Safety
    /// 1. No device reaches it any more: no queue mapped it, or an unmap or a commit has returned it under a strict policy, or over a
    ///    mapper whose unmaps take effect at once, as [`KernelMapper`](crate::vfio::KernelMapper)'s do.
    pub unsafe fn into_inner(self) -> B {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: it is initialised until `drop`, which no longer runs; and it is taken once.
        unsafe { ManuallyDrop::take(&mut this.buffer).assume_init() }
    }
}

impl<B: WriteBuffer + ReadBuffer + 'static> Drop for AnyBuffer<B> {
    fn drop(&mut self) {
        // SAFETY: it is initialised, and dropped once.
        unsafe { self.buffer.assume_init_drop() }
    }
}

impl<B: WriteBuffer + ReadBuffer + 'static> fmt::Debug for AnyBuffer<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyBuffer").field("segment", &self.segment).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn a_buffer_is_named_where_it_is_and_comes_back_as_it_was() {
        let vec = vec![1_u16, 2, 3];
        let at = vec.as_ptr();
        let buffer = AnyBuffer::new(vec);
        let moved = Box::new(buffer);
        assert_eq!(moved.segments(), [PhysSegment { phys: PhysAddr::new(at.addr() as u64), len: 6 }]);
        // SAFETY: clause 1: no device has it; only this code writes it.
        let vec = unsafe {
            std::ptr::with_exposed_provenance_mut::<u16>(moved.segments()[0].phys.get() as usize + 2)
                .write_volatile(9);
            moved.into_inner()
        };
        assert_eq!((vec.as_ptr(), &vec[..]), (at, &[1, 9, 3][..]));
        assert_eq!(AnyBuffer::new(Vec::<u8>::new()).segments()[0].len, 0);
    }

    /// A buffer that counts its drops.
    struct Told(Box<[u8]>, #[allow(dead_code, reason = "its count is what is looked at")] Rc<()>);

    // SAFETY: the box owns its memory, at a fixed address.
    unsafe impl WriteBuffer for Told {
        type Word = u8;

        unsafe fn write_buffer(&mut self) -> (*mut u8, usize) {
            (self.0.as_mut_ptr(), self.0.len())
        }
    }

    // SAFETY: as above.
    unsafe impl ReadBuffer for Told {
        type Word = u8;

        unsafe fn read_buffer(&self) -> (*const u8, usize) {
            (self.0.as_ptr(), self.0.len())
        }
    }

    #[test]
    fn a_buffer_ends_once() {
        let told = Rc::new(());
        let buffer = || AnyBuffer::new(Told(Box::new([0; 8]), Rc::clone(&told)));
        drop(buffer());
        assert_eq!(Rc::strong_count(&told), 1);
        // SAFETY: clause 1: no device has it.
        let taken = unsafe { buffer().into_inner() };
        assert_eq!(Rc::strong_count(&told), 2);
        drop(taken);
        assert_eq!(Rc::strong_count(&told), 1);
    }
}
