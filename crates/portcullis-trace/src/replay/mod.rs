//! Replays a trace under several protection policies at once.
//!
//! The trace is read once, in chunks; each policy replays a chunk before the next is read, so that memory stays bounded and all policies
//! run under the same conditions. Each device of the trace gets a domain of its own in a software IOMMU, with real page tables in simulated
//! memory.
//!
//! *Measured* are the library's map and unmap calls, in nanoseconds of this machine. *Modelled* is the time that hardware would make the
//! CPU wait, by a [`Profile`]. *Observed* by the software IOMMU is everything else: misses, faults and exposure. Memory that is registered
//! once, and never unmapped, needs no call and no model: its exposure follows from the recording. A device transfers a mapping's bytes just
//! before the mapping ends (and a synced part before a sync for the CPU); after each unmap a hostile one tries every page again.

mod choices;
mod data;
mod driver;
mod engine;
mod format;
mod hostile;
mod live;
mod memory;
mod mode;
mod painted;
mod platform;
mod port;
mod profile;
mod queue;
mod registered;
mod report;
mod requests;
mod share;
mod tables;
mod timing;

pub use choices::{Choice, Choices};
pub use format::FORMATS;
pub use hostile::{InForce, Promise, Retry};
pub use memory::{MOST_BYTES, TraceMemory};
pub use mode::{BATCH_UNMAPS, COMMIT_WITHIN_NS, Mode, RING_BATCH, RING_PAGES};
pub use painted::{Paint, Painted};
pub use platform::ReplayPlatform;
pub use profile::{Caches, Cost, Profile, ProfileError, Waits, built_in_names, built_in_text};
pub use report::{Exposure, Name, PolicyReport, Report, TraceReport, Work};
pub use requests::{RequestMapper, RequestWaits};
pub use timing::{Figures, INTERRUPTED_NS, Samples, Timer};

use std::sync::Arc;

use engine::Engine;
use format::AnyFormat;
use portcullis::SetupError;
use portcullis::addr::PhysAddr;
use portcullis::dma::{DmaMapError, DmaUnmapError};
use registered::Registered;
use share::Share;

use crate::budget::{Over, WayOut};
use crate::figures::{bytes, count, number_of};
use crate::printable::Printable;
use crate::{Chunk, Trace, TraceError};

const CHUNK_EVENTS: usize = 16_384;

