//! A unit: bring-up, take-over, the table that leads devices to domains, shutdown.

use portcullis::addr::{DeviceId, DomainId, Iova, IovaRange};
use portcullis::invalidation::{Invalidation, InvalidationError, InvalidationQueue, Request};
use portcullis::pgtable::{AmdV1, Format};
use portcullis::platform::Frames;

use super::events::Log;
use super::layout::{
    EXCLUSION_ON, RESERVED, capability, command, control, device_table, entry, feature, reg, ring_base,
    ring_place, status,
};
use super::queue::{Bell, describe, set};
use crate::blocks::EVERYTHING;
use crate::fault::Fault;
use crate::frames::Words;
use crate::host::{Host, Registers, UnitError, wait_until};
use crate::iommu::{Attachment, Iommu};
use crate::numbers::Numbers;
use crate::queue::{Command, Commands, Queue};
use crate::switch::Switch;
use crate::sync::{AtomicBool, Mutex, Ordering};
use crate::waits::Waits;

/// The domain of devices that are attached to nothing, which events name.
const NOTHING: u16 = 0;
/// That of devices without translation. (QEMU 10 refuses the entries of domains whose number has
/// bit 8 set, which it takes to be reserved.)
const PASS_THROUGH: u16 = 0xfeff;

/// What firmware and the bus say of a unit. Its registers do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The highest number of a device behind the unit: bus, device and function, as 16 bits (ACPI's
    /// IVRS lists them). The device table takes 32 bytes for each number up to it, in one piece.
    pub last_device: u16,
    /// The first 32 bits of the unit's capability block (identifier 0x0f) in its PCI configuration
    /// space, where the host can read it. A unit that a hypervisor emulates may say there that it
    /// caches absent entries; without this word the driver takes it that the unit does not.
    pub capability: Option<u32>,
}

impl Default for Config {
    /// Every number that there is: 2 MiB.
    fn default() -> Self {
        Self { last_device: u16::MAX, capability: None }
    }
}

/// What a unit can do, as its registers and its capability block say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    features: u64,
    levels: u32,
    caches_absent: bool,
}

impl Capabilities {
    fn new(features: u64, header: Option<u32>) -> Result<Self, UnitError> {
        if let Some(header) = header
            && header & capability::ID_AND_TYPE != capability::OF_AN_IOMMU
        {
            return Err(UnitError::NotThere { register: "capability header", value: u64::from(header) });
        }
        // Units without an Extended Feature register have 0 there: the fewest levels, and no more
        // commands than all have.
        let features =
            if header.is_some_and(|header| header & capability::EFR_SUP == 0) { 0 } else { features };
        let levels = feature::host_levels(features).ok_or(UnitError::Lacks {
            what: "page tables for host translation",
            register: "Extended Feature",
            value: features,
        })?;
        let caches_absent = header.is_some_and(|header| header & capability::NP_CACHE != 0);
        Ok(Self { features, levels, caches_absent })
    }

    /// The Extended Feature register.
    pub const fn features(&self) -> u64 {
        self.features
    }

    /// The most levels of a page table.
    pub const fn levels(&self) -> u32 {
        self.levels
    }

    /// Whether entries that are absent are cached, so that each map must be followed by an
    /// invalidation.
    pub const fn caches_absent(&self) -> bool {
        self.caches_absent
    }
}

/// An AMD-Vi unit.
///
/// Its structures stay allocated when it is dropped, as the hardware goes on reading them:
/// [`shut_down`](Iommu::shut_down) gives them back.
#[derive(Debug)]
pub struct Unit<H: Host> {
    host: H,
    capabilities: Capabilities,
    last_device: u16,
    queue: Queue,
    /// The device table. A device is attached where its second word, which has its domain, is not
    /// 0.
    devices: Mutex<Words>,
    log: Mutex<Log>,
    /// Held for a change of the control register.
    control: Mutex<()>,
    switch: Switch,
    /// See [`Bell`].
    should_run: AtomicBool,
    numbers: Numbers,
    waits: Waits,
}

