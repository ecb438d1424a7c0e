//! Registers, rings and requests of virtio-iommu: where bits lie, and nothing else.
//!
//! Source: Virtual I/O Device (VIRTIO), Version 1.3 (OASIS Committee Specification 01, October 2023): section 2.7 "Split Virtqueues",
//! section 4.1.4 "Virtio Structure PCI Capabilities", section 5.13 "IOMMU Device".
#![allow(missing_docs, reason = "names of the specification")]

/// PCI configuration space: offsets, in bytes (PCI Local Bus Specification 3.0, section 6.1, and VIRTIO 4.1.4).
pub mod pci {
    pub const ID: u16 = 0x00;
    pub const COMMAND_STATUS: u16 = 0x04;
    /// The device has a capability list.
    pub const CAPABILITIES: u32 = 1 << 20;
    pub const FIRST_CAPABILITY: u16 = 0x34;
    /// Capability ID of vendors.
    pub const VENDOR: u32 = 9;
    /// Fields of a virtio capability's first word: ID, next, type.
    pub const fn number(head: u32) -> u32 {
        head & 0xff
    }
    pub const fn next(word: u32, shift: u32) -> u16 {
        (word >> shift & 0xfc) as u16
    }
    pub const fn kind(head: u32) -> u8 {
        (head >> 24) as u8
    }
    pub const COMMON: u8 = 1;
    pub const NOTIFY: u8 = 2;
    pub const DEVICE: u8 = 4;
    /// Offsets of a capability's words.
    pub const BAR: u16 = 4;
    pub const OFFSET: u16 = 8;
    pub const LENGTH: u16 = 12;
    pub const MULTIPLIER: u16 = 16;
    /// Vendor 0x1af4, device 0x1040 + 23.
    pub const VIRTIO_IOMMU: u32 = 0x1057_1af4;
}

/// The common configuration (4.1.4.3), in bytes from its beginning.
pub mod common {
    pub const DEVICE_FEATURE_SELECT: usize = 0x00;
    pub const DEVICE_FEATURE: usize = 0x04;
    pub const DRIVER_FEATURE_SELECT: usize = 0x08;
    pub const DRIVER_FEATURE: usize = 0x0c;
    /// 8 bits each.
    pub const DEVICE_STATUS: usize = 0x14;
    pub const CONFIG_GENERATION: usize = 0x15;
    /// 16 bits each.
    pub const QUEUE_SELECT: usize = 0x16;
    pub const QUEUE_SIZE: usize = 0x18;
    pub const QUEUE_ENABLE: usize = 0x1c;
    pub const QUEUE_NOTIFY_OFF: usize = 0x1e;
    /// 64 bits each, written in halves.
    pub const QUEUE_DESC: usize = 0x20;
    pub const QUEUE_DRIVER: usize = 0x28;
    pub const QUEUE_DEVICE: usize = 0x30;
    pub const LENGTH: u32 = 0x38;
}

/// The device status (2.1).
pub mod status {
    pub const ACKNOWLEDGE: u8 = 1;
    pub const DRIVER: u8 = 2;
    pub const DRIVER_OK: u8 = 4;
    pub const FEATURES_OK: u8 = 8;
}

/// Features (5.13.3, and section 6).
pub mod feature {
    pub const INPUT_RANGE: u64 = 1 << 0;
    pub const DOMAIN_RANGE: u64 = 1 << 1;
    pub const MAP_UNMAP: u64 = 1 << 2;
    pub const PROBE: u64 = 1 << 4;
    pub const BYPASS_CONFIG: u64 = 1 << 6;
    pub const VERSION_1: u64 = 1 << 32;
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
}

/// The device configuration (5.13.4), in bytes from its beginning.
pub mod config {
    pub const PAGE_SIZE_MASK: usize = 0;
    pub const INPUT_START: usize = 8;
    pub const INPUT_END: usize = 16;
    pub const DOMAIN_START: usize = 24;
    pub const DOMAIN_END: usize = 28;
    pub const PROBE_SIZE: usize = 32;
    /// 8 bits.
    pub const BYPASS: usize = 36;
    pub const LENGTH: u32 = 40;
}

/// Queue indices (5.13.2).
pub const REQUESTS: u16 = 0;
pub const EVENTS: u16 = 1;

