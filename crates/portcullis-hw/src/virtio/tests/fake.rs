//! A virtio-iommu in the test, which carries out requests at its doorbell, or not, as the test says.

extern crate std;

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use std::sync::{Mutex, MutexGuard, PoisonError};

use portcullis::addr::PhysAddr;
use portcullis::platform::{FRAME_SIZE, Frames, TABLE_ENTRIES, Table};

use crate::host::{Host, Registers};
use crate::sync::{AtomicU64, Ordering};
use crate::virtio::layout::{answer, common, config, feature, property};
use crate::virtio::{NarrowRegisters, Structures};

const BASE: u64 = 0x1_0000_0000;
const FRAMES: usize = 64;

pub const STRUCTURES: Structures =
    Structures { common: 0, notify: 0x100, notify_bytes: 8, notify_multiplier: 4, device: 0x200 };

/// Existing endpoints besides the first and the last: an ordinary one, and one that reserves addresses.
pub const ENDPOINT: u32 = 0x28;
pub const OTHER: u32 = 0x30;
/// First and last.
pub const KEPT: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);

pub struct Memory {
    tables: Vec<Table>,
    taken: Mutex<Vec<bool>>,
    /// Allocations that succeed.
    pub most: AtomicU64,
}

impl Memory {
    fn new() -> Self {
        let table = |_| core::array::from_fn::<_, TABLE_ENTRIES, _>(|_| AtomicU64::new(0));
        Self {
            tables: (0..FRAMES).map(table).collect(),
            taken: Mutex::new(alloc::vec![false; FRAMES]),
            most: AtomicU64::new(u64::MAX),
        }
    }

    fn taken(&self) -> MutexGuard<'_, Vec<bool>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn in_use(&self) -> usize {
        self.taken().iter().filter(|taken| **taken).count()
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        let index = usize::try_from((at - BASE) / 8).unwrap();
        &self.tables[index / TABLE_ENTRIES][index % TABLE_ENTRIES]
    }

    pub fn read(&self, at: u64, bytes: u64) -> u64 {
        (0..bytes).fold(0, |all, byte| {
            let at = at + byte;
            all | (self.word(at & !7).load(Ordering::Acquire) >> (at % 8 * 8) & 0xff) << (byte * 8)
        })
    }

    fn write(&self, at: u64, bytes: u64, value: u64) {
        for (byte, at) in (at..at + bytes).enumerate() {
            let (word, shift) = (self.word(at & !7), at % 8 * 8);
            let new = |old: u64| Some(old & !(0xff << shift) | (value >> (byte * 8) & 0xff) << shift);
            let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, new);
        }
    }
}

// SAFETY: 1: a frame has one owner until it is freed, and is zeroed then. 2 and 3: of a table behind an `Arc`. 4: all accesses are atomic.
unsafe impl Frames for Memory {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        let spend = |most: u64| most.checked_sub(1);
        self.most.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).ok()?;
        let mut taken = self.taken();
        let fits = |first: &usize| taken.get(*first..first + count).is_some_and(|run| !run.contains(&true));
        let first = (0..FRAMES).step_by(count.next_power_of_two()).find(fits)?;
        taken[first..first + count].fill(true);
        let words = self.tables[first..first + count].iter().flatten();
        words.for_each(|word| word.store(0, Ordering::Relaxed));
        Some(PhysAddr::new(BASE + first as u64 * FRAME_SIZE))
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        let first = usize::try_from((first.get() - BASE) / FRAME_SIZE).unwrap();
        let mut taken = self.taken();
        assert!(taken[first..first + count].iter().all(|taken| *taken), "freed twice");
        taken[first..first + count].fill(false);
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        &self.tables[usize::try_from((frame.get() - BASE) / FRAME_SIZE).unwrap()]
    }
}

/// A mapping: last address, memory, flags.
pub type Mapping = (u64, u64, u32);

