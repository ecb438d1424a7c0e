//! What a replay found: the documented JSON, and nothing that a person's table does not need too.

use std::borrow::Cow;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::choices::Choices;
use super::hostile::InForce;
use super::mode::Mode;
use super::painted::Painted;
use super::timing::Figures;
use crate::{Recorded, Summary};

/// A name out of a list that the library has. (Serde's derive takes a field that it sees to be a reference for borrowed from
/// the text; here the list's name is found instead.)
pub type Name = &'static str;

/// A whole replay. Serialises to the JSON that `docs/replay.md` describes, and is read from it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// What was replayed.
    pub trace: TraceReport,
    /// The name of the hardware profile.
    pub profile: String,
    /// What the driver and the stack above it are taken to spend per map-and-unmap pair, in nanoseconds.
    pub work_ns: f64,
    /// How that is known.
    #[serde(default)]
    pub work: Work,
    /// One entry for each policy, in the order asked for.
    #[serde(deserialize_with = "policies")]
    pub policies: Vec<PolicyReport>,
    /// What measuring one call cost; it is taken off.
    #[serde(skip)]
    pub timer_ns: f64,
}

/// How the CPU time is known that comes with each mapping besides protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// The caller named it, as all results before this one.
    #[default]
    Asked,
    /// The recording tells how much CPU time the machine took meanwhile, but for the recorder's ([`Measured`](crate::Measured)). What
    /// protection took, and the kernel to record, is in it.
    Measured,
    /// All time of the recording's CPUs, for each mapping: no more can have come with it.
    Most,
    /// The recording does not tell: a microsecond.
    Assumed,
}

impl Work {
    /// What a recording tells of it once it was read, in nanoseconds for each mapping.
    pub fn of(summary: &Summary) -> (f64, Self) {
        if let Some(ns) = measured(summary) {
            return (ns, Self::Measured);
        }
        let ns = summary.cpus as f64 * summary.duration_ns() as f64 / summary.mappings() as f64;
        if ns.is_finite() && ns >= 1.0 { (ns.round(), Self::Most) } else { (1_000.0, Self::Assumed) }
    }
}

/// The CPU time for each mapping that the machine took; of a recording that was not read to its end, for as long as that was.
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
    /// Pieces of memory in them; earlier results do not say, and have 0.
    #[serde(default)]
    pub pieces_mapped: u64,
    /// From its first event to its last; earlier results do not say, and have 0.
    #[serde(default)]
    pub duration_ns: u64,
    /// It has events of the IOMMU alone, so nothing tells what would be copied: policies that copy copy nothing of it.
    pub iommu_only: bool,
    /// What kinds of recording it is.
    #[serde(default)]
    pub recorded: Vec<Recorded>,
    /// Mappings of which only events of the IOMMU are known: no direction.
    #[serde(default)]
    pub without_direction: u64,
    /// Mappings that are not in it, but their ends are, or, where one device was asked for, may be of another.
    #[serde(default)]
    pub hidden: u64,
    /// Events that were lost while it was recorded, or that its header promises and the file has not.
    #[serde(default)]
    pub missing: u64,
    /// It tells what policies that copy would copy, but for one mapping, and one byte, in a hundred.
    #[serde(default = "yes")]
    pub copies_known: bool,
    /// It tells the direction and the bytes of all mappings, but for one in a hundred.
    #[serde(skip, default = "yes")]
    pub directions_known: bool,
    /// It has the mappings of all syncs, but for one in a hundred.
    #[serde(skip, default = "yes")]
    pub syncs_known: bool,
    /// It has all mappings that it shows to be, but for one in a hundred.
    #[serde(default = "yes")]
    pub costs_known: bool,
}

/// Earlier results do not say, and were taken for that.
fn yes() -> bool {
    true
}

impl TraceReport {
    /// Whether the recording tells what `mode` costs its mappings.
    pub fn tells_cost_of(&self, mode: Mode) -> bool {
        self.tells_copies() || !mode.copies()
    }

    /// Whether the recording tells which bytes of which pages its mappings are.
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

/// Bytes that a device could reach although no mapping covered them, times how long, in byte-seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Exposure {
    /// Of buffers that were unmapped.
    #[serde(deserialize_with = "none_where_null")]
    pub stale_byte_s: f64,
    /// Of whatever shares a page with a buffer.
    #[serde(deserialize_with = "none_where_null")]
    pub neighbour_byte_s: f64,
}