/// Why a replay failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The trace could not be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The library refused a mapping.
    #[error("line {line}: map failed: {error}")]
    Map {
        /// The event's line.
        line: u64,
        /// Why.
        error: DmaMapError,
    },
    /// The library could not end a mapping.
    #[error("line {line}: unmap failed: {error}")]
    Unmap {
        /// The event's line.
        line: u64,
        /// Why.
        error: DmaUnmapError,
    },
    /// The library could not commit a batch.
    #[error("line {line}: commit failed: {error}")]
    Commit {
        /// The event's line; 0 for a commit by a timer.
        line: u64,
        /// Why.
        error: DmaUnmapError,
    },
    /// The library could not sync a mapping.
    #[error("line {line}: sync failed: {error}")]
    Sync {
        /// The event's line.
        line: u64,
        /// Why.
        error: DmaUnmapError,
    },
    /// The library could not make a queue.
    #[error("line {line}: queue: {error}")]
    Queue {
        /// The event's line; 0 for one that was made with its device.
        line: u64,
        /// Why.
        error: SetupError,
    },
    /// The replay needs more memory than the limit: each policy tracks each device, each live mapping and each of its pages.
    #[error(
        "{name}: line {line}: with {} and {}, {over}",
        number_of(*devices as u64, "device"),
        number_of(*mappings as u64, "live mapping"),
        name = Printable(name)
    )]
    Memory {
        /// The recording.
        name: String,
        /// The event's line.
        line: u64,
        /// Devices that have mapped so far.
        devices: usize,
        /// Mappings that are alive.
        mappings: usize,
        /// The numbers.
        over: Over,
    },
    /// Few events map and sync more pages, or run more timers, than can be tracked individually in reasonable time.
    #[error(
        "{name}: line {line}: {} pages and timers would be followed one by one by now, {} are possible for a recording of so \
         few events: --device, --limit or --policy make it less",
        count(*pages),
        count(*most),
        name = Printable(name)
    )]
    TooManyPages {
        /// The recording.
        name: String,
        /// The event's line.
        line: u64,
        /// Pages so far, counted at each map, sync and unmap.
        pages: u64,
        /// The limit.
        most: u64,
    },
    /// Copied mappings have more bytes than the replay can keep.
    #[error(
        "{name}: line {line}: {policy} keeps the bytes of what is mapped, and their copies: it needs {} more, and may have {} \
         in all (its part of half of --memory, {} at the most): {}",
        bytes(*wanted as f64),
        bytes(*most as f64),
        bytes(MOST_BYTES as f64),
        WayOut(*memory),
        name = Printable(name)
    )]
    TooManyBytes {
        /// The recording.
        name: String,
        /// The event's line.
        line: u64,
        /// The policy that copies.
        policy: &'static str,
        /// Bytes of the mapping's pages, or of a bounce buffer.
        wanted: u64,
        /// The limit, including bounce buffers and the directory of pages.
        most: u64,
        /// A memory limit that is likely to suffice, if any does.
        memory: Option<u64>,
    },
    /// The trace names memory at the replay's bounce buffer addresses.
    #[error("line {line}: mapping: memory at {phys}, where the replay has its bounce buffers")]
    PoolsMemory {
        /// The event's line.
        line: u64,
        /// The memory.
        phys: PhysAddr,
    },
    /// A device's page table, domain or pool cannot be made.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// No such page-table format.
    #[error("no page-table format is called {name:?}: there are {}", FORMATS.join(", "))]
    NoSuchFormat {
        /// The requested name.
        name: String,
    },
    /// More devices than an IOMMU has domains.
    #[error("the trace names more than {}: an IOMMU has 65,535 domains", number_of(*number as u64, "device"))]
    TooManyDevices {
        /// Devices so far.
        number: usize,
    },
}

/// Options of a replay.
#[derive(Debug, Clone)]
pub struct Options {
    /// The policies. The first of a kind counts.
    pub policies: Vec<Mode>,
    /// The hardware.
    pub profile: Profile,
    /// The time of the driver and the stack above for each map-and-unmap pair, in nanoseconds. `None`: the recording's, by [`Work`].
    pub work_ns: Option<f64>,
    /// The page-table format: one of [`FORMATS`].
    pub format: String,
    /// `bounce` copies the driver's bytes of a device-written buffer into the slot first, so that bytes that the device does not write stay
    /// unchanged. The Linux module does so, for unmodified drivers, and a swiotlb always does; it is one more copy. Without it slots are
    /// used as they are, as in the library's queues.
    pub copies_in: bool,
    /// For tests of the checker: the model ignores every invalidation, as if the driver had omitted them.
    pub break_invalidation: bool,
    /// For tests of the checker: copies between buffers and bounce buffers do nothing.
    pub break_copies: bool,
    /// For tests of the library: a device that retries every address it ever saw, while policies change. It takes time, which the measured
    /// figures exclude, and memory for each page of addresses ever used.
    pub retry: Option<Retry>,
    /// For tests of the library: a device that reads and writes all memory that it reaches, which is painted, and drivers and devices that
    /// verify every byte. It takes time, and memory for all pages that the trace names.
    pub paint: Option<Paint>,
}

impl Options {
    /// All policies, on `profile`, with the recording's work.
    pub fn new(profile: Profile) -> Self {
        let policies = Mode::ALL.to_vec();
        let format = profile.format.clone().unwrap_or_else(|| FORMATS[0].into());
        Self {
            policies,
            profile,
            work_ns: None,
            format,
            copies_in: false,
            break_invalidation: false,
            break_copies: false,
            retry: None,
            paint: None,
        }
    }
}

