//! The counts of a trace's events, and the warnings.

use std::collections::BTreeMap;

use portcullis::bounce::PoolConfig;
use serde::{Deserialize, Serialize};

use crate::error::{TraceError, Warning, excerpt};
use crate::measured::Measured;
use crate::recorded::Recorded;

/// Warnings that are kept in full; the rest are only counted.
pub const KEPT_WARNINGS: usize = 20;

/// Event names that are distinguished; the rest count together.
const KEPT_NAMES: usize = 32;

/// Whether `part` is at most one in a hundred of `all`: too little to change a mean visibly.
fn few(part: u64, all: u64) -> bool {
    part <= all / 100
}

/// Counts `name`. Allocates only for a new name.
fn count_name(names: &mut BTreeMap<String, u64>, name: &[u8]) {
    if let Some(count) = std::str::from_utf8(name).ok().and_then(|name| names.get_mut(name)) {
        *count += 1;
        return;
    }
    let name = if names.len() < KEPT_NAMES { excerpt(name) } else { "others".into() };
    *names.entry(name).or_default() += 1;
}

/// Unmaps, frees or syncs without a mapping in this file, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unpaired {
    /// Never mapped in it: the mapping is older than the recording.
    pub before_recording: u64,
    /// Unmapped before, with no map since.
    pub already_unmapped: u64,
    /// Events were lost before it: the map may be among them.
    pub after_loss: u64,
}

impl Unpaired {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.before_recording.saturating_add(self.already_unmapped).saturating_add(self.after_loss)
    }
}

/// The contents of a trace, with the category of each event.
///
/// The counts are complete once [`Trace::next_chunk`](crate::Trace::next_chunk) has returned `false`; then [`accounted`](Self::accounted)
/// equals [`events`](Self::events). Before, IOMMU events with an undecided owner are in no category.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Summary {
    /// The file.
    pub name: String,
    /// Lines of text.
    pub lines: u64,
    /// Bytes of text, uncompressed.
    pub text_bytes: u64,
    /// Trace events of any kind.
    pub events: u64,
    /// The earliest and the latest time of all events, in nanoseconds; `None` before the first.
    pub times_ns: Option<(u64, u64)>,
    /// Events below a later one of another CPU, by at most 1 ms, which were sorted by timestamp.
    pub moved_events: u64,
    /// Lines that are neither events nor comments (each gave a warning); not counted as events.
    pub unrecognised_lines: u64,

    /// Map and alloc events that became operations.
    pub maps: u64,
    /// Unmap and free events that became operations.
    pub unmaps: u64,
    /// Unmap and free events without a map.
    pub unpaired: Unpaired,
    /// Sync events that became operations.
    pub syncs: u64,
    /// Sync events without a mapping.
    pub syncs_unpaired: Unpaired,
    /// `iommu:` events that are part of a `dma_*` event.
    pub iommu_claimed: u64,
    /// `iommu:` events that became operations without a `dma_*` event, of the one device that was attached to a domain, or else of
    /// [`DIRECT_DEVICE`](crate::DIRECT_DEVICE).
    pub iommu_direct: u64,
    /// The mappings of these: one for each unmap that covers runs as a whole, and else one for each run; an unmap of a part cuts it in two.
    pub direct_maps: u64,
    /// Those of them that ended.
    pub direct_unmaps: u64,
    /// Bytes in them.
    pub direct_bytes: u64,
    /// `iommu:map` events of at least one byte.
    pub iommu_maps: u64,
    /// `iommu:unmap` events of at least one byte.
    pub iommu_unmaps: u64,
    /// `iommu:unmap` events with neither a `dma_*` event nor an earlier `iommu:map`. They are among the [unclaimed](Self::iommu_unclaimed).
    pub ends_without_map: u64,
    /// Mappings with only IOMMU events and no device, if one device was selected, whose they may be. Their events are among the
    /// [unclaimed](Self::iommu_unclaimed).
    pub nameless: u64,
    /// `iommu:map` events that are part of a `dma_*` event.
    pub runs_claimed: u64,
    /// Mappings by `dma_*` events whose device address is not the physical one.
    pub translated: u64,
    /// `iommu:map` events of no bytes.
    pub empty_maps: u64,
    /// Allocations whose events have no direction.
    pub allocs_without_dir: u64,
    /// Allocations whose events have an invalid direction.
    pub allocs_unreadable_dir: u64,
    /// Unusable `iommu:` events, because their device is unknown.
    pub iommu_unclaimed: u64,
    /// Known events that map nothing.
    pub not_mapping_events: u64,
    /// Events of other kinds.
    pub other_events: u64,
    /// Their number by event name.
    pub other_names: BTreeMap<String, u64>,
    /// Events without effect: a free of nothing, a map or an allocation that failed in the kernel, an unmap of unmapped addresses.
    pub ignored: u64,
    /// Events skipped with a warning.
    pub skipped: u64,
    /// Their number by event name.
    pub skipped_names: BTreeMap<String, u64>,
    /// Events of devices that were not selected.
    pub filtered: u64,

    /// The names of all devices; a [`DeviceId`](crate::DeviceId) is an index.
    pub devices: Vec<String>,
    /// Distinct CPUs.
    pub cpus: u64,
    /// Bytes in all mappings made.
    pub bytes_mapped: u64,
    /// Their pieces of memory: adjacent list entries are one piece, as in Linux's `dma_map_sg`.
    pub pieces_mapped: u64,
    /// Of these the mappings that `bounce` maps, as they are too large to be copied.
    pub large: Large,
    /// The CPU usage meanwhile, if the recording has it.
    pub measured: Option<Measured>,
    /// Entries in the kernel's buffer, by the header.
    pub promised_entries: Option<u64>,
    /// Whether reading stopped before the end of the file, at [`ReadOptions::limit`](crate::ReadOptions::limit).
    pub limited: bool,
    /// Whether reading stopped before the end of the file because of [`Trace::stop`](crate::Trace::stop).
    pub stopped: bool,
    /// Events that the kernel dropped, as far as it says.
    pub lost_events: u64,
    /// Lists truncated by the kernel at 128 entries.
    pub truncated_lists: u64,
    /// Mappings whose entries' lengths follow from the `iommu:map` events before them.
    pub derived_lengths: u64,
    /// Mappings with guessed entry lengths or addresses: each entry extends to the end of its page, and coherent memory is at its device
    /// address.
    pub guessed_lengths: u64,
    /// How many warnings there were.
    pub warnings: u64,
    /// The first [`KEPT_WARNINGS`] of them.
    pub kept_warnings: Vec<Warning>,
}

