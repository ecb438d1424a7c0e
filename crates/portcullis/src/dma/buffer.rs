//! The memory that a mapping owns: it is the mapping's alone, and stays sound to use whatever a
//! device writes there.

use crate::addr::PhysSegment;

/// Memory that a device may be given.
///
/// # Safety
/// 1. It is the machine's memory, or the process's where the domain's mapper takes a process's addresses. Where the device's domain has memory that
///    [copies](crate::platform::CopyMemory), that reaches it by the same physical addresses. For a
///    device that is not coherent, so does the domain's
///    [cache maintenance](crate::platform::CacheMaintenance).
/// 2. [`segments`](Self::segments) names memory that belongs to this value alone, and always the same until
///    the value is dropped, wherever the value itself is moved; for ever, if it is leaked.
/// 3. What safe code can do with the value stays sound while a device reads and writes that memory
///    at any time: access is atomic or volatile, or there is none. Under every policy that is not
///    strict this goes for the value that an unmap gives back, too: there the device may go on for a
///    while. What a CPU stores there while a device that is not coherent may write is lost, or parts
///    of it are, as if the device had written the old bytes again.
/// 4. What safe code can do with a reference to the value ([`Mapping::buffer`](crate::dma::Mapping::buffer) gives one) stays sound
///    while the domain's memory copies these bytes on another thread, for a sync. It accesses them by
///    [words](crate::platform::words), and they are in frames of that memory's own; or it reaches none of them.
pub unsafe trait DmaBuffer: 'static {
    /// The pieces of the memory, in the order in which the device finds them. Each has at least one
    /// byte, or a map refuses them; any alignment will do.
    fn segments(&self) -> &[PhysSegment];
}
