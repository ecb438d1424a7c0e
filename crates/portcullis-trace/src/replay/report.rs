//! A replay's results: the documented JSON, and only what the printed table needs, too.

use std::borrow::Cow;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::choices::Choices;
use super::hostile::InForce;
use super::mode::Mode;
use super::painted::Painted;
use super::timing::Figures;
use crate::{Large, Recorded, Summary};

/// A name from one of the library's lists. (Serde's derive would borrow a reference field from the text; here the list's name is looked up
/// instead.)
pub type Name = &'static str;

/// A whole replay. Serialises to the JSON that `docs/replay.md` describes, and is read from it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// The trace.
    pub trace: TraceReport,
    /// The name of the hardware profile.
    pub profile: String,
    /// The assumed time of the driver and the stack above for each map-and-unmap pair, in nanoseconds.
    pub work_ns: f64,
    /// Its source.
    #[serde(default)]
    pub work: Work,
    /// One entry for each policy, in the requested order.
    #[serde(deserialize_with = "policies")]
    pub policies: Vec<PolicyReport>,
    /// The measured cost of timing one call, which is subtracted.
    #[serde(skip)]
    pub timer_ns: f64,
}

/// The source of the CPU time of a mapping besides protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// The caller gave it, as in all earlier results.
    #[default]
    Asked,
    /// The recording has the machine's CPU time, without the recorder's ([`Measured`](crate::Measured)). It includes the time of
    /// protection, and of tracing.
    Measured,
    /// All time of the recording's CPUs, for each mapping: an upper bound.
    Most,
    /// The recording does not tell: a microsecond.
    Assumed,
}

impl Work {
    /// A recording's value after it was read, in nanoseconds for each mapping.
    pub fn of(summary: &Summary) -> (f64, Self) {
        if let Some(ns) = measured(summary) {
            return (ns, Self::Measured);
        }
        let ns = summary.cpus as f64 * summary.duration_ns() as f64 / summary.mappings() as f64;
        if ns.is_finite() && ns >= 1.0 { (ns.round(), Self::Most) } else { (1_000.0, Self::Assumed) }
    }
}

/// The machine's CPU time for each mapping; of a recording that was not read to its end, for the part that was.
fn measured(summary: &Summary) -> Option<f64> {
    let measured = summary.measured?;
    let whole = !summary.limited && !summary.stopped;
    let part = if whole { 1.0 } else { (summary.duration_ns() as f64 / measured.wall_ns as f64).min(1.0) };
    let ns =
        (measured.busy_ns.saturating_sub(measured.own_ns) as f64 * part / summary.mappings() as f64).round();
    (ns.is_finite() && ns >= 1.0).then_some(ns)
}

/// The trace in figures.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TraceReport {
    /// Its file name.
    pub name: String,
    /// Events in it.
    pub events: u64,
    /// Mappings made.
    pub maps: u64,
    /// Mappings ended.
    pub unmaps: u64,
    /// Unmaps, frees and syncs whose map is not in the file.
    pub unpaired: u64,
    /// The devices, as the trace names them.
    pub devices: Vec<String>,
    /// CPUs that acted.
    pub cpus: u64,
    /// Bytes of all buffers mapped.
    pub bytes_mapped: u64,
    /// Their pieces of memory; 0 in earlier results.
    #[serde(default)]
    pub pieces_mapped: u64,
    /// Of these what `bounce` maps; nothing in earlier results.
    #[serde(default)]
    pub large: Large,
    /// From its first event to its last; 0 in earlier results.
    #[serde(default)]
    pub duration_ns: u64,
    /// It has only IOMMU events, so it does not tell what would be copied: copying policies copy nothing of it.
    pub iommu_only: bool,
    /// The kinds of the recording.
    #[serde(default)]
    pub recorded: Vec<Recorded>,
    /// Mappings with only IOMMU events: no direction.
    #[serde(default)]
    pub without_direction: u64,
    /// Mappings that are not in it, but their ends are, or, if one device was selected, may be of another.
    #[serde(default)]
    pub hidden: u64,
    /// Events that were lost while it was recorded, or that its header promises and the file does not have.
    #[serde(default)]
    pub missing: u64,
    /// It tells what copying policies would copy, except at most one mapping, and one byte, in a hundred.
    #[serde(default = "yes")]
    pub copies_known: bool,
    /// It tells the direction and the bytes of all mappings, except at most one in a hundred.
    #[serde(skip, default = "yes")]
    pub directions_known: bool,
    /// It has the mappings of all syncs, except at most one in a hundred.
    #[serde(skip, default = "yes")]
    pub syncs_known: bool,
    /// It has all mappings that its events show, except at most one in a hundred.
    #[serde(default = "yes")]
    pub costs_known: bool,
}

