//! A virtio-iommu that answers what the input says: statuses, answers to what was never asked,
//! properties, events; and its configuration. Where the input has come to its end, it carries
//! everything out.

use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange, Permissions, PhysAddr};
use portcullis::invalidation::Gather;
use portcullis::mapper::Mapper;
use portcullis::std_platform::StdPlatform;
use portcullis_hw::Registers;
use portcullis_hw::virtio::{NarrowRegisters, RequestMapper, Structures, Unit};
use portcullis_model::Memory;

use super::lying::LyingHost;
use super::{is_sound, memory, told};
use crate::input::Input;
use crate::reached::{note, noted};

/// Where its structures lie, and its doorbells.
const STRUCTURES: Structures =
    Structures { common: 0, notify: 0x100, notify_bytes: 8, notify_multiplier: 4, device: 0x200 };

const DEVICE_FEATURE_SELECT: usize = 0x00;
const DEVICE_FEATURE: usize = 0x04;
const DEVICE_STATUS: usize = 0x14;
const QUEUE_SELECT: usize = 0x16;
const QUEUE_SIZE: usize = 0x18;
const QUEUE_NOTIFY_OFF: usize = 0x1e;
const QUEUE_PARTS: usize = 0x20;

/// Of the input, how much is for the device.
const SHARE: u64 = 3;

static PLATFORM: LazyLock<StdPlatform> = LazyLock::new(StdPlatform::new);

/// The device.
struct Device {
    bytes: Vec<u8>,
    features: u64,
    sizes: [u16; 2],
    /// What it answers, as long as there is anything.
    script: Vec<u8>,
    taken: [u16; 2],
    written: [u16; 2],
    parts: [[u64; 3]; 2],
    accesses: u64,
}

struct Virtio {
    memory: Arc<Memory>,
    device: Mutex<Device>,
}

impl Device {
    fn new(input: &mut Input<'_>) -> Self {
        let mut bytes = vec![0; 0x300];
        let mut put = |at: usize, value: u64, count: usize| {
            bytes[0x200 + at..][..count].copy_from_slice(&value.to_le_bytes()[..count]);
        };
        // Pages, addresses, domains, properties, bypass.
        put(0, !0xfff, 8);
        put(16, (1 << 39) - 1, 8);
        put(28, u32::MAX.into(), 4);
        put(32, 512, 4);
        put(36, 1, 1);
        for _ in 0..input.below(4) {
            let at = input.below(5) * 8;
            put(at as usize, input.number(), 8);
        }
        // Version 1; ranges, requests to map, probes, a bypass of the configuration.
        let features = (1 << 32 | 0b101_0111) ^ if input.flag() { input.number() } else { 0 };
        let sizes = if input.flag() { [input.number() as u16, input.number() as u16] } else { [64, 8] };
        let share = input.below(SHARE << 5);
        let script = (0..share).map(|_| input.byte()).rev().collect();
        Self {
            bytes,
            features,
            sizes,
            script,
            taken: [0; 2],
            written: [0; 2],
            parts: [[0; 3]; 2],
            accesses: 0,
        }
    }

