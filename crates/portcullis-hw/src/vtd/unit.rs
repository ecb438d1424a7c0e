//! A unit: bring-up, take-over, the tables that lead devices to domains, shutdown.

use alloc::boxed::Box;

use portcullis::addr::{DeviceId, DomainId, Iova, PageSize};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::pgtable::{Format, VtdSecondStage};
use portcullis::platform::Frames;

use super::faults;
use super::layout::{
    FECTL_IM, IQA_ONE_FRAME, PMEN_EPM, PMEN_PRS, RTADDR_MODE, cap, descriptor, ecap, entry, fsts, global,
    record, reg,
};
use super::queue::{Bell, describe};
use crate::fault::Fault;
use crate::frames::Words;
use crate::host::{Host, Registers, UnitError, wait_until};
use crate::iommu::{Attachment, Iommu};
use crate::queue::{Command, Queue};
use crate::sync::Mutex;

/// Words of a root or context table: 256 entries of two.
const FUNCTIONS: u32 = 256;

/// What a unit can do, as its two capability registers say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    cap: u64,
    ecap: u64,
}

impl Capabilities {
    /// The Capability Register.
    pub const fn cap(&self) -> u64 {
        self.cap
    }

    /// The Extended Capability Register.
    pub const fn ecap(&self) -> u64 {
        self.ecap
    }

    fn last_iova(&self) -> Iova {
        Iova::new(u64::MAX >> (64 - cap::mgaw(self.cap).min(64)))
    }

    /// Whether devices can be let through without translation.
    pub const fn has_pass_through(&self) -> bool {
        self.ecap & ecap::PT != 0
    }

    /// Whether entries that are absent are cached, so that each map must be followed by an invalidation.
    pub const fn caches_absent(&self) -> bool {
        self.cap & cap::CM != 0
    }

    /// Whether the unit knows of devices that cache translations. (This driver lets no device do so: what it attaches is refused
    /// translations of its own.)
    pub const fn has_device_tlbs(&self) -> bool {
        self.ecap & ecap::DT != 0
    }

    /// Number 0 is kept, as a unit that caches what is absent uses it for that; and the highest, for devices without translation.
    fn domains(&self) -> (DomainId, DomainId) {
        let last = (1_u32 << cap::domain_bits(self.cap).min(16)) - 2;
        (DomainId(1), DomainId(last as u16))
    }

    /// Four levels where it walks them, else three, else five; large pages and snooping as it has them.
    fn second_stage(&self) -> Result<VtdSecondStage, UnitError> {
        let layouts =
            [VtdSecondStage::four_level(), VtdSecondStage::three_level(), VtdSecondStage::five_level()];
        let walked = layouts.into_iter().find(|layout| cap::sagaw(self.cap) >> layout.aw() & 1 != 0);
        let lacks =
            UnitError::Lacks { what: "page tables of 3 to 5 levels", register: "CAP", value: self.cap };
        let largest = match (self.cap & cap::PAGES_2M != 0, self.cap & cap::PAGES_1G != 0) {
            (true, true) => PageSize::SIZE_1G,
            (true, false) => PageSize::SIZE_2M,
            // 1 GiB without 2 MiB is no hardware that there is.
            (false, _) => PageSize::SIZE_4K,
        };
        let snoops = self.ecap & ecap::SC != 0;
        walked.map(|layout| layout.up_to(largest).with_snoop_control(snoops)).ok_or(lacks)
    }
}

/// A VT-d unit.
///
/// Its structures stay allocated when it is dropped, as the hardware goes on reading them: [`shut_down`](Iommu::shut_down)
/// gives them back.
#[derive(Debug)]
pub struct Unit<H: Host> {
    host: H,
    capabilities: Capabilities,
    /// What an invalidation of the IOTLB waits for besides.
    drain: u64,
    queue: Queue,
    tables: Mutex<Tables>,
    /// Held for one command in the global command register, which takes them one at a time.
    commands: Mutex<()>,
    /// Where the next fault record is looked for.
    next_record: Mutex<usize>,
}

/// The root table, and a context table for each bus that has a device.
#[derive(Debug)]
struct Tables {
    root: Words,
    contexts: Box<[Option<Words>]>,
}

