//! A device that tries every address that it ever saw, at every step, and the account of what it must not reach.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use portcullis::addr::{Iova, IovaRange, Permissions, PhysAddr, PhysSegment};
use portcullis::dma::DmaBuffer;
use portcullis_model::{DeviceId, Iommu, Memory};

use crate::faults::Faults;

pub const PAGE: u64 = 4096;

/// What a freed frame is filled with: whoever walks it as a table of any level comes to [`CANARY`].
const POISON: u64 = CANARY | 0x83;
const CANARY: u64 = 0x70_0000_0000;

/// Where buffers are that no CPU looks into.
const ELSEWHERE: u64 = 0x9_0000_0000;

/// Addresses that are tried of a long range.
const TRIED: u64 = 6;

#[derive(Default)]
pub struct Hostile {
    pub faults: Faults,
    account: Mutex<Account>,
}

#[derive(Default)]
struct Account {
    unit: Option<Weak<Iommu>>,
    devices: Vec<DeviceId>,
    /// Every address that was ever mapped, or was to be.
    known: BTreeSet<u64>,
    /// Frames that were given back, to the allocator or to the driver.
    gone: BTreeSet<u64>,
    /// Frames that were given back while lazy protection leaves them open.
    lazily: BTreeSet<u64>,
    /// What was handed out by frame and count.
    frames: BTreeMap<u64, usize>,
    buffers: u64,
    /// Buffers that are somebody's.
    held: BTreeSet<u64>,
    /// Buffers that were cleaned, and those of them that a device was given and that no CPU
    /// invalidated since.
    cleaned: BTreeSet<u64>,
    given: BTreeSet<u64>,
    /// Frames that a device without an IOMMU was told of.
    told: BTreeSet<u64>,
    is_lazy: bool,
    violations: Vec<String>,
}

impl Hostile {
    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `device` is behind `unit`, and tries.
    pub fn is_behind(&self, unit: &Arc<Iommu>, device: DeviceId) {
        let mut account = self.account();
        account.unit = Some(Arc::downgrade(unit));
        account.devices.push(device);
    }

    /// Buffers come back while a window is open.
    pub fn set_lazy(&self, is_lazy: bool) {
        self.account().is_lazy = is_lazy;
    }

    /// The device has seen `range`.
    pub fn knows(&self, range: IovaRange) {
        let (first, pages) = (range.start().get(), range.len() / PAGE);
        let step = pages.div_ceil(TRIED).max(1);
        let mut account = self.account();
        account.known.extend((0..pages).step_by(step as usize).map(|page| first + page * PAGE));
        account.known.insert(first + (pages - 1) * PAGE);
        drop(account);
        self.look();
    }

    /// A device without an IOMMU uses the page of `phys`.
    pub fn uses(&self, phys: PhysAddr) {
        self.account().told.insert(phys.get() & !(PAGE - 1));
        self.look();
    }

    /// It is done with all that it was told of.
    pub fn is_done(&self) {
        self.account().told.clear();
    }

    /// The device tries everything, and keeps what it finds.
    pub fn look(&self) {
        let mut account = self.account();
        if let Some(frame) = account.told.intersection(&account.gone).next().copied() {
            note(&mut account.violations, format!("the frame at {frame:#x} is freed, and a device uses it"));
        }
        let Some(unit) = account.unit.as_ref().and_then(Weak::upgrade) else { return };
        let Account { devices, known, gone, violations, .. } = &mut *account;
        for device in devices.iter() {
            for iova in known.iter().map(|iova| Iova::new(*iova)) {
                for access in [Permissions::WRITE, Permissions::READ] {
                    let mut reached = None;
                    let tried =
                        unit.translate_each(*device, iova, 1, access, |_, phys, _| reached = Some(phys));
                    if let (Ok(()), Some(phys)) = (tried, reached) {
                        let frame = phys.get() & !(PAGE - 1);
                        if frame >> 36 == CANARY >> 36 {
                            note(violations, format!("{device:?} at {iova} walks freed tables"));
                        } else if gone.contains(&frame) {
                            note(
                                violations,
                                format!("{device:?} at {iova} reaches {phys}, which was given back"),
                            );
                        }
                        break;
                    }
                }
            }
        }
    }

