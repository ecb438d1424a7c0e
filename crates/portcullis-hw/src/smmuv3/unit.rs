//! A unit: bring-up, take-over, attaching streams, shutdown.

use portcullis::addr::{DeviceId, DomainId, Iova, PageSize, PhysAddr};
use portcullis::invalidation::{Granularity, Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::pgtable::{ARM_MAIR, Arm, Format, Layout};
use portcullis::platform::{FRAME_SIZE, Frames};

use super::Stage;
use super::events::Events;
use super::layout::{IDR3_RIL, cd, command, cr0, cr1, cr2, gbpa, idr0, idr1, idr5, reg, ste};
use super::own::{self, OwnQueues};
use super::queue::{Queue, Ways};
use super::streams::{Held, Stream, Streams};
use crate::fault::Fault;
use crate::host::{Host, Registers, UnitError, wait_until};
use crate::iommu::{Attachment, Iommu};
use crate::numbers::Numbers;
use crate::sync::{AtomicU64, Mutex, Ordering, fence};
use crate::waits::Waits;

/// Capabilities, from four identification registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    idr0: u32,
    idr1: u32,
    idr3: u32,
    idr5: u32,
}

impl Capabilities {
    fn read(registers: &impl Registers) -> Result<Self, UnitError> {
        let [idr0, idr1, idr3, idr5] =
            [reg::IDR0, reg::IDR1, reg::IDR3, reg::IDR5].map(|at| registers.read32(at));
        if idr0 == 0 || idr0 == u32::MAX || idr1 == u32::MAX || idr5 == u32::MAX {
            return Err(UnitError::NotThere { register: "IDR0", value: u64::from(idr0) });
        }
        Ok(Self { idr0, idr1, idr3, idr5 })
    }

    /// `SMMU_IDR0`, `SMMU_IDR1`, `SMMU_IDR3` and `SMMU_IDR5`.
    pub const fn registers(&self) -> [u32; 4] {
        [self.idr0, self.idr1, self.idr3, self.idr5]
    }

    /// Whether the unit has this stage.
    pub const fn has_stage(&self, stage: Stage) -> bool {
        let bit = match stage {
            Stage::One => idr0::S1P,
            Stage::Two => idr0::S2P,
        };
        self.idr0 & bit != 0
    }

    /// The widest layout of `stage` that the unit walks, except 16 KiB pages with 52 bits. A second-stage root may be several concatenated
    /// tables.
    ///
    /// # Errors
    /// [`UnitError::Lacks`]: the unit does not have the stage, or this page size.
    pub fn layout<const GRANULE: u32>(&self, stage: Stage) -> Result<Arm<GRANULE>, UnitError> {
        let lacks = |what, register, value| Err(UnitError::Lacks { what, register, value: u64::from(value) });
        if self.idr0 & idr0::TTF_AARCH64 == 0 {
            return lacks("a walk of AArch64's tables", "IDR0", self.idr0);
        }
        if !self.has_stage(stage) {
            return lacks("the stage of translation that was asked for", "IDR0", self.idr0);
        }
        if !idr5::has_granule(self.idr5, GRANULE) {
            return lacks("pages of the size that was asked for", "IDR5", self.idr5);
        }
        let (input, output) = (self.input_bits(stage, GRANULE), self.address_bits(GRANULE));
        let layout = match stage {
            Stage::One => Arm::stage_1(input, output),
            Stage::Two => Arm::stage_2_with_ias(input, output, self.ias()),
        };
        layout.or_else(|_| lacks("tables of a common shape", "IDR5", self.idr5))
    }

    /// The widest physical addresses that both tables of this granule and the unit support.
    fn address_bits(&self, granule: u32) -> u32 {
        idr5::address_bits(self.idr5).min(if granule == 16 { 52 } else { 48 })
    }

    /// Width of the second stage's input.
    fn ias(&self) -> u32 {
        let bits = idr5::address_bits(self.idr5);
        if self.idr0 & idr0::TTF_AARCH32 != 0 { bits.max(40) } else { bits }
    }

