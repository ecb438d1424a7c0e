//! The driver's messages to the device and its results, call by call, against files in `tests/transcripts`: register writes (doorbells only
//! counted), requests with answers, frames.

use alloc::format;
use alloc::string::{String, ToString};
use core::fmt::Debug;
use core::sync::atomic::{AtomicU64, Ordering};

use portcullis::heap::{OutOfMemory, Weak};
use portcullis::pgtable::{Attributes, Memory as Kind};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents, PlatformNumber};

use super::*;
use crate::transcript::Transcript;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/portcullis-hw/tests/transcripts");

/// Request types.
const ATTACH: u8 = 1;
const DETACH: u8 = 2;
const MAP: u8 = 3;
const UNMAP: u8 = 4;
const PROBE: u8 = 5;

fn below(fake: &Fake) -> Vec<String> {
    let mut guard = fake.device();
    let device = &mut *guard;
    let writes = core::mem::take(&mut device.writes).into_iter();
    let writes = writes.filter(|(at, ..)| !(0x100..0x200).contains(at));
    let writes = writes.map(|(at, bytes, value)| format!("{at:#x}:{bytes}={value:#x}"));
    let mut events: Vec<_> = writes.chain(core::mem::take(&mut device.told)).collect();
    for (what, count) in [("doorbells", &mut device.doorbells), ("events", &mut device.event_doorbells)] {
        let count = core::mem::take(count);
        if count > 0 {
            events.push(format!("{what} {count}"));
        }
    }
    events
}

/// A platform that counts how often a CPU was lent: a thread that holds the record's lock has one, so no thread spins for a preempted one.
struct Lends(StdPlatform, Arc<AtomicU64>);

// SAFETY: the clauses are the standard platform's.
unsafe impl Platform for Lends {
    fn cpus(&self) -> usize {
        self.0.cpus()
    }

    fn number(&self) -> PlatformNumber {
        self.0.number()
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.with_cpu(f)
    }

    fn now_ns(&self) -> u64 {
        self.0.now_ns()
    }

    fn register(&self, events: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        self.0.register(events)
    }

    fn wake_at(&self, deadline_ns: u64) {
        self.0.wake_at(deadline_ns);
    }
}

struct Script {
    said: Transcript,
    fake: Fake,
    unit: Arc<Unit<Fake>>,
    mapper: RequestMapper<Fake>,
    platform: Lends,
}

impl Script {
    fn new(name: &str, change: impl FnOnce(&mut fake::Device)) -> Self {
        let fake = Fake::new();
        change(&mut fake.device());
        let (heard, lends) = (fake.clone(), Arc::new(AtomicU64::new(0)));
        let platform = Lends(StdPlatform::new(), Arc::clone(&lends));
        let mut said = Transcript::new(name, move || {
            let mut events = below(&heard);
            let lends = lends.swap(0, Ordering::Relaxed);
            events.extend((lends > 0).then(|| format!("cpu lent {lends}")));
            events
        });
        let unit = Arc::new(said.call_as("start", || start(&fake), |_| String::new()).unwrap());
        said.note("aperture", unit.aperture().to_string());
        said.note("domains", unit.domains());
        said.call("enable", || unit.enable()).unwrap();
        let kept = IovaRange::from_bounds(Iova::new(KEPT.0), Iova::new(KEPT.1)).unwrap();
        let mapper = unit.mapper(DomainId(1), alloc::vec![kept]).unwrap();
        said.note("geometry", (mapper.geometry(), mapper.costs()));
        Self { said, fake, unit, mapper, platform }
    }

    fn attach(&mut self, device: u32) {
        let _ = self.said.call(format_args!("attach {device:#x}"), || self.mapper.attach(DeviceId(device)));
    }

    fn detach(&mut self, device: u32) {
        let _ = self.said.call(format_args!("detach {device:#x}"), || self.unit.detach(DeviceId(device)));
    }

    fn map(&mut self, page: u64, memory: &[u64], attributes: impl Into<Attributes>) {
        let list = memory.iter().map(|frame| (PhysAddr::new(frame * PAGE), PAGE));
        let (range, mut gather, attributes) =
            (range(page, memory.len() as u64), Gather::new(), attributes.into());
        // SAFETY: there is no memory.
        let map = || unsafe { self.mapper.map(&self.platform, range, list, attributes, &mut gather) };
        let _ = self.said.call(format_args!("map {page:#x} to {memory:x?}"), map);
        if !gather.is_empty() {
            let _ = self.said.call("forget what was undone", || self.mapper.sync(&gather));
        }
    }

    fn unmap(&mut self, parts: &[(u64, u64)]) {
        let mut gather = Gather::new();
        for &(page, pages) in parts {
            let unmap =
                || Ok::<_, String>(self.mapper.unmap(&self.platform, range(page, pages), &mut gather));
            let show = |Unmapped { bytes, kept, stale }: &Unmapped| {
                format!("{bytes:#x}, kept {kept:#x}, stale {stale}")
            };
            let _ = self.said.call_as(format_args!("unmap {page:#x}+{pages:#x}"), unmap, show);
        }
        let _ = self.said.call("forget", || self.mapper.sync(&gather));
    }