/// Default for earlier results.
fn yes() -> bool {
    true
}

impl TraceReport {
    /// Whether the recording tells the cost of its mappings under `mode`.
    pub fn tells_cost_of(&self, mode: Mode) -> bool {
        self.tells_copies() || !mode.copies()
    }

    /// Whether the recording tells the exact bytes of its mappings.
    pub fn tells_copies(&self) -> bool {
        self.copies_known && !self.iommu_only
    }
}

impl From<&Summary> for TraceReport {
    fn from(summary: &Summary) -> Self {
        Self {
            name: summary.name.clone(),
            events: summary.events,
            maps: summary.mappings(),
            unmaps: summary.mappings_ended(),
            unpaired: summary.unpaired.total() + summary.syncs_unpaired.total(),
            devices: summary.devices.clone(),
            cpus: summary.cpus,
            bytes_mapped: summary.bytes_mapped,
            pieces_mapped: summary.pieces_mapped,
            large: summary.large,
            duration_ns: summary.duration_ns(),
            iommu_only: summary.maps == 0 && summary.direct_maps > 0,
            recorded: summary.recorded(),
            without_direction: summary.direct_maps,
            hidden: summary.hidden(),
            missing: summary.lost_events.saturating_add(summary.cut().unwrap_or(0)),
            copies_known: summary.copies_known(),
            directions_known: summary.directions_known(),
            syncs_known: summary.syncs_known(),
            costs_known: summary.costs_known(),
        }
    }
}

/// Bytes that a device could reach although no mapping covered them, times their duration, in byte-seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Exposure {
    /// Of unmapped buffers.
    #[serde(deserialize_with = "none_where_null")]
    pub stale_byte_s: f64,
    /// Of other data in a buffer's page.
    #[serde(deserialize_with = "none_where_null")]
    pub neighbour_byte_s: f64,
}