    /// The widest input of this stage and granule.
    fn input_bits(&self, stage: Stage, granule: u32) -> u32 {
        match stage {
            Stage::One if granule == 16 && idr5::is_wide(self.idr5) => 52,
            Stage::One => 48,
            // As in `Arm::stage_2_with_ias`: input beyond the physical address width ends at 40 bits.
            Stage::Two => self.address_bits(granule).max(self.ias().min(40)),
        }
    }

    /// Number 0 is reserved: it is the VMID of first-stage streams.
    fn domains(&self, stage: Stage) -> (DomainId, DomainId) {
        let wide = match stage {
            Stage::One => idr0::ASID16,
            Stage::Two => idr0::VMID16,
        };
        (DomainId(1), DomainId(if self.idr0 & wide != 0 { u16::MAX } else { 0xff }))
    }

    /// The default stage of domains.
    fn stage(&self) -> Stage {
        if self.has_stage(Stage::One) { Stage::One } else { Stage::Two }
    }
}

/// An SMMUv3 whose tables have pages of 2^`GRANULE` bytes: 12, 14 or 16.
///
/// A drop leaks its structures, because the hardware goes on reading them: [`shut_down`](Iommu::shut_down) frees them.
#[derive(Debug)]
pub struct Unit<H: Host, const GRANULE: u32> {
    host: H,
    capabilities: Capabilities,
    queue: Queue,
    own: OwnQueues,
    events: Mutex<Events>,
    streams: Mutex<Streams>,
    /// The stages that a device was ever attached to, as bits: an invalidation goes to these.
    stages: AtomicU64,
    /// Serializes changes of CR0 and GBPA, which the unit acknowledges.
    control: Mutex<()>,
    numbers: Numbers,
    /// Of the main queue.
    waits: Waits,
}

impl<H: Host, const GRANULE: u32> Unit<H, GRANULE> {
    /// Takes a unit over: reads its capabilities, and replaces the queues that firmware may have left on by its own. Devices keep the
    /// access that they had until [`enable`](Iommu::enable); before that, attach devices that must not be interrupted (firmware's reserved
    /// regions, a display).
    ///
    /// If the unit has ECMDQs, and the host says which [CPU](Host::cpu) calls, CPUs have queues of their own: one for each, or for a few of
    /// them, as many as the unit has and memory allows.
    ///
    /// Allocates three frames, more if stream IDs have more than 17 bits or if the stream table is linear, and one for each ECMDQ. Waits
    /// for the unit, up to three times the host's patience, and for each ECMDQ.
    ///
    /// # Errors
    /// [`UnitError::NotThere`]; [`UnitError::Lacks`] if the unit walks no AArch64 tables of this page size, is big-endian, stalls refused
    /// accesses, or has its tables and queues in memory of its own, or if it is non-coherent and frames are not [cleaned](Frames::clean);
    /// [`UnitError::OutOfMemory`]; [`UnitError::TimedOut`].
    pub fn start(host: H) -> Result<Self, UnitError> {
        let capabilities = Capabilities::read(host.registers())?;
        let Capabilities { idr0, idr1, .. } = capabilities;
        let lacking = [
            (idr0::only_big_endian(idr0), "little-endian tables", "IDR0", idr0),
            (idr0::always_stalls(idr0), "a way to refuse without stalling", "IDR0", idr0),
            (
                idr0 & idr0::COHACC == 0 && H::Frames::COHERENT,
                "coherent access, and Frames::COHERENT says that stores need no cleaning",
                "IDR0",
                idr0,
            ),
            (idr1 & idr1::TABLES_PRESET != 0, "a stream table in memory of the host's", "IDR1", idr1),
            (idr1 & idr1::QUEUES_PRESET != 0, "queues in memory of the host's", "IDR1", idr1),
            (idr1::commands(idr1) == 0, "a queue of two commands", "IDR1", idr1),
        ];
        if let Some((_, what, register, value)) = lacking.into_iter().find(|(lacks, ..)| *lacks) {
            return Err(UnitError::Lacks { what, register, value: u64::from(value) });
        }
        capabilities.layout::<GRANULE>(capabilities.stage())?;

        let frames = host.frames();
        let queue = Queue::new(frames, idr1::commands(idr1))?;
        let rest = Events::new(frames, idr1::events(idr1)).and_then(|events| {
            let two_levels = idr0::two_levels(idr0);
            let has_contexts = capabilities.has_stage(Stage::One);
            match Streams::new(frames, idr1::stream_bits(idr1), two_levels, has_contexts) {
                Ok(streams) => Ok((events, streams)),
                Err(error) => {
                    // SAFETY: 1: allocated above from the host's frames. 2: the unit was not told of it.
                    unsafe { events.free(frames) };
                    Err(error)
                }
            }
        });
        let (events, streams) = match rest {
            Ok(rest) => rest,
            Err(error) => {
                // SAFETY: 1: allocated above from the host's frames. 2: the unit was not told of it.
                unsafe { queue.free(frames) };
                return Err(error);
            }
        };
        let waits = Waits::new(&host);
        let mut unit = Self {
            host,
            capabilities,
            queue,
            own: OwnQueues::none(),
            events: Mutex::new(events),
            streams: Mutex::new(streams),
            stages: AtomicU64::new(0),
            control: Mutex::new(()),
            numbers: Numbers::new(),
            waits,
        };
        // After an error the unit may know the queues' addresses: they stay allocated.
        unit.turn_on_queues()?;
        if let Err(error) = unit.own.turn_on(&unit.host, idr1) {
            // Memory that the unit does not release, either, stays allocated.
            let _ = unit.give_back(u32::MAX);
            return Err(error);
        }
        Ok(unit)
    }

