//! A software VT-d unit, to test a kernel's port: its [`Host`](crate::Host), its platform and its drivers (feature `model`).
//!
//! The software IOMMU (`portcullis-model`) has the registers of a VT-d unit: root, context and PASID tables, which it caches until they are
//! invalidated, queued invalidation, one fault record. So the same driver runs against QEMU's unit and, on every machine, against this one,
//! which refuses unmapped accesses. Its scalable mode has features that QEMU's lacks: a PASID cache, and both stages at once. It uses the
//! software machine's memory: the host's [`Frames`](portcullis::platform::Frames) are an `Arc<Memory>`, or a type around it.
//!
//! `cargo run -p portcullis-hw --features model --example port` brings it up, maps, and shows that it refuses a late write.

extern crate std;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use portcullis::addr::{DeviceId, DomainId, Iova, Permissions, PhysAddr};
use portcullis::platform::FRAME_SIZE;
use portcullis_model::{Context, Descriptor, Fault, FaultReason, Iommu, IommuConfig, Memory, TableFormat};

use crate::Registers;

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

/// 16 bits of domains; four levels; large pages; blocks of 2 MiB; drains; fault record at 0x220.
const CAPABILITIES: u64 = 6 | 1 << 10 | 0x22 << 24 | 3 << 34 | 1 << 39 | 9 << 48 | 3 << 54;
/// Coherent; queued invalidation; pass-through.
const EXTENDED: u64 = 1 | 1 << 1 | 1 << 6;
const CACHES_ABSENT: u64 = 1 << 7;
/// Scalable mode; in it, the second stage, the first stage, and coherent walks. First-stage pages of 1 GiB.
const SCALABLE: u64 = 1 << 43 | 1 << 46 | 1 << 47 | 1 << 48;
const FIRST_STAGE_GIB: u64 = 1 << 56;

/// The mode in the root's address; 256-bit descriptors in the queue's.
const SCALABLE_ROOT: u64 = 1 << 10;
const WIDE: u64 = 1 << 11;

/// Features of a unit.
#[derive(Debug, Clone, Copy)]
pub struct Manners {
    /// Caching mode: it caches non-present page-table entries until they are invalidated. It caches no absent context.
    pub caches_absent: bool,
    /// Scalable mode, with both stages.
    pub scalable: bool,
    /// Width of the addresses that it translates, in either stage, whatever its tables have (MGAW): 1 to 63.
    pub bits: u32,
}

/// Legacy mode, and 48 bits.
impl Default for Manners {
    fn default() -> Self {
        Self { caches_absent: false, scalable: false, bits: 48 }
    }
}

/// The unit. A driver starts on its [`Registers`]. A device behind it accesses memory by [`read`](Self::read) and [`write`](Self::write).
///
/// It executes the descriptors that this crate's driver submits, and panics at any other descriptor.
pub struct SoftwareVtd {
    iommu: Arc<Iommu>,
    memory: Arc<Memory>,
    manners: Manners,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    status: u32,
    root_to_take: u64,
    root: u64,
    queue: u64,
    head: u64,
    /// Cached context entries, by device: their first words.
    contexts: BTreeMap<u16, u64>,
    /// Cached entries of PASID 0, by device, and their domains. (In legacy mode from context entries.)
    pasids: BTreeMap<u16, (Context, u16)>,
    /// Domains with possibly cached translations, and whether these are first-stage.
    domains: BTreeMap<u16, bool>,
    /// The fault record's words.
    record: Option<(u64, u64)>,
}

impl fmt::Debug for SoftwareVtd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the software IOMMU's registers")
    }
}