    fn state(&mut self) {
        let device = self.fake.device();
        let state = (device.domains.clone(), device.endpoints.clone());
        drop(device);
        self.said.line(format_args!("the device has {state:x?}"));
    }

    fn end(self, name: &str) {
        let Self { mut said, fake, unit, mapper, .. } = self;
        drop(mapper);
        let _ = said.call("shut down", || Arc::into_inner(unit).unwrap().shut_down());
        said.note("frames", fake.memory.in_use());
        said.assert_is(FOLDER, name);
    }
}

const BOTH: Permissions = Permissions::READ_WRITE;

#[test]
fn mappings() {
    let mut script = Script::new("virtio-iommu: mappings", |_| ());
    script.attach(ENDPOINT);
    script.said.part("of each kind");
    script.map(1, &[9], Permissions::READ);
    script.map(2, &[10, 11, 12], Permissions::WRITE);
    script.map(5, &[20, 22, 23, 25], BOTH);
    let special =
        Attributes { memory: Kind::Device, privileged: true, execute: true, snoop: true, ..BOTH.into() };
    script.map(9, &[1], special);
    script.map(6, &[1], BOTH);
    script.map(3, &[1, 2, 3, 4], BOTH);
    script.map((1 << 39) / PAGE - 1, &[1], BOTH);
    script.map((1 << 39) / PAGE, &[1], BOTH);
    script.state();
    script.said.part("parts");
    script.unmap(&[(1, 1)]);
    script.unmap(&[(3, 1)]);
    script.unmap(&[(2, 1), (4, 1)]);
    script.unmap(&[(5, 2), (7, 1)]);
    script.unmap(&[(0, 0x100)]);
    script.unmap(&[(0x1000, 1)]);
    script.state();
    script.said.part("many pieces");
    let many: Vec<u64> = (0..40).map(|page| page * 2).collect();
    script.map(0x100, &many, BOTH);
    script.unmap(&[(0x100, 20), (0x120, 8)]);
    script.unmap(&[(0x100, 40)]);
    script.said.part("another endpoint, and what is mapped before it comes");
    script.map(0x10, &[1, 2, 3], BOTH);
    script.detach(ENDPOINT);
    script.state();
    script.unmap(&[(0x11, 1)]);
    script.map(0x20, &[7], Permissions::READ);
    for endpoint in [ENDPOINT, OTHER, 0x99, 0x77, ENDPOINT] {
        script.attach(endpoint);
    }
    script.state();
    // SAFETY: there is no memory.
    let pass = || unsafe { script.unit.pass_through(DeviceId(0)) };
    let _ = script.said.call("pass through 0x0", pass);
    for device in [ENDPOINT, 0, OTHER, 0x77] {
        let regions = || script.unit.regions(DeviceId(device));
        let _ = script.said.call(format_args!("regions of {device:#x}"), regions);
        script.detach(device);
        script.detach(device);
    }
    script.state();
    script.end("virtio-mappings");
}

#[test]
fn refusals() {
    let mut script = Script::new("virtio-iommu: refusals", |_| ());
    let devil = |script: &Script, refuses| script.fake.device().refuses = refuses;
    for kind in [ATTACH, DETACH, MAP, UNMAP, PROBE] {
        for status in [answer::NOENT, answer::INVAL, answer::RANGE, answer::NOMEM, 2, 0x55] {
            script.said.part(format_args!("requests of kind {kind} are answered {status}"));
            devil(&script, Some((kind, if kind == MAP { 2 } else { 0 }, status)));
            script.attach(ENDPOINT);
            script.map(1, &[1, 3, 5, 7], BOTH);
            script.unmap(&[(1, 2)]);
            script.detach(ENDPOINT);
            devil(&script, None);
            script.unmap(&[(1, 4)]);
            script.detach(ENDPOINT);
        }
    }
    script.said.part("it does not answer");
    script.attach(ENDPOINT);
    script.map(1, &[1, 3], BOTH);
    script.fake.device().holds = true;
    script.map(0x30, &[1], BOTH);
    script.unmap(&[(1, 1)]);
    script.detach(ENDPOINT);
    script.fake.device().holds = false;
    script.fake.catch_up();
    script.state();
    script.unmap(&[(1, 2)]);
    script.unmap(&[(0x30, 1)]);
    script.fake.device().backwards = true;
    script.map(0x40, &[1, 3, 5], BOTH);
    script.unmap(&[(0x40, 3)]);
    script.detach(ENDPOINT);
    script.state();
    script.end("virtio-refusals");
}

