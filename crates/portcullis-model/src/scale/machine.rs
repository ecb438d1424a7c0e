//! The machine around the library: its CPUs, the IOMMUs, its memory.

/// A machine and its costs. Times are nanoseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// CPUs, from 1 to 256.
    pub cpus: u32,
    /// Sockets, among which they are divided.
    pub sockets: u32,
    /// IOMMUs, at least 1. Each has some of the devices, and none is without one.
    pub iommus: u32,
    /// Transfer of a cache line from another CPU of the socket.
    pub near_ns: f64,
    /// Transfer of a cache line from another socket.
    pub far_ns: f64,
    /// A submission to the invalidation queue, from the doorbell to the confirmation.
    pub submission_ns: f64,
    /// Each request in it.
    pub request_ns: f64,
    /// Concurrent submissions of the hardware.
    pub in_flight: u32,
    /// Each map, if maps are requests, and each of its pages.
    pub map_request_ns: f64,
    /// Each page of such a map.
    pub map_page_ns: f64,
    /// Each page of such an unmap.
    pub unmap_page_ns: f64,
    /// One memory read of a page walk.
    pub walk_read_ns: f64,
    /// Costs of copies.
    pub copies: Copies,
    /// `bounce` is the Linux module's. It first copies a device-written buffer into its slot, and so copies it twice; and what it does not copy, it
    /// maps as [`LINUX_STRICT`](super::LINUX_STRICT) does: each unmap waits with a lock held.
    pub of_module: bool,
}

/// Costs of copies, in nanoseconds for each KiB.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Copies {
    /// Both sides are in the CPU's cache.
    pub hot_ns: f64,
    /// Neither is in any cache.
    pub cold_ns: f64,
    /// One side is modified in another CPU's cache, and the other is in this one's. Far less than `cold_ns`: caches of a socket transfer
    /// lines as fast as they are requested, while both sides of a cold copy come from memory, a page at a time.
    pub remote_ns: f64,
    /// The most that a socket's memory copies, for all its CPUs, in GB/s.
    pub socket_gb_per_s: f64,
}