/// Mappings of more bytes than [`PoolConfig::threshold`](portcullis::bounce::PoolConfig::threshold) has by default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Large {
    /// Their number.
    pub maps: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their pieces of memory.
    pub pieces: u64,
}

impl Large {
    fn count(&mut self, bytes: u64, pieces: u64) {
        if bytes > PoolConfig::default().threshold {
            self.maps += 1;
            self.bytes = self.bytes.saturating_add(bytes);
            self.pieces = self.pieces.saturating_add(pieces);
        }
    }
}

impl Summary {
    /// Counts the bytes of a mapping, and its pieces of memory.
    pub(crate) fn count_shape(&mut self, bytes: u64, pieces: u64) {
        self.bytes_mapped = self.bytes_mapped.saturating_add(bytes);
        self.pieces_mapped = self.pieces_mapped.saturating_add(pieces);
        self.large.count(bytes, pieces);
    }

    /// The kinds of this recording; the first is how mappings are recorded.
    pub fn recorded(&self) -> Vec<Recorded> {
        Recorded::of(self)
    }

    /// Whether the recording tells what copying policies would copy: [directions](Self::directions_known) and [syncs](Self::syncs_known).
    pub fn copies_known(&self) -> bool {
        self.directions_known() && self.syncs_known()
    }

    /// Whether it tells the direction and the bytes of all mappings, except at most one in a hundred.
    pub fn directions_known(&self) -> bool {
        let without = self.direct_maps.saturating_add(self.nameless);
        few(without, self.mappings().saturating_add(self.nameless))
            && few(self.direct_bytes, self.bytes_mapped)
    }

    /// Whether it has the mappings of all syncs, except at most one in a hundred.
    pub fn syncs_known(&self) -> bool {
        few(self.syncs_unpaired.total(), self.syncs.saturating_add(self.mappings()))
    }