/// The device, and its behaviour.
pub struct Device {
    /// The registers, as bytes.
    pub bytes: Vec<u8>,
    pub features: u64,
    pub queue_sizes: [u16; 2],
    /// Status bits that it never sets.
    pub stuck_status: u8,
    /// It reads all ones.
    pub absent: bool,
    /// It accepts requests, and delays them until it is told to carry them out.
    pub holds: bool,
    /// Reverses the requests of each doorbell.
    pub backwards: bool,
    /// Refuses requests of this kind, from this index on, with this status.
    pub refuses: Option<(u8, u32, u8)>,
    /// An unplugged endpoint.
    pub unplugged: Option<u32>,
    /// Called at the next doorbell for requests.
    pub at_doorbell: Option<fn(&mut Self, &Memory)>,
    /// How many reads of the configuration generation find a new one.
    pub unsettled: u32,
    /// Its bypass setting does not change.
    pub keeps_bypass: bool,
    /// Register writes: offset, bytes, value.
    pub writes: Vec<(usize, usize, u64)>,
    /// Doorbells and requests so far, and doorbells for events.
    pub doorbells: u64,
    pub event_doorbells: u64,
    pub requests: Vec<u8>,
    /// Requests and answers, readable.
    pub told: Vec<String>,
    pub endpoints: BTreeMap<u32, (u32, bool)>,
    pub domains: BTreeMap<u32, BTreeMap<u64, Mapping>>,
    /// Set by the driver: size, and the addresses of the three parts.
    pub queues: [(u16, [u64; 3]); 2],
    /// Available entries taken, and used entries written.
    taken: [u16; 2],
    written: [u16; 2],
    pub held: Vec<u16>,
    /// Buffers for events.
    buffers: Vec<u16>,
}

impl Device {
    fn new() -> Self {
        let mut device = Self {
            bytes: alloc::vec![0; 0x300],
            features: feature::VERSION_1
                | feature::MAP_UNMAP
                | feature::INPUT_RANGE
                | feature::DOMAIN_RANGE
                | feature::PROBE
                | feature::BYPASS_CONFIG,
            queue_sizes: [256, 16],
            stuck_status: 0,
            absent: false,
            holds: false,
            backwards: false,
            refuses: None,
            unplugged: None,
            at_doorbell: None,
            unsettled: 0,
            keeps_bypass: false,
            writes: Vec::new(),
            doorbells: 0,
            event_doorbells: 0,
            requests: Vec::new(),
            told: Vec::new(),
            endpoints: BTreeMap::new(),
            domains: BTreeMap::new(),
            queues: Default::default(),
            taken: [0; 2],
            written: [0; 2],
            held: Vec::new(),
            buffers: Vec::new(),
        };
        device.configure(config::PAGE_SIZE_MASK, 8, !0xfff);
        device.configure(config::INPUT_END, 8, (1 << 39) - 1);
        device.configure(config::DOMAIN_END, 4, u64::from(u32::MAX));
        device.configure(config::PROBE_SIZE, 4, 512);
        device.configure(config::BYPASS, 1, 1);
        device
    }

    pub fn configure(&mut self, at: usize, bytes: usize, value: u64) {
        self.put(STRUCTURES.device + at, bytes, value);
    }