    fn get(&mut self, offset: usize, count: usize) -> u64 {
        self.accesses += 1;
        assert!(self.accesses < 2_000_000, "the driver does not come to an end");
        let field = self.bytes.get(offset..offset + count);
        field.map_or(u64::MAX, |field| field.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
    }

    fn put(&mut self, offset: usize, count: usize, value: u64) {
        if let Some(field) = self.bytes.get_mut(offset..offset + count) {
            field.copy_from_slice(&value.to_le_bytes()[..count]);
        }
    }

    fn queue(&mut self) -> usize {
        self.get(QUEUE_SELECT, 2) as usize % 2
    }

    fn read(&mut self, offset: usize, count: usize) -> u64 {
        let queue = self.queue();
        match offset {
            DEVICE_FEATURE => {
                let half = self.get(DEVICE_FEATURE_SELECT, 4);
                self.features >> (half % 2 * 32) & u64::from(u32::MAX)
            }
            QUEUE_SIZE => self.sizes[queue].into(),
            QUEUE_NOTIFY_OFF => queue as u64,
            _ => self.get(offset, count),
        }
    }

    fn written(&mut self, offset: usize, count: usize, value: u64, memory: &Memory) {
        let queue = self.queue();
        match offset {
            QUEUE_SIZE => self.sizes[queue] = value as u16,
            DEVICE_STATUS if value == 0 => {
                self.put(offset, count, value);
                (self.taken, self.written, self.parts) = ([0; 2], [0; 2], [[0; 3]; 2]);
            }
            0x100 => self.work(memory),
            _ => self.put(offset, count, value),
        }
        if let Some(part) = offset.checked_sub(QUEUE_PARTS).filter(|part| *part < 24) {
            self.parts[queue][part / 8] = self.get(QUEUE_PARTS + part / 8 * 8, 8);
        }
    }

    /// Answers the requests that were made available.
    fn work(&mut self, memory: &Memory) {
        let ([descriptors, driver, _], size) = (self.parts[0], self.sizes[0].max(1));
        let end = load(memory, driver, 2, 2) as u16;
        // No more than there are.
        for _ in 0..size {
            if self.taken[0] == end {
                return;
            }
            let head = load(memory, driver, 4 + u64::from(self.taken[0] % size) * 2, 2) as u16;
            self.taken[0] = self.taken[0].wrapping_add(1);
            let describe =
                |index: u16| [0, 8].map(|at| load(memory, descriptors, u64::from(index) * 16 + at, 8));
            let (mut index, mut steps) = (head, 0);
            let mut last = describe(index);
            while last[1] >> 32 & 1 != 0 && steps < 3 {
                index = (last[1] >> 48) as u16;
                last = describe(index);
                steps += 1;
                // Properties, where a third descriptor follows.
                if last[1] >> 32 & 1 != 0 {
                    let count = self.script.len().min(last[1] as u32 as usize).min(96);
                    for at in 0..count as u64 {
                        let byte = self.script.pop().unwrap_or(0);
                        store(memory, last[0] + at, 1, byte.into());
                    }
                }
            }
            let (status, id) = match self.script.pop().unwrap_or(0) {
                how @ 0..=0xbf => (u64::from(how & how >> 4 & 0xf), u32::from(head)),
                0xc0..=0xcf => continue,
                how @ 0xd0..=0xdf => (0, u32::from(how) << (how & 0xf)),
                0xe0..=0xef => {
                    let claimed = u64::from(self.script.pop().unwrap_or(0)) << 8;
                    store(memory, self.parts[0][2] + 2, 2, claimed);
                    continue;
                }
                how => (u64::from(how), u32::from(head)),
            };
            store(memory, last[0], 4, status);
            self.used(memory, 0, id, size);
        }
    }

    /// Writes an entry of the device's ring of a queue.
    fn used(&mut self, memory: &Memory, queue: usize, id: u32, size: u16) {
        let at = self.parts[queue][2] + 4 + u64::from(self.written[queue] % size.max(1)) * 8;
        store(memory, at, 4, id.into());
        self.written[queue] = self.written[queue].wrapping_add(1);
        store(memory, self.parts[queue][2] + 2, 2, self.written[queue].into());
    }

    /// Reports a fault in buffer `id`.
    fn report(&mut self, memory: &Memory, id: u32, words: [u64; 3]) {
        if self.parts[1][2] == 0 {
            return;
        }
        let size = self.sizes[1];
        if id < u32::from(size) {
            let buffer = load(memory, self.parts[1][0], u64::from(id) * 16, 8);
            for (at, word) in (buffer..).step_by(8).zip(words) {
                store(memory, at, 8, word);
            }
        }
        self.used(memory, 1, id, size);
    }
}

/// `count` bytes at `base + at`, which do not cross a word.
fn load(memory: &Memory, base: u64, at: u64, count: u64) -> u64 {
    let at = base.wrapping_add(at);
    let frame = memory.table_at(PhysAddr::new(at & !0xfff));
    let word = frame[(at % 4096 / 8) as usize].load(Ordering::Acquire) >> (at % 8 * 8);
    if count == 8 { word } else { word & ((1 << (count * 8)) - 1) }
}

fn store(memory: &Memory, at: u64, count: u64, value: u64) {
    let frame = memory.table_at(PhysAddr::new(at & !0xfff));
    let (word, shift) = (&frame[(at % 4096 / 8) as usize], at % 8 * 8);
    let mask = if count == 8 { u64::MAX } else { ((1 << (count * 8)) - 1) << shift };
    let new = |old: u64| Some(old & !mask | value << shift & mask);
    let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, new);
}