/// Replays `trace`, calling `progress` after each chunk.
///
/// # Errors
/// [`ReplayError`] if the trace cannot be read to its end. A mapping that the library refuses is counted in its policy's report, with the
/// first reason.
pub fn replay(
    trace: &mut Trace<'_>,
    options: &Options,
    mut progress: impl FnMut(&Trace<'_>),
) -> Result<Report, ReplayError> {
    replay_telling(trace, options, &mut progress)
}

/// The non-generic part of [`replay`], compiled only in this crate.
fn replay_telling(
    trace: &mut Trace<'_>,
    options: &Options,
    progress: &mut dyn FnMut(&Trace<'_>),
) -> Result<Report, ReplayError> {
    let no_such_format = || ReplayError::NoSuchFormat { name: options.format.clone() };
    let format: Arc<dyn AnyFormat> = format::named(&options.format).ok_or_else(no_such_format)??;
    let timer = Timer::calibrated();
    let mut asked = options.policies.clone();
    // The baseline of every share, even if it was not requested.
    let with_baseline = asked.contains(&Mode::PASSTHROUGH);
    if !with_baseline {
        asked.push(Mode::PASSTHROUGH);
    }
    let mut chunk = Chunk::default();
    let mut more = trace.next_chunk(&mut chunk, CHUNK_EVENTS)?;
    // In a recording with only IOMMU events, operations may be held back.
    while more && chunk.ops.is_empty() {
        progress(trace);
        more = trace.next_chunk(&mut chunk, CHUNK_EVENTS)?;
    }
    // As many CPUs as have had events by now; later ones share them.
    let recorded = usize::try_from(trace.summary().cpus).unwrap_or(usize::MAX);
    let cpus = chunk.ops.iter().map(|op| op.cpu as usize + 1).max().unwrap_or(1).max(recorded);
    let share = Share::of(&asked, trace.summary());
    let engine = |mode: &Mode| Engine::new(*mode, &format, &options.profile, &timer, cpus, &share);
    let mut engines: Vec<Engine> = asked.iter().filter(|mode| mode.is_replayed()).map(engine).collect();
    let at = asked.iter().position(|mode| !mode.is_replayed());
    let mut registered = at.map(|at| (at, Registered::new(format.granule())));
    if let Some(retry) = options.retry {
        engines.iter_mut().for_each(|engine| engine.retry(retry));
    }
    if let Some(paint) = options.paint {
        engines.iter_mut().for_each(|engine| engine.paint(paint));
    }
    if options.break_invalidation {
        engines.iter().for_each(Engine::break_invalidation);
    }
    if options.break_copies {
        engines.iter().for_each(Engine::break_copies);
    }
    engines.iter_mut().for_each(|engine| engine.copies_in(options.copies_in));
    while more {
        for engine in &mut engines {
            engine.run(&chunk)?;
        }
        if let Some((_, registered)) = &mut registered {
            registered.run(&chunk);
        }
        progress(trace);
        more = trace.next_chunk(&mut chunk, CHUNK_EVENTS)?;
    }
    let times_ns = trace.summary().times_ns.unwrap_or_default();
    let (work_ns, work) = options.work_ns.map_or_else(|| Work::of(trace.summary()), |ns| (ns, Work::Asked));
    let mut policies: Vec<PolicyReport> =
        engines.into_iter().map(|engine| engine.finish(work_ns, times_ns.1)).collect();
    let passthrough = policies.iter().find(|report| report.policy == Mode::PASSTHROUGH.name());
    let yardstick = passthrough.map(|report| report.ops_per_s).filter(|ops| *ops > 0.0);
    for report in &mut policies {
        report.relative_to_passthrough = yardstick.map(|yardstick| report.ops_per_s / yardstick);
    }
    if let Some((at, registered)) = registered {
        let report = registered.finish(work_ns, times_ns);
        policies.insert(at, PolicyReport { relative_to_passthrough: yardstick.map(|_| 1.0), ..report });
    }
    if !with_baseline {
        policies.pop();
    }
    Ok(Report {
        trace: trace.summary().into(),
        profile: options.profile.name.clone(),
        work_ns,
        work,
        policies,
        timer_ns: timer.overhead_ns(),
    })
}
