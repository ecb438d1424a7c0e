//! A unit: bring-up, take-over, device contexts, shutdown.

use portcullis::addr::{DeviceId, DomainId, Iova, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::pgtable::{Format, Layout, Riscv};

use super::capabilities::{Capabilities, Stage};
use super::directory::{Directory, LEVELS, Place};
use super::faults::FaultQueue;
use super::layout::{
    COMMAND_ORDER, FAULT_ORDER, FCTL_BE, FCTL_GXL, NUMBER, cap, command, context, csr, ddtp, number,
    queue_base, reg,
};
use super::queue::{Bell, all_of, describe};
use crate::fault::Fault;
use crate::host::{Host, Registers, UnitError, wait_until};
use crate::iommu::{Attachment, Iommu};
use crate::numbers::Numbers;
use crate::queue::{Command, Queue};
use crate::sync::Mutex;
use crate::waits::Waits;

/// The control word of a context that is not valid, whose device still counts as attached. The unit ignores it.
const BETWEEN: u64 = 2;

/// A RISC-V IOMMU.
///
/// A drop leaks its structures, because the hardware goes on reading them: [`shut_down`](Iommu::shut_down) frees them.
#[derive(Debug)]
pub struct Unit<H: Host> {
    host: H,
    capabilities: Capabilities,
    stage: Stage,
    queue: Queue,
    /// Protects the fault records, and the control register of their queue.
    faults: Mutex<FaultQueue>,
    /// Protects contexts and `ddtp`. Held during waits for the unit.
    contexts: Mutex<Contexts>,
    numbers: Numbers,
    waits: Waits,
}

#[derive(Debug)]
struct Contexts {
    directory: Directory,
    /// Levels that the unit walks; `None` if they are not known, and it walks none.
    levels: Option<u32>,
}

impl Contexts {
    /// The largest device ID, as far as is known.
    fn last_device(&self) -> u32 {
        self.directory.last_device(self.levels.unwrap_or(LEVELS))
    }
}

impl<H: Host> Unit<H> {
    /// Takes a unit over: reads its capabilities, and replaces the queues that firmware may have left on by a command queue and a fault
    /// queue of its own. Devices keep the access that they had until [`enable`](Iommu::enable); before that, attach devices that must not
    /// be interrupted. Domains use the first stage if the unit has it, else the second.
    ///
    /// Allocates six frames. Waits for the unit, up to ten times the host's patience.
    ///
    /// # Errors
    /// [`UnitError::NotThere`]; [`UnitError::Lacks`] for a version other than 1, structures that are not little-endian, page tables that no
    /// [`Riscv`] describes, or queues of less than a frame; [`UnitError::OutOfMemory`]; [`UnitError::TimedOut`].
    pub fn start(host: H) -> Result<Self, UnitError> {
        let capabilities = Capabilities(host.registers().read64(reg::CAPABILITIES));
        let has_first = capabilities.layouts(Stage::First).next().is_some();
        Self::start_in(host, if has_first { Stage::First } else { Stage::Second })
    }

    /// As [`start`](Self::start), for domains of `stage`.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_in(host: H, stage: Stage) -> Result<Self, UnitError> {
        let registers = host.registers();
        let capabilities = Capabilities(registers.read64(reg::CAPABILITIES));
        let Capabilities(value) = capabilities;
        if value == 0 || value == u64::MAX {
            return Err(UnitError::NotThere { register: "capabilities", value });
        }
        if cap::major(value) != 1 {
            let what = "version 1 of the architecture";
            return Err(UnitError::Lacks { what, register: "capabilities", value });
        }
        let features = registers.read32(reg::FCTL);
        if features & (FCTL_BE | FCTL_GXL) != 0 {
            let what = "little-endian structures and tables of 64-bit entries";
            return Err(UnitError::Lacks { what, register: "fctl", value: u64::from(features) });
        }
        capabilities.layout(stage)?;
        // Without ATS there is no page-request queue, and its register reads 0.
        for register in [reg::CQCSR, reg::FQCSR, reg::PQCSR] {
            turn(&host, register, false, "turn off a queue that it was left with")?;
        }

        let directory = Directory::new(host.frames(), capabilities.is_extended())?;
        let queue = match Queue::new(host.frames()) {
            Ok(queue) => queue,
            Err(error) => {
                // SAFETY: 1: allocated above from the host's frames. 2: the unit was not told of them.
                unsafe { directory.free(host.frames()) };
                return Err(error);
            }
        };
        let faults = match FaultQueue::new(host.frames()) {
            Ok(faults) => faults,
            Err(error) => {
                // SAFETY: 1: allocated above from the host's frames. 2: the unit was not told of them.
                unsafe {
                    queue.free(host.frames());
                    directory.free(host.frames());
                }
                return Err(error);
            }
        };
        let waits = Waits::new(&host);
        let unit = Self {
            host,
            capabilities,
            stage,
            queue,
            faults: Mutex::new(faults),
            contexts: Mutex::new(Contexts { directory, levels: None }),
            numbers: Numbers::new(),
            waits,
        };
        // After an error the unit may know the queues' addresses: they stay allocated.
        unit.turn_on_queues()?;
        Ok(unit)
    }

    fn turn_on_queues(&self) -> Result<(), UnitError> {
        let registers = self.host.registers();
        let take = |what, register, name, base| {
            registers.write64(register, base);
            // A size or an address that the unit does not support reads back differently.
            let value = registers.read64(register);
            if value & (NUMBER | 0x1f) == base {
                Ok(())
            } else {
                Err(UnitError::Lacks { what, register: name, value })
            }
        };
        let records = self.faults.lock().address();
        take("a fault queue of a frame", reg::FQB, "fqb", queue_base(records, FAULT_ORDER))?;
        registers.write32(reg::FQH, 0);
        turn(&self.host, reg::FQCSR, true, "turn its fault queue on")?;
        let commands = self.queue.address();
        take("a command queue of a frame", reg::CQB, "cqb", queue_base(commands, COMMAND_ORDER))?;
        registers.write32(reg::CQT, 0);
        turn(&self.host, reg::CQCSR, true, "turn its command queue on")
    }

    /// The unit's capabilities.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// The stage of its domains.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The host.
    pub fn host(&self) -> &H {
        &self.host
    }

    fn confirm(&self, commands: &[Command]) -> Result<(), UnitError> {
        self.queue.submit(&self.host, &Bell(&self.host), commands).map_err(UnitError::Unconfirmed)
    }

    /// Writes `ddtp`, and returns what it then reads. The caller holds the lock.
    fn point(&self, value: u64, what: &'static str) -> Result<u64, UnitError> {
        let registers = self.host.registers();
        let wait_while_busy = || {
            wait_until(&self.host, what, || {
                let low = registers.read32(reg::DDTP);
                low != u32::MAX && low & ddtp::BUSY == 0
            })
        };
        wait_while_busy()?;
        // The mode is in the low half, which is therefore last, on every bus.
        registers.write32(reg::DDTP + 4, (value >> 32) as u32);
        wait_while_busy()?;
        registers.write32(reg::DDTP, value as u32);
        wait_while_busy()?;
        Ok(registers.read64(reg::DDTP))
    }

    /// Makes the unit refuse all accesses, and waits for earlier ones. The caller holds the lock.
    fn turn_off(&self) -> Result<(), UnitError> {
        // The page number stays, as the manual demands.
        let kept = self.host.registers().read64(reg::DDTP) & NUMBER;
        self.switch(kept, ddtp::OFF, "turn translation off")
    }

    /// Sets a mode that every unit supports.
    fn switch(&self, page_number: u64, mode: u64, what: &'static str) -> Result<(), UnitError> {
        let value = self.point(page_number | mode, what)?;
        if value & ddtp::MODE == mode {
            Ok(())
        } else {
            Err(UnitError::Lacks { what: "the modes Off and Bare", register: "ddtp", value })
        }
    }

    /// The words of a context that leads to a page table.
    fn context(
        &self,
        domain: DomainId,
        root: PhysAddr,
        format: Riscv,
    ) -> Result<[(usize, u64); 3], UnitError> {
        if Stage::of(format) != self.stage || !self.capabilities.walks(format) {
            return Err(UnitError::NoSuchTables { levels: format.levels() });
        }
        // A second-stage root has four frames.
        let frames = format.root_frames() as u64;
        if root.get() & !context::ROOT != 0 || !(root.get() >> 12).is_multiple_of(frames) {
            return Err(UnitError::BadRoot { root });
        }
        let (code, DomainId(tag)) = (format.mode(), domain);
        let (second, attributes, first) = match self.stage {
            Stage::First => (0, context::pscid(tag.into()), context::stage(code, 0, root.get())),
            Stage::Second => (context::stage(code, tag, root.get()), 0, 0),
        };
        Ok([(context::SECOND, second), (context::ATTRIBUTES, attributes), (context::FIRST, first)])
    }
}