    pub fn get(&self, at: usize, bytes: usize) -> u64 {
        let field = self.bytes.get(at..at + bytes).filter(|_| !self.absent);
        field.map_or(u64::MAX, |field| field.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
    }

    fn put(&mut self, at: usize, bytes: usize, value: u64) {
        for (index, byte) in self.bytes[at..at + bytes].iter_mut().enumerate() {
            *byte = (value >> (index * 8)) as u8;
        }
    }

    pub fn mapped(&self, domain: u32) -> Vec<(u64, u64)> {
        let mappings = self.domains.get(&domain).into_iter().flatten();
        mappings.map(|(first, (last, ..))| (*first, *last)).collect()
    }

    fn descriptor(&self, memory: &Memory, queue: usize, index: u16) -> (u64, u32, u16, u16) {
        let at = self.queues[queue].1[0] + u64::from(index) * 16;
        let rest = memory.read(at + 8, 8);
        (memory.read(at, 8), rest as u32, (rest >> 32) as u16, (rest >> 48) as u16)
    }

    /// Takes a queue's available entries.
    fn take(&mut self, memory: &Memory, queue: usize) -> Vec<u16> {
        let (size, [_, driver, _]) = self.queues[queue];
        let end = memory.read(driver + 2, 2) as u16;
        let mut heads = Vec::new();
        while self.taken[queue] != end {
            let at = driver + 4 + u64::from(self.taken[queue] % size) * 2;
            heads.push(memory.read(at, 2) as u16);
            self.taken[queue] = self.taken[queue].wrapping_add(1);
        }
        heads
    }

    /// Writes a used entry, and then the index.
    pub fn use_up(&mut self, memory: &Memory, queue: usize, id: u32, bytes: u32) {
        let (size, [_, _, device]) = self.queues[queue];
        let at = device + 4 + u64::from(self.written[queue] % size) * 8;
        memory.write(at, 8, u64::from(id) | u64::from(bytes) << 32);
        self.written[queue] = self.written[queue].wrapping_add(1);
        memory.write(device + 2, 2, u64::from(self.written[queue]));
    }

    /// Sets the index of used entries.
    pub fn claim(&mut self, memory: &Memory, queue: usize, index: u16) {
        memory.write(self.queues[queue].1[2] + 2, 2, u64::from(index));
    }

    /// Carries out delayed requests.
    pub fn catch_up(&mut self, memory: &Memory) {
        let mut heads = core::mem::take(&mut self.held);
        if self.backwards {
            heads.reverse();
        }
        for head in heads {
            let (mut readable, mut writable, mut next) = (Vec::new(), Vec::new(), Some(head));
            while let Some(index) = next {
                let (address, len, flags, following) = self.descriptor(memory, 0, index);
                let bytes = address..address + u64::from(len);
                if flags & 2 == 0 {
                    readable.extend(bytes)
                } else {
                    writable.extend(bytes)
                }
                next = (flags & 1 != 0).then_some(following);
            }
            let request: Vec<u8> = readable.iter().map(|at| memory.read(*at, 1) as u8).collect();
            let mut answer = alloc::vec![0; writable.len()];
            let tail = answer.len() - 4;
            answer[tail] = self.carry_out(&request, tail, &mut answer[..tail]);
            self.tell(&request, answer[tail]);
            for (index, (at, byte)) in writable.iter().zip(&answer).enumerate() {
                // At most the existing properties.
                if index >= tail || *byte > 0 {
                    memory.write(*at, 1, u64::from(*byte));
                }
            }
            self.use_up(memory, 0, u32::from(head), answer.len() as u32);
        }
    }

    /// Records the request's kind and words, and the answer.
    fn tell(&mut self, request: &[u8], answer: u8) {
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |all, byte| all << 8 | u64::from(*byte));
        let words = |bytes: &[u8], size: usize| {
            let words = bytes.chunks(size).map(|word| alloc::format!("{:#x}", number(word)));
            words.collect::<Vec<_>>().join(" ")
        };
        let (kind, domain, rest) = (request[0], number(&request[4..8]), &request[8..]);
        let rest = match kind {
            3 | 4 => words(rest, 8),
            5 => String::new(),
            _ => words(rest, 4),
        };
        self.told.push(alloc::format!("{kind} {domain:#x} {rest} = {answer}"));
    }