#[test]
fn faults() {
    let mut script = Script::new("virtio-iommu: faults", |_| ());
    for reason in 0..=5 {
        for flags in [0, 1, 2, 4, 7, 0x100, 0x101, 0x107] {
            let words = [reason | flags << 32, 0x28 | 5 << 32, 0x1234_5678];
            assert!(script.fake.device().report(&script.fake.memory, words));
            let next = || Ok::<_, String>(script.unit.next_fault());
            let show = |fault: &Option<crate::Fault>| format!("{fault:x?}");
            let _ = script.said.call_as(format_args!("fault {reason} {flags:#x}"), next, show);
        }
    }
    script.end("virtio-faults");
}

/// The same with changed device configurations.
#[test]
fn devices() {
    type Change = fn(&mut fake::Device);
    let changes: [(&str, Change); 22] = [
        ("no VERSION_1", |device| device.features &= !feature::VERSION_1),
        ("no MAP_UNMAP", |device| device.features &= !feature::MAP_UNMAP),
        ("no INPUT_RANGE", |device| device.features &= !feature::INPUT_RANGE),
        ("no DOMAIN_RANGE", |device| device.features &= !feature::DOMAIN_RANGE),
        ("no PROBE", |device| device.features &= !feature::PROBE),
        ("no BYPASS_CONFIG", |device| device.features &= !feature::BYPASS_CONFIG),
        ("all features", |device| device.features = u64::MAX),
        ("pages of 64 KiB", |device| device.configure(config::PAGE_SIZE_MASK, 8, !0xffff)),
        ("pages of 4 KiB and 2 MiB", |device| device.configure(config::PAGE_SIZE_MASK, 8, 0x20_1000)),
        ("no pages", |device| device.configure(config::PAGE_SIZE_MASK, 8, 0)),
        ("addresses up to the last", |device| device.configure(config::INPUT_END, 8, u64::MAX)),
        ("few addresses", |device| device.configure(config::INPUT_END, 8, 0xffe)),
        ("domains 5 to 9", |device| {
            device.configure(config::DOMAIN_START, 4, 5);
            device.configure(config::DOMAIN_END, 4, 9);
        }),
        ("one domain", |device| device.configure(config::DOMAIN_END, 4, 0)),
        ("domains from 2^16 on", |device| device.configure(config::DOMAIN_START, 4, 1 << 16)),
        ("no properties", |device| device.configure(config::PROBE_SIZE, 4, 0)),
        ("very many properties", |device| device.configure(config::PROBE_SIZE, 4, 1 << 20)),
        ("small queues", |device| device.queue_sizes = [8, 2]),
        ("odd queues", |device| device.queue_sizes = [3, 24]),
        ("no queue", |device| device.queue_sizes = [256, 0]),
        ("features are not taken", |device| device.stuck_status = 8),
        ("it is absent", |device| device.absent = true),
    ];
    let mut said = Transcript::new("virtio-iommu: what devices say", Vec::new);
    for (name, change) in changes {
        let fake = Fake::new();
        change(&mut fake.device());
        let shown = |what: &str, result: &dyn Debug| {
            format!("{what}: {result:x?} | {}", crate::transcript::joined(below(&fake)))
        };
        said.part(name);
        let unit = match start(&fake) {
            Ok(unit) => Arc::new(unit),
            Err(error) => {
                said.line(format_args!(
                    "{error} | {}, {} frames",
                    crate::transcript::joined(below(&fake)),
                    fake.memory.in_use()
                ));
                continue;
            }
        };
        said.line(shown("start", &(unit.aperture(), unit.domains())));
        said.line(shown("enable", &unit.enable()));
        match unit.mapper(unit.domains().0, Vec::new()) {
            Ok(mapper) => {
                said.line(shown("mapper", mapper.geometry()));
                said.line(shown("attach", &mapper.attach(DeviceId(OTHER))));
                said.line(shown("regions", &unit.regions(DeviceId(OTHER))));
                // SAFETY: there is no memory.
                said.line(shown("pass through", &unsafe { unit.pass_through(DeviceId(ENDPOINT)) }));
                let (platform, mut gather) = (StdPlatform::new(), Gather::new());
                let granule = mapper.geometry().page_sizes.smallest().map_or(PAGE, |size| size.bytes());
                let many = (0..20).map(|page| (PhysAddr::new(page * 2 * granule), granule));
                let range = IovaRange::new(Iova::new(granule), 20 * granule).unwrap();
                // SAFETY: there is no memory.
                let mapped = unsafe { mapper.map(&platform, range, many, BOTH.into(), &mut gather) };
                said.line(shown("map", &mapped));
                said.line(shown("unmap", &mapper.unmap(&platform, range, &mut gather).bytes));
                said.line(shown("forget", &mapper.sync(&gather)));
            }
            Err(error) => said.line(error),
        }
        said.line(shown("shut down", &Arc::into_inner(unit).map(Unit::shut_down)));
        said.line(format_args!("{} frames", fake.memory.in_use()));
    }
    said.assert_is(FOLDER, "virtio-devices");
}