/// A split virtqueue of at most 256 descriptors, in two frames; all in 64-bit words (2.7.5 to 2.7.8).
pub mod ring {
    pub const MOST: u16 = 256;
    /// Word indices of the driver's ring ("available ring") and the device's ("used ring").
    pub const DRIVER: usize = 512;
    pub const DEVICE: usize = 640;
    /// The second word of a descriptor.
    pub const fn descriptor(len: u32, flags: u16, next: u16) -> u64 {
        len as u64 | (flags as u64) << 32 | (next as u64) << 48
    }
    pub const NEXT: u16 = 1;
    pub const DEVICE_WRITES: u16 = 2;
    /// The first word of the driver's ring: flags, index, two entries.
    pub const NO_INTERRUPT: u64 = 1;
    pub const fn index(word: u64) -> u16 {
        (word >> 16) as u16
    }
    pub const fn with_index(word: u64, index: u16) -> u64 {
        word & !(0xffff << 16) | (index as u64) << 16
    }
    /// A 16-bit entry of the driver's ring: its word, and its shift there.
    pub const fn driver_entry(at: u16) -> (usize, u32) {
        let position = at as usize + 2;
        (DRIVER + position / 4, (position % 4 * 16) as u32)
    }
    /// The word whose upper half has an entry of the device's ring (the descriptor ID).
    pub const fn device_entry(at: u16) -> usize {
        DEVICE + at as usize
    }
    pub const fn id(word: u64) -> u32 {
        (word >> 32) as u32
    }
}

/// Requests (5.13.6), as the 64-bit words that the device reads.
pub mod request {
    /// A request's words, and how many bytes of them the device reads. Other words are 0.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Request {
        pub words: [u64; 5],
        pub bytes: u32,
    }

    const fn head(kind: u32, second: u32) -> u64 {
        kind as u64 | (second as u64) << 32
    }

    pub const fn attach(domain: u32, endpoint: u32, flags: u32) -> Request {
        Request { words: [head(1, domain), endpoint as u64 | (flags as u64) << 32, 0, 0, 0], bytes: 20 }
    }
    /// Of `attach`: the endpoint bypasses translation.
    pub const BYPASS: u32 = 1;

    pub const fn detach(domain: u32, endpoint: u32) -> Request {
        Request { words: [head(2, domain), endpoint as u64, 0, 0, 0], bytes: 20 }
    }

    pub const fn map(domain: u32, first: u64, last: u64, phys: u64, flags: u32) -> Request {
        Request { words: [head(3, domain), first, last, phys, flags as u64], bytes: 36 }
    }
    /// Of `map`.
    pub const READ: u32 = 1;
    pub const WRITE: u32 = 2;

    pub const fn unmap(domain: u32, first: u64, last: u64) -> Request {
        Request { words: [head(4, domain), first, last, 0, 0], bytes: 28 }
    }

    pub const fn probe(endpoint: u32) -> Request {
        Request { words: [head(5, endpoint), 0, 0, 0, 0], bytes: 72 }
    }

    /// The device writes this many bytes behind a request; the first is the status.
    pub const TAIL_BYTES: u32 = 4;
    pub const fn status(tail: u64) -> u8 {
        tail as u8
    }
}

/// The status of a request.
pub mod answer {
    pub const OK: u8 = 0;
    pub const RANGE: u8 = 5;
    pub const INVAL: u8 = 4;
    pub const NOENT: u8 = 6;
    pub const NOMEM: u8 = 8;
}

/// Endpoint properties, as a probe returns them: 16-bit type, 16-bit length, data.
pub mod property {
    pub const HEAD_BYTES: usize = 4;
    pub const fn kind(head: u64) -> u16 {
        head as u16 & 0xfff
    }
    pub const fn bytes(head: u64) -> u16 {
        (head >> 16) as u16
    }
    pub const NONE: u16 = 0;
    pub const RESERVED_MEMORY: u16 = 1;
    /// Reserved memory, behind the head: subtype, first and last address, and the total length.
    pub const SUBTYPE: usize = 0;
    pub const FIRST: usize = 4;
    pub const LAST: usize = 12;
    pub const RESERVED_BYTES: usize = 20;
    /// Subtype: writes there are interrupts.
    pub const MSI: u8 = 1;
}

/// A fault event, of 24 bytes (5.13.6, "Fault reporting").
pub mod fault {
    pub const BYTES: u32 = 24;
    pub const fn reason(first: u64) -> u8 {
        first as u8
    }
    pub const fn flags(first: u64) -> u32 {
        (first >> 32) as u32
    }
    pub const fn endpoint(second: u64) -> u32 {
        second as u32
    }
    /// The endpoint is attached to nothing.
    pub const DOMAIN: u8 = 1;
    pub const MAPPING: u8 = 2;
    pub const READ: u32 = 1;
    pub const WRITE: u32 = 2;
    pub const EXECUTE: u32 = 4;
    /// The address is given.
    pub const ADDRESS: u32 = 1 << 8;
}
