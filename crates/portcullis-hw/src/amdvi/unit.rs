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

/// The domain of unattached devices in events.
const NOTHING: u16 = 0;
/// The domain of pass-through devices. (QEMU 10 refuses entries whose domain has bit 8 set, which it treats as reserved.)
const PASS_THROUGH: u16 = 0xfeff;

/// What firmware and the PCI bus know of a unit, and its registers do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The highest device ID behind the unit: bus, device and function, as 16 bits (from ACPI's IVRS). The device table takes 32 bytes for
    /// each ID up to it, physically contiguous.
    pub last_device: u16,
    /// The first 32 bits of the unit's capability block (ID 0x0f) in PCI configuration space, if the host can read it. An emulated unit may
    /// report caching mode there. Without this word the driver assumes that the unit caches no non-present entries.
    pub capability: Option<u32>,
}

impl Default for Config {
    /// All IDs: 2 MiB.
    fn default() -> Self {
        Self { last_device: u16::MAX, capability: None }
    }
}

/// Capabilities, from the unit's registers and its capability block.
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
        // A unit without an Extended Feature register has 0: the fewest levels, and only the commands that all units have.
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

    /// Caching mode: non-present entries may be cached, so each map must be followed by an invalidation.
    pub const fn caches_absent(&self) -> bool {
        self.caches_absent
    }
}

/// An AMD-Vi unit.
///
/// A drop leaks its structures, because the hardware goes on reading them: [`shut_down`](Iommu::shut_down) frees them.
#[derive(Debug)]
pub struct Unit<H: Host> {
    host: H,
    capabilities: Capabilities,
    last_device: u16,
    queue: Queue,
    /// The device table. The second word of an attached device's entry is not 0: it holds the domain.
    devices: Mutex<Words>,
    log: Mutex<Log>,
    /// Protects the control register.
    control: Mutex<()>,
    switch: Switch,
    /// See [`Bell`].
    should_run: AtomicBool,
    numbers: Numbers,
    waits: Waits,
}

impl<H: Host> Unit<H> {
    /// Takes a unit over: reads its capabilities, and replaces the command buffer and event log that firmware may have left on. Devices
    /// keep the access that they had until [`enable`](Iommu::enable); before that, attach devices that must not be interrupted (firmware's
    /// reserved regions, a display).
    ///
    /// Allocates the device table, physically contiguous, and three frames. Waits for the unit, up to the host's patience.
    ///
    /// # Errors
    /// [`UnitError::NotThere`]; [`UnitError::Lacks`] for a unit without version 1 page tables; [`UnitError::OutOfMemory`];
    /// [`UnitError::TimedOut`].
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
                // SAFETY: 1: they were allocated above from these frames. 2: the unit was not told of them.
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
        // After an error the unit may know the rings' addresses: they stay allocated.
        unit.take_rings()?;
        Ok(unit)
    }

    /// Gives the unit an empty command buffer and an empty event log, both off.
    fn take_rings(&self) -> Result<(), UnitError> {
        let registers = self.host.registers();
        set(&self.host, &self.control, control::CMD_BUF_EN | control::EVENT_LOG_EN, false);
        self.wait_for_rings("leave the rings that it was left with")?;
        // Before the base registers: QEMU ignores a write of the event log's base while its interrupt is pending.
        registers.write64(reg::STATUS, status::EVENT_OVERFLOW | status::EVENT_LOG_INT | status::COM_WAIT_INT);
        let (commands, events) =
            (ring_base(self.queue.address()), ring_base(self.log.lock().words.phys().get()));
        registers.write64(reg::COMMAND_BASE, commands);
        registers.write64(reg::EVENT_BASE, events);
        // The manual has the writes of the base registers reset these, too.
        for place in [reg::COMMAND_HEAD, reg::COMMAND_TAIL, reg::EVENT_HEAD, reg::EVENT_TAIL] {
            registers.write64(place, ring_place(0));
        }
        // No register identifies a unit: it is there if it keeps a value written.
        let kept = registers.read64(reg::COMMAND_BASE);
        if kept == commands {
            Ok(())
        } else {
            Err(UnitError::NotThere { register: "Command Buffer Base", value: kept })
        }
    }

    /// Waits until the unit uses neither ring.
    fn wait_for_rings(&self, what: &'static str) -> Result<(), UnitError> {
        let registers = self.host.registers();
        wait_until(&self.host, what, || {
            // All ones, which is what a CPU reads if nothing answers, mean that both run.
            registers.read64(reg::STATUS) & (status::CMD_BUF_RUN | status::EVENT_LOG_RUN) == 0
        })
    }

    /// The unit's capabilities.
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

    fn confirm(&self, commands: &[Command]) -> Result<(), UnitError> {
        self.queue.submit(&self.host, &self.bell(), commands).map_err(UnitError::Unconfirmed)
    }

    /// Invalidates all caches; without a command for that, device by device and domain by domain: all IDs, as firmware's device table may
    /// have been larger than this one.
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

    fn index_of(&self, device: DeviceId) -> Result<(u16, usize), UnitError> {
        let last = u32::from(self.last_device);
        let number = u16::try_from(device.0).ok().filter(|number| *number <= self.last_device);
        let number = number.ok_or(UnitError::NoSuchDevice { device: device.0, last })?;
        Ok((number, usize::from(number) * entry::WORDS))
    }
}