impl<H: Host> Unit<H> {
    /// Takes a unit over: reads what it can do, turns off the invalidation queue that firmware may have left on, and turns on
    /// one of its own. Devices reach what they have reached before, until [`enable`](Iommu::enable); attach before that what
    /// must not be interrupted (firmware's reserved regions, a display).
    ///
    /// Allocates three frames. Waits for the unit, up to four times the host's patience. Faults that were recorded before are
    /// dropped.
    ///
    /// # Errors
    /// [`UnitError::NotThere`]; [`UnitError::Lacks`] where there is no queued invalidation (all units since 2009 have it), none that
    /// waits for accesses under way, or a walker that is not coherent and frames that are not [cleaned](Frames::clean); [`UnitError::OutOfMemory`];
    /// [`UnitError::TimedOut`].
    pub fn start(host: H) -> Result<Self, UnitError> {
        let registers = host.registers();
        let version = registers.read32(reg::VER);
        let (cap_value, ecap_value) = (registers.read64(reg::CAP), registers.read64(reg::ECAP));
        if version == 0 || version == u32::MAX {
            return Err(UnitError::NotThere { register: "VER", value: u64::from(version) });
        }
        if cap_value == u64::MAX || ecap_value == u64::MAX {
            return Err(UnitError::NotThere { register: "CAP", value: cap_value });
        }
        let lacks = |what| UnitError::Lacks { what, register: "ECAP", value: ecap_value };
        if ecap_value & ecap::QI == 0 {
            return Err(lacks("queued invalidation"));
        }
        if ecap_value & ecap::C == 0 && H::Frames::COHERENT {
            return Err(lacks("a coherent walker, and Frames::COHERENT says that stores need no cleaning"));
        }
        let capabilities = Capabilities { cap: cap_value, ecap: ecap_value };
        capabilities.second_stage()?;
        // From major version 2 on, invalidations wait for accesses unasked (section 6.5.2).
        let (has_drains, drains_unasked) = (cap_value & (cap::DWD | cap::DRD), version >> 4 & 0xf >= 2);
        if has_drains != cap::DWD | cap::DRD && !drains_unasked {
            let what = "invalidations that wait for accesses under way";
            return Err(UnitError::Lacks { what, register: "CAP", value: cap_value });
        }
        let drains = [(cap::DWD, descriptor::DRAIN_WRITES), (cap::DRD, descriptor::DRAIN_READS)];
        let drain = drains.iter().filter(|(can, _)| cap_value & can != 0).fold(0, |all, (_, bit)| all | bit);

        let root = Words::new(host.frames(), 1)?;
        let queue = match Queue::new(host.frames()) {
            Ok(queue) => queue,
            Err(error) => {
                // SAFETY: of the line above; the unit was told nothing.
                unsafe { root.free(host.frames()) };
                return Err(error);
            }
        };
        let contexts = (0..FUNCTIONS).map(|_| None).collect();
        let unit = Self {
            host,
            capabilities,
            drain,
            queue,
            tables: Mutex::new(Tables { root, contexts }),
            commands: Mutex::new(()),
            next_record: Mutex::new(0),
        };
        // After an error the unit may have been told of the queue's memory: it stays allocated.
        unit.turn_on_queue()?;
        Ok(unit)
    }

