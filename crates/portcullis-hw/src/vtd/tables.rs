//! The tables from devices to page tables: a root table, context tables, and in scalable mode PASID tables.

use alloc::vec::Vec;

use arrayvec::ArrayVec;
use portcullis::addr::PhysAddr;
use portcullis::platform::Frames;

use super::capabilities::{Capabilities, Mode};
use super::layout::{RTADDR_LEGACY, RTADDR_SCALABLE, descriptor, ecap, entry, pasid, scalable};
use crate::frames::Words;
use crate::heap::{Map, filled};
use crate::host::UnitError;
use crate::queue::Command;

/// The target of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lead {
    /// First-stage page tables, and the FSPM field for their levels.
    FirstStage { root: PhysAddr, levels: u32, fspm: u32 },
    /// Second-stage page tables, of the width of AW.
    SecondStage { root: PhysAddr, aw: u32 },
    /// All memory.
    PassThrough,
}

/// What the unit may have cached of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cached {
    mode: Mode,
    domain: u16,
    /// Its translations are invalidated as first-stage ones.
    by_pasid: bool,
}

impl Cached {
    /// Invalidates the entries of `source` and their translations. (Section 6.5.3.3 "Guidance to Software for Invalidations".)
    pub fn commands(&self, source: u16, drain: u64) -> Forgetting {
        match self.mode {
            Mode::Legacy => {
                forgetting(descriptor::context_of(self.domain, source), None, self.translations(drain))
            }
            // A context entry names no domain.
            Mode::Scalable => {
                let pasids = Some(descriptor::pasids_of(self.domain));
                forgetting(descriptor::context_of(0, source), pasids, self.translations(drain))
            }
        }
    }

    /// In caching mode, invalidates the cached non-present entries of `source`: these are tagged with domain 0.
    pub fn commands_of_absent(&self, source: u16, drain: u64) -> Forgetting {
        let contexts = descriptor::context_of(0, source);
        forgetting(contexts, all_pasids(self.mode), self.translations(drain))
    }

    fn translations(&self, drain: u64) -> Command {
        if self.by_pasid {
            descriptor::first_stage_all(self.domain)
        } else {
            descriptor::iotlb_domain(drain, self.domain)
        }
    }
}

/// Descriptors that invalidate entries and their translations.
pub(super) type Forgetting = ArrayVec<Command, 3>;

/// Entries first, each kind before its targets, which could be refetched otherwise.
fn forgetting(contexts: Command, pasids: Option<Command>, translations: Command) -> Forgetting {
    [Some(contexts), pasids, Some(translations)].into_iter().flatten().collect()
}

fn all_pasids(mode: Mode) -> Option<Command> {
    match mode {
        Mode::Legacy => None,
        Mode::Scalable => Some(descriptor::PASIDS_ALL),
    }
}

pub(super) fn everything(mode: Mode, drain: u64) -> Forgetting {
    forgetting(descriptor::CONTEXT_ALL, all_pasids(mode), descriptor::iotlb_all(drain))
}

#[derive(Debug)]
pub(super) struct Tables {
    mode: Mode,
    root: Words,
    /// Existing context tables: in legacy mode one for each bus, in scalable mode two.
    contexts: Vec<Option<Words>>,
    /// PASID tables of devices that have been attached in scalable mode.
    pasids: Map<u16, Pasids>,
    /// The default AW: the widest of the unit.
    widest: u32,
    /// Walks are coherent.
    walks_snoop: bool,
    /// The unit can force snooping.
    pages_snoop: bool,
}

/// A PASID directory, and its first table.
#[derive(Debug)]
struct Pasids {
    directory: Words,
    table: Words,
}

/// The place of a device's context entry.
struct Place {
    /// Index of the context table, the root table's word that names it, and the entry's first word in it.
    table: usize,
    root: usize,
    index: usize,
}