impl SoftwareVtd {
    /// A unit after reset, in front of all devices: it is off, and they access all of `memory` by physical addresses.
    pub fn new(memory: Arc<Memory>, manners: Manners) -> Arc<Self> {
        let caches_absent = manners.caches_absent;
        let config = IommuConfig { caches_absent, ..IommuConfig::new(Arc::clone(&memory)) };
        Arc::new(Self { iommu: Iommu::new(config), memory, manners, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device reads memory into `bytes`. Returns whether the unit allowed it; otherwise `bytes` is unchanged, and the unit records a
    /// fault.
    pub fn read(&self, source: u16, from: Iova, bytes: &mut [u8]) -> bool {
        if !self.translates(source) {
            return self.memory.read(PhysAddr::new(from.get()), bytes).is_ok();
        }
        let takes = self.takes(source, from, bytes.len(), Permissions::READ);
        self.note(source, takes.and_then(|()| self.iommu.dma_read(DeviceId(source.into()), from, bytes)))
    }

    /// A device writes `bytes` to memory. Returns whether the unit allowed it; otherwise the unit records a fault.
    pub fn write(&self, source: u16, to: Iova, bytes: &[u8]) -> bool {
        if !self.translates(source) {
            return self.memory.write(PhysAddr::new(to.get()), bytes).is_ok();
        }
        let takes = self.takes(source, to, bytes.len(), Permissions::WRITE);
        self.note(source, takes.and_then(|()| self.iommu.dma_write(DeviceId(source.into()), to, bytes)))
    }

    /// Refuses addresses beyond MGAW, without a table walk.
    fn takes(&self, source: u16, iova: Iova, len: usize, access: Permissions) -> Result<(), Fault> {
        let last = iova.get().checked_add((len as u64).saturating_sub(1));
        if last.is_some_and(|last| last >> self.manners.bits == 0) {
            return Ok(());
        }
        Err(Fault { device: DeviceId(source.into()), iova, access, reason: FaultReason::BeyondWidth })
    }

    fn word(&self, at: u64) -> u64 {
        self.memory.read_u64(PhysAddr::new(at)).unwrap_or(0)
    }

    /// Whether the unit is on. Caches the device's context, if there is one.
    fn translates(&self, source: u16) -> bool {
        let mut state = self.state();
        if state.status & ON == 0 {
            return false;
        }
        if state.pasids.contains_key(&source) && state.contexts.contains_key(&source) {
            return true;
        }
        let found = if state.root & SCALABLE_ROOT == 0 {
            self.legacy(&mut state, source)
        } else {
            self.scalable(&mut state, source)
        };
        if let Some((context, domain)) = found {
            let of_first_stage = matches!(context, Context::Translated { .. });
            self.iommu.attach(DeviceId(source.into()), context);
            state.pasids.insert(source, (context, domain));
            state.domains.insert(domain, of_first_stage);
        }
        true
    }

    /// Decodes a context entry, with its domain.
    fn legacy(&self, state: &mut State, source: u16) -> Option<(Context, u16)> {
        let root = self.word((state.root & !0xfff) + u64::from(source >> 8) * 16);
        let at = (root & !0xfff) + u64::from(source & 0xff) * 16;
        let (low, high) = if root & 1 != 0 { (self.word(at), self.word(at + 8)) } else { (0, 0) };
        if low & 1 == 0 {
            return None;
        }
        state.contexts.insert(source, low);
        let domain = (high >> 8) as u16;
        let context = match low >> 2 & 3 {
            0 => Context::SecondStage {
                domain: DomainId(domain),
                root: PhysAddr::new(low & !0xfff),
                levels: (high & 7) as u32 + 2,
            },
            2 => Context::Passthrough,
            _ => Context::Blocked,
        };
        Some((context, domain))
    }

    /// Decodes the entry of PASID 0 in the tables of a context entry, with its domain.
    fn scalable(&self, state: &mut State, source: u16) -> Option<(Context, u16)> {
        let context = state.contexts.get(&source).copied().or_else(|| {
            let table = self.word((state.root & !0xfff) + u64::from(source >> 7) * 8);
            let at = (table & !0xfff) + u64::from(source & 0x7f) * 32;
            let words = [0, 8, 16, 24].map(|word| self.word(at + word));
            // No PASIDs of the device; requests without one have PASID 0.
            let known = words[0] & 0xffe == 0 && words[1..] == [0; 3];
            (table & 1 != 0 && words[0] & 1 != 0 && known).then_some(words[0])
        })?;
        state.contexts.insert(source, context);
        if let Some(cached) = state.pasids.get(&source) {
            return Some(*cached);
        }
        let table = self.word(context & !0xfff);
        let words = [0, 8, 16].map(|word| self.word((table & !0xfff) + word));
        if table & 1 == 0 || words[0] & 1 == 0 {
            return None;
        }
        let (domain, width) = (words[1] as u16, (words[0] >> 2 & 7) as u32 + 2);
        let found = match words[0] >> 6 & 7 {
            // With NXE, because leaves forbid execution.
            1 if words[2] >> 5 & 1 != 0 => Context::Translated {
                domain: DomainId(domain),
                root: PhysAddr::new(words[2] & !0xfff),
                format: TableFormat::X86FirstStage { levels: (words[2] >> 2 & 3) as u32 + 4 },
            },
            2 => Context::SecondStage {
                domain: DomainId(domain),
                root: PhysAddr::new(words[0] & !0xfff),
                levels: width,
            },
            // The widest addresses.
            4 if width == 4 => Context::Passthrough,
            _ => Context::Blocked,
        };
        Some((found, domain))
    }

    /// Records a fault if the record is free. Returns whether there was none.
    fn note(&self, source: u16, result: Result<(), Fault>) -> bool {
        let Err(fault) = result else { return true };
        let reads = fault.access.allows(Permissions::READ);
        let mut state = self.state();
        let domain = state.pasids.get(&source);
        let first = domain.is_some_and(|(_, domain)| state.domains.get(domain) == Some(&true));
        // Legacy mode; second stage; first stage.
        let codes: [u64; 3] = match fault.reason {
            FaultReason::NoContext | FaultReason::Blocked => [0x2, 0x41, 0x41],
            FaultReason::BadContext => [0x3, 0x5b, 0x5b],
            FaultReason::BeyondWidth => [0x4, 0x83, 0x80],
            FaultReason::ReservedBit | FaultReason::AddressSize => [0xc, 0x7a, 0x72],
            FaultReason::BadTable(_) => [0x7, 0x78, 0x70],
            FaultReason::Permission if reads => [0x6, 0x86, 0x86],
            FaultReason::Permission => [0x5, 0x85, 0x85],
            _ if reads => [0x6, 0x79, 0x71],
            _ => [0x5, 0x79, 0x71],
        };
        let scalable = state.root & SCALABLE_ROOT != 0;
        let code = codes[usize::from(scalable) + usize::from(scalable && first)];
        let kind = if reads { 1 << 62 } else { 0 };
        let record = (fault.iova.get() & !0xfff, 1 << 63 | kind | code << 32 | u64::from(source));
        state.record.get_or_insert(record);
        false
    }

    fn command(&self, command: u32) {
        let mut state = self.state();
        if command & TAKE_ROOT != 0 {
            state.root = state.root_to_take;
        }
        if command & QUEUE != 0 && state.status & QUEUE == 0 {
            state.head = 0;
        }
        // The root stays taken.
        state.status = command & (ON | QUEUE) | (state.status | command) & TAKE_ROOT;
    }

    /// Bytes of a descriptor, as a binary logarithm.
    fn width(&self, state: &State) -> u32 {
        if self.manners.scalable && state.queue & WIDE != 0 { 5 } else { 4 }
    }

    /// Executes the queue's descriptors before `tail`, in bytes.
    fn carry_out(&self, tail: u64) {
        let mut state = self.state();
        if state.status & QUEUE == 0 {
            return;
        }
        let width = self.width(&state);
        while state.head != tail >> width {
            let at = (state.queue & !0xfff) + (state.head << width);
            let (low, high) = (self.word(at), self.word(at + 8));
            if width == 5 {
                assert_eq!((self.word(at + 16), self.word(at + 24)), (0, 0), "reserved");
            }
            self.carry_out_one(&mut state, low, high);
            state.head = (state.head + 1) % 256;
        }
    }

    fn carry_out_one(&self, state: &mut State, low: u64, high: u64) {
        let queue = self.iommu.queue();
        let number = (low >> 16) as u16;
        let domain = DomainId(number);
        let forget_all = || {
            let _ = queue.submit(&[Descriptor::DomainSelective { domain }]);
        };
        let forget_pages = || {
            let address = Iova::new(high & !0xfff);
            let (address_mask, leaf_only) = ((high & 0x3f) as u32, high >> 6 & 1 != 0);
            let _ = queue.submit(&[Descriptor::PageSelective { domain, address, address_mask, leaf_only }]);
        };
        let of_first_stage = state.domains.get(&number) == Some(&true);
        let forget_pasids = |state: &mut State, forgotten: &dyn Fn(u16, u16) -> bool| {
            state.pasids.retain(|source, (_, domain)| {
                let stays = !forgotten(*source, *domain);
                if !stays {
                    self.iommu.detach(DeviceId((*source).into()));
                }
                stays
            });
        };
        match (low & 0xf, low >> 4 & 3) {
            (1, granularity) => {
                let named = (low >> 32) as u16;
                let forgotten = |source: u16| granularity != 3 || source == named;
                for source in state.contexts.keys().filter(|source| forgotten(**source)) {
                    self.iommu.detach(DeviceId((*source).into()));
                }
                state.contexts.retain(|source, _| !forgotten(*source));
                if state.root & SCALABLE_ROOT == 0 {
                    forget_pasids(state, &|source, _| forgotten(source));
                }
            }
            (2, 1) => {
                for number in state.domains.keys() {
                    let _ = queue.submit(&[Descriptor::DomainSelective { domain: DomainId(*number) }]);
                }
            }
            (2, 2) => forget_all(),
            // Pages of the second stage: all of the first.
            (2, _) if of_first_stage => forget_all(),
            (2, _) => forget_pages(),
            // Second-stage translations have no PASID.
            (6, granularity) if self.manners.scalable => {
                assert_eq!(low >> 32 & 0xf_ffff, 0, "the PASID of requests without one");
                match granularity {
                    2 if of_first_stage => forget_all(),
                    3 if of_first_stage => forget_pages(),
                    2 | 3 => {}
                    other => panic!("an invalidation of granularity {other}"),
                }
            }
            (7, granularity) if self.manners.scalable => match granularity {
                3 => forget_pasids(state, &|_, _| true),
                0 | 1 => forget_pasids(state, &|_, domain| domain == number),
                other => panic!("an invalidation of granularity {other}"),
            },
            (5, _) => {
                let _ = queue.submit(&[Descriptor::Wait]);
                if low >> 5 & 1 != 0 {
                    let frame = self.memory.table_at(PhysAddr::new(high & !(FRAME_SIZE - 1)));
                    frame[(high % FRAME_SIZE / 8) as usize].store(low >> 32, Ordering::Release);
                }
            }
            other => panic!("a descriptor of kind {other:?}"),
        }
    }
}

// SAFETY: 1 to 6: each access completes before it returns, under a lock; memory accesses are atomic. 7: other offsets are in the match. 8
// is left to the host's owner.
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
            CAP => {
                let absent = if self.manners.caches_absent { CACHES_ABSENT } else { 0 };
                let gib = if self.manners.scalable { FIRST_STAGE_GIB } else { 0 };
                CAPABILITIES | u64::from(self.manners.bits - 1) << 16 | absent | gib
            }
            ECAP => EXTENDED | if self.manners.scalable { SCALABLE } else { 0 },
            RTADDR => self.state().root_to_take,
            // All commands are executed.
            IQH | IQT => {
                let state = self.state();
                state.head << self.width(&state)
            }
            RECORD => record(self.state()).0,
            offset if offset == RECORD + 8 => record(self.state()).1,
            _ => 0,
        }
    }

    fn write64(&self, offset: usize, value: u64) {
        match offset {
            RTADDR => self.state().root_to_take = value,
            IQA => self.state().queue = value,
            IQT => self.carry_out(value & 0x7_fff0),
            _ => {}
        }
    }
}
