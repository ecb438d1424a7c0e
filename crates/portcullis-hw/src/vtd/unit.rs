//! A unit: bring-up, take-over, device tables, shutdown.

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::pgtable::{Format, VtdSecondStage};
use portcullis::platform::Frames;

use super::capabilities::{Capabilities, Mode};
use super::faults;
use super::layout::{
    FECTL_IM, INTERRUPTS, IQA_NARROW, IQA_WIDE, PMEN_EPM, PMEN_PRS, RTADDR_LEGACY, RTADDR_MODE,
    RTADDR_SCALABLE, cap, descriptor, ecap, entry, fsts, global, record, reg,
};
use super::queue::{Bell, Stage, describe};
use super::tables::{Lead, Tables, everything};
use crate::fault::Fault;
use crate::host::{Host, Registers, UnitError, wait_until};
use crate::iommu::{Attachment, Iommu};
use crate::numbers::Numbers;
use crate::queue::{Command, Queue};
use crate::switch::Switch;
use crate::sync::{AtomicBool, Mutex, Ordering};
use crate::waits::Waits;

/// A VT-d unit.
///
/// A drop leaks its structures, because the hardware goes on reading them: [`shut_down`](Iommu::shut_down) frees them.
#[derive(Debug)]
pub struct Unit<H: Host> {
    host: H,
    capabilities: Capabilities,
    mode: Mode,
    /// The drain bits of IOTLB invalidations.
    drain: u64,
    queue: Queue,
    tables: Mutex<Tables>,
    /// Whether the unit may use the tables, and whether it has taken their root: see [`has_root`](Self::has_root).
    switch: Switch,
    took_root: AtomicBool,
    /// Serializes global commands.
    commands: Mutex<()>,
    /// Index of the next fault record.
    next_record: Mutex<usize>,
    numbers: Numbers,
    /// For domains with second-stage tables, and with first-stage ones, as a request does not say which.
    second: Waits,
    first: Waits,
}

impl<H: Host> Unit<H> {
    /// Takes a unit over: reads its capabilities, and replaces the invalidation queue that firmware may have left on by its own. Devices
    /// keep the access that they had until [`enable`](Iommu::enable); before that, attach devices that must not be interrupted (firmware's
    /// reserved regions, a display).
    ///
    /// A unit that already translates stays in its [mode](Mode), if the driver supports that with these frames. Otherwise the driver
    /// prefers scalable mode with a second stage; then legacy mode; then scalable mode without one. If a unit is on in a mode that the
    /// driver leaves, such as one where firmware made it refuse everything, see [`start_in`](Self::start_in) for what `enable` does then.
    ///
    /// Allocates three frames, or four. Waits for the unit, up to four times the host's patience. Drops earlier fault records.
    ///
    /// # Errors
    /// [`UnitError::NotThere`]; [`UnitError::Lacks`] if there is no queued invalidation (all units since 2009 have it), none that drains, a
    /// non-coherent walker with frames that are not [cleaned](Frames::clean), or no mode that this driver supports;
    /// [`UnitError::OutOfMemory`]; [`UnitError::TimedOut`].
    pub fn start(host: H) -> Result<Self, UnitError> {
        Self::start_with(host, None)
    }

    /// The same in this mode. If the unit already translates in another, and cannot change that while it does (CAP.ESRTPS is clear),
    /// [`enable`](Iommu::enable) turns it off for a moment, in which devices reach all memory.
    ///
    /// # Errors
    /// Those of [`start`](Self::start); [`UnitError::Lacks`] if the unit has no such mode.
    pub fn start_in(host: H, mode: Mode) -> Result<Self, UnitError> {
        Self::start_with(host, Some(mode))
    }