/// Turns a queue on or off, and waits until it is.
fn turn<H: Host>(host: &H, register: usize, on: bool, what: &'static str) -> Result<(), UnitError> {
    let registers = host.registers();
    let mut control = 0;
    wait_until(host, what, || {
        control = registers.read32(register);
        control != u32::MAX && control & csr::BUSY == 0
    })?;
    if !on && control & (csr::ENABLE | csr::ON) == 0 {
        return Ok(());
    }
    registers.write32(register, control & csr::KEPT | if on { csr::ENABLE } else { 0 });
    wait_until(host, what, || {
        let control = registers.read32(register);
        control != u32::MAX && control & csr::BUSY == 0 && (control & csr::ON != 0) == on
    })
}

// SAFETY: 1 and 2: the submissions at the end of `attach` and `detach`, by `InvalidationQueue` below. 3: the unit's structures change only
// after the last check. 4: the layout is of its capabilities. 5: the numbers are a field of the unit.
unsafe impl<H: Host> Iommu<Riscv> for Unit<H> {
    type Frames = H::Frames;

    fn frames(&self) -> &H::Frames {
        self.host.frames()
    }

    fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    fn layout(&self) -> Result<Riscv, UnitError> {
        self.capabilities.layout(self.stage)
    }

    fn domains(&self) -> (DomainId, DomainId) {
        (DomainId(0), DomainId(u16::MAX))
    }