    fn turn_on_queues(&self) -> Result<(), UnitError> {
        let registers = self.host.registers();
        registers.write32(reg::IRQ_CTRL, 0);
        wait_until(&self.host, "turn its interrupts off", || registers.read32(reg::IRQ_CTRLACK) == 0)?;
        // Firmware's invalidations may never be executed: `enable` invalidates everything.
        self.control(|on| on & !(QUEUES | cr0::PRIQEN), "turn its queues off")?;
        own::turn_off_all(&self.host, self.capabilities.idr1)?;
        let attributes = self.cached(cr1::QUEUES_CACHED, cr1::QUEUES_UNCACHED);
        registers.write32(reg::CR1, registers.read32(reg::CR1) & cr1::TABLES | attributes);
        self.queue.tell(registers);
        self.events.lock().tell(registers);
        // Errors of those queues.
        registers.write32(reg::GERRORN, registers.read32(reg::GERROR));
        self.control(|on| on | QUEUES, "turn its queues on")
    }

    /// Turns off the queues and all else in CR0 except `rest`, and frees all memory. The unit reads no stream table of this driver.
    fn give_back(self, rest: u32) -> Result<(), UnitError> {
        self.own.turn_off(&self.host)?;
        self.control(|on| on & rest & !QUEUES, "turn its queues off")?;
        let Self { host, queue, own, events, streams, .. } = self;
        // SAFETY: 1: the host's frames allocated it. 2: the queues are off, as the unit has confirmed. Then it neither reads nor writes
        // them (CR0.CMDQEN, CR0.EVENTQEN, ECMDQ_CONS.ENACK), no CMD_SYNC of this driver stores anything, and the unit reads no stream
        // table.
        unsafe {
            own.free(&host);
            queue.free(host.frames());
            events.into_inner().free(host.frames());
            streams.into_inner().free(host.frames());
        }
        Ok(())
    }

    /// Selects a field's value by whether the unit's accesses are coherent.
    fn cached<T>(&self, cached: T, uncached: T) -> T {
        if self.capabilities.idr0 & idr0::COHACC != 0 { cached } else { uncached }
    }

    /// The unit's capabilities.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// The host.
    pub fn host(&self) -> &H {
        &self.host
    }

    /// How many command queues CPUs have of their own (ECMDQ).
    pub fn own_queues(&self) -> usize {
        self.own.len()
    }

