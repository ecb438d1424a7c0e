//! What `scale --explain` says: which counts a table rests on, how busy they keep what all CPUs share, and where each price comes from.

use portcullis_model::scale::Outcome;
use portcullis_trace::Printable;
use portcullis_trace::replay::Profile;

use super::{Table, of_mapping};
use crate::calibration::Calibration;
use crate::counted::instruction;
use crate::legend::{item, waits};
use crate::look::{count, wrap};

/// The counts of `table`, and all prices.
pub fn explain(table: &Table, profile: &Profile, calibration: &Calibration) -> String {
    let title = "\nInstructions of the kernel for a mapping, and how busy the IOMMUs, the devices and copying memory are";
    let mut text = wrap(title, "");
    let line = |[policy, rest @ ..]: [&str; 5]| {
        rest.iter().fold(format!("{policy:<13}"), |line, cell| format!("{line}{cell:>9}")) + "\n"
    };
    text.push_str(&line(["policy", "instr.", "IOMMU", "devices", "memory"]));
    let (rows, of_kernel) = table.printed();
    for (at, row) in rows.into_iter().enumerate() {
        let counted = of_mapping(&table.workload, row.policy).filter(|_| at < of_kernel);
        let instructions = counted.map_or("-".into(), |counted| count(counted.round() as u64));
        let Outcome { queue_busy, device_busy, copy_busy, .. } = row.outcome;
        let [queue, device, copy] =
            [queue_busy, device_busy, copy_busy].map(|busy| format!("{:.1} %", busy.min(1.0) * 100.0));
        text.push_str(&line([row.name, &instructions, &queue, &device, &copy]));
    }
    text.push_str(&wrap(&instruction(), ""));
    text.push_str(&waits(profile));
    text.push_str(&wrap(&format!("\nCache lines and copies of {}", Printable(&calibration.machine)), ""));
    for (name, figure) in calibration.named() {
        text.push_str(&item(&format!("{name}: {} - {}", figure.value, Printable(&figure.source))));
    }
    text
}