    fn turn_on_queue(&self) -> Result<(), UnitError> {
        let registers = self.host.registers();
        if registers.read32(reg::GSTS) & global::QIE != 0 {
            // It may have stopped at something. What it was asked for is for nobody now: where it does not come to the end, it is
            // turned off all the same.
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
        // What was refused before is of no device that this driver has attached. No more than there are records: one may stay.
        for _ in 0..cap::fault_records(self.capabilities.cap) {
            if self.next_fault().is_none() {
                break;
            }
        }
        registers.write64(reg::IQT, 0);
        registers.write64(reg::IQA, self.queue.address() | IQA_ONE_FRAME);
        self.command(global::QIE, true, "turn its invalidation queue on")
    }

    /// What the unit can do.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// The host.
    pub fn host(&self) -> &H {
        &self.host
    }

    /// Gives a global command, and waits until its status says that it is carried out.
    fn command(&self, bit: u32, on: bool, what: &'static str) -> Result<(), UnitError> {
        let registers = self.host.registers();
        let _one_at_a_time = self.commands.lock();
        let status = registers.read32(reg::GSTS);
        if status == u32::MAX {
            return Err(UnitError::NotThere { register: "GSTS", value: u64::from(status) });
        }
        let states = status & global::STATES;
        registers.write32(reg::GCMD, if on { states | bit } else { states & !bit });
        wait_until(&self.host, what, || {
            let status = registers.read32(reg::GSTS);
            status != u32::MAX && (status & bit != 0) == on
        })
    }

    /// Has the unit forget contexts.
    fn confirm(&self, commands: &[Command]) -> Result<(), UnitError> {
        self.queue.submit(&self.host, &Bell(&self.host), commands).map_err(UnitError::Unconfirmed)
    }

    /// Makes a unit with a write buffer see what is stored.
    fn flush_write_buffer(&self) -> Result<(), UnitError> {
        if self.capabilities.cap & cap::RWBF == 0 {
            return Ok(());
        }
        let registers = self.host.registers();
        let _one_at_a_time = self.commands.lock();
        let states = registers.read32(reg::GSTS) & global::STATES;
        registers.write32(reg::GCMD, states | global::WBF);
        wait_until(&self.host, "flush its write buffer", || registers.read32(reg::GSTS) & global::WBF == 0)
    }
}

impl<H: Host> Iommu<VtdSecondStage> for Unit<H> {
    fn layout(&self) -> Result<VtdSecondStage, UnitError> {
        self.capabilities.second_stage()
    }

    fn domains(&self) -> (DomainId, DomainId) {
        self.capabilities.domains()
    }

    fn last_iova(&self) -> Iova {
        self.capabilities.last_iova()
    }