    /// Mappings known only by their end, because the kernel records no `iommu:map`, and mappings that may be of the selected device, or of
    /// another.
    pub fn hidden(&self) -> u64 {
        let no_maps = self.iommu_unmaps > 0 && self.runs_claimed == 0 && self.direct_maps == 0;
        let ends = if no_maps && self.translated > 0 { self.ends_without_map } else { 0 };
        ends.saturating_add(self.nameless)
    }

    /// Whether the recording has all mappings that its events show, except at most one in a hundred.
    pub fn costs_known(&self) -> bool {
        few(self.hidden(), self.mappings().saturating_add(self.hidden()))
    }

    /// From the earliest event to the latest, in seconds.
    pub fn seconds(&self) -> f64 {
        self.duration_ns() as f64 / 1e9
    }

    /// Extends the recording's times.
    pub(crate) fn seen_at(&mut self, time_ns: u64) {
        let (first, last) = self.times_ns.unwrap_or((time_ns, time_ns));
        self.times_ns = Some((first.min(time_ns), last.max(time_ns)));
    }

    /// Mappings made, by any events.
    pub fn mappings(&self) -> u64 {
        self.maps.saturating_add(self.direct_maps)
    }

    /// Mappings ended.
    pub fn mappings_ended(&self) -> u64 {
        self.unmaps.saturating_add(self.direct_unmaps)
    }

    /// Map and alloc events whose mappings were still live at the end.
    pub fn still_mapped(&self) -> u64 {
        self.maps.saturating_sub(self.unmaps)
    }

    /// Map events whose unmap was found.
    pub fn paired_maps(&self) -> u64 {
        self.unmaps
    }

    /// The sum of all categories of events.
    pub fn accounted(&self) -> u64 {
        [
            self.paired_maps(),
            self.still_mapped(),
            self.unmaps,
            self.unpaired.total(),
            self.syncs,
            self.syncs_unpaired.total(),
            self.iommu_claimed,
            self.iommu_direct,
            self.iommu_unclaimed,
            self.not_mapping_events,
            self.other_events,
            self.ignored,
            self.skipped,
            self.filtered,
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }

    /// Events missing from the header's promise; `None` if there are none, or no promise, or reading stopped before the end.
    pub fn cut(&self) -> Option<u64> {
        self.promised_entries
            .filter(|_| !self.limited && !self.stopped)?
            .checked_sub(self.events)
            .filter(|&missing| missing > 0)
    }

    /// From the earliest event to the latest.
    pub fn duration_ns(&self) -> u64 {
        self.times_ns.map_or(0, |(first, last)| last.saturating_sub(first))
    }

    /// Counts a warning; makes its text only while there is room to keep it.
    pub(crate) fn warn(&mut self, line: u64, text: impl FnOnce() -> (String, String)) {
        self.warnings += 1;
        if self.kept_warnings.len() < KEPT_WARNINGS {
            let (expected, found) = text();
            self.kept_warnings.push(Warning { line, expected, found });
        }
    }

    /// A warning for a skipped event.
    pub(crate) fn skip(&mut self, line: u64, text: impl FnOnce() -> (String, String)) {
        self.skipped += 1;
        self.warn(line, text);
    }

    /// Counts a skipped event called `name`.
    pub(crate) fn name_skipped(&mut self, name: &[u8]) {
        count_name(&mut self.skipped_names, name);
    }

    /// Counts another event called `name`.
    pub(crate) fn name_other(&mut self, name: &[u8]) {
        count_name(&mut self.other_names, name);
    }

    /// Events that were read and are useless for a replay: of other kinds, without their map, or skipped.
    pub fn unused(&self) -> u64 {
        let unpaired = self.unpaired.total().saturating_add(self.syncs_unpaired.total());
        [self.other_events, self.ignored, self.skipped, self.iommu_unclaimed, unpaired]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// The first warning, as an error.
    pub(crate) fn strict_error(&self) -> Result<(), TraceError> {
        match self.kept_warnings.first() {
            Some(warning) => Err(TraceError::Strict { name: self.name.clone(), warning: warning.clone() }),
            None => Ok(()),
        }
    }
}
