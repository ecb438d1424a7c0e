//! A recording from its beginning to its end: what `record` and `watch` have in common.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use portcullis_trace::is_named;

use super::events::{Events, Kernel, hidden};
use super::instance::{Hands, Instance};
use super::pages::Pages;
use super::streams::{Round, Streams};
use super::tracefs::{Tracefs, TracingError};
use crate::linux::host::{Here, Host};

/// Memory for the buffers of all CPUs to begin with, of one at least and at most then, and of one at most later, in KiB.
const ALL_KIB: u64 = 64 << 10;
const LEAST_KIB: u64 = 1 << 10;
const USUAL_KIB: u64 = 16 << 10;
const MOST_KIB: u64 = 64 << 10;

/// Buffers are read as often as keeps them less than a quarter full, within these limits.
const SOON: Duration = Duration::from_millis(5);
const LATE: Duration = Duration::from_millis(100);

/// Events being recorded. It ends, and leaves tracing as it was found, where it is dropped.
#[derive(Debug)]
pub struct Session {
    // An open reader keeps its instance from being removed: this is dropped first.
    streams: Streams,
    instance: Instance,
    pub events: Events,
    buffer_kib: u64,
    wait: Duration,
    _tracefs: Tracefs,
}

impl Session {
    /// Gets all ready on the machine below `root`, with events of the devices that `device` names. It returns what is to be said
    /// before it begins, too.
    pub fn prepare(
        root: &Path,
        hands: Hands,
        device: Option<&str>,
    ) -> Result<(Self, Vec<String>), TracingError> {
        device.map_or(Ok(()), |device| is_there(root, device))?;
        let tracefs = Tracefs::find(root)?;
        let (instance, was_left) = Instance::make(&tracefs, hands)?;
        let streams = Streams::open(&instance)?;
        let buffer_kib = (ALL_KIB / streams.cpus().max(1) as u64).clamp(LEAST_KIB, USUAL_KIB);
        instance.write("buffer_size_kb", &buffer_kib.to_string())?;
        let events = Events::switch_on(&instance, device)?;
        let mut said = hidden(&events, Kernel::of(root), device.is_some());
        if was_left {
            said.insert(
                0,
                "A run before this one was killed: the tracing instance that it left is removed.".into(),
            );
        }
        let session = Self { streams, instance, events, buffer_kib, wait: LATE, _tracefs: tracefs };
        Ok((session, said))
    }

    /// Events are recorded from now on, or no more.
    pub fn switch(&self, on: bool) -> Result<(), TracingError> {
        self.instance.write("tracing_on", if on { "1" } else { "0" })
    }

    /// Reads all that there is, and shows it to `take`. Where a buffer was half full, it is made larger.
    pub fn round(&mut self, take: impl FnMut(&Pages) -> io::Result<()>) -> io::Result<Round> {
        let buffer = self.buffer_kib << 10;
        let now_ns = self.instance.now_ns();
        // Without a clock, what comes meanwhile could go on for ever.
        let most = if now_ns.is_some() { u64::MAX } else { buffer.saturating_mul(2) };
        let round = self.streams.round(&self.events.formats, most, now_ns, take)?;
        if round.fullest > buffer / 4 {
            self.wait = (self.wait / 2).max(SOON);
        } else if round.fullest < buffer / 16 {
            self.wait = (self.wait * 2).min(LATE);
        }
        if (round.fullest > buffer / 2 || round.lost > 0) && self.buffer_kib < MOST_KIB {
            // A machine without the memory keeps the buffers that it has.
            if self.instance.write("buffer_size_kb", &(self.buffer_kib * 2).to_string()).is_ok() {
                self.buffer_kib *= 2;
            }
        }
        Ok(round)
    }

    /// Waits until buffers are to be read again, or until `end`.
    pub fn pause(&self, end: Option<Instant>) {
        let left = end.map_or(self.wait, |end| end.saturating_duration_since(Instant::now()).min(self.wait));
        std::thread::sleep(left);
    }

    /// Now, on the events' clock; `None` where that is not known.
    pub fn now_ns(&self) -> Option<u64> {
        self.instance.now_ns()
    }

    /// Leaves tracing as it was found, and says what the events' fields are.
    pub fn end(self) -> Result<Events, TracingError> {
        let Self { streams, instance, events, .. } = self;
        drop(streams);
        instance.remove()?;
        Ok(events)
    }
}

/// Whether `asked` names a device of the machine below `root`. Where sysfs shows no device at all, any may be there.
fn is_there(root: &Path, asked: &str) -> Result<(), TracingError> {
    let root = root.canonicalize().unwrap_or_else(|_| root.to_owned());
    let host = Host::new(root, &Here);
    let buses = host.at("sys/bus");
    let on = |bus: &String| host.names(&buses.join(bus).join("devices"));
    let mut all = host.names(&buses).iter().flat_map(on).collect::<Vec<_>>().into_iter().peekable();
    if all.peek().is_none() || all.any(|name| is_named(asked, &name)) {
        return Ok(());
    }
    let means = host.find(asked).ok().map(|device| device.name);
    let devices = host.devices().into_iter().map(|device| device.name).collect();
    Err(TracingError::NoSuchDevice { name: asked.to_owned(), means, devices })
}
