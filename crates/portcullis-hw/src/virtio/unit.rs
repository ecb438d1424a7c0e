//! The unit: take-over, endpoints, faults, shutdown.

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use portcullis::addr::{DeviceId, DomainId, IovaRange, PageSizes};
use portcullis::mapper::Geometry;
use portcullis::platform::Platform;

use super::events::Events;
use super::layout::{EVENTS, REQUESTS, answer, common, config, feature, request, ring, status};
use super::mapper::RequestMapper;
use super::pci::{NarrowRegisters, Structures};
use super::requests::{BATCH, Failure, Requests};
use super::ring::{Ring, write_halves};
use super::settings::{Region, Settings, is_kept_free, parse};
use super::space::{Asked, Space};
use crate::domain::{DomainError, UnitDomainBuilder};
use crate::fault::Fault;
use crate::frames::Words;
use crate::host::{Host, Registers, UnitError, wait_until};
use crate::sync::Mutex;

/// The attachment of an endpoint.
#[derive(Debug)]
struct Attached {
    /// `None` for bypass.
    space: Option<Arc<Space>>,
    /// The outcome of an attach or detach request is unknown: it timed out, or the host panicked.
    is_unsure: bool,
    /// The outcome of a detach request is unknown, and it may have been carried out since.
    is_leaving: bool,
}

/// A virtio-iommu.
///
/// Life cycle: [`start`](Self::start), attach devices that must not be interrupted, [`enable`](Self::enable), attach and detach,
/// [`shut_down`](Self::shut_down). A drop instead leaks its memory, because the device goes on using it.
#[derive(Debug)]
pub struct Unit<H: Host> {
    pub(super) host: H,
    pub(super) requests: Requests,
    structures: Structures,
    features: u64,
    granules: PageSizes,
    aperture: IovaRange,
    /// The first and the last domain number.
    numbers: (u16, u16),
    events: Events,
    /// The buffer for an endpoint's properties, and its size in bytes.
    properties: Option<(Words, u32)>,
    /// Attachments. Held during waits for the device: only attach and detach take it.
    endpoints: Mutex<BTreeMap<u32, Attached>>,
    /// The domains by their numbers.
    spaces: Mutex<BTreeMap<u16, Weak<Space>>>,
}