    /// A CPU was asked for by code that has one lent, which no platform has to survive.
    pub fn asked_twice(&self) {
        note(&mut self.account().violations, "a CPU is asked for while one is lent".into());
    }

    pub fn handed_out(&self, first: PhysAddr, count: usize) {
        self.account().frames.insert(first.get(), count);
    }

    pub fn freed(&self, memory: &Memory, first: PhysAddr, count: usize) {
        let mut account = self.account();
        if account.frames.remove(&first.get()) != Some(count) {
            note(
                &mut account.violations,
                format!("{count} frames at {first} are freed, which were not handed out"),
            );
        }
        for frame in (0..count as u64).map(|frame| first.get() + frame * PAGE) {
            let words = memory.table_at(PhysAddr::new(frame));
            words.iter().for_each(|word| word.store(POISON, std::sync::atomic::Ordering::Relaxed));
            account.gone.insert(frame);
        }
        drop(account);
        self.look();
    }

    pub fn used(&self, frame: PhysAddr) {
        let mut account = self.account();
        if account.gone.contains(&frame.get()) {
            note(&mut account.violations, format!("the table at {frame} is used, and was freed"));
        }
    }

    /// A buffer of `pages` pages.
    pub fn buffer(self: &Arc<Self>, pages: u64) -> Owned {
        let mut account = self.account();
        let phys = PhysAddr::new(ELSEWHERE + account.buffers * PAGE);
        // Never two in a row: each is by itself.
        account.buffers += pages + 1;
        account.held.insert(phys.get());
        Owned { list: [PhysSegment { phys, len: pages * PAGE }], hostile: Arc::clone(self) }
    }

    pub fn cleaned(&self, phys: PhysAddr) {
        self.account().cleaned.insert(phys.get());
    }

    /// A queue has mapped the buffer of `segment`.
    pub fn given(&self, segment: PhysSegment) {
        let mut account = self.account();
        if account.cleaned.contains(&segment.phys.get()) {
            account.given.insert(segment.phys.get());
        }
    }

    /// What counts is a buffer as a whole, and not the few bytes of a sync.
    pub fn invalidated(&self, segment: PhysSegment) {
        if segment.len >= PAGE {
            self.account().given.remove(&segment.phys.get());
        }
    }

    /// The pages of `segment` are the driver's again.
    pub fn gave_back(&self, segment: PhysSegment) {
        let mut account = self.account();
        if account.given.contains(&segment.phys.get()) {
            note(&mut account.violations, format!("{segment:x?} comes back and was not invalidated"));
        }
        let frames =
            (0..segment.len.div_ceil(PAGE)).map(|page| (segment.phys.get() & !(PAGE - 1)) + page * PAGE);
        let is_lazy = account.is_lazy;
        let to = if is_lazy { &mut account.lazily } else { &mut account.gone };
        to.extend(frames);
        drop(account);
        self.look();
    }

    /// Every window is over.
    pub fn windows_end(&self) {
        let mut account = self.account();
        let lazily = std::mem::take(&mut account.lazily);
        account.gone.extend(lazily);
        drop(account);
        self.look();
    }

    /// Frames in use, and buffers that were not dropped.
    pub fn outstanding(&self) -> (usize, usize) {
        let account = self.account();
        (account.frames.values().sum(), account.held.len())
    }

    /// What went wrong since the last call.
    pub fn violations(&self) -> Vec<String> {
        std::mem::take(&mut self.account().violations)
    }
}

/// One of a kind says it.
fn note(violations: &mut Vec<String>, what: String) {
    if violations.len() < 3 && !violations.contains(&what) {
        violations.push(what);
    }
}

/// A buffer that tells when it is dropped.
#[derive(Debug)]
pub struct Owned {
    list: [PhysSegment; 1],
    hostile: Arc<Hostile>,
}

impl std::fmt::Debug for Hostile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hostile")
    }
}

impl Owned {
    pub fn segment(&self) -> PhysSegment {
        self.list[0]
    }
}

// SAFETY: the pages are of no other buffer; no CPU reaches them, and none has a cache.
unsafe impl DmaBuffer for Owned {
    fn segments(&self) -> &[PhysSegment] {
        &self.list
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let segment = self.segment();
        self.hostile.account().held.remove(&segment.phys.get());
        self.hostile.gave_back(segment);
    }
}