    /// Changes CR0, and waits until the unit acknowledges it.
    fn control(&self, change: impl Fn(u32) -> u32, what: &'static str) -> Result<(), UnitError> {
        let registers = self.host.registers();
        let _one_at_a_time = self.control.lock();
        let value = change(registers.read32(reg::CR0));
        registers.write32(reg::CR0, value);
        let ats = if self.capabilities.idr0 & idr0::ATS != 0 { cr0::ATSCHK } else { 0 };
        let acknowledged = cr0::SMMUEN | cr0::PRIQEN | cr0::EVENTQEN | cr0::CMDQEN | ats;
        wait_until(&self.host, what, || {
            let acting = registers.read32(reg::CR0ACK);
            acting != u32::MAX && (acting ^ value) & acknowledged == 0
        })
    }

    /// Makes the unit refuse all accesses while translation is off, or let them through.
    fn refuse_while_off(&self, refuse: bool) -> Result<(), UnitError> {
        let registers = self.host.registers();
        let _one_at_a_time = self.control.lock();
        let taken = || registers.read32(reg::GBPA) & gbpa::UPDATE == 0;
        wait_until(&self.host, "be ready for a change of GBPA", taken)?;
        let rest = registers.read32(reg::GBPA) & !gbpa::ABORT;
        let abort = if refuse { gbpa::ABORT } else { 0 };
        registers.write32(reg::GBPA, rest | abort | gbpa::UPDATE);
        wait_until(&self.host, "take a change of GBPA", taken)
    }

    /// Executes commands about the unit's own tables.
    fn carry_out(&self, commands: &[[u64; 2]]) -> Result<(), UnitError> {
        self.queue.submit(&self.host, commands).map_err(UnitError::Unconfirmed)
    }

    /// Invalidates a stream's cached entry and context descriptor.
    fn forget_entry(&self, stream: u32) -> Result<(), UnitError> {
        // A unit without the first stage does not know the second command.
        let both = [command::stream(stream), command::context(stream)];
        self.carry_out(&both[..if self.capabilities.has_stage(Stage::One) { 2 } else { 1 }])
    }

    /// Checks that the unit walks tables of this layout from this root, for a domain of this number.
    fn check(&self, domain: DomainId, root: PhysAddr, format: &Arm<GRANULE>) -> Result<(), UnitError> {
        let can = self.capabilities;
        let stage = Stage::of(format);
        let tables = UnitError::NoSuchTables { levels: format.levels() };
        can.layout::<GRANULE>(stage)?;
        if format.input_bits() > can.input_bits(stage, GRANULE)
            || format.last_phys().get() >> can.address_bits(GRANULE) != 0
        {
            return Err(tables);
        }
        let (first, last) = can.domains(stage);
        if domain < first || domain > last {
            return Err(UnitError::NoSuchDomain { domain: domain.0, first: first.0, last: last.0 });
        }
        let size = format.root_frames() as u64 * FRAME_SIZE;
        if !root.get().is_multiple_of(size) || root > format.last_phys() {
            return Err(UnitError::BadRoot { root });
        }
        Ok(())
    }

    /// Stores all words of the entry of `stream` for `to` except the first, which it returns.
    fn lead(&self, stream: &Stream<'_>, to: &Attachment<Arm<GRANULE>>) -> Result<u64, UnitError> {
        let frames = self.host.frames();
        let shareable = match self.capabilities.idr1 & idr1::ATTR_TYPES_OVR {
            0 => 0,
            _ => ste::SHCFG_INCOMING,
        };
        let (first, rest) = match *to {
            Attachment::PassThrough => (ste::BYPASS, [shareable, 0, 0]),
            Attachment::Table { domain, root, format } => match format.sl0() {
                None => {
                    let walk = cd::walk(format.t0sz(), format.tg0(), format.ps())
                        | self.cached(cd::CACHED, cd::UNCACHED);
                    let flags = cd::V | cd::EPD1 | cd::AA64 | cd::R | cd::A | cd::ASET;
                    let context = [walk | flags | cd::asid(domain.0), root.get() & cd::TTB0, 0, ARM_MAIR];
                    let context = stream.store_context(frames, context)?;
                    let read = self.cached(ste::S1C_CACHED, ste::S1C_UNCACHED);
                    (ste::STAGE_1 | context & ste::CONTEXT, [read | shareable, ste::s2_vmid(0), 0])
                }
                Some(sl0) => {
                    let walk = ste::s2_walk(format.t0sz(), sl0, format.tg0(), format.ps())
                        | self.cached(ste::S2_CACHED, ste::S2_UNCACHED);
                    let how = walk | ste::S2AA64 | ste::S2R | ste::s2_vmid(domain.0);
                    (ste::STAGE_2, [shareable, how, root.get() & ste::S2TTB])
                }
            },
        };
        stream.store_rest(frames, rest);
        Ok(first | ste::V)
    }
}

