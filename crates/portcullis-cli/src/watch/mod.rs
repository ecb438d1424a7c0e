//! `portcullis watch`: what each device maps now, and what it may still reach after its unmap.
//!
//! It records as `record` does, and reads that by the same reader as `replay`, while it comes.

mod device;
mod flush;
mod live;
mod table;

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use portcullis_trace::budget;
use portcullis_trace::{Chunk, Input, OpKind, ReadOptions, Summary, Trace, TraceError};

use self::device::Devices;
use self::live::Live;
use self::table::View;
use crate::linux::host::{Here, Host};
use crate::record::args::Watch;
use crate::record::instance;
use crate::record::session::Session;
use crate::record::tracefs::TracingError;
use crate::{interrupt, look};

/// Why there is nothing to watch.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error(transparent)]
    Tracing(#[from] TracingError),
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error("standard output: {0}")]
    Output(#[from] std::io::Error),
}

/// Runs the command.
pub fn run(asked: &Watch) -> Result<ExitCode, CommandError> {
    budget::set_limit(budget::USUAL);
    interrupt::listen_to_ends();
    let root = Path::new("/");
    let (session, notes) = Session::prepare(root, instance::KERNEL, asked.device.as_deref())?;
    let notes = notes.iter().map(String::as_str).chain(without_iommu(root));
    notes.for_each(|note| look::tell(&look::wrap(note, "")));
    session.switch(true)?;
    let end = asked.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let (live, session) = Live::new(session, end);
    let outcome = show(live, end, Duration::from_secs(asked.interval), Devices::new(root));
    let ended = session.lock().ok().and_then(|mut session| session.take()).map(Session::end);
    outcome?;
    ended.transpose()?;
    Ok(ExitCode::SUCCESS)
}

/// What a view is of on a machine without an IOMMU.
fn without_iommu(root: &Path) -> Option<&'static str> {
    Host::new(root, &Here).list("sys/kernel/iommu_groups").is_empty().then_some(
        "This machine has no IOMMU, or it is off: every device reaches all memory, before its map and after its unmap. What is shown are \
         mappings at the memory's own addresses, and of bounce buffers (swiotlb). Virtio devices make none then. `portcullis doctor` says \
         how to switch an IOMMU on.",
    )
}

/// What is shorter makes no view of its own at the end.
const SHORT_NS: u64 = 500_000_000;

/// Shows what comes until there is no more.
fn show(
    live: Live,
    end: Option<Instant>,
    interval: Duration,
    mut devices: Devices,
) -> Result<(), CommandError> {
    let mut trace = Trace::new(Input::from_reader("this machine", live)?, ReadOptions::default());
    let (mut chunk, mut view) = (Chunk::default(), Screen::new());
    let start = Instant::now();
    let (mut shown, mut shown_ns) = (start, None);
    loop {
        let more = trace.next_chunk(&mut chunk, 1)?;
        take(&mut devices, &chunk, trace.summary());
        let times_ns = trace.summary().times_ns;
        let now = times_ns.map_or(0, |(_, last)| last);
        times_ns.into_iter().for_each(|(first, _)| devices.begin(first));
        // The last view is of what came after the one before, if that is enough for a rate.
        let is_new = shown_ns.is_none_or(|shown_ns| now.saturating_sub(shown_ns) > SHORT_NS);
        let since = shown.elapsed();
        if since >= interval || (!more && is_new) {
            (shown, shown_ns) = (Instant::now(), Some(now));
            let view_of = View { time: start.elapsed(), lost: trace.summary().lost_events };
            let devices = devices.views(now, since.as_nanos() as u64);
            view.show(&table::text(&devices, view_of, look::is_unicode(), look::room()))?;
        }
        if !more {
            return Ok(());
        }
        // Whatever has come and was not read.
        if interrupt::stopped() || end.is_some_and(|end| Instant::now() >= end) {
            trace.stop();
        }
    }
}

/// Counts what a piece of the recording did.
fn take(devices: &mut Devices, chunk: &Chunk, summary: &Summary) {
    for op in &chunk.ops {
        match &op.kind {
            OpKind::Map { id, segments, .. } => {
                let bytes = chunk
                    .segments_of(segments)
                    .iter()
                    .fold(0, |sum: u64, piece| sum.saturating_add(piece.len));
                devices.map(op, *id, bytes, &summary.devices);
            }
            OpKind::Unmap { id } => devices.unmap(op, *id),
            OpKind::SyncForCpu { .. } | OpKind::SyncForDevice { .. } => {}
        }
    }
}

/// A table that takes the place of the one before, on a terminal.
struct Screen {
    terminal: bool,
    lines: usize,
}

impl Screen {
    fn new() -> Self {
        Self { terminal: std::io::stdout().is_terminal(), lines: 0 }
    }

    fn show(&mut self, text: &str) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        if self.terminal && self.lines > 0 {
            // Up to the table's first line, and nothing below.
            write!(out, "\x1b[{}A\x1b[J", self.lines)?;
        }
        self.lines = text.lines().count();
        match out.write_all(look::shown(text).as_bytes()).and_then(|()| out.flush()) {
            // A reader who has seen enough (`| head`) wants no more.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                interrupt::stop();
                Ok(())
            }
            result => result,
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_machine_without_an_iommu_is_said_to_have_none() {
        let root = tempfile::tempdir().unwrap();
        let said = || super::without_iommu(root.path());
        assert!(said().is_some_and(|said| said.starts_with("This machine has no IOMMU, or it is off: ")));
        let groups = root.path().join("sys/kernel/iommu_groups");
        std::fs::create_dir_all(&groups).unwrap();
        assert!(said().is_some());
        // With one, also where it lets devices through.
        std::fs::create_dir(groups.join("0")).unwrap();
        assert_eq!(said(), None);
    }
}