impl<H: Host> Unit<H> {
    /// Takes a unit over: reads what it can do, and takes the command buffer and the event log away
    /// from firmware that has left them on. Devices reach what they have reached before, until
    /// [`enable`](Iommu::enable); attach before that what must not be interrupted (firmware's
    /// reserved regions, a display).
    ///
    /// Allocates the device table, in one piece, and three frames. Waits for the unit, up to the
    /// host's patience.
    ///
    /// # Errors
    /// [`UnitError::NotThere`]; [`UnitError::Lacks`] for a unit that walks no tables of version 1;
    /// [`UnitError::OutOfMemory`]; [`UnitError::TimedOut`].
    pub fn start(host: H, config: Config) -> Result<Self, UnitError> {
        let registers = host.registers();
        let features = registers.read64(reg::EXTENDED_FEATURE);
        if features == u64::MAX || registers.read64(reg::CONTROL) == u64::MAX {
            return Err(UnitError::NotThere { register: "Extended Feature", value: features });
        }
        let capabilities = Capabilities::new(features, config.capability)?;

        let frames = host.frames();
        let devices = device_words(frames, config.last_device)?;
        let (queue, log) = match (Queue::new(frames), Words::new(frames, 1)) {
            (Ok(queue), Ok(log)) => (queue, log),
            (queue, log) => {
                // SAFETY: of the lines above; the unit was told nothing.
                unsafe {
                    devices.free(frames);
                    queue.into_iter().for_each(|queue| queue.free(frames));
                    log.into_iter().for_each(|log| log.free(frames));
                }
                return Err(UnitError::OutOfMemory);
            }
        };
        let waits = Waits::new(&host);
        let unit = Self {
            host,
            capabilities,
            last_device: config.last_device,
            queue,
            devices: Mutex::new(devices),
            log: Mutex::new(Log::new(log)),
            control: Mutex::new(()),
            switch: Switch::new(),
            should_run: AtomicBool::new(false),
            numbers: Numbers::new(),
            waits,
        };
        // After an error the unit may have been told of the rings' memory: it stays allocated.
        unit.take_rings()?;
        Ok(unit)
    }

    /// Leaves the unit with a command buffer and an event log that are empty, and off.
    fn take_rings(&self) -> Result<(), UnitError> {
        let registers = self.host.registers();
        set(&self.host, &self.control, control::CMD_BUF_EN | control::EVENT_LOG_EN, false);
        self.wait_for_rings("leave the rings that it was left with")?;
        // Before the bases: QEMU keeps the event log's while an interrupt of it is pending.
        registers.write64(reg::STATUS, status::EVENT_OVERFLOW | status::EVENT_LOG_INT | status::COM_WAIT_INT);
        let (commands, events) =
            (ring_base(self.queue.address()), ring_base(self.log.lock().words.phys().get()));
        registers.write64(reg::COMMAND_BASE, commands);
        registers.write64(reg::EVENT_BASE, events);
        // The bases' writes have set these to 0 as well, on units as the manual has them.
        for place in [reg::COMMAND_HEAD, reg::COMMAND_TAIL, reg::EVENT_HEAD, reg::EVENT_TAIL] {
            registers.write64(place, ring_place(0));
        }
        // There is no register that says "a unit": one is there if it keeps what it is told.
        let kept = registers.read64(reg::COMMAND_BASE);
        if kept == commands {
            Ok(())
        } else {
            Err(UnitError::NotThere { register: "Command Buffer Base", value: kept })
        }
    }

    /// Waits until the unit uses neither of its rings.
    fn wait_for_rings(&self, what: &'static str) -> Result<(), UnitError> {
        let registers = self.host.registers();
        wait_until(&self.host, what, || {
            // All ones, where nothing answers, say that both run.
            registers.read64(reg::STATUS) & (status::CMD_BUF_RUN | status::EVENT_LOG_RUN) == 0
        })
    }

    /// What the unit can do.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// The host.
    pub fn host(&self) -> &H {
        &self.host
    }