impl Tables {
    /// Tables without a device.
    pub fn new<F: Frames>(frames: &F, mode: Mode, capabilities: &Capabilities) -> Result<Self, UnitError> {
        let count = match mode {
            Mode::Legacy => 1 << 8,
            Mode::Scalable => 1 << (16 - scalable::DEVICES_SHIFT),
        };
        Ok(Self {
            mode,
            contexts: filled(count, || None)?,
            root: Words::new(frames, 1)?,
            pasids: Map::new(),
            widest: capabilities.widest(),
            walks_snoop: capabilities.ecap & ecap::SMPWC != 0,
            pages_snoop: capabilities.ecap & ecap::SC != 0,
        })
    }

    /// The value of the unit's root register.
    pub fn address(&self) -> u64 {
        let mode = match self.mode {
            Mode::Legacy => RTADDR_LEGACY,
            Mode::Scalable => RTADDR_SCALABLE,
        };
        self.root.phys().get() | mode
    }

    fn place(&self, source: u16) -> Place {
        let source = usize::from(source);
        match self.mode {
            Mode::Legacy => Place { table: source >> 8, root: (source >> 8) * 2, index: (source & 0xff) * 2 },
            Mode::Scalable => {
                let table = source >> scalable::DEVICES_SHIFT;
                let within = source & ((1 << scalable::DEVICES_SHIFT) - 1);
                Place { table, root: table, index: within * scalable::WORDS }
            }
        }
    }

    /// Points a device to `lead`, cached under `domain`. Makes missing tables.
    ///
    /// # Errors
    /// [`UnitError::NoSuchTables`], [`UnitError::Attached`], [`UnitError::OutOfMemory`]: nothing has changed.
    pub fn attach<F: Frames>(
        &mut self,
        frames: &F,
        source: u16,
        lead: Lead,
        domain: u16,
    ) -> Result<Cached, UnitError> {
        let attached = UnitError::Attached { device: u32::from(source) };
        if self.attached(frames, source).is_some() {
            return Err(attached);
        }
        let place = self.place(source);
        let nowhere = UnitError::NoSuchDevice { device: u32::from(source), last: u32::from(u16::MAX) };
        let slot = self.contexts.get_mut(place.table).ok_or(nowhere)?;
        let context = match slot {
            Some(context) => context,
            None => {
                let context = Words::new(frames, 1)?;
                self.root.store(frames, place.root, context.phys().get() | entry::PRESENT);
                slot.insert(context)
            }
        };
        let by_pasid = match self.mode {
            Mode::Legacy => {
                let [low, high] = context_entry(lead, domain, self.widest)?;
                // This last store makes the entry present.
                context.store(frames, place.index + 1, high);
                context.store(frames, place.index, low | entry::PRESENT);
                false
            }
            Mode::Scalable => {
                let pasids = self.pasids.get_or_insert(source, || Pasids::new(frames))?;
                let [first, second, third] = pasid_entry(lead, domain, self.widest);
                let walks = if self.walks_snoop { pasid::WALKS_SNOOP } else { 0 };
                // Second-stage entries have a bit of their own for it.
                let pages = match lead {
                    Lead::FirstStage { .. } if self.pages_snoop => pasid::PAGES_SNOOP,
                    _ => 0,
                };
                pasids.table.store(frames, 2, third);
                pasids.table.store(frames, 1, second | walks | pages);
                pasids.table.store(frames, 0, first | entry::PRESENT);
                let directory = scalable::context(pasids.directory.phys().get());
                context.store(frames, place.index + 1, scalable::RID);
                context.store(frames, place.index, directory | entry::PRESENT);
                !matches!(lead, Lead::SecondStage { .. })
            }
        };
        Ok(Cached { mode: self.mode, domain, by_pasid })
    }

    /// Clears a device's entry. It counts as attached until [`forget`](Self::forget).
    ///
    /// # Errors
    /// [`UnitError::NotAttached`].
    pub fn detach<F: Frames>(&self, frames: &F, source: u16) -> Result<Cached, UnitError> {
        let not_attached = UnitError::NotAttached { device: u32::from(source) };
        let cached = self.attached(frames, source).ok_or(not_attached)?;
        let place = self.place(source);
        if let Some(context) = self.contexts.get(place.table).and_then(Option::as_ref) {
            context.store(frames, place.index, 0);
        }
        if let Some(pasids) = self.pasids.get(source) {
            let first = pasids.table.load(frames, 0);
            pasids.table.store(frames, 0, first & !entry::PRESENT);
        }
        Ok(cached)
    }

