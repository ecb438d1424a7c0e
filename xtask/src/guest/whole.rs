//! The jobs, which of them run where, and the machines that they run in.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use super::jobs::{self, JOBS, Job};
use super::machine::{Iommu, Run};
use super::{KERNELS, parse};
use crate::whole::told;

/// Adds them to `text`.
pub fn tell(text: &mut String) {
    text.push_str("== jobs\n");
    for Job {
        name,
        script,
        modes,
        settings,
        words,
        cpus,
        counted,
        hostile,
        many,
        has_command,
        next,
        user,
        time,
        ..
    } in JOBS
    {
        let is = [
            ("counted", *counted),
            ("hostile", *hostile),
            ("many", *many),
            ("command", *has_command),
            ("user", user.is_some()),
        ];
        let is: Vec<_> = is.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect();
        writeln!(
            text,
            "{name}: {script} {next:?} [{modes}] {settings:?} {words:?} {cpus} CPUs {time:?} {}",
            is.join(" ")
        )
        .unwrap();
    }
    let asked: [&[&str]; 6] = [
        &[],
        &["--iommu", "virtio"],
        &["--job", "edu", "--job", "files"],
        &["--job", "edu", "--iommu", "virtio", "--iommu", "amdvi"],
        &["--guest-kernel", "/a", "--minutes", "7", "--patience", "3", "--verbose"],
        &["--guest-kernel", "/a", "--job", "user", "--modes", "lazy", "--kernel", "6.1", "--kernel", "6.12"],
    ];
    for words in asked {
        let wanted = parse(words).unwrap();
        let super::Wanted { kernels, given, modes, minutes, patience, verbose, .. } = &wanted;
        writeln!(text, "== asked: {words:?}: {kernels:?} {given:?} {modes:?} {minutes} {patience} {verbose}")
            .unwrap();
        for (kernel, _) in KERNELS {
            let runs: Vec<_> = jobs::of(&wanted, kernel)
                .map(|(job, iommu)| format!("{} behind {}", job.name, iommu.name()))
                .collect();
            writeln!(text, "{kernel}: {}", runs.join(", ")).unwrap();
        }
    }
    text.push_str("== machines\n");
    for iommu in Iommu::ALL {
        for is_odd in [false, true] {
            let run = Run {
                image: Path::new("IMAGE"),
                archives: &[],
                iommu,
                cpus: 3,
                counted: is_odd,
                words: "MORE",
                boot: Duration::ZERO,
                time: Duration::ZERO,
                is_linux_alone: false,
                hostile: false,
                many: is_odd,
                native_hotplug: is_odd,
                aloud: false,
                folder: Path::new("/no/such"),
            };
            writeln!(text, "{}", told(&run.command())).unwrap();
        }
    }
}
