//! What a guest is asked to do, and which of that is usual.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::machine::Iommu;
use super::{Wanted, kernel};

/// Drivers of the kernel that the jobs load.
pub const DRIVERS: [&str; 16] = [
    "ahci",
    "e1000e",
    "ext4",
    "igb",
    "nvme",
    "sd_mod",
    "uas",
    "usb_storage",
    "vfio_iommu_type1",
    "vfio_pci",
    "virtio_blk",
    "virtio_iommu",
    "virtio_net",
    "virtio_pci",
    "xhci_pci",
    "crc32c_generic",
];

/// The project's policies.
const OURS: &str = "strict lazy bounce auto";
/// Linux's modes.
const LINUX: &str = "linux-passthrough linux-lazy linux-strict";
/// Both.
pub const ALL: &str = "linux-passthrough linux-lazy linux-strict lazy strict bounce auto";

/// Builds programs into a folder, and says where they are.
type Build = fn(&Path) -> Result<Vec<PathBuf>, String>;

/// A job.
pub struct Job {
    pub name: &'static str,
    pub what: &'static str,
    /// The script below `tests/guest/jobs`.
    pub script: &'static str,
    pub modes: &'static str,
    /// Variables that the script reads.
    pub settings: &'static str,
    pub words: &'static str,
    pub cpus: usize,
    pub counted: bool,
    pub hostile: bool,
    /// Whether the machine has devices behind a bridge, behind an external port, and with memory of their own.
    pub many: bool,
    /// Whether the guest has the command `portcullis`.
    pub has_command: bool,
    /// The script of the kernel that follows the first one by kexec.
    pub next: Option<&'static str>,
    /// What builds programs that drive devices by themselves, if it has some.
    pub user: Option<Build>,
    pub time: Duration,
}

const USUAL: Job = Job {
    name: "",
    what: "",
    script: "",
    modes: OURS,
    settings: "",
    words: "",
    cpus: 2,
    counted: false,
    hostile: false,
    many: false,
    has_command: false,
    next: None,
    user: None,
    time: Duration::from_secs(600),
};

/// Mappings of 4, 16, 64 and 128 KiB, each in one piece and as a list of pages, with the data and without.
macro_rules! per_gb {
    () => {
        "CASES='1 1 split\n1 4 split\n1 16 split\n1 32 split\n1 4 split sg\n1 16 split sg\n1 32 split sg\n1 1 split skip to\n\
         1 4 split skip to\n1 16 split skip to\n1 32 split skip to\n1 4 split sg skip to\n1 16 split sg skip to\n1 32 split sg skip to'"
    };
}