    fn start_with(host: H, asked: Option<Mode>) -> Result<Self, UnitError> {
        let registers = host.registers();
        let version = registers.read32(reg::VER);
        let (cap_value, ecap_value) = (registers.read64(reg::CAP), registers.read64(reg::ECAP));
        if version == 0 || version == u32::MAX {
            return Err(UnitError::NotThere { register: "VER", value: u64::from(version) });
        }
        if cap_value == u64::MAX || ecap_value == u64::MAX {
            let register = if cap_value == u64::MAX { "CAP" } else { "ECAP" };
            return Err(UnitError::NotThere { register, value: u64::MAX });
        }
        if ecap_value & ecap::QI == 0 {
            let what = "queued invalidation";
            return Err(UnitError::Lacks { what, register: "ECAP", value: ecap_value });
        }
        let capabilities = Capabilities { cap: cap_value, ecap: ecap_value };
        let mode = match asked {
            Some(mode) => capabilities.can(mode, H::Frames::COHERENT).map(|()| mode)?,
            None => capabilities.preferred(mode_of(registers), H::Frames::COHERENT)?,
        };
        // From major version 2 on, invalidations always drain (section 6.5.2).
        let (has_drains, drains_unasked) = (cap_value & (cap::DWD | cap::DRD), version >> 4 & 0xf >= 2);
        if has_drains != cap::DWD | cap::DRD && !drains_unasked {
            let what = "invalidations that wait for accesses under way";
            return Err(UnitError::Lacks { what, register: "CAP", value: cap_value });
        }
        let drains = [(cap::DWD, descriptor::DRAIN_WRITES), (cap::DRD, descriptor::DRAIN_READS)];
        let drain = drains.iter().filter(|(can, _)| cap_value & can != 0).fold(0, |all, (_, bit)| all | bit);

        let tables = Tables::new(host.frames(), mode, &capabilities)?;
        let wide = capabilities.has_wide_descriptors();
        let queue = if wide { Queue::wide(host.frames()) } else { Queue::new(host.frames()) };
        let queue = match queue {
            Ok(queue) => queue,
            Err(error) => {
                // SAFETY: 1: allocated above from the host's frames. 2: the unit was not told of them.
                unsafe { tables.free(host.frames()) };
                return Err(error);
            }
        };
        // None for a stage that the unit does not walk.
        let waits = |walks: bool| if walks { Waits::new(&host) } else { Waits::alone() };
        let (second, first) =
            (capabilities.second_stage(mode).is_ok(), capabilities.first_stage(mode).is_ok());
        let (second, first) = (waits(second), waits(first));
        let unit = Self {
            host,
            capabilities,
            mode,
            drain,
            queue,
            tables: Mutex::new(tables),
            switch: Switch::new(),
            took_root: AtomicBool::new(false),
            commands: Mutex::new(()),
            next_record: Mutex::new(0),
            numbers: Numbers::new(),
            second,
            first,
        };
        // After an error the unit may know the queue's address: it stays allocated.
        unit.turn_on_queue()?;
        Ok(unit)
    }

    fn turn_on_queue(&self) -> Result<(), UnitError> {
        let registers = self.host.registers();
        if registers.read32(reg::GSTS) & global::QIE != 0 {
            // It may have stopped at a descriptor. Nobody waits for firmware's descriptors: if the unit does not reach the last of them,
            // its queue is turned off all the same.
            registers.write32(reg::FSTS, fsts::IQE | fsts::ITE | fsts::ICE);
            let index = |register| registers.read64(register) & 0x7_fff0;
            let _ = wait_until(&self.host, "work off the queue that it was left with", || {
                index(reg::IQH) == index(reg::IQT)
            });
            self.command(global::QIE, false, "turn its invalidation queue off")?;
        }
        if registers.read32(reg::GSTS) & global::EAFL != 0 {
            // Faults would go to firmware's memory.
            self.command(global::EAFL, false, "turn firmware's fault log off")?;
        }
        registers.write32(reg::FECTL, FECTL_IM);
        registers.write32(reg::FSTS, fsts::IQE | fsts::ITE | fsts::ICE | fsts::PFO);
        // Earlier faults are of devices that this driver has not attached. Drops at most as many as there are records: one may stay.
        for _ in 0..cap::fault_records(self.capabilities.cap) {
            if self.next_fault().is_none() {
                break;
            }
        }
        registers.write64(reg::IQT, 0);
        let wide = self.capabilities.has_wide_descriptors();
        registers.write64(reg::IQA, self.queue.address() | if wide { IQA_WIDE } else { IQA_NARROW });
        self.command(global::QIE, true, "turn its invalidation queue on")
    }