    /// The status of a request, by the specification.
    fn carry_out(&mut self, request: &[u8], room: usize, properties: &mut [u8]) -> u8 {
        let number = |at: usize, bytes: usize| {
            request[at..at + bytes].iter().rev().fold(0_u64, |all, byte| all << 8 | u64::from(*byte))
        };
        let (kind, domain) = (request[0], number(4, 4) as u32);
        self.requests.push(kind);
        if let Some((refused, after, status)) = &mut self.refuses
            && *refused == kind
        {
            if *after == 0 {
                return *status;
            }
            *after -= 1;
        }
        let unplugged = self.unplugged;
        let exists =
            |endpoint| [0, ENDPOINT, OTHER, u32::MAX].contains(&endpoint) && unplugged != Some(endpoint);
        match (kind, request.len()) {
            (1, 20) => {
                let (endpoint, flags) = (number(8, 4) as u32, number(12, 4));
                if !exists(endpoint) {
                    return answer::NOENT;
                }
                let _ = self.leave(endpoint);
                self.domains.entry(domain).or_default();
                self.endpoints.insert(endpoint, (domain, flags & 1 != 0));
                answer::OK
            }
            (2, 20) => match self.endpoints.get(&(number(8, 4) as u32)) {
                Some((attached, _)) if *attached == domain => self.leave(number(8, 4) as u32),
                _ if exists(number(8, 4) as u32) => answer::INVAL,
                _ => answer::NOENT,
            },
            (3, 36) => {
                let (first, last, phys) = (number(8, 8), number(16, 8), number(24, 8));
                let Some(mappings) = self.domains.get_mut(&domain) else { return answer::NOENT };
                if (first | phys | last.wrapping_add(1)) & 0xfff != 0 || last < first {
                    return answer::RANGE;
                }
                if mappings.iter().any(|(from, (to, ..))| *from <= last && first <= *to) {
                    return answer::INVAL;
                }
                mappings.insert(first, (last, phys, number(32, 4) as u32));
                answer::OK
            }
            (4, 28) => {
                let (first, last) = (number(8, 8), number(16, 8));
                let Some(mappings) = self.domains.get_mut(&domain) else { return answer::NOENT };
                let overlaps = |from: u64, to: u64| from <= last && first <= to;
                let inside = |from: u64, to: u64| first <= from && to <= last;
                if mappings.iter().any(|(from, (to, ..))| overlaps(*from, *to) && !inside(*from, *to)) {
                    return answer::RANGE;
                }
                mappings.retain(|from, (to, ..)| !overlaps(*from, *to));
                answer::OK
            }
            (5, 72) if !exists(domain) => answer::NOENT,
            (5, 72) => {
                if domain == OTHER && room >= 32 {
                    let head = [property::RESERVED_MEMORY as u8, 0, property::RESERVED_BYTES as u8, 0, 1];
                    properties[..5].copy_from_slice(&head);
                    // Reserved: a driver ignores it.
                    properties[5..8].fill(0xee);
                    properties[8..16].copy_from_slice(&KEPT.0.to_le_bytes());
                    properties[16..24].copy_from_slice(&KEPT.1.to_le_bytes());
                }
                answer::OK
            }
            _ => 2,
        }
    }

    fn leave(&mut self, endpoint: u32) -> u8 {
        if let Some((domain, _)) = self.endpoints.remove(&endpoint)
            && !self.endpoints.values().any(|(other, _)| *other == domain)
        {
            self.domains.remove(&domain);
        }
        answer::OK
    }

    /// Reports a fault, if there is a buffer.
    pub fn report(&mut self, memory: &Memory, words: [u64; 3]) -> bool {
        let new = self.take(memory, 1);
        self.buffers.extend(new);
        // In any order.
        let Some(head) = self.buffers.pop() else { return false };
        let (address, ..) = self.descriptor(memory, 1, head);
        for (at, word) in (address..).step_by(8).zip(words) {
            memory.write(at, 8, word);
        }
        self.use_up(memory, 1, u32::from(head), 24);
        true
    }
}

/// The device's registers, its memory, and a clock that advances by 1 us with each read.
#[derive(Clone)]
pub struct Fake {
    pub device: Arc<Mutex<Device>>,
    pub memory: Arc<Memory>,
    now: Arc<AtomicU64>,
    /// Accesses and clock reads left before the one that panics; `u64::MAX` for none.
    pub left: Arc<AtomicU64>,
}

impl core::fmt::Debug for Fake {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("a device")
    }
}

impl Fake {
    pub fn new() -> Self {
        Self {
            device: Arc::new(Mutex::new(Device::new())),
            memory: Arc::new(Memory::new()),
            now: Arc::new(AtomicU64::new(0)),
            left: Arc::new(AtomicU64::new(u64::MAX)),
        }
    }

    fn may_panic(&self) {
        let left = self.left.fetch_sub(1, Ordering::Relaxed);
        if left == 0 {
            // Bypasses the panic hook, which would print it.
            std::panic::resume_unwind(alloc::boxed::Box::new("the host"));
        }
    }