    fn last_iova(&self) -> Iova {
        let widest = self.capabilities.layouts(self.stage).next_back();
        widest.map_or(Iova::new(0), |layout| layout.last_iova())
    }

    /// A unit that firmware left translating refuses all accesses for a moment: there is no other way between two directories. One that
    /// firmware left without translation switches at once.
    ///
    /// [`UnitError::NoSuchDevice`]: an attached device is beyond the unit's directory. It is refused, while all others work: detach it, and
    /// call this again.
    fn enable(&self) -> Result<(), UnitError> {
        let registers = self.host.registers();
        let mut contexts = self.contexts.lock();
        if registers.read64(reg::DDTP) & ddtp::MODE != ddtp::BARE {
            self.turn_off()?;
        }
        contexts.levels = None;
        // Without translation the unit caches nothing new, and keeps its old cache entries.
        let all_guests = self.capabilities.value() & cap::SECOND_STAGE != 0;
        let everything = [command::DIRECTORY_ALL, command::VMA_ALL, command::GVMA_ALL];
        self.confirm(if all_guests { &everything } else { &everything[..2] })?;
        for levels in (1..=LEVELS).rev() {
            let Some(root) = contexts.directory.root(levels) else { continue };
            let wanted = number(root.get()) | ddtp::directory(levels);
            // From here on it may walk the directory, even after an error.
            contexts.levels = Some(levels);
            let value = self.point(wanted, "turn translation on")?;
            if value & (ddtp::MODE | NUMBER) != wanted {
                // The unit has taken another mode, or another address.
                if ![ddtp::OFF, ddtp::BARE].contains(&(value & ddtp::MODE)) {
                    self.turn_off()?;
                }
                contexts.levels = None;
                continue;
            }
            // Wait for outstanding accesses without translation.
            self.confirm(&[])?;
            let last = contexts.last_device();
            let beyond = contexts.directory.beyond(self.host.frames(), last);
            return beyond.map_or(Ok(()), |device| Err(UnitError::NoSuchDevice { device, last }));
        }
        let value = registers.read64(reg::DDTP);
        Err(UnitError::Lacks { what: "a device directory", register: "ddtp", value })
    }