pub const JOBS: [&Job; 28] = [
    &Job {
        name: "drivers",
        what: "each driver by each policy, all bytes checked",
        script: "drivers",
        ..USUAL
    },
    &Job {
        name: "linux-drivers",
        what: "the same in Linux's modes, without the module",
        script: "drivers",
        modes: LINUX,
        ..USUAL
    },
    &Job {
        name: "edu",
        what: "what a hostile device reaches by each policy",
        script: "edu",
        hostile: true,
        ..USUAL
    },
    &Job {
        name: "linux-edu",
        what: "what it reaches in Linux's modes",
        script: "edu",
        modes: LINUX,
        hostile: true,
        ..USUAL
    },
    &Job {
        name: "all-edu",
        what: "the same for Linux's modes and our policies, beside each other",
        script: "edu",
        modes: ALL,
        hostile: true,
        ..USUAL
    },
    &Job {
        name: "events",
        what: "calls of iommu_map and iommu_unmap, and invalidations, per read of a disk",
        script: "events",
        modes: ALL,
        ..USUAL
    },
    &Job {
        name: "instructions",
        what: "instructions in map and unmap, on one CPU whose clock counts them",
        script: "bench",
        modes: ALL,
        settings: "SETTLE=60 ROUNDS=1 LOOPS=8000 CASES='1 1 skip\n1 1 depth=64 skip\n1 1 skip to\n1 1\n1 16 skip\n1 16 skip to\n1 16 sg skip\n1 16 sg skip to'",
        cpus: 1,
        counted: true,
        ..USUAL
    },
    &Job {
        name: "map-benchmark",
        what: "nanoseconds in a map and in an unmap as Linux's dma_map_benchmark takes them: 1 and 2 threads, 1 and 16 pages; the clock counts instructions",
        script: "bench",
        modes: "linux-lazy linux-strict lazy strict bounce auto",
        settings: "SETTLE=60 ROUNDS=1 LOOPS=8000 CASES='1 1 split\n2 1 split\n1 16 split\n2 16 split\n1 1 split skip\n2 1 split skip\n1 16 split skip\n2 16 split skip'",
        counted: true,
        ..USUAL
    },
    &Job {
        name: "per-gb",
        what: "microseconds in map and unmap per GB, in mappings of 4 to 128 KiB, copies included, and what they come to without the data",
        script: "bench",
        modes: "linux-strict strict bounce auto",
        settings: concat!("PER_GB=1 ROUNDS=5 LOOPS=400 ", per_gb!()),
        ..USUAL
    },
    &Job {
        name: "per-gb-instructions",
        what: "the same on one CPU whose clock counts the guest's instructions, and nothing of what QEMU does for them",
        script: "bench",
        modes: "linux-strict strict bounce auto",
        settings: concat!("SETTLE=60 PER_GB=1 ROUNDS=1 LOOPS=2000 ", per_gb!()),
        cpus: 1,
        counted: true,
        ..USUAL
    },
    &Job {
        name: "idle",
        what: "the module loaded, no device taken: instructions in map and unmap, and where maps go, as before",
        script: "idle",
        modes: "linux-strict linux-lazy",
        settings: "SETTLE=60",
        cpus: 1,
        counted: true,
        ..USUAL
    },
    &Job {
        name: "bench",
        what: "nanoseconds in map and unmap, 1 and 2 threads, 1 and 16 pages, as dma_map_benchmark takes them",
        script: "bench",
        modes: ALL,
        settings: "ROUNDS=3 LOOPS=20000 CASES='1 1 split\n2 1 split\n1 16 split\n2 16 split\n1 4 split\n1 32 split'",
        ..USUAL
    },
    &Job {
        name: "lazy",
        what: "lazy: invalidations in 100,000 unmaps, and how long after its unmap a buffer is reached",
        script: "lazy",
        modes: "linux-lazy lazy linux-strict",
        hostile: true,
        ..USUAL
    },
    &Job {
        name: "files",
        what: "a file system made, filled, read again and checked",
        script: "files",
        ..USUAL
    },
    &Job { name: "linux-files", what: "the same in Linux's modes", script: "files", modes: LINUX, ..USUAL },
    &Job {
        name: "commands",
        what: "the command `portcullis`, as a user gives it",
        script: "commands",
        has_command: true,
        ..USUAL
    },
    &Job {
        name: "record",
        what: "`portcullis record` and `watch`: rate, losses, its share of a CPU, and that tracing is left as it was found",
        script: "record",
        modes: "",
        has_command: true,
        ..USUAL
    },
    &Job {
        name: "doctor",
        what: "`portcullis doctor` names the IOMMU, the mode of a group as it changes, and a parameter that the kernel ignores",
        script: "doctor",
        modes: "",
        has_command: true,
        ..USUAL
    },
    &Job {
        name: "refused",
        what: "what cannot be done, and what faulty drivers do, is refused and told",
        script: "refused",
        hostile: true,
        ..USUAL
    },
    &Job {
        name: "api",
        what: "what the DMA API promises drivers, each call of it and each policy; and devices that firmware says are outside",
        script: "api",
        // Memory that nobody has zeroed is not zero.
        words: "init_on_alloc=0 page_poison=1",
        hostile: true,
        many: true,
        ..USUAL
    },
    &Job {
        name: "linux-api",
        what: "the same of what Linux promises, in its modes that translate",
        script: "api",
        modes: "linux-lazy linux-strict",
        // Memory that nobody has zeroed is not zero.
        words: "init_on_alloc=0 page_poison=1",
        hostile: true,
        many: true,
        ..USUAL
    },
    &Job {
        name: "stress",
        what: "under load: policies change, CPUs, drivers and a device leave; the module is removed and loaded again",
        script: "stress",
        ..USUAL
    },
    &Job {
        name: "kexec",
        what: "a kernel follows another without the firmware, while protected devices are in use: they are as Linux leaves them",
        script: "kexec",
        next: Some("kexec-next"),
        ..USUAL
    },
    &Job {
        name: "suspend",
        what: "the machine sleeps and wakes while devices are in use",
        script: "suspend",
        modes: "linux-lazy strict lazy bounce auto",
        time: Duration::from_secs(900),
        ..USUAL
    },
    &Job {
        name: "user",
        what: "a process that drives a device by itself: what the device reaches, parts, limits, forks and deaths, interrupts, devices unplugged and plugged in, over VFIO's type 1 and iommufd",
        script: "user",
        modes: "",
        hostile: true,
        user: Some(kernel::user),
        ..USUAL
    },
    &Job {
        name: "user-nvme",
        what: "the same with a disk: reads of 4 to 128 KiB by each way to map buffers, what these take, and how many system calls they make",
        script: "user-nvme",
        modes: "",
        settings: "ARGUMENTS=''",
        time: Duration::from_secs(1500),
        user: Some(kernel::measured),
        ..USUAL
    },
    &Job {
        name: "fail",
        what: "memory runs out during I/O, or Linux refuses to map",
        script: "fail",
        ..USUAL
    },
    &Job { name: "soak", what: "everything at once, for `--minutes`", script: "soak", ..USUAL },
];