/// Reads a figure that is `null` if it is not known or all memory is open: other fields say which.
fn none_where_null<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// The cost of one policy, and its exposure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PolicyReport {
    /// The mode's name.
    #[serde(deserialize_with = "policy")]
    pub policy: Name,
    /// Its promise, and how it ends mappings.
    #[serde(skip, default = "passthrough")]
    pub mode: Mode,
    /// Replayed mappings: each is one map and, if the trace has it, one unmap.
    pub operations: u64,
    /// Measured: the library's map call.
    pub map_ns: Figures,
    /// Measured: the library's unmap call, without the model's part in it.
    pub unmap_ns: Figures,
    /// A histogram of map calls with the profile's waits: nanoseconds, to two significant digits, and calls, shortest first.
    #[serde(default)]
    pub map_latency: Vec<(f64, u64)>,
    /// The same for unmap calls. Without commits by a timer.
    #[serde(default)]
    pub unmap_latency: Vec<(f64, u64)>,
    /// Modelled by the profile: waiting for hardware, per operation.
    pub wait_ns_per_op: f64,
    /// Operations of one CPU in a second, with work, measured time and modelled wait.
    pub ops_per_s: f64,
    /// The same as a share of passthrough's.
    pub relative_to_passthrough: Option<f64>,
    /// Invalidation requests, of ranges and of domains.
    pub invalidations: u64,
    /// IOTLB misses for each access of a device (one access stays within one 4 KiB page).
    pub iotlb_misses_per_access: f64,
    /// Page walks, for each access, that missed in the last-level walk cache.
    pub walk_cache_misses_per_access: f64,
    /// The most address space in use: mapped, waiting for a flush, or cached.
    pub peak_iova_bytes: u64,
    /// The most memory of page tables.
    pub peak_table_bytes: u64,
    /// The most memory of bounce buffers.
    pub peak_bounce_bytes: u64,
    /// Bytes that the library copied, into bounce buffers and out of them. The same in every replay of a recording, under all policies
    /// except `adaptive`. `None` in earlier results.
    #[serde(default)]
    pub copied_bytes: Option<u64>,
    /// The exposure, as the software IOMMU saw it.
    pub exposure: Exposure,
    /// The domains' own count of it at run time: an upper bound, up to its sampled clock. `None` without translation.
    pub exposure_counted: Option<Exposure>,
    /// Refused accesses of a well-behaved device.
    pub faults: u64,
    /// Broken promises: memory reached after a strict unmap, or the commit of its batch, returned, or after lazy protection's window, an
    /// access to the wrong address, bytes that a copy lost or misplaced, or more exposure than the domains counted.
    pub violations: u64,
    /// The timer's cost for each call, measured beside them, in nanoseconds; it is subtracted.
    pub timer_ns: f64,
    /// Map and unmap calls left out of the measured figures, because this machine interrupted them: they seemed to take 100 us or more.
    pub interrupted_calls: u64,
    /// The choices for each device, and their reasons, if there was a choice.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub choices: Vec<Choices>,
    /// The longest time for which anything stale could be reached.
    #[serde(skip)]
    pub longest_stale_ns: u64,
    /// The findings of a device that retried everything, if [requested](super::Options::retry).
    #[serde(skip)]
    pub in_force: Option<InForce>,
    /// The findings of a device that reads and writes all memory it reaches, if [requested](super::Options::paint), and there is
    /// translation.
    #[serde(skip)]
    pub painted: Option<Painted>,
    /// Map and unmap calls that failed.
    #[serde(skip)]
    pub failures: u64,
    /// The first failure.
    #[serde(skip)]
    pub first_failure: Option<String>,
}

fn passthrough() -> Mode {
    Mode::PASSTHROUGH
}

/// Reads policies' results, and finds each one's mode by its name.
fn policies<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PolicyReport>, D::Error> {
    let mut all = Vec::<PolicyReport>::deserialize(from)?;
    for policy in &mut all {
        policy.mode = Mode::named(policy.policy).unwrap_or(policy.mode);
    }
    Ok(all)
}

fn policy<'de, D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
    one_of(&Mode::ALL.map(Mode::name), from)
}

/// Reads one of `names`.
pub(super) fn one_of<'de, D: Deserializer<'de>>(names: &[Name], from: D) -> Result<Name, D::Error> {
    let read = <Cow<'_, str>>::deserialize(from)?;
    let known = names.iter().find(|name| **name == read).copied();
    known.ok_or_else(|| D::Error::custom(format_args!("{read:?} is none of {}", names.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Measured;

    #[test]
    fn what_copies_costs_is_told_where_the_bytes_of_mappings_are() {
        for (copies_known, iommu_only, told) in
            [(true, false, true), (false, false, false), (true, true, false), (false, true, false)]
        {
            let trace = TraceReport { copies_known, iommu_only, ..TraceReport::from(&Summary::default()) };
            let tells = [Mode::Bounce, Mode::Adaptive, Mode::Swiotlb, Mode::StrictRing, Mode::StrictBatch];
            assert_eq!(tells.map(|mode| trace.tells_cost_of(mode)), [told, told, told, true, true]);
        }
    }

    /// The rest of the recording had the rest of the CPU time.
    #[test]
    fn of_a_recording_that_was_not_read_to_its_end_the_work_is_of_what_was_read() {
        let measured = Some(Measured { cpus: 2, wall_ns: 10_000, busy_ns: 9_000, own_ns: 1_000 });
        let of = |limited, stopped| {
            let summary = Summary {
                measured,
                limited,
                stopped,
                maps: 2,
                times_ns: Some((500, 3_000)),
                ..Summary::default()
            };
            Work::of(&summary)
        };
        assert_eq!(of(false, false), (4_000.0, Work::Measured));
        for (limited, stopped) in [(true, false), (false, true), (true, true)] {
            assert_eq!(of(limited, stopped), (1_000.0, Work::Measured), "{limited} {stopped}");
        }
    }
}