    fn bell(&self) -> Bell<'_, H> {
        Bell { host: &self.host, control: &self.control, should_run: &self.should_run }
    }

    /// Has the unit forget what it was led to.
    fn confirm(&self, commands: &[Command]) -> Result<(), UnitError> {
        self.queue.submit(&self.host, &self.bell(), commands).map_err(UnitError::Unconfirmed)
    }

    /// Has the unit forget all that it has cached: device by device and domain by domain, where it
    /// has no command for it. Firmware's table may have had more devices than this one.
    fn forget_everything(&self) -> Result<(), UnitError> {
        if self.capabilities.features & feature::IA_SUP != 0 {
            return self.confirm(&[command::ALL]);
        }
        let mut commands = Commands::new();
        let devices = (0..=u16::MAX).map(command::devtab_entry);
        let domains = (0..=u16::MAX).map(|domain| command::pages(domain, 0, EVERYTHING, false));
        for next in devices.chain(domains) {
            if commands.try_push(next).is_err() {
                self.confirm(&commands)?;
                commands.clear();
                commands.push(next);
            }
        }
        self.confirm(&commands)
    }

    /// The first word of a device's entry.
    fn index_of(&self, device: DeviceId) -> Result<(u16, usize), UnitError> {
        let last = u32::from(self.last_device);
        let number = u16::try_from(device.0).ok().filter(|number| *number <= self.last_device);
        let number = number.ok_or(UnitError::NoSuchDevice { device: device.0, last })?;
        Ok((number, usize::from(number) * entry::WORDS))
    }
}

/// A device table for the devices up to `last`, all attached to nothing.
fn device_words<F: Frames>(frames: &F, last: u16) -> Result<Words, UnitError> {
    let count = usize::from(last) / entry::PER_FRAME + 1;
    let words = Words::new(frames, count)?;
    for index in (0..words.len()).step_by(entry::WORDS) {
        words.store(frames, index, entry::BLOCKED);
    }
    Ok(words)
}

// SAFETY: 1. and 2. by the submissions that end `attach` and `detach`: see `InvalidationQueue` below. 3. What the unit reads is
// stored behind the last check. 4. The layout is of its capabilities. 5. The numbers are a field of the unit.
unsafe impl<H: Host> Iommu<AmdV1> for Unit<H> {
    type Frames = H::Frames;

    fn frames(&self) -> &H::Frames {
        self.host.frames()
    }

    fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    /// Four levels, with every size of page: all units walk these.
    fn layout(&self) -> Result<AmdV1, UnitError> {
        Ok(AmdV1::four_level())
    }

    fn domains(&self) -> (DomainId, DomainId) {
        (DomainId(NOTHING + 1), DomainId(PASS_THROUGH - 1))
    }