    /// The unit's capabilities.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Its mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The host.
    pub fn host(&self) -> &H {
        &self.host
    }

    /// Writes a global command, and waits until its status says that it is done.
    fn command(&self, bit: u32, on: bool, what: &'static str) -> Result<(), UnitError> {
        self.commanded(
            |states| if on { states | bit } else { states & !bit },
            what,
            |status| (status & bit != 0) == on,
        )
    }

    /// Writes the global command register, and waits for the status that was requested.
    fn commanded(
        &self,
        change: impl FnOnce(u32) -> u32,
        what: &'static str,
        is_done: impl Fn(u32) -> bool,
    ) -> Result<(), UnitError> {
        let registers = self.host.registers();
        self.host.undisturbed(|| {
            let _one_at_a_time = self.commands.lock();
            let status = registers.read32(reg::GSTS);
            if status == u32::MAX {
                return Err(UnitError::NotThere { register: "GSTS", value: u64::from(status) });
            }
            registers.write32(reg::GCMD, change(status & global::STATES));
            wait_until(&self.host, what, || {
                let status = registers.read32(reg::GSTS);
                status != u32::MAX && is_done(status)
            })
        })
    }

    /// Whether the unit may have cached anything of this driver's tables. If it is taking their root at the moment, waits until it has.
    ///
    /// Nothing is submitted before that. The unit decodes descriptors in the mode of its current root: if firmware left it in legacy mode,
    /// it may stop at one that names a PASID. And some chipsets (X58) never complete an invalidation of contexts while they have no root at
    /// all, as Linux's driver notes, whose order is: queue, root, then invalidation of everything. Nothing needs to be submitted either:
    /// what a caller that finds no root has stored is in memory before the unit is given these tables, by [`Switch`]'s order, and
    /// [`enable`](Iommu::enable) invalidates everything that was cached of other tables.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`]: it has not taken the root.
    fn has_root(&self) -> Result<bool, UnitError> {
        // Acquire: what was before `enable` happens before what follows, as with the switch.
        let took_root = || self.took_root.load(Ordering::Acquire);
        if took_root() {
            return Ok(true);
        }
        if !self.switch.is_on() {
            return Ok(false);
        }
        wait_until(&self.host, "take its root table", took_root).map(|()| true)
    }

    fn confirm(&self, commands: &[Command]) -> Result<(), UnitError> {
        self.queue.submit(&self.host, &self.bell(), commands).map_err(UnitError::Unconfirmed)
    }

    fn bell(&self) -> Bell<'_, H> {
        Bell::new(&self.host, self.capabilities.has_wide_descriptors())
    }

    /// Makes a unit with a write buffer see earlier stores.
    fn flush_write_buffer(&self) -> Result<(), UnitError> {
        if self.capabilities.cap() & cap::RWBF == 0 {
            return Ok(());
        }
        let flush = |states| states | global::WBF;
        self.commanded(flush, "flush its write buffer", |status| status & global::WBF == 0)
    }
}

impl<H: Host> Unit<H> {
    /// Attaches `device`: to the table of `domain`, or to all memory.
    pub(super) fn attach_to(
        &self,
        device: DeviceId,
        domain: Option<DomainId>,
        lead: Lead,
    ) -> Result<(), UnitError> {
        let source = source_of(device)?;
        let (first, last) = self.capabilities.domains();
        let number = match domain {
            Some(domain) if domain < first || domain > last => {
                return Err(UnitError::NoSuchDomain { domain: domain.0, first: first.0, last: last.0 });
            }
            Some(domain) => domain.0,
            None if !self.capabilities.has_pass_through() => {
                let value = self.capabilities.ecap();
                return Err(UnitError::Lacks { what: "pass-through", register: "ECAP", value });
            }
            None => last.0 + 1,
        };
        if let Lead::FirstStage { root, .. } | Lead::SecondStage { root, .. } = lead
            && root.get() & !entry::ADDRESS != 0
        {
            return Err(UnitError::BadRoot { root });
        }
        let mut tables = self.tables.lock();
        let cached = tables.attach(self.host.frames(), source, lead, number)?;
        if !self.has_root()? {
            return Ok(());
        }
        self.flush_write_buffer()?;
        if self.capabilities.caches_absent() {
            self.confirm(&cached.commands_of_absent(source, self.drain))?;
        }
        Ok(())
    }