    /// The unit has confirmed the invalidation of the device's entry.
    pub fn forget<F: Frames>(&self, frames: &F, source: u16) {
        let place = self.place(source);
        match self.pasids.get(source) {
            Some(pasids) => (0..pasid::WORDS).for_each(|word| pasids.table.store(frames, word, 0)),
            None => {
                if let Some(context) = self.contexts.get(place.table).and_then(Option::as_ref) {
                    context.store(frames, place.index + 1, 0);
                }
            }
        }
    }

    /// What may be cached of a device that is attached, or was and is not invalidated yet: its entry's second word says so.
    fn attached<F: Frames>(&self, frames: &F, source: u16) -> Option<Cached> {
        let place = self.place(source);
        let (mode, domain, by_pasid) = match self.mode {
            Mode::Scalable => {
                let table = &self.pasids.get(source)?.table;
                let by_pasid = table.load(frames, 0) & pasid::PGTT != pasid::SECOND_STAGE;
                (Mode::Scalable, pasid::domain_of(table.load(frames, 1)), by_pasid)
            }
            Mode::Legacy => {
                let context = self.contexts.get(place.table)?.as_ref()?;
                (Mode::Legacy, entry::domain_of(context.load(frames, place.index + 1)), false)
            }
        };
        // No domain has number 0.
        (domain != 0).then_some(Cached { mode, domain, by_pasid })
    }

    /// Frees all frames.
    ///
    /// # Safety
    /// 1. `frames` allocated them.
    /// 2. The unit is off.
    pub unsafe fn free<F: Frames>(self, frames: &F) {
        let pasids = self.pasids.into_values().flat_map(|pasids| [pasids.directory, pasids.table]);
        let tables = self.contexts.into_iter().flatten().chain(pasids);
        for words in tables.chain([self.root]) {
            // SAFETY: clauses 1 and 2.
            unsafe { words.free(frames) };
        }
    }
}

/// A context entry of legacy mode, which has no first stage.
fn context_entry(lead: Lead, domain: u16, widest: u32) -> Result<[u64; 2], UnitError> {
    match lead {
        Lead::FirstStage { levels, .. } => Err(UnitError::NoSuchTables { levels }),
        Lead::SecondStage { root, aw } => Ok([root.get() | entry::TRANSLATED, entry::domain(aw, domain)]),
        // The widest AW of the unit, as the manual demands.
        Lead::PassThrough => Ok([entry::PASS_THROUGH, entry::domain(widest, domain)]),
    }
}

fn pasid_entry(lead: Lead, domain: u16, widest: u32) -> [u64; pasid::WORDS] {
    let (first, third) = match lead {
        Lead::SecondStage { root, aw } => (root.get() | pasid::SECOND_STAGE | pasid::width(aw), 0),
        // The manual has AW ignored here. QEMU 10.0 takes the address width from it.
        Lead::FirstStage { root, fspm, .. } => {
            (pasid::FIRST_STAGE | pasid::width(widest), pasid::first_stage(root.get(), fspm))
        }
        // The widest, as the manual demands.
        Lead::PassThrough => (pasid::PASS_THROUGH | pasid::width(widest), 0),
    };
    [first, pasid::domain(domain), third]
}

impl Pasids {
    /// An empty directory with one table.
    fn new<F: Frames>(frames: &F) -> Result<Self, UnitError> {
        let directory = Words::new(frames, 1)?;
        let table = match Words::new(frames, 1) {
            Ok(table) => table,
            Err(error) => {
                // SAFETY: 1: allocated above from `frames`. 2: the unit was not told of it.
                unsafe { directory.free(frames) };
                return Err(error);
            }
        };
        directory.store(frames, 0, table.phys().get() | entry::PRESENT);
        Ok(Self { directory, table })
    }
}