    fn reserved(&self) -> &'static [IovaRange] {
        &RESERVED
    }

    fn last_iova(&self) -> Iova {
        let bits = 12 + 9 * self.capabilities.levels;
        Iova::new(u64::MAX >> 64_u32.saturating_sub(bits))
    }

    fn enable(&self) -> Result<(), UnitError> {
        let registers = self.host.registers();
        let (table, frames) = {
            let devices = self.devices.lock();
            (devices.phys().get(), devices.frames())
        };
        self.switch.turn_on();
        // Firmware may have opened a range to all devices.
        if registers.read64(reg::EXCLUSION_BASE) & EXCLUSION_ON != 0 {
            registers.write64(reg::EXCLUSION_BASE, 0);
        }
        registers.write64(reg::DEVICE_TABLE_BASE, device_table(table, frames));
        self.host.undisturbed(|| {
            let _one_at_a_time = self.control.lock();
            let kept = registers.read64(reg::CONTROL) & control::FIRMWARES;
            let rings = control::CMD_BUF_EN | control::EVENT_LOG_EN;
            registers.write64(reg::CONTROL, kept | rings | control::COHERENT | control::IOMMU_EN);
        });
        let runs = wait_until(&self.host, "turn its command buffer on", || {
            let status = registers.read64(reg::STATUS);
            status != u64::MAX && status & status::CMD_BUF_RUN != 0
        });
        // If it does not run yet, it may have stopped at a command already.
        self.should_run.store(true, Ordering::Release);
        runs?;
        self.forget_everything()
    }

    unsafe fn attach(&self, device: DeviceId, to: Attachment<AmdV1>) -> Result<(), UnitError> {
        let (number, index) = self.index_of(device)?;
        let (first, last) = self.domains();
        let (low, domain) = match to {
            Attachment::Table { domain, root, format } => {
                if domain < first || domain > last {
                    return Err(UnitError::NoSuchDomain { domain: domain.0, first: first.0, last: last.0 });
                }
                if root.get() & !entry::ADDRESS != 0 {
                    return Err(UnitError::BadRoot { root });
                }
                if format.mode() > self.capabilities.levels {
                    return Err(UnitError::NoSuchTables { levels: format.levels() });
                }
                (entry::translated(root.get(), format.mode()), domain.0)
            }
            Attachment::PassThrough => (entry::PASS_THROUGH, PASS_THROUGH),
        };
        let frames = self.host.frames();
        let devices = self.devices.lock();
        if devices.load(frames, index + 1) != 0 {
            return Err(UnitError::Attached { device: device.0 });
        }
        // What the device may reach is there with the last store.
        devices.store(frames, index + 1, u64::from(domain));
        devices.store(frames, index, low);
        if !self.switch.is_on() {
            return Ok(());
        }
        // The entry that refused everything may be cached, as it was valid.
        let forget =
            [command::devtab_entry(number), command::BARRIER, command::pages(domain, 0, EVERYTHING, false)];
        self.confirm(if self.capabilities.caches_absent { &forget } else { &forget[..1] })
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitError> {
        let (number, index) = self.index_of(device)?;
        let frames = self.host.frames();
        // Held while the unit is waited for: nothing but attaching waits for it.
        let devices = self.devices.lock();
        let second = devices.load(frames, index + 1);
        if second == 0 {
            return Err(UnitError::NotAttached { device: device.0 });
        }
        devices.store(frames, index, entry::BLOCKED);
        if self.switch.is_on() {
            // The entry first: what it leads to could be cached anew else.
            let domain = entry::domain(second);
            self.confirm(&[
                command::devtab_entry(number),
                command::BARRIER,
                command::pages(domain, 0, EVERYTHING, false),
            ])?;
        }
        // The second word says that the device is attached, until here.
        devices.store(frames, index + 1, u64::from(NOTHING));
        Ok(())
    }

    fn next_fault(&self) -> Option<Fault> {
        self.log.lock().next(&self.host, &self.control)
    }

    fn shut_down(self) -> Result<(), UnitError> {
        // A command that waits for a device may be under way, and store when the ring is off: CmdBufRun says that no more
        // are fetched. By the switch, as `enable` may have panicked with its rings on.
        let settled = if self.switch.is_on() { self.queue.settle(&self.host, &self.bell()) } else { Ok(()) };
        let all = control::IOMMU_EN | control::CMD_BUF_EN | control::EVENT_LOG_EN;
        set(&self.host, &self.control, all, false);
        let registers = self.host.registers();
        wait_until(&self.host, "turn translation off", || registers.read64(reg::CONTROL) & all == 0)?;
        self.wait_for_rings("turn its rings off")?;
        settled?;
        let Self { host, queue, devices, log, .. } = self;
        // SAFETY: translation and the rings are off, and no command is under way, as the unit has confirmed.
        unsafe {
            queue.free(host.frames());
            devices.into_inner().free(host.frames());
            log.into_inner().words.free(host.frames());
        }
        Ok(())
    }
}

// SAFETY: a submission ends with a COMPLETION_WAIT, which stores when all commands before it are
// complete (section 2.4.1), and an invalidation is when the accesses that used what it names are.
// The commands are in the order of the requests, with a barrier where a device could undo one, and
// each covers its request. Submissions are in one order by the ring's exchanges, and those of a
// unit that is not on yet by the switch's: such a unit has never read what they name. Registers and
// memory are as `Registers` and `Frames` promise. Where CPUs share waits, `Ok` is of a submission that
// covers the requests and began after the call (`SharedWaits::submit`).
unsafe impl<H: Host> InvalidationQueue for Unit<H> {
    fn invalidate(&self, domain: DomainId, invalidation: Invalidation) -> Result<(), InvalidationError> {
        self.submit(&[Request { domain, invalidation }])
    }

    fn submit(&self, requests: &[Request]) -> Result<(), InvalidationError> {
        if !self.switch.is_on() {
            return Ok(());
        }
        self.waits.share(&self.host, requests, |requests| {
            self.queue.carry_out(&self.host, &self.bell(), requests, describe)
        })
    }

    fn caches_absent(&self) -> bool {
        self.capabilities.caches_absent
    }
}