/// Reads a figure that is `null` where it is not known or all memory is open: other fields say which.
fn none_where_null<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// What one policy cost and what it left exposed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PolicyReport {
    /// The mode's name.
    #[serde(deserialize_with = "policy")]
    pub policy: Name,
    /// What it promises, and how it ends mappings.
    #[serde(skip, default = "passthrough")]
    pub mode: Mode,
    /// Mappings replayed: each is one map and, where the trace has it, one unmap.
    pub operations: u64,
    /// Measured: the library's map call.
    pub map_ns: Figures,
    /// Measured: the library's unmap call, without the model's part in it.
    pub unmap_ns: Figures,
    /// How many map calls took how long, what the profile makes each wait included: nanoseconds, to two significant digits,
    /// and calls, shortest first.
    #[serde(default)]
    pub map_latency: Vec<(f64, u64)>,
    /// The same of unmap calls. Commits that time alone asked for are none of them.
    #[serde(default)]
    pub unmap_latency: Vec<(f64, u64)>,
    /// Modelled by the profile: waiting for hardware, per operation.
    pub wait_ns_per_op: f64,
    /// Operations that one CPU can do in a second of work, measured time and modelled wait.
    pub ops_per_s: f64,
    /// The same as a share of passthrough's.
    pub relative_to_passthrough: Option<f64>,
    /// Invalidation requests, of ranges and of domains.
    pub invalidations: u64,
    /// IOTLB misses for each access of a device (one access stays within one 4 KiB page).
    pub iotlb_misses_per_access: f64,
    /// Page walks, for each access, that had to read more than the last table.
    pub walk_cache_misses_per_access: f64,
    /// The most address space that was taken at once: mapped, waiting for a flush, or cached.
    pub peak_iova_bytes: u64,
    /// The most memory that page tables took.
    pub peak_table_bytes: u64,
    /// The most memory that bounce buffers took.
    pub peak_bounce_bytes: u64,
    /// Bytes that the library copied: into bounce buffers and out of them. The same recording has the same, under all policies but
    /// `adaptive`. `None` in earlier results.
    #[serde(default)]
    pub copied_bytes: Option<u64>,
    /// What was exposed, as the software IOMMU saw it.
    pub exposure: Exposure,
    /// The domains' own account of it, kept at run time: no less, but for its sampled clock. `None` without translation.
    pub exposure_counted: Option<Exposure>,
    /// Accesses of a well-behaved device that were refused.
    pub faults: u64,
    /// Broken promises: memory reached after a strict unmap, or the commit of its batch, returned, or after lazy protection's window,
    /// an access that ended in the wrong place, bytes that a copy lost or brought to the wrong place, or more exposure than
    /// the domains counted.
    pub violations: u64,
    /// What the timer costs each call, measured beside them, in nanoseconds: it is taken off.
    pub timer_ns: f64,
    /// Map and unmap calls left out of the measured figures, because this machine interrupted them: they
    /// seemed to take 100 us or more.
    pub interrupted_calls: u64,
    /// What was chosen for each device, and why, where there was a choice.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub choices: Vec<Choices>,
    /// The longest time for which anything stale could be reached.
    #[serde(skip)]
    pub longest_stale_ns: u64,
    /// What a device found that retried everything, where one was [asked for](super::Options::retry).
    #[serde(skip)]
    pub in_force: Option<InForce>,
    /// What a device found that reads and writes whatever it reaches, where one was [asked for](super::Options::paint),
    /// and there is translation.
    #[serde(skip)]
    pub painted: Option<Painted>,
    /// Map and unmap calls that failed.
    #[serde(skip)]
    pub failures: u64,
    /// The first of them.
    #[serde(skip)]
    pub first_failure: Option<String>,
}

fn passthrough() -> Mode {
    Mode::PASSTHROUGH
}

/// Reads what policies cost, and finds each one's mode by its name.
fn policies<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PolicyReport>, D::Error> {
    let mut all = Vec::<PolicyReport>::deserialize(from)?;
    for policy in &mut all {
        policy.mode = Mode::named(policy.policy).unwrap_or(policy.mode);
    }
    Ok(all)
}

/// Reads the name of a policy.
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
}
