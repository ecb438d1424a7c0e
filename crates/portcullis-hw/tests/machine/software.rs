//! The software IOMMU behind the registers of a VT-d unit: root and context tables, which it caches until it is told not to,
//! queued invalidation, one fault record. So the driver that runs against QEMU runs here, on every machine.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use portcullis::addr::{DeviceId, DomainId, Iova, Permissions, PhysAddr};
use portcullis::platform::FRAME_SIZE;
use portcullis_hw::Registers;
use portcullis_model::{Context, Descriptor, Fault, FaultReason, Iommu, IommuConfig, Memory};

const VER: usize = 0x00;
const CAP: usize = 0x08;
const ECAP: usize = 0x10;
const GCMD: usize = 0x18;
const GSTS: usize = 0x1c;
const RTADDR: usize = 0x20;
const FSTS: usize = 0x34;
const IQH: usize = 0x80;
const IQT: usize = 0x88;
const IQA: usize = 0x90;
const RECORD: usize = 0x220;

const ON: u32 = 1 << 31;
const TAKE_ROOT: u32 = 1 << 30;
const QUEUE: u32 = 1 << 26;

/// 16 bits of domains; four levels, 48 bits; large pages; blocks of 2 MiB; drains; fault record at 0x220.
const CAPABILITIES: u64 = 6 | 1 << 10 | 47 << 16 | 0x22 << 24 | 3 << 34 | 1 << 39 | 9 << 48 | 3 << 54;
/// Coherent; queued invalidation; pass-through.
const EXTENDED: u64 = 1 | 1 << 1 | 1 << 6;
const CACHES_ABSENT: u64 = 1 << 7;

/// The unit.
pub struct SoftwareVtd {
    iommu: Arc<Iommu>,
    memory: Arc<Memory>,
    capabilities: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    status: u32,
    root_to_take: u64,
    root: u64,
    queue: u64,
    head: u64,
    /// Context entries that are cached, by the device.
    contexts: BTreeMap<u16, (u64, u64)>,
    /// Domains of which something may be cached.
    domains: BTreeSet<u16>,
    /// The fault record's words.
    record: Option<(u64, u64)>,
}

impl fmt::Debug for SoftwareVtd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the software IOMMU's registers")
    }
}