    /// Carries out `requests` of domains with tables of `stage`.
    pub(super) fn carry_out(&self, requests: &[Request], stage: Stage) -> Result<(), InvalidationError> {
        let timed_out = |_| InvalidationError::TimedOut { waited_ns: self.host.patience_ns() };
        if !self.has_root().map_err(timed_out)? {
            return Ok(());
        }
        let waits = if matches!(stage, Stage::First) { &self.first } else { &self.second };
        waits.share(&self.host, requests, |requests| {
            self.flush_write_buffer().map_err(timed_out)?;
            self.queue.carry_out(&self.host, &self.bell(), requests, |commands, request| {
                describe(commands, &self.capabilities, stage, request)
            })
        })
    }
}

// SAFETY: 1 and 2: the submissions at the end of `attach` and `detach`, by `InvalidationQueue` below. 3: the unit's structures change only
// after the last check. 4: the layout is of its capabilities. 5: the numbers are a field of the unit.
unsafe impl<H: Host> Iommu<VtdSecondStage> for Unit<H> {
    type Frames = H::Frames;

    fn frames(&self) -> &H::Frames {
        self.host.frames()
    }

    fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    fn layout(&self) -> Result<VtdSecondStage, UnitError> {
        self.capabilities.second_stage(self.mode)
    }

    fn domains(&self) -> (DomainId, DomainId) {
        self.capabilities.domains()
    }

