//! What was replayed, and what of the recording is to be known besides.

use indicatif::HumanBytes;
use portcullis_trace::replay::Report;
use portcullis_trace::{Era, Printable, Recorded, Summary};

use crate::look::{count, number_of};

/// A line each.
pub fn lines(report: &Report, summary: &Summary) -> Vec<String> {
    let trace = &report.trace;
    let devices = if trace.devices.is_empty() { "none".into() } else { some_of(&trace.devices) };
    let mut lines = vec![
        format!(
            "{}: {}, {}, {}, {} mapped in {:.1} s, {}",
            Printable(&trace.name),
            number_of(trace.events, "event"),
            number_of(trace.maps, "map"),
            number_of(trace.unmaps, "unmap"),
            HumanBytes(trace.bytes_mapped),
            summary.seconds(),
            number_of(trace.cpus, "CPU")
        ),
        format!("devices: {devices}"),
        format!("recorded: {}", recorded(&trace.recorded)),
    ];
    lines.extend(notes(summary).into_iter().map(|note| format!("note: {note}")));
    lines
}

/// Names that are said; of more only the number.
const NAMES: usize = 16;

/// `names`, or the first of them and how many there are besides.
pub fn some_of(names: &[String]) -> String {
    let mut said: Vec<String> = names.iter().take(NAMES).map(|name| Printable(name).to_string()).collect();
    if let more @ 1.. = names.len() - said.len() {
        said.push(format!("and {} more", count(more as u64)));
    }
    said.join(", ")
}

/// What kind of recording it is, and whether that hides anything: what, is one of the notes.
pub fn recorded(all: &[Recorded]) -> String {
    let kinds: Vec<String> = all.iter().map(kind).collect();
    let hides = if all.iter().all(|one| one.hides.is_none()) { "; nothing is hidden" } else { "" };
    kinds.join("; ") + hides
}

/// What it hides that a recording is of this kind.
pub fn hidden(one: &Recorded) -> Option<String> {
    one.hides.as_ref().map(|hides| format!("the recording has {}: {hides}", kind(one)))
}

fn kind(one: &Recorded) -> String {
    let number = |thing| number_of(one.count, thing);
    match one.era {
        Era::DmaAndIommu => "a dma:* event of each mapping, and those of the IOMMU".into(),
        Era::Untranslated => {
            "a dma:* event of each mapping; devices use the memory's own addresses, without an IOMMU".into()
        }
        Era::DmaAlone => {
            "dma:* events of mappings at other addresses than the memory's, and none of an IOMMU".into()
        }
        Era::IommuAlone => "events of the IOMMU alone".into(),
        Era::Mixed => format!("dma:* events, and of {} events of the IOMMU alone", number("mapping")),
        Era::UnmapsAlone => "dma:* events, and of the IOMMU unmaps without any map".into(),
        Era::Nothing => "no mapping".into(),
        Era::AllocationsWithoutDirection => {
            format!("{} without a direction, which is both", number("allocation"))
        }
        Era::AllocationsUnreadable => {
            format!("{} with a direction that cannot be, and is taken for both", number("allocation"))
        }
        Era::MapsWithoutSize => format!("{} of the IOMMU without a size", number("map")),
    }
}

/// How every event that is not in the figures is accounted for, and what of the recording is to be known besides.
pub fn notes(summary: &Summary) -> Vec<String> {
    let (unmaps, syncs) = (&summary.unpaired, &summary.syncs_unpaired);
    let never_end = summary.mappings().saturating_sub(summary.mappings_ended());
    let in_the_file = match summary {
        Summary { limited: true, .. } => "before the limit",
        Summary { stopped: true, .. } => "so far",
        _ => "in the file",
    };
    let known = [
        (never_end, "mapping", format!("without an end {in_the_file}")),
        (unmaps.before_recording, "unmap", "of buffers mapped before the recording began".into()),
        (unmaps.already_unmapped, "unmap", "of buffers unmapped before".into()),
        (syncs.before_recording, "sync", "of buffers mapped before the recording began".into()),
        (syncs.already_unmapped, "sync", "after the unmap of their buffer".into()),
        (
            unmaps.after_loss + syncs.after_loss,
            "event",
            "of mappings whose map may be among lost events".into(),
        ),
        (summary.lost_events, "event", "lost while recording".into()),
        (summary.cut().unwrap_or(0), "event", "that the header promises, missing in the file".into()),
        (summary.moved_events, "event", "put back in the order of time, by 1 ms at most".into()),
        (summary.truncated_lists, "scatter-gather list", "cut by the kernel, at 128 entries".into()),
        (summary.guessed_lengths, "list", "with entries whose lengths had to be guessed".into()),
        (summary.iommu_unclaimed, "IOMMU event", "of an unknown device".into()),
        (summary.filtered, "event", "of other devices".into()),
    ];
    let seen = known.into_iter().filter(|(n, ..)| *n > 0);
    let mut notes: Vec<String> =
        seen.map(|(n, thing, what)| format!("{} {what}", number_of(n, thing))).collect();
    if summary.skipped > 0 {
        let names = summary.skipped_names.iter().map(|(name, n)| format!("{} {name}", count(*n)));
        let names = names.collect::<Vec<_>>().join(", ");
        notes.push(format!("{} passed over with a warning: {names}", number_of(summary.skipped, "event")));
    }
    if summary.stopped {
        notes.push(format!("stopped after {}, by Ctrl-C", number_of(summary.events, "event")));
    }
    if summary.limited {
        notes.push(format!("stopped after {}, as --limit asks", number_of(summary.events, "event")));
    }
    if summary.mappings() == 0 {
        let of = match (summary.filtered, summary.limited) {
            (0, false) => "in this recording",
            (0, true) => "before the limit",
            (_, false) => "for this device",
            (_, true) => "for this device before the limit: a higher --limit may reach its mappings",
        };
        notes.push(format!("nothing is mapped {of}, so there is nothing to compare"));
    }
    notes.extend(summary.recorded().iter().filter_map(hidden));
    notes
}