/// What `cargo xtask test` runs: kernel, IOMMU, job. The drivers on 6.1, load, and what an I/O costs take four minutes more: by name.
const MATRIX: [(&str, Iommu, &str); 6] = [
    ("6.12", Iommu::Vtd, "all-edu"),
    ("6.12", Iommu::Vtd, "refused"),
    ("6.12", Iommu::Vtd, "api"),
    ("6.12", Iommu::Vtd, "user"),
    ("6.12", Iommu::Virtio, "user"),
    ("newest", Iommu::Virtio, "drivers"),
];

/// The usual runs.
pub fn usual() -> impl Iterator<Item = (&'static str, Iommu, &'static Job)> {
    MATRIX.iter().filter_map(|&(kernel, iommu, name)| {
        JOBS.into_iter().find(|job| job.name == name).map(|job| (kernel, iommu, job))
    })
}

/// The runs of a kernel: each job that was named behind each IOMMU that was; or of the usual ones those that are not left out.
pub fn of<'a>(wanted: &'a Wanted, kernel: &'a str) -> Box<dyn Iterator<Item = (&'static Job, Iommu)> + 'a> {
    let is_wanted = move |iommu: &Iommu| wanted.iommus.is_empty() || wanted.iommus.contains(iommu);
    if wanted.jobs.is_empty() {
        let of_kernel = move |&(name, iommu, _): &(&str, Iommu, _)| {
            (name == kernel || wanted.given.is_some()) && is_wanted(&iommu)
        };
        return Box::new(usual().filter(of_kernel).map(|(_, iommu, job)| (job, iommu)));
    }
    let of_debian = wanted.given.is_none();
    let iommus = Iommu::ALL.into_iter().filter(is_wanted);
    // Debian has built the driver since Linux 6.12.
    let iommus = iommus.filter(move |iommu| !(of_debian && kernel == "6.1" && *iommu == Iommu::Virtio));
    Box::new(iommus.flat_map(move |iommu| wanted.jobs.iter().map(move |&job| (job, iommu))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_usual_run_has_a_job_and_a_kernel() {
        assert_eq!(usual().count(), MATRIX.len());
        for (kernel, iommu, _) in usual() {
            assert!(super::super::KERNELS.iter().any(|(name, _)| *name == kernel));
            assert!(kernel != "6.1" || iommu != Iommu::Virtio, "Debian's 6.1 has no driver of it");
        }
    }
}