// SAFETY: 1 and 2: the submissions at the end of `attach` and `detach`, by `InvalidationQueue` below. 3: the unit's structures change only
// after the last check. 4: the layout is of its capabilities. 5: the numbers are a field of the unit.
unsafe impl<H: Host, const GRANULE: u32> Iommu<Arm<GRANULE>> for Unit<H, GRANULE> {
    type Frames = H::Frames;

    fn frames(&self) -> &H::Frames {
        self.host.frames()
    }

    fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    /// First stage, if the unit has it. [`Capabilities::layout`] returns either.
    fn layout(&self) -> Result<Arm<GRANULE>, UnitError> {
        self.capabilities.layout(self.capabilities.stage())
    }

    fn domains(&self) -> (DomainId, DomainId) {
        self.capabilities.domains(self.capabilities.stage())
    }

    fn last_iova(&self) -> Iova {
        let bits = self.capabilities.input_bits(self.capabilities.stage(), GRANULE);
        Iova::new(u64::MAX >> (64 - bits))
    }

    /// A unit that already translates takes another stream table only while it is off: meanwhile it refuses all accesses, also of attached
    /// devices. (One that is off turns on without such a gap.)
    fn enable(&self) -> Result<(), UnitError> {
        let registers = self.host.registers();
        if registers.read32(reg::CR0) & cr0::SMMUEN != 0 {
            self.refuse_while_off(true)?;
            self.control(|_| QUEUES, "turn firmware's translation off")?;
        }
        let tables = self.cached(cr1::TABLES_CACHED, cr1::TABLES_UNCACHED);
        registers.write32(reg::CR1, registers.read32(reg::CR1) & !cr1::TABLES | tables);
        registers.write32(reg::CR2, cr2::RECINVSID | cr2::PTM);
        let (base, shape) = self.streams.lock().registers();
        registers.write64(reg::STRTAB_BASE, base);
        registers.write32(reg::STRTAB_BASE_CFG, shape);
        // Entries first: their translations could be refetched otherwise.
        self.carry_out(&[command::CFGI_ALL])?;
        let all = [command::TLBI_ALL, command::TLBI_EL2];
        let has_el2 = self.capabilities.idr0 & idr0::HYP != 0;
        self.carry_out(&all[..if has_el2 { 2 } else { 1 }])?;
        let check = if self.capabilities.idr0 & idr0::ATS != 0 { cr0::ATSCHK } else { 0 };
        self.control(|_| QUEUES | cr0::SMMUEN | check, "turn translation on")
    }