    fn reserved(&self) -> &'static [IovaRange] {
        &INTERRUPTS
    }

    fn last_iova(&self) -> Iova {
        self.capabilities.last_iova()
    }

    fn enable(&self) -> Result<(), UnitError> {
        let registers = self.host.registers();
        // Held to the end: another call of this must not find translation on in a mode that this one is about to leave.
        let tables = self.tables.lock();
        // Before the flush: the unit sees earlier stores, and later ones are invalidated.
        self.switch.turn_on();
        self.flush_write_buffer()?;
        let root = tables.address();
        let is_on = registers.read32(reg::GSTS) & global::TE != 0;
        let mode_stays = (registers.read64(reg::RTADDR) ^ root) & RTADDR_MODE == 0;
        if is_on && !mode_stays && self.capabilities.cap() & cap::ESRTPS == 0 {
            // Such a unit must not be given tables of another mode while it walks (RTADDR_REG).
            self.command(global::TE, false, "turn firmware's translation off")?;
        }
        registers.write64(reg::RTADDR, root);
        self.command(global::SRTP, true, "take its root table")?;
        self.took_root.store(true, Ordering::Release);
        // A unit with ESRTPS does this by itself; to do it again is harmless.
        self.confirm(&everything(self.mode, self.drain))?;
        self.command(global::TE, true, "turn translation on")?;
        if self.capabilities.cap() & (cap::PLMR | cap::PHMR) != 0 {
            // Firmware's protected regions would keep devices from memory that is mapped for them.
            let enabled = registers.read32(reg::PMEN);
            registers.write32(reg::PMEN, enabled & !PMEN_EPM);
            wait_until(&self.host, "open firmware's protected memory", || {
                registers.read32(reg::PMEN) & PMEN_PRS == 0
            })?;
        }
        Ok(())
    }

    unsafe fn attach(&self, device: DeviceId, to: Attachment<VtdSecondStage>) -> Result<(), UnitError> {
        match to {
            Attachment::Table { domain, root, format } => {
                let aw = format.aw();
                if self.capabilities.second_stage(self.mode).is_err() || !self.capabilities.walks(aw) {
                    return Err(UnitError::NoSuchTables { levels: format.levels() });
                }
                self.attach_to(device, Some(domain), Lead::SecondStage { root, aw })
            }
            Attachment::PassThrough => self.attach_to(device, None, Lead::PassThrough),
        }
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitError> {
        let source = source_of(device)?;
        let frames = self.host.frames();
        // Held during the wait for the unit: only attach and detach take it.
        let tables = self.tables.lock();
        let cached = tables.detach(frames, source)?;
        if self.has_root()? {
            self.flush_write_buffer()?;
            self.confirm(&cached.commands(source, self.drain))?;
        }
        tables.forget(frames, source);
        Ok(())
    }

    fn next_fault(&self) -> Option<Fault> {
        let registers = self.host.registers();
        let (offset, count) =
            (cap::fault_offset(self.capabilities.cap()), cap::fault_records(self.capabilities.cap()));
        let mut next = self.next_record.lock();
        let status = registers.read32(reg::FSTS);
        if status & fsts::PPF == 0 || status == u32::MAX {
            return None;
        }
        for index in (0..count).map(|step| (*next + step) % count) {
            let at = offset + index * 16;
            let high = registers.read64(at + 8);
            if high & record::F == 0 || high == u64::MAX {
                continue;
            }
            let fault = faults::decode(registers.read64(at), high);
            registers.write32(at + 12, record::F32);
            // The unit records again only when this is clear.
            registers.write32(reg::FSTS, fsts::PFO);
            *next = (index + 1) % count;
            return Some(fault);
        }
        None
    }

    fn shut_down(self) -> Result<(), UnitError> {
        self.command(global::TE, false, "turn translation off")?;
        // The last descriptor is a wait, because the queue must be idle when it is turned off. An outstanding wait, behind a device that
        // does not answer, say, may be confirmed later than that: GSTS.QIES only says that no more are fetched.
        let settled = self.queue.settle(&self.host, &self.bell());
        self.command(global::QIE, false, "turn its invalidation queue off")?;
        settled?;
        let Self { host, queue, tables, .. } = self;
        // SAFETY: 1: the host's frames allocated it. 2: translation and the queue are off, and no wait is outstanding, as the unit has
        // confirmed.
        unsafe {
            queue.free(host.frames());
            tables.into_inner().free(host.frames());
        }
        Ok(())
    }
}

/// The mode of a unit that translates.
fn mode_of(registers: &impl Registers) -> Option<Mode> {
    let is_on = registers.read32(reg::GSTS) & global::TE != 0;
    match registers.read64(reg::RTADDR) & RTADDR_MODE {
        RTADDR_LEGACY if is_on => Some(Mode::Legacy),
        RTADDR_SCALABLE if is_on => Some(Mode::Scalable),
        _ => None,
    }
}

fn source_of(device: DeviceId) -> Result<u16, UnitError> {
    let last = u32::from(u16::MAX);
    u16::try_from(device.0).map_err(|_| UnitError::NoSuchDevice { device: device.0, last })
}

// SAFETY: 1: a submission ends with a descriptor that the unit confirms after its other descriptors are complete (section 6.5.2.8), IOTLB
// invalidations drain (`start` takes no unit that cannot), and each descriptor covers its request. If CPUs share waits, `Ok` is of a
// submission that covers the requests and began after the call (`SharedWaits::submit`); all requests of one batch are of this stage. 2: by
// `Registers` and `Frames`. 3: the ring's exchanges order the submissions, and the switch's order the calls of a unit that has no root yet,
// which has read nothing of what they name. 4: the descriptors are in the order of the requests.
unsafe impl<H: Host> InvalidationQueue for Unit<H> {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.carry_out(requests, Stage::Second { drain: self.drain })
    }

    fn caches_absent(&self) -> bool {
        self.capabilities.cap() & (cap::CM | cap::RWBF) != 0
    }
}
