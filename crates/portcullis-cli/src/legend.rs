//! What `replay --legend` says: what each word of the tables means, and where the waits come from.

use portcullis_trace::Printable;
use portcullis_trace::replay::{Profile, built_in_names};

use crate::look::{columns, number_of, number_of_these, wrap, wrap_at};
use crate::short::spread_sign;
use crate::table::LINES;

/// The short table's words, in its order. Those with a name in CSV and JSON have it behind them.
const SHORT: [(&str, &str); 8] = [
    ("policy", "a way to protect memory from devices; `portcullis replay --help` says what each one does"),
    (
        "cost, ns",
        "what a mapping costs the CPU, in nanoseconds: the library's map and unmap, as measured on this machine, and the wait. \
         Of several runs it is the one in the middle. In CSV cost_median_ns, in JSON median_ns of costs",
    ),
    (
        "±",
        "half of how far the runs of this command lie apart, as a share of the cost: they follow each other on this machine, so at \
         another time of day, or on another machine, costs may differ by more. - for a single run, and below 5 ns",
    ),
    (
        "of which wait, ns",
        "the part of the cost in which the CPU waits for the IOMMU, by the profile's figures. In CSV and JSON wait_ns_per_op",
    ),
    (
        "CPU time",
        "the share of the CPU's time that protection takes: cost / (cost + work), with what passthrough costs counted as work. \
         Work is the other CPU time that comes with each mapping: what --work names, or else all that the recording's CPUs had. A \
         workload that the CPU limits loses this share of its throughput. In CSV and JSON it is 1 less \
         relative_to_passthrough",
    ),
    (
        "< 1 % from",
        "the work for each mapping from which on that share is less than 1 %. --sweep prints it at other rates",
    ),
    (
        "freed memory open for 1 s",
        "bytes of buffers that the driver had got back while a device still reached them, times seconds: 10 bytes open for \
         0.1 s make 1. `all`: nothing is translated, and a device reaches all memory. In CSV and JSON stale_byte_s, where `all` is null in JSON",
    ),
    (
        "other data open for 1 s",
        "bytes that are nobody's buffer but share a page with one, so that a device reached them, times seconds. In CSV and \
         JSON neighbour_byte_s; what is not known is empty in CSV, and null in JSON",
    ),
];

/// The legend.
pub fn render(profile: &Profile, unicode: bool) -> String {
    let mut text = String::from("\nWhat the table's words mean\n");
    for (word, meaning) in SHORT {
        let word = if word == "±" { spread_sign(unicode) } else { word };
        text.push_str(&item(&format!("{word}: {meaning}")));
    }
    text.push_str(&wrap("\nWhat each line of the full table means (--full)", ""));
    for line in &LINES {
        text.push_str(&item(&format!("{}: {}", line.label.trim(), line.meaning)));
    }
    text.push_str(&item(
        "maps and unmaps, above the table: those that were replayed. An unmap without a map in the file is in a note, and is \
         not among them",
    ));
    text.push_str(&waits(profile));
    let caches = &profile.caches;
    text.push_str(&item(&format!(
        "caches: IOTLB of {}, {}; {} a level - {}",
        number_of_these(caches.iotlb_entries as u64, "entry", "entries"),
        number_of(caches.iotlb_ways as u64, "way"),
        number_of(caches.walk_cache_entries as u64, "table pointer"),
        Printable(&caches.source)
    )));
    text.push_str(&item(&format!(
        "other profiles: {}, or a file of yours; for AMD's IOMMU see docs/replay.md#an-amd-machine",
        built_in_names().into_iter().filter(|name| *name != profile.name).collect::<Vec<_>>().join(", ")
    )));
    text
}

/// The waits of `profile`, and where they come from.
pub fn waits(profile: &Profile) -> String {
    let (name, about) = (Printable(&profile.name), Printable(&profile.about));
    let mut text = wrap(&format!("\nThe waits of profile {name} ({about})"), "");
    for (_, what, cost) in profile.waits.named() {
        text.push_str(&item(&format!("{what}: {} ns - {}", cost.ns, Printable(&cost.source))));
    }
    text
}

/// One of a list.
pub fn item(text: &str) -> String {
    format!("  {}", wrap_at(text, "    ", columns() - 2))
}