/// A device table up to `last`, with no device attached.
fn device_words<F: Frames>(frames: &F, last: u16) -> Result<Words, UnitError> {
    let count = usize::from(last) / entry::PER_FRAME + 1;
    let words = Words::new(frames, count)?;
    for index in (0..words.len()).step_by(entry::WORDS) {
        words.store(frames, index, entry::BLOCKED);
    }
    Ok(words)
}

// SAFETY: 1 and 2: the submissions at the end of `attach` and `detach`, by `InvalidationQueue` below. 3: the unit's structures change only
// after the last check. 4: the layout is of its capabilities. 5: the numbers are a field of the unit.
unsafe impl<H: Host> Iommu<AmdV1> for Unit<H> {
    type Frames = H::Frames;

    fn frames(&self) -> &H::Frames {
        self.host.frames()
    }

    fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    /// Four levels, with all page sizes: all units walk these.
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
        // If it does not run yet, it may already have stopped at a command.
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
        // This store makes the entry valid for its device.
        devices.store(frames, index + 1, u64::from(domain));
        devices.store(frames, index, low);
        if !self.switch.is_on() {
            return Ok(());
        }
        // The entry that refused everything was valid, so the unit may have cached it.
        let forget =
            [command::devtab_entry(number), command::BARRIER, command::pages(domain, 0, EVERYTHING, false)];
        self.confirm(if self.capabilities.caches_absent { &forget } else { &forget[..1] })
    }

    fn detach(&self, device: DeviceId) -> Result<(), UnitError> {
        let (number, index) = self.index_of(device)?;
        let frames = self.host.frames();
        // Held during the wait for the unit: only attach and detach take it.
        let devices = self.devices.lock();
        let second = devices.load(frames, index + 1);
        if second == 0 {
            return Err(UnitError::NotAttached { device: device.0 });
        }
        devices.store(frames, index, entry::BLOCKED);
        if self.switch.is_on() {
            // Entries first: their translations could be refetched otherwise.
            let domain = entry::domain(second);
            self.confirm(&[
                command::devtab_entry(number),
                command::BARRIER,
                command::pages(domain, 0, EVERYTHING, false),
            ])?;
        }
        // Until here, the second word says that the device is attached.
        devices.store(frames, index + 1, u64::from(NOTHING));
        Ok(())
    }

    fn next_fault(&self) -> Option<Fault> {
        self.log.lock().next(&self.host, &self.control)
    }

    fn shut_down(self) -> Result<(), UnitError> {
        // A command that waits for a device may be outstanding, and store after the ring is off: CmdBufRun only says that no more are
        // fetched. The switch decides, because `enable` may have panicked with its rings on.
        let settled = if self.switch.is_on() { self.queue.settle(&self.host, &self.bell()) } else { Ok(()) };
        let all = control::IOMMU_EN | control::CMD_BUF_EN | control::EVENT_LOG_EN;
        set(&self.host, &self.control, all, false);
        let registers = self.host.registers();
        wait_until(&self.host, "turn translation off", || registers.read64(reg::CONTROL) & all == 0)?;
        self.wait_for_rings("turn its rings off")?;
        settled?;
        let Self { host, queue, devices, log, .. } = self;
        // SAFETY: 1: the rings and the table were allocated from the host's frames. 2: translation and the rings are off, and no command is
        // outstanding, as the unit has confirmed.
        unsafe {
            queue.free(host.frames());
            devices.into_inner().free(host.frames());
            log.into_inner().words.free(host.frames());
        }
        Ok(())
    }
}

// SAFETY: 1: a submission ends with a COMPLETION_WAIT, which stores after all earlier commands are complete (section 2.4.1), and an
// invalidation is complete when the accesses that used its translations are. Each command covers its request. If CPUs share waits, `Ok` is
// of a submission that covers the requests and began after the call (`SharedWaits::submit`). 2: by `Registers` and `Frames`. 3: the ring's
// exchanges order the submissions, and the switch's order the calls of a unit that is not on yet, which has never read what they name. 4:
// commands are in the order of the requests, with a barrier where a device could refetch.
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
