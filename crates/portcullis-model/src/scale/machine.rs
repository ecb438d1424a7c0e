//! The machine around the library: its CPUs, the hardware that they wait for, its memory.

/// What a machine has, and what things cost on it. Times are nanoseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// CPUs, from 1 to 256.
    pub cpus: u32,
    /// Sockets, over which they are spread.
    pub sockets: u32,
    /// IOMMUs, at least 1. Each is for some of the devices, and none is without one.
    pub iommus: u32,
    /// A cache line of another CPU of the socket.
    pub near_ns: f64,
    /// A cache line of another socket.
    pub far_ns: f64,
    /// A submission to the invalidation queue, from the doorbell to the confirmation.
    pub submission_ns: f64,
    /// Each request in it.
    pub request_ns: f64,
    /// Submissions that the hardware works on at once.
    pub in_flight: u32,
    /// Each map, where mapping is a request to somebody, and each of its pages.
    pub map_request_ns: f64,
    /// Each page of such a map.
    pub map_page_ns: f64,
    /// Each page of such an unmap.
    pub unmap_page_ns: f64,
    /// One memory read of a page walk.
    pub walk_read_ns: f64,
    /// What copying costs.
    pub copies: Copies,
    /// `bounce` copies a buffer that a device writes into its slot first, as the Linux module does, and so copies it twice.
    pub copies_in: bool,
}

/// What it costs to copy. Nanoseconds for each KiB.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Copies {
    /// Both sides are in the CPU's cache.
    pub hot_ns: f64,
    /// Neither is in any cache.
    pub cold_ns: f64,
    /// One side is in another CPU's cache, which has changed it, and the other in this one's. Far less than `cold_ns`: caches of a
    /// socket pass lines on as fast as they can be asked for, while both sides of a cold copy come from memory, a page at a time.
    pub remote_ns: f64,
    /// What a socket's memory copies at the most, by all its CPUs, in GB/s.
    pub socket_gb_per_s: f64,
}