impl SoftwareVtd {
    pub fn new(memory: Arc<Memory>, caches_absent: bool) -> Arc<Self> {
        let config = IommuConfig { caches_absent, ..IommuConfig::new(Arc::clone(&memory)) };
        let capabilities = CAPABILITIES | if caches_absent { CACHES_ABSENT } else { 0 };
        Arc::new(Self { iommu: Iommu::new(config), memory, capabilities, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device reads memory into `bytes`; they stay where it is refused.
    pub fn read(&self, source: u16, from: Iova, bytes: &mut [u8]) {
        if self.translates(source) {
            let result = self.iommu.dma_read(DeviceId(source.into()), from, bytes);
            self.note(source, result);
        } else {
            let _ = self.memory.read(PhysAddr::new(from.get()), bytes);
        }
    }

    /// A device writes `bytes` to memory, unless it is refused.
    pub fn write(&self, source: u16, to: Iova, bytes: &[u8]) {
        if self.translates(source) {
            let result = self.iommu.dma_write(DeviceId(source.into()), to, bytes);
            self.note(source, result);
        } else {
            let _ = self.memory.write(PhysAddr::new(to.get()), bytes);
        }
    }

    /// Whether the unit is on. Then it has the device's context, if there is one.
    fn translates(&self, source: u16) -> bool {
        let mut state = self.state();
        if state.status & ON == 0 {
            return false;
        }
        if state.contexts.contains_key(&source) {
            return true;
        }
        let word = |at: u64| self.memory.read_u64(PhysAddr::new(at)).unwrap_or(0);
        let root = word(state.root + u64::from(source >> 8) * 16);
        let at = (root & !0xfff) + u64::from(source & 0xff) * 16;
        let (low, high) = if root & 1 != 0 { (word(at), word(at + 8)) } else { (0, 0) };
        if low & 1 != 0 {
            let context = match low >> 2 & 3 {
                0 => Context::SecondStage {
                    domain: DomainId((high >> 8) as u16),
                    root: PhysAddr::new(low & !0xfff),
                    levels: (high & 7) as u32 + 2,
                },
                2 => Context::Passthrough,
                _ => Context::Blocked,
            };
            self.iommu.attach(DeviceId(source.into()), context);
            state.contexts.insert(source, (low, high));
            state.domains.insert((high >> 8) as u16);
        }
        true
    }

    /// Records a refusal, as long as the record is free.
    fn note(&self, source: u16, result: Result<(), Fault>) {
        let Err(fault) = result else { return };
        let reads = fault.access.allows(Permissions::READ);
        let code: u64 = match fault.reason {
            FaultReason::NoContext | FaultReason::Blocked => 2,
            FaultReason::BadContext => 3,
            FaultReason::BeyondWidth => 4,
            FaultReason::ReservedBit | FaultReason::AddressSize => 0xc,
            FaultReason::BadTable(_) => 7,
            _ if reads => 6,
            _ => 5,
        };
        let kind = if reads { 1 << 62 } else { 0 };
        let record = (fault.iova.get() & !0xfff, 1 << 63 | kind | code << 32 | u64::from(source));
        self.state().record.get_or_insert(record);
    }

    fn command(&self, command: u32) {
        let mut state = self.state();
        if command & TAKE_ROOT != 0 {
            state.root = state.root_to_take & !0xfff;
        }
        if command & QUEUE != 0 && state.status & QUEUE == 0 {
            state.head = 0;
        }
        // The root stays taken.
        state.status = command & (ON | QUEUE) | (state.status | command) & TAKE_ROOT;
    }

    /// Carries out the queue's descriptors before `tail`.
    fn carry_out(&self, tail: u64) {
        let mut state = self.state();
        if state.status & QUEUE == 0 {
            return;
        }
        let queue = self.iommu.queue();
        while state.head != tail {
            let at = (state.queue & !0xfff) + state.head * 16;
            let word = |at: u64| self.memory.read_u64(PhysAddr::new(at)).unwrap_or(0);
            let (low, high) = (word(at), word(at + 8));
            let domain = DomainId((low >> 16) as u16);
            match (low & 0xf, low >> 4 & 3) {
                (1, granularity) => {
                    let named = (low >> 32) as u16;
                    let forgotten = |source: &u16| granularity != 3 || *source == named;
                    for source in state.contexts.keys().filter(|source| forgotten(source)) {
                        self.iommu.detach(DeviceId((*source).into()));
                    }
                    state.contexts.retain(|source, _| !forgotten(source));
                }
                (2, 1) => {
                    for number in &state.domains {
                        let _ = queue.submit(&[Descriptor::DomainSelective { domain: DomainId(*number) }]);
                    }
                }
                (2, 2) => {
                    let _ = queue.submit(&[Descriptor::DomainSelective { domain }]);
                }
                (2, _) => {
                    let address = Iova::new(high & !0xfff);
                    let (address_mask, leaf_only) = ((high & 0x3f) as u32, high >> 6 & 1 != 0);
                    let _ = queue.submit(&[Descriptor::PageSelective {
                        domain,
                        address,
                        address_mask,
                        leaf_only,
                    }]);
                }
                (5, _) => {
                    let _ = queue.submit(&[Descriptor::Wait]);
                    if low >> 5 & 1 != 0 {
                        let frame = self.memory.table_at(PhysAddr::new(high & !(FRAME_SIZE - 1)));
                        frame[(high % FRAME_SIZE / 8) as usize].store(low >> 32, Ordering::Release);
                    }
                }
                other => panic!("a descriptor of kind {other:?}"),
            }
            state.head = (state.head + 1) % 256;
        }
    }
}

// SAFETY: each access is carried out before it returns, under a lock; memory is atomics.
unsafe impl Registers for SoftwareVtd {
    fn read32(&self, offset: usize) -> u32 {
        match offset {
            VER => 0x10,
            GSTS => self.state().status,
            FSTS => u32::from(self.state().record.is_some()) << 1,
            _ => 0,
        }
    }

    fn write32(&self, offset: usize, value: u32) {
        match offset {
            GCMD => self.command(value),
            offset if offset == RECORD + 12 => {
                let _ = self.state().record.take_if(|_| value >> 31 != 0);
            }
            _ => {}
        }
    }

    fn read64(&self, offset: usize) -> u64 {
        let record = |state: MutexGuard<'_, State>| state.record.unwrap_or_default();
        match offset {
            CAP => self.capabilities,
            ECAP => EXTENDED,
            // All that it was told of is carried out.
            IQH | IQT => self.state().head << 4,
            RECORD => record(self.state()).0,
            offset if offset == RECORD + 8 => record(self.state()).1,
            _ => 0,
        }
    }

    fn write64(&self, offset: usize, value: u64) {
        match offset {
            RTADDR => self.state().root_to_take = value,
            IQA => self.state().queue = value,
            IQT => self.carry_out(value >> 4 & 0x7fff),
            _ => {}
        }
    }
}
