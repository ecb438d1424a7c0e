//! What a mapping owns.

use crate::addr::PhysSegment;

/// Memory that a device may be let into.
///
/// # Safety
/// - It is the machine's memory: where the device's domain has memory that [copies](crate::platform::CopyMemory), that reaches it by
///   the same numbers.
/// - [`segments`](Self::segments) names memory that belongs to this value alone, and always the same until
///   the value is dropped, wherever the value itself is moved; for ever, if it is leaked.
/// - What safe code can do with the value stays sound while a device reads and writes that memory at any
///   time: access is atomic or volatile, or there is none. This goes for the value that an unmap gives back
///   too, under every policy but the strict ones: there the device may go on for a while.
pub unsafe trait DmaBuffer: 'static {
    /// Where the memory is.
    fn segments(&self) -> &[PhysSegment];
}