impl<H: Host> Unit<H>
where
    H::Registers: NarrowRegisters,
{
    /// Takes the device over: resets it, negotiates features, and gives it two queues. Then detaches `endpoints`: name all that a previous
    /// driver may have used, such as the kernel that started this one. (The specification has a reset do this; QEMU's device keeps
    /// attachments and mappings.) The device's bypass setting governs unattached endpoints, as before, until [`enable`](Self::enable).
    ///
    /// A device may translate its own accesses, too (QEMU's, with `iommu_platform=on`): let it [pass through](Self::pass_through) before it
    /// is enabled.
    ///
    /// Allocates up to ten frames, and as many as an endpoint's properties take. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::NotThere`]; [`UnitError::Lacks`] if the device lacks a needed feature; [`UnitError::OutOfMemory`];
    /// [`UnitError::TimedOut`], [`UnitError::Refused`].
    pub fn start(
        host: H,
        structures: Structures,
        endpoints: impl IntoIterator<Item = DeviceId>,
    ) -> Result<Self, UnitError> {
        let registers = host.registers();
        let at = |offset: usize| structures.common + offset;
        let device_status = || registers.read8(at(common::DEVICE_STATUS));
        let set_status = |value| registers.write8(at(common::DEVICE_STATUS), value);
        if device_status() == u8::MAX {
            return Err(UnitError::NotThere { register: "device status", value: u64::from(u8::MAX) });
        }
        set_status(0);
        wait_until(&host, "reset itself", || device_status() == 0)?;
        set_status(status::ACKNOWLEDGE | status::DRIVER);

        let mut offered = 0;
        for half in 0..2_u32 {
            registers.write32(at(common::DEVICE_FEATURE_SELECT), half);
            offered |= u64::from(registers.read32(at(common::DEVICE_FEATURE))) << (half * 32);
        }
        let lacks = |what, register, value| UnitError::Lacks { what, register, value };
        if offered & feature::VERSION_1 == 0 {
            return Err(lacks("version 1 of virtio", "features", offered));
        }
        if offered & feature::MAP_UNMAP == 0 {
            return Err(lacks("requests to map and unmap", "features", offered));
        }
        // The driver does not accept BYPASS, which BYPASS_CONFIG replaces: so the device refuses accesses of unattached endpoints.
        let features = offered
            & (feature::VERSION_1
                | feature::ACCESS_PLATFORM
                | feature::INPUT_RANGE
                | feature::DOMAIN_RANGE
                | feature::MAP_UNMAP
                | feature::PROBE
                | feature::BYPASS_CONFIG);
        for half in 0..2_u32 {
            registers.write32(at(common::DRIVER_FEATURE_SELECT), half);
            registers.write32(at(common::DRIVER_FEATURE), (features >> (half * 32)) as u32);
        }
        let agreed = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
        set_status(agreed);
        if device_status() & status::FEATURES_OK == 0 {
            return Err(lacks("a driver with other features", "features", offered));
        }

        let settings = Settings::read(registers, &structures, features)?;
        let queue_size = |number, least: u16, what| {
            registers.write16(at(common::QUEUE_SELECT), number);
            let most = registers.read16(at(common::QUEUE_SIZE)).min(ring::MOST);
            let offset = registers.read16(at(common::QUEUE_NOTIFY_OFF));
            let doorbell = structures.doorbell(offset);
            match doorbell {
                // A power of two.
                Some(doorbell) if most >= least => Ok((1 << most.ilog2(), doorbell)),
                _ => Err(lacks(what, "queue size", u64::from(most))),
            }
        };
        let (size, doorbell) = queue_size(REQUESTS, 4, "a queue for requests")?;
        let (event_size, event_doorbell) = queue_size(EVENTS, 1, "a queue for events")?;

        let frames = host.frames();
        let requests = Requests::new(frames, size, doorbell)?;
        let events = match Events::new(frames, event_size, event_doorbell) {
            Ok(events) => events,
            Err(error) => {
                // SAFETY: 1: allocated above from the host's frames. 2: the device was not told of it.
                unsafe { requests.free(frames) };
                return Err(error);
            }
        };
        let count = (settings.probe_bytes as usize).div_ceil(4096);
        let properties = match (settings.probe_bytes > 0).then(|| Words::new(frames, count)).transpose() {
            Ok(properties) => properties.map(|words| (words, settings.probe_bytes)),
            Err(error) => {
                // SAFETY: 1: allocated above from the host's frames. 2: the device was not told of them.
                unsafe {
                    requests.free(frames);
                    events.free(frames);
                }
                return Err(error);
            }
        };

        // After an error from here on the device may know the memory's address: it stays allocated.
        for (number, queue) in [(REQUESTS, requests.ring()), (EVENTS, events.ring())] {
            enable_queue(registers, structures.common, number, queue);
        }
        set_status(agreed | status::DRIVER_OK);
        events.ring().notify(registers);
        let Settings { granules, aperture, numbers, .. } = settings;
        let unit = Self {
            host,
            requests,
            structures,
            features,
            granules,
            aperture,
            numbers,
            events,
            properties,
            endpoints: Mutex::new(BTreeMap::new()),
            spaces: Mutex::new(BTreeMap::new()),
        };
        unit.release(endpoints)?;
        Ok(unit)
    }

    /// Detaches endpoints from unknown domains: attaching one to another domain removes it from its old one.
    fn release(&self, endpoints: impl IntoIterator<Item = DeviceId>) -> Result<(), UnitError> {
        let number = u32::from(self.numbers.1);
        let mut endpoints = endpoints.into_iter();
        loop {
            let batch: arrayvec::ArrayVec<u32, BATCH> =
                endpoints.by_ref().take(BATCH).map(|device| device.0).collect();
            if batch.is_empty() {
                return Ok(());
            }
            let carry_out = |what, request: fn(u32, u32) -> request::Request| {
                let requests = batch.iter().map(|endpoint| request(number, *endpoint));
                // An endpoint that does not exist is not attached.
                self.requests
                    .carry_out(&self.host, requests, &[answer::OK, answer::NOENT])
                    .map_err(|failure| explain(what, u32::MAX, failure))
            };
            carry_out("take a device from what it was attached to", |domain, endpoint| {
                request::attach(domain, endpoint, 0)
            })?;
            carry_out("release a device", request::detach)?;
        }
    }

    /// From the return of `Ok`, a device reaches only what it is attached to. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`]: devices may reach anything.
    pub fn enable(&self) -> Result<(), UnitError> {
        self.set_bypass(0, "turn bypass off")
    }

    fn set_bypass(&self, bypass: u8, what: &'static str) -> Result<(), UnitError> {
        if self.features & feature::BYPASS_CONFIG == 0 {
            // It never bypasses.
            return Ok(());
        }
        let (registers, at) = (self.host.registers(), self.structures.device + config::BYPASS);
        registers.write8(at, bypass);
        wait_until(&self.host, what, || registers.read8(at) == bypass)
    }

    /// The host.
    pub fn host(&self) -> &H {
        &self.host
    }

    /// The addresses that the unit translates.
    pub fn aperture(&self) -> IovaRange {
        self.aperture
    }

    /// The first and the last domain number. (The driver uses the two numbers behind them itself.)
    pub fn domains(&self) -> (DomainId, DomainId) {
        (DomainId(self.numbers.0), DomainId(self.numbers.1 - 2))
    }

    /// Begins the domain `number`, which no other has. It allocates addresses that the unit translates. Name the devices that are to be
    /// attached ([`for_device`](UnitDomainBuilder::for_device)), because each may reserve addresses.
    ///
    /// # Errors
    /// [`UnitError::NoSuchDomain`], [`UnitError::DomainInUse`].
    pub fn domain<P: Platform>(
        self: &Arc<Self>,
        number: DomainId,
    ) -> Result<UnitDomainBuilder<RequestMapper<H>, P>, DomainError> {
        Ok(UnitDomainBuilder::new(self.mapper(number, Vec::new())?))
    }

    /// The mapper of the domain `number`, which has no endpoint yet, and no other mapper. It maps nothing in `reserved`: include at least
    /// the [regions](Self::regions) of the devices that are to be attached.
    ///
    /// # Errors
    /// [`UnitError::NoSuchDomain`], [`UnitError::DomainInUse`].
    pub fn mapper(
        self: &Arc<Self>,
        number: DomainId,
        reserved: Vec<IovaRange>,
    ) -> Result<RequestMapper<H>, UnitError> {
        let (first, last) = self.domains();
        if number < first || number > last {
            return Err(UnitError::NoSuchDomain { domain: number.0, first: first.0, last: last.0 });
        }
        let mut spaces = self.spaces.lock();
        spaces.retain(|_, space| space.strong_count() > 0);
        if spaces.contains_key(&number.0) {
            return Err(UnitError::DomainInUse { domain: number.0 });
        }
        let space = Arc::new(Space::new(u32::from(number.0)));
        spaces.insert(number.0, Arc::downgrade(&space));
        let geometry = Geometry { aperture: self.aperture, page_sizes: self.granules, reserved };
        Ok(RequestMapper::new(Arc::clone(self), space, number, geometry))
    }

    /// The addresses that `device` reserves; none if the unit cannot tell. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::NoSuchDevice`], [`UnitError::Refused`], [`UnitError::TimedOut`].
    pub fn regions(&self, device: DeviceId) -> Result<Vec<Region>, UnitError> {
        let _one_at_a_time = self.endpoints.lock();
        self.probe(device)
    }

    /// The same, with the lock of the endpoints held.
    fn probe(&self, device: DeviceId) -> Result<Vec<Region>, UnitError> {
        let Some((words, bytes)) = &self.properties else { return Ok(Vec::new()) };
        let frames = self.host.frames();
        // Zeroes what an earlier probe has left behind this one's last property.
        (0..words.len()).for_each(|index| words.store(frames, index, 0));
        let probed = self.requests.probe(&self.host, request::probe(device.0), (words.phys().get(), *bytes));
        probed.map_err(|failure| explain("probe a device", device.0, failure))?;
        let byte = |at: usize| (words.load_from_unit(frames, at / 8) >> (at % 8 * 8)) as u8;
        let bytes: Vec<u8> = (0..*bytes as usize).map(byte).collect();
        Ok(parse(&bytes))
    }

    pub(super) fn attach(
        &self,
        device: DeviceId,
        space: &Arc<Space>,
        (geometry, kept): (&Geometry, &[IovaRange]),
    ) -> Result<(), UnitError> {
        let mut endpoints = self.endpoints.lock();
        if endpoints.contains_key(&device.0) {
            return Err(UnitError::Attached { device: device.0 });
        }
        self.end_detaching(&mut endpoints, space)?;
        let regions = self.probe(device)?;
        if let Some(region) = regions.iter().find(|region| !is_kept_free(region.range, geometry, kept)) {
            return Err(UnitError::Reserved { device: device.0, range: region.range });
        }
        space.attaching();
        let request = request::attach(space.number, device.0, 0);
        let attached = self.attach_to(&mut endpoints, device, Some(Arc::clone(space)), request);
        if attached.is_err() && !endpoints.contains_key(&device.0) {
            space.detached();
        }
        attached.map_err(|failure| explain("attach a device", device.0, failure))?;
        space.attached();
        let mut from = Some(0);
        while from.is_some() {
            let recorded = space.recorded(&mut from);
            let maps = recorded
                .iter()
                .map(|piece| request::map(space.number, piece.first, piece.last, piece.phys, piece.flags));
            let asked = Asked(space, &recorded);
            let mapped = self.requests.carry_out(&self.host, maps, &[answer::OK]);
            drop(asked);
            mapped.map_err(|failure| match failure {
                Failure::TimedOut { waited_ns } => {
                    UnitError::TimedOut { what: "map what is recorded of a domain", waited_ns }
                }
                Failure::Refused { status, .. } => {
                    UnitError::Incomplete { device: device.0, code: u32::from(status) }
                }
            })?;
        }
        Ok(())
    }

    /// Sends a `request` to attach. The device counts as attached from before that, so a detach knows of it whatever happens to the call;
    /// until the unit says that it is not attached.
    fn attach_to(
        &self,
        endpoints: &mut BTreeMap<u32, Attached>,
        device: DeviceId,
        space: Option<Arc<Space>>,
        request: request::Request,
    ) -> Result<(), Failure> {
        endpoints.insert(device.0, Attached { space, is_unsure: true, is_leaving: false });
        let attached = self.requests.carry_out(&self.host, [request], &[answer::OK]);
        match (attached, endpoints.get_mut(&device.0)) {
            (Ok(()), Some(endpoint)) => endpoint.is_unsure = false,
            (Err(Failure::Refused { .. }), _) => {
                endpoints.remove(&device.0);
            }
            _ => {}
        }
        attached
    }

    /// Detaches the endpoints of `space` with an unknown state: with its last endpoint the device has dropped the domain's mappings, and
    /// would give the next endpoint only the mappings made since.
    fn end_detaching(
        &self,
        endpoints: &mut BTreeMap<u32, Attached>,
        space: &Arc<Space>,
    ) -> Result<(), UnitError> {
        let is_of_space =
            |attached: &Attached| attached.space.as_ref().is_some_and(|of| Arc::ptr_eq(of, space));
        while let Some((device, attached)) =
            endpoints.iter_mut().find(|(_, attached)| attached.is_leaving && is_of_space(attached))
        {
            let device = *device;
            match self.detach_from(DeviceId(device), attached) {
                Ok(()) => {
                    endpoints.remove(&device);
                }
                Err(timed_out @ UnitError::TimedOut { .. }) => return Err(timed_out),
                // The device says that it is attached, so the domain exists.
                Err(_) => attached.is_leaving = false,
            }
        }
        Ok(())
    }

    /// Lets `device` reach all memory, by physical addresses. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::Lacks`] for a unit without pass-through; [`UnitError::Attached`], [`UnitError::NoSuchDevice`], [`UnitError::Refused`]:
    /// nothing has changed. [`UnitError::TimedOut`]: the device counts as attached, and may be refused.
    ///
    /// # Safety
    /// 1. The device reaches all memory: the caller answers for it, until [`detach`](Self::detach) of it has returned `Ok`.
    pub unsafe fn pass_through(&self, device: DeviceId) -> Result<(), UnitError> {
        if self.features & feature::BYPASS_CONFIG == 0 {
            let value = self.features;
            return Err(UnitError::Lacks { what: "pass-through", register: "features", value });
        }
        let mut endpoints = self.endpoints.lock();
        if endpoints.contains_key(&device.0) {
            return Err(UnitError::Attached { device: device.0 });
        }
        let request = request::attach(self.bypass_number(), device.0, request::BYPASS);
        let attached = self.attach_to(&mut endpoints, device, None, request);
        attached.map_err(|failure| explain("let a device pass through", device.0, failure))
    }

    /// The domain of bypassing endpoints.
    fn bypass_number(&self) -> u32 {
        u32::from(self.numbers.1 - 1)
    }

    /// Detaches `device`. After `Ok` its accesses are refused, and no earlier one is outstanding. With its last device a domain's mappings
    /// become recorded again. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::NotAttached`]. [`UnitError::TimedOut`], [`UnitError::Refused`]: the device may still reach what it was attached to, and
    /// stays attached until another call returns `Ok`. If it was the domain's last, mappings made until then, or until another device is
    /// attached, are only recorded. After a time-out, attaching another device to the domain detaches this one first.
    pub fn detach(&self, device: DeviceId) -> Result<(), UnitError> {
        let mut endpoints = self.endpoints.lock();
        let Some(attached) = endpoints.get_mut(&device.0) else {
            return Err(UnitError::NotAttached { device: device.0 });
        };
        self.detach_from(device, attached)?;
        endpoints.remove(&device.0);
        Ok(())
    }

    fn detach_from(&self, device: DeviceId, attached: &mut Attached) -> Result<(), UnitError> {
        let space = attached.space.as_deref();
        if let Some(space) = space {
            wait_until(&self.host, "answer requests to map", || space.detaching())?;
        }
        let number = space.map_or(self.bypass_number(), |space| space.number);
        // A device that does not exist is detached. One that the unit says is not attached may have been detached by a late request.
        let detached: &[u8] = &[answer::OK, answer::NOENT, answer::INVAL];
        let detached = if attached.is_unsure { detached } else { &detached[..2] };
        let before = (attached.is_leaving, attached.is_unsure);
        // Even if the host panics.
        (attached.is_leaving, attached.is_unsure) = (true, true);
        let answered = self.requests.carry_out(&self.host, [request::detach(number, device.0)], detached);
        if !matches!(answered, Err(Failure::TimedOut { .. })) {
            (attached.is_leaving, attached.is_unsure) = before;
        }
        answered.map_err(|failure| explain("detach a device", device.0, failure))?;
        if let Some(space) = space {
            space.detached();
        }
        Ok(())
    }

    /// The next reported fault, if there is one. Faults while all buffers of the queue are full are lost. Does not wait.
    pub fn next_fault(&self) -> Option<Fault> {
        self.events.next(&self.host)
    }

    /// Turns bypass on, detaches all devices, turns the unit off and frees its memory. **Devices then reach all memory**, as without an
    /// IOMMU. Waits for the unit.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`], [`UnitError::Refused`]: the unit may go on, and its memory stays
    /// allocated.
    pub fn shut_down(self) -> Result<(), UnitError> {
        // First, for a device that translates its own accesses.
        self.set_bypass(1, "turn bypass on")?;
        for (device, attached) in &mut *self.endpoints.lock() {
            self.detach_from(DeviceId(*device), attached)?;
        }
        let (registers, at) = (self.host.registers(), self.structures.common + common::DEVICE_STATUS);
        registers.write8(at, 0);
        wait_until(&self.host, "reset itself", || registers.read8(at) == 0)?;
        let Self { host, requests, events, properties, .. } = self;
        // SAFETY: 1: the host's frames allocated it. 2: the reset, which the device has confirmed, turned the queues off.
        unsafe {
            requests.free(host.frames());
            events.free(host.frames());
            if let Some((words, _)) = properties {
                words.free(host.frames());
            }
        }
        Ok(())
    }
}

/// Gives the device a queue's addresses, and turns the queue on.
fn enable_queue<R: NarrowRegisters>(registers: &R, structure: usize, number: u16, queue: &Ring) {
    let at = |offset: usize| structure + offset;
    registers.write16(at(common::QUEUE_SELECT), number);
    registers.write16(at(common::QUEUE_SIZE), queue.size());
    let parts = [common::QUEUE_DESC, common::QUEUE_DRIVER, common::QUEUE_DEVICE];
    for (part, address) in parts.into_iter().zip(queue.addresses()) {
        write_halves(registers, at(part), address);
    }
    registers.write16(at(common::QUEUE_ENABLE), 1);
}

fn explain(what: &'static str, device: u32, failure: Failure) -> UnitError {
    match failure {
        Failure::TimedOut { waited_ns } => UnitError::TimedOut { what, waited_ns },
        Failure::Refused { status: answer::NOENT, .. } => UnitError::NoSuchDevice { device, last: u32::MAX },
        Failure::Refused { status, .. } => UnitError::Refused { what, code: u32::from(status) },
    }
}