    unsafe fn attach(&self, device: DeviceId, to: Attachment<Arm<GRANULE>>) -> Result<(), UnitError> {
        let held = match to {
            Attachment::PassThrough => Held::Everything,
            Attachment::Table { domain, root, format } => {
                self.check(domain, root, &format)?;
                Held::Table(Stage::of(&format), domain)
            }
        };
        let frames = self.host.frames();
        // Held during the wait for the unit: only attach and detach take it.
        let mut streams = self.streams.lock();
        let mut stream = streams.make(frames, device.0)?;
        if stream.held() != Held::Nothing {
            return Err(UnitError::Attached { device: device.0 });
        }
        let first = self.lead(&stream, &to)?;
        stream.hold(held);
        // The entry is not valid until the cached copies of its other words are invalidated (section 3.21.3: the unit reads them one by
        // one, in any order).
        self.forget_entry(device.0)?;
        if let Held::Table(stage, _) = held {
            // Before the unit can walk the table; see `submit`.
            self.stages.fetch_or(bit(stage), Ordering::AcqRel);
            fence(Ordering::SeqCst);
        }
        stream.store_first(frames, first);
        // It may have cached the invalid entry.
        self.carry_out(&[command::stream(device.0)])
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitError> {
        let frames = self.host.frames();
        let mut streams = self.streams.lock();
        let mut stream = streams.find(device.0)?;
        let held = stream.held();
        if held == Held::Nothing {
            return Err(UnitError::NotAttached { device: device.0 });
        }
        stream.store_first(frames, 0);
        // First, and confirmed: its translations could be refetched otherwise.
        self.forget_entry(device.0)?;
        match held {
            Held::Table(Stage::One, domain) => self.carry_out(&[command::tlbi_asid(domain.0)])?,
            Held::Table(Stage::Two, domain) => self.carry_out(&[command::tlbi_vmid(domain.0)])?,
            Held::Everything | Held::Nothing => {}
        }
        stream.hold(Held::Nothing);
        Ok(())
    }

    fn next_fault(&self) -> Option<Fault> {
        let fault = self.events.lock().next(self.host.frames(), self.host.registers());
        if fault.is_none() {
            // Acknowledges aborted writes of the event queue, or no event is delivered again.
            self.queue.look_for_errors(&self.host);
        }
        fault
    }

    fn shut_down(self) -> Result<(), UnitError> {
        self.control(|on| on & !cr0::SMMUEN, "turn translation off")?;
        self.refuse_while_off(false)?;
        self.give_back(0)
    }
}

/// CR0: the queues that each unit has.
const QUEUES: u32 = cr0::CMDQEN | cr0::EVENTQEN;

const fn bit(stage: Stage) -> u64 {
    match stage {
        Stage::One => 1,
        Stage::Two => 2,
    }
}

// SAFETY: 1: a submission ends with CMD_SYNC, which the unit consumes after all earlier invalidations are complete, including accesses that
// used their translations (section 4.7), and a CPU returns `Ok` when that is consumed and no command was refused meanwhile. (A CMD_SYNC
// confirms its own queue: see `own`.) The commands cover their requests in each stage that a device was attached to: this CPU's fence is
// either before that of `attach`, and then the unit sees what the caller has stored when it first walks that stage; or after it, and then
// the stage's bit is seen here. If CPUs share waits, `Ok` is of a submission that covers the requests and began after the call
// (`SharedWaits::submit`): the CPU that makes it has the fence, after all that the others have stored. 2: by `Registers` and `Frames`. 3:
// these fences order the submissions, in whichever queue they are. 4: no device has a TLB, because the unit refuses ATS.
unsafe impl<H: Host, const GRANULE: u32> InvalidationQueue for Unit<H, GRANULE> {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        let own = self.own.of_caller(&self.host);
        let (queue, waits) = own.map_or((&self.queue, &self.waits), |own| (&own.queue, &own.waits));
        waits.share(&self.host, requests, |requests| self.submit_to(queue, requests))
    }
}

impl<H: Host, const GRANULE: u32> Unit<H, GRANULE> {
    /// Submits `requests` without sharing the wait.
    fn submit_to(&self, queue: &Queue, requests: &[Request]) -> Result<(), InvalidationError> {
        fence(Ordering::SeqCst);
        let used = self.stages.load(Ordering::Acquire);
        let has_ranges = self.capabilities.idr3 & IDR3_RIL != 0;
        let granularity = if has_ranges { Granularity::Run } else { Granularity::Page };
        // All tables of this unit have this granule: 12, 14 or 16, so it is a page size.
        let granule = PageSize::from_shift(GRANULE).unwrap_or(PageSize::SIZE_4K);
        let ways = Ways { granule, granularity };
        let stages = || [Stage::One, Stage::Two].into_iter().filter(|stage| used & bit(*stage) != 0);
        let each = requests.iter().flat_map(|request| stages().map(move |stage| (request, stage)));
        queue.carry_out(&self.host, ways, each)
    }
}