    unsafe fn attach(&self, device: DeviceId, to: Attachment<Riscv>) -> Result<(), UnitError> {
        let words = match to {
            Attachment::Table { domain, root, format } => self.context(domain, root, format)?,
            // No stage translates.
            Attachment::PassThrough => {
                [context::SECOND, context::ATTRIBUTES, context::FIRST].map(|word| (word, 0))
            }
        };
        let frames = self.host.frames();
        let mut contexts = self.contexts.lock();
        let (DeviceId(device), last, is_walked) = (device, contexts.last_device(), contexts.levels.is_some());
        if device > last {
            return Err(UnitError::NoSuchDevice { device, last });
        }
        let place = contexts.directory.make(frames, device)?;
        if place.load(frames, context::CONTROL) != 0 {
            return Err(UnitError::Attached { device });
        }
        place.store(frames, context::CONTROL, BETWEEN);
        for (word, value) in words {
            place.store(frames, word, value);
        }
        // The unit may read the words of a context in any order ("Device-context"): if it has read these with their old values, and then
        // reads that the context is valid, it would let the device through. So what it has read is invalidated first.
        if is_walked {
            self.confirm(&[command::directory(device)])?;
        }
        place.store(frames, context::CONTROL, context::VALID);
        Ok(())
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitError> {
        let frames = self.host.frames();
        let contexts = self.contexts.lock();
        // A device that was attached before the unit's width was known can be beyond it.
        let widest = contexts.directory.last_device(LEVELS);
        if device.0 > widest {
            return Err(UnitError::NoSuchDevice { device: device.0, last: widest });
        }
        let absent = UnitError::NotAttached { device: device.0 };
        let place = contexts.directory.find(device.0).ok_or(absent)?;
        if place.load(frames, context::CONTROL) == 0 {
            return Err(absent);
        }
        place.store(frames, context::CONTROL, BETWEEN);
        let is_walked = contexts.levels.is_some() && device.0 <= contexts.last_device();
        let forget = self.forget(place);
        // The command takes no ID beyond the width. The context goes first: its translations could be refetched otherwise; and because the
        // unit may reorder commands, a fence separates them.
        let directory = if is_walked { command::directory(device.0) } else { command::NOTHING };
        self.confirm(&[directory, command::NOTHING, forget[0], forget[1]])?;
        for word in [context::SECOND, context::ATTRIBUTES, context::FIRST] {
            place.store(frames, word, 0);
        }
        place.store(frames, context::CONTROL, 0);
        Ok(())
    }

    fn next_fault(&self) -> Option<Fault> {
        self.faults.lock().next(self.host.registers(), self.host.frames())
    }

    fn shut_down(self) -> Result<(), UnitError> {
        {
            let _contexts = self.contexts.lock();
            // `Bare` has no other way. Cache entries stay, and neither mode uses them: the next `enable` invalidates them.
            self.turn_off()?;
            self.switch(0, ddtp::BARE, "let all accesses through")?;
        }
        // `cqon` only says that the unit no longer fetches from the queue. A fetched fence may still be about to store.
        let settled = self.queue.settle(&self.host, &Bell(&self.host));
        turn(&self.host, reg::CQCSR, false, "turn its command queue off")?;
        turn(&self.host, reg::FQCSR, false, "turn its fault queue off")?;
        settled?;
        let Self { host, queue, faults, contexts, .. } = self;
        // SAFETY: 1: all of it was allocated from the host's frames. 2: translation and the queues are off, and no fence is outstanding, as
        // the unit has confirmed.
        unsafe {
            queue.free(host.frames());
            faults.into_inner().free(host.frames());
            contexts.into_inner().directory.free(host.frames());
        }
        Ok(())
    }
}

impl<H: Host> Unit<H> {
    /// Invalidates all that the unit has cached by a context ("Changing device directory table entry").
    fn forget(&self, place: Place<'_>) -> [Command; 2] {
        let word = |word| place.load(self.host.frames(), word);
        let (second, attributes, first) =
            (word(context::SECOND), word(context::ATTRIBUTES), word(context::FIRST));
        if context::mode_of(second) != 0 {
            let guest = context::gscid_of(second);
            [command::vma_of_guest(guest), all_of(Stage::Second, DomainId(guest))]
        } else if context::mode_of(first) != 0 {
            [command::vma(context::pscid_of(attributes)), command::NOTHING]
        } else {
            [command::NOTHING; 2]
        }
    }
}

// SAFETY: 1: a submission ends with a fence that the unit confirms after all earlier commands are complete, and accesses that it has
// processed by then are visible (PR and PW; section "IOMMU Command-queue Fence commands"). Each command covers its request: a leaf by its
// address, all levels without one. If CPUs share waits, `Ok` is of a submission that covers the requests and began after the call
// (`SharedWaits::submit`). 2: by `Registers` and `Frames`. 3: the ring's exchanges order the submissions. 4: a fence separates commands for
// the IOTLB from those for device TLBs.
unsafe impl<H: Host> InvalidationQueue for Unit<H> {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        self.waits.share(&self.host, requests, |requests| {
            self.queue.carry_out(&self.host, &Bell(&self.host), requests, |commands, request| {
                describe(commands, self.stage, &self.capabilities, request)
            })
        })
    }
}