impl Virtio {
    fn device(&self) -> MutexGuard<'_, Device> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, offset: usize, count: usize) -> u64 {
        self.device().read(offset, count)
    }

    fn write(&self, offset: usize, count: usize, value: u64) {
        self.device().written(offset, count, value, &self.memory);
    }
}

// SAFETY: each access is carried out before it returns, under a lock; memory is the model's, which
// nothing can harm.
unsafe impl Registers for Virtio {
    fn read32(&self, offset: usize) -> u32 {
        self.read(offset, 4) as u32
    }

    fn write32(&self, offset: usize, value: u32) {
        self.write(offset, 4, value.into());
    }

    fn read64(&self, offset: usize) -> u64 {
        self.read(offset, 8)
    }

    fn write64(&self, offset: usize, value: u64) {
        self.write(offset, 8, value);
    }
}

// SAFETY: as above.
unsafe impl NarrowRegisters for Virtio {
    fn read8(&self, offset: usize) -> u8 {
        self.read(offset, 1) as u8
    }

    fn write8(&self, offset: usize, value: u8) {
        self.write(offset, 1, value.into());
    }

    fn read16(&self, offset: usize) -> u16 {
        self.read(offset, 2) as u16
    }

    fn write16(&self, offset: usize, value: u16) {
        self.write(offset, 2, value.into());
    }
}

type Behind = LyingHost<Virtio>;

/// Starts the driver, and calls it as the input says.
pub fn play(input: &mut Input<'_>) {
    let memory = memory();
    let device = Mutex::new(Device::new(input));
    let host = LyingHost::new(Virtio { memory: Arc::clone(&memory), device }, &memory);
    let unit = match noted("start", Unit::start(host, STRUCTURES, (0..3).map(DeviceId))) {
        Ok(unit) => Arc::new(unit),
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return is_sound(&memory);
        }
    };
    let mut mappers: Vec<RequestMapper<Behind>> = Vec::new();
    for _ in 0..64 {
        if input.is_empty() {
            break;
        }
        unit.host().registers.device().accesses = 0;
        step(input, &unit, &mut mappers, &memory);
        is_sound(&memory);
    }
    drop(mappers);
    if let Some(unit) = Arc::into_inner(unit)
        && noted("shut_down", unit.shut_down()).is_ok()
    {
        assert_eq!(memory.frames_in_use(), 0, "a unit that is off keeps memory");
    }
    is_sound(&memory);
}

fn step(
    input: &mut Input<'_>,
    unit: &Arc<Unit<Behind>>,
    mappers: &mut Vec<RequestMapper<Behind>>,
    memory: &Memory,
) {
    let device = DeviceId(u32::from(input.byte() % 4));
    let mapper = input.which(mappers.len()).map(|index| &mappers[index]);
    let page = |input: &mut Input<'_>| input.number() & !0xfff;
    match (input.below(9), mapper) {
        (0, _) => drop(noted("enable", unit.enable())),
        (1, _) => {
            let made = unit.mapper(DomainId(input.number() as u16), Vec::new());
            mappers.extend(noted("mapper", made).ok());
        }
        (2, Some(mapper)) => drop(noted("attach", mapper.attach(device))),
        (3, _) => drop(noted("detach", unit.detach(device))),
        (4, _) => drop(noted("regions", unit.regions(device))),
        (5, Some(mapper)) => {
            let (start, pages) = (page(input), input.below(8) + 1);
            let Ok(range) = IovaRange::new(Iova::new(start), pages << 12) else { return };
            let list = (0..pages).map(|page| (PhysAddr::new(page << 13), 4096));
            let mut gather = Gather::new();
            // SAFETY: no device is behind it.
            let result =
                unsafe { mapper.map(&*PLATFORM, range, list, Permissions::READ.into(), &mut gather) };
            let _ = noted("map", result);
        }
        (6, Some(mapper)) => {
            let Ok(range) = IovaRange::new(Iova::new(page(input)), (input.below(8) + 1) << 12) else {
                return;
            };
            let mut gather = Gather::new();
            note(format_args!("{:?}", mapper.unmap(&*PLATFORM, range, &mut gather)));
            let _ = noted("sync", mapper.sync(&gather));
        }
        (7, _) => {
            let (id, words) = (input.number() as u32, [input.number(), input.number(), input.number()]);
            unit.host().registers.device().report(memory, id % 16, words);
        }
        _ => {
            let most = input.byte();
            (0..most).take_while(|_| told(unit.next_fault())).for_each(drop);
        }
    }
}