    fn enable(&self) -> Result<(), UnitError> {
        let registers = self.host.registers();
        self.flush_write_buffer()?;
        let is_on = registers.read32(reg::GSTS) & global::TE != 0;
        if is_on && registers.read64(reg::RTADDR) & RTADDR_MODE != 0 {
            // The mode of the tables changes, which it may not while they are walked.
            self.command(global::TE, false, "turn firmware's translation off")?;
        }
        registers.write64(reg::RTADDR, self.tables.lock().root.phys().get());
        self.command(global::SRTP, true, "take its root table")?;
        // A unit with ESRTPS does this by itself, and once more does no harm.
        let everything = [descriptor::CONTEXT_ALL, descriptor::iotlb_all(self.drain)];
        self.confirm(&everything)?;
        self.command(global::TE, true, "turn translation on")?;
        if self.capabilities.cap & (cap::PLMR | cap::PHMR) != 0 {
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
        let source = source_of(device)?;
        let (first, last) = self.capabilities.domains();
        let (low, high, number) = match to {
            Attachment::Table { domain, root, format } => {
                if domain < first || domain > last {
                    return Err(UnitError::NoSuchDomain { domain: domain.0, first: first.0, last: last.0 });
                }
                if root.get() & !entry::ADDRESS != 0 {
                    return Err(UnitError::BadRoot { root });
                }
                let aw = format.aw();
                if cap::sagaw(self.capabilities.cap) >> aw & 1 == 0 {
                    return Err(UnitError::NoSuchTables { levels: format.levels() });
                }
                (root.get() | entry::TRANSLATED, entry::domain(aw, domain.0), domain)
            }
            Attachment::PassThrough => {
                if !self.capabilities.has_pass_through() {
                    let value = self.capabilities.ecap;
                    return Err(UnitError::Lacks { what: "pass-through", register: "ECAP", value });
                }
                // The widest addresses that the unit has, as the manual demands.
                let aw = 31 - cap::sagaw(self.capabilities.cap).leading_zeros();
                let number = DomainId(last.0 + 1);
                (entry::PASS_THROUGH, entry::domain(aw, number.0), number)
            }
        };
        let frames = self.host.frames();
        let mut tables = self.tables.lock();
        let at = tables.context_of(frames, source)?;
        let (table, index) = (tables.context(source)?, at);
        if table.load(frames, index) != 0 || table.load(frames, index + 1) != 0 {
            return Err(UnitError::Attached { device: device.0 });
        }
        // The entry is present with its last store.
        table.store(frames, index + 1, high);
        table.store(frames, index, low | entry::PRESENT);
        self.flush_write_buffer()?;
        if self.capabilities.caches_absent() {
            // What is absent is cached as domain 0's.
            let forget = [descriptor::context_of(0, source), descriptor::iotlb_domain(self.drain, number.0)];
            self.confirm(&forget)?;
        }
        Ok(())
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitError> {
        let source = source_of(device)?;
        let frames = self.host.frames();
        // Held while the unit is waited for: nothing but attaching waits for it.
        let tables = self.tables.lock();
        let absent = UnitError::NotAttached { device: device.0 };
        let table = tables.context(source).map_err(|_| absent)?;
        let index = index_in_bus(source);
        let high = table.load(frames, index + 1);
        if high == 0 {
            return Err(absent);
        }
        table.store(frames, index, 0);
        self.flush_write_buffer()?;
        let domain = entry::domain_of(high);
        // The context first: what it leads to could be cached anew else.
        let forget = [descriptor::context_of(domain, source), descriptor::iotlb_domain(self.drain, domain)];
        self.confirm(&forget)?;
        // The second word says that the device is attached, until here.
        table.store(frames, index + 1, 0);
        Ok(())
    }

    fn next_fault(&self) -> Option<Fault> {
        let registers = self.host.registers();
        let (offset, count) =
            (cap::fault_offset(self.capabilities.cap), cap::fault_records(self.capabilities.cap));
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
        // The last descriptor is a wait, as the queue must be idle when it is turned off.
        let _ = self.confirm(&[]);
        self.command(global::QIE, false, "turn its invalidation queue off")?;
        let Self { host, queue, tables, .. } = self;
        let tables = tables.into_inner();
        // SAFETY: translation and the queue are off, as the unit has confirmed.
        unsafe {
            queue.free(host.frames());
            tables.root.free(host.frames());
            tables.contexts.into_iter().flatten().for_each(|table| table.free(host.frames()));
        }
        Ok(())
    }
}

impl Tables {
    /// Makes the context table of a device's bus, if there is none. Where the device's entry is in it.
    fn context_of<F: Frames>(&mut self, frames: &F, source: u16) -> Result<usize, UnitError> {
        let bus = usize::from(source >> 8);
        if let Some(place @ None) = self.contexts.get_mut(bus) {
            let table = Words::new(frames, 1)?;
            self.root.store(frames, bus * 2, table.phys().get() | entry::PRESENT);
            *place = Some(table);
        }
        Ok(index_in_bus(source))
    }

    /// The context table of a device's bus.
    fn context(&self, source: u16) -> Result<&Words, UnitError> {
        let table = self.contexts.get(usize::from(source >> 8)).and_then(Option::as_ref);
        table.ok_or(UnitError::NotAttached { device: u32::from(source) })
    }
}

/// The first word of a device's entry in the context table of its bus.
fn index_in_bus(source: u16) -> usize {
    usize::from(source & 0xff) * 2
}

fn source_of(device: DeviceId) -> Result<u16, UnitError> {
    let last = u32::from(u16::MAX);
    u16::try_from(device.0).map_err(|_| UnitError::NoSuchDevice { device: device.0, last })
}

// SAFETY: a submission ends with a descriptor that the unit confirms when all before it is complete (section 6.5.2.8), IOTLB
// invalidations wait for accesses (`start` takes no unit that cannot), the descriptors are in the order of the requests, and each covers its request. Submissions are in one order by the ring's exchanges. Registers and memory
// are as `Registers` and `Frames` promise.
unsafe impl<H: Host> InvalidationQueue for Unit<H> {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.flush_write_buffer()
            .map_err(|_| InvalidationError::TimedOut { waited_ns: self.host.patience_ns() })?;
        let Capabilities { cap, ecap } = self.capabilities;
        self.queue.carry_out(&self.host, &Bell(&self.host), requests, |commands, request| {
            describe(commands, (cap, ecap), self.drain, request)
        })
    }

    fn caches_absent(&self) -> bool {
        self.capabilities.cap & (cap::CM | cap::RWBF) != 0
    }
}