    pub fn device(&self) -> MutexGuard<'_, Device> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn catch_up(&self) {
        self.device().catch_up(&self.memory);
    }

    fn read(&self, at: usize, bytes: usize) -> u64 {
        self.may_panic();
        let mut device = self.device();
        let queue = usize::from(device.bytes[common::QUEUE_SELECT]);
        match at {
            common::CONFIG_GENERATION if device.unsettled > 0 => {
                device.unsettled -= 1;
                u64::from(device.unsettled & 0xff)
            }
            _ if device.absent => u64::MAX,
            common::DEVICE_FEATURE => {
                let half = device.get(common::DEVICE_FEATURE_SELECT, 4);
                device.features >> (half * 32) & u64::from(u32::MAX)
            }
            common::QUEUE_SIZE => device.queue_sizes.get(queue).map_or(0, |size| u64::from(*size)),
            common::QUEUE_NOTIFY_OFF => queue as u64,
            _ => device.get(at, bytes),
        }
    }

    fn write(&self, at: usize, bytes: usize, value: u64) {
        self.may_panic();
        let mut guard = self.device();
        let device = &mut *guard;
        device.writes.push((at, bytes, value));
        if device.keeps_bypass && at == STRUCTURES.device + config::BYPASS {
            return;
        }
        let queue = usize::from(device.bytes[common::QUEUE_SELECT]);
        let kept = if at == common::DEVICE_STATUS {
            value & !u64::from(device.stuck_status) | u64::from(device.stuck_status & 0x80)
        } else {
            value
        };
        device.put(at, bytes, kept);
        match at {
            common::DEVICE_STATUS if value == 0 => {
                (device.taken, device.written) = ([0; 2], [0; 2]);
                device.held.clear();
                device.buffers.clear();
            }
            common::QUEUE_ENABLE => {
                let part = |at| device.get(at, 8);
                let parts =
                    [part(common::QUEUE_DESC), part(common::QUEUE_DRIVER), part(common::QUEUE_DEVICE)];
                device.queues[queue] = (device.get(common::QUEUE_SIZE, 2) as u16, parts);
            }
            0x104 => device.event_doorbells += 1,
            0x100 => {
                device.doorbells += 1;
                let heads = device.take(&self.memory, 0);
                device.held.extend(heads);
                if let Some(act) = device.at_doorbell.take() {
                    act(device, &self.memory);
                }
                if !device.holds {
                    device.catch_up(&self.memory);
                }
            }
            _ => {}
        }
    }
}

// SAFETY: 1 to 6: a lock serializes accesses; memory accesses are atomic. 7: other offsets read as all ones. 8: only this test uses it.
unsafe impl Registers for Fake {
    fn read32(&self, offset: usize) -> u32 {
        self.read(offset, 4) as u32
    }

    fn write32(&self, offset: usize, value: u32) {
        self.write(offset, 4, u64::from(value));
    }

    fn read64(&self, _: usize) -> u64 {
        unreachable!("virtio has no such access")
    }

    fn write64(&self, _: usize, _: u64) {
        unreachable!("virtio has no such access")
    }
}

// SAFETY: as above.
unsafe impl NarrowRegisters for Fake {
    fn read8(&self, offset: usize) -> u8 {
        self.read(offset, 1) as u8
    }

    fn write8(&self, offset: usize, value: u8) {
        self.write(offset, 1, u64::from(value));
    }

    fn read16(&self, offset: usize) -> u16 {
        self.read(offset, 2) as u16
    }

    fn write16(&self, offset: usize, value: u16) {
        self.write(offset, 2, u64::from(value));
    }
}

impl Host for Fake {
    type Registers = Self;
    type Frames = Memory;

    fn registers(&self) -> &Self {
        self
    }

    fn frames(&self) -> &Memory {
        &self.memory
    }

    fn now_ns(&self) -> u64 {
        self.may_panic();
        self.now.fetch_add(1000, Ordering::Relaxed)
    }

    fn relax(&self) {
        self.may_panic();
        std::thread::yield_now();
    }

    fn patience_ns(&self) -> u64 {
        // Each read of the clock advances it by 1,000 ns. A thread named "patient" never times out, so that the threads of a test do not
        // miss each other.
        if std::thread::current().name() == Some("patient") { u64::MAX } else { 100_000 }
    }
}
