//! Workloads: requests, with the work around their mappings, and the devices that carry them out.

/// One mapping of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mapping {
    /// Pages of 4 KiB that a request maps and unmaps for it. 0: the buffer stays mapped from request to request, and a policy at most
    /// copies it.
    pub pages: u64,
    /// Pieces of memory that these are, of a list.
    pub pieces: u64,
    /// Bytes that the device moves, and that bounce buffers copy.
    pub bytes: u64,
    /// Other data lies in its first or its last page.
    pub shared: bool,
    /// A device writes it, and does not read it.
    pub received: bool,
}

/// One request of a CPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The CPU's other work, in nanoseconds: half before the device gets the request, half afterwards.
    pub work_ns: f64,
    /// Its mappings.
    pub mappings: Vec<Mapping>,
}

impl Request {
    /// Its mappings that are mapped and unmapped.
    pub fn mapped(&self) -> impl Iterator<Item = &Mapping> {
        self.mappings.iter().filter(|mapping| mapping.pages > 0)
    }

    /// Bytes of all its mappings.
    pub fn bytes(&self) -> u64 {
        self.mappings.iter().map(|mapping| mapping.bytes).sum()
    }
}

/// Devices. A request goes to one of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Device {
    /// How many there are.
    pub count: u32,
    /// The most requests of each in a second.
    pub requests_per_s: f64,
    /// Its bandwidth, in GB/s.
    pub gb_per_s: f64,
    /// Additional latency of a request, in nanoseconds.
    pub latency_ns: f64,
    /// Each page that it moves, without walks, in nanoseconds.
    pub page_ns: f64,
}

impl Device {
    /// Has no limits, so that it never keeps CPUs waiting, page walks included.
    pub fn keeps_up(&self) -> bool {
        self.requests_per_s >= 1e12 && self.gb_per_s >= 1e3
    }
}

/// The loop of each CPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Its name in commands.
    pub name: String,
    /// A description, and the source of its figures.
    pub about: String,
    /// Its requests, in rotation.
    pub requests: Vec<Request>,
    /// The most outstanding requests of each CPU.
    pub depth: u32,
    /// Its devices.
    pub device: Device,
}

/// The built-in workloads.
pub const NAMES: [&str; 8] =
    ["memcached", "nvme", "nvme-2026", "nic", "nic-page-pool", "swiotlb", "disk-2008", "nested"];

/// Whole received pages.
fn pages(pages: u64) -> Vec<Mapping> {
    vec![Mapping { pages, pieces: 1, bytes: pages * 4096, shared: false, received: true }]
}

/// A received or sent part of a page.
const fn part(bytes: u64, received: bool) -> Mapping {
    Mapping { pages: 1, pieces: 1, bytes, shared: true, received }
}

impl Workload {
    /// A built-in one, on `cpus` CPUs.
    pub fn named(name: &str, cpus: u32) -> Option<Self> {
        // For each 32 CPUs, or a part of them, as many devices as its figures are for.
        let count = cpus.div_ceil(32);
        let nic = Device { count, requests_per_s: 1e12, gb_per_s: 12.5, latency_ns: 20_000.0, page_ns: 65.0 };
        Some(match name {
            "memcached" => Self {
                name: name.into(),
                about: "16 instances did 990,803 transactions/s on 16 CPUs without an IOMMU (Peleg and Morrison, 2016): 16,148 ns \
                        each. 3 mappings, each a part of a page: 110 bytes that are received, and headers of 66 and a value of 1,124 that are sent, which \
                        Linux maps apart (assumed). A link of 100 Gb/s for each 32 CPUs (assumed)"
                    .into(),
                requests: vec![Request { work_ns: 16_148.0, mappings: vec![part(110, true), part(66, false), part(1_124, false)] }],
                depth: 64,
                device: nic,
            },
            "nvme" => Self {
                name: name.into(),
                about: "random reads of 4 KiB, 32 deep; a disk of 410,392 IOPS and 2.5 GB/s for each 32 CPUs, 80 us away (Kovvuri, \
                        2017: IOPS, and 152,583 of 16 KiB); 5,000 ns of CPU for each (assumed)"
                    .into(),
                requests: vec![Request { work_ns: 5_000.0, mappings: pages(1) }],
                depth: 32,
                device: Device { count, requests_per_s: 410_392.0, gb_per_s: 2.5, latency_ns: 80_000.0, page_ns: 0.0 },
            },
            "nvme-2026" => Self {
                name: name.into(),
                about: "random reads of 4 KiB, 64 deep; a disk of 2,062,500 IOPS and 14 GB/s for each 9 CPUs, 70 us away: a server of 72 Arm CPUs \
                        did 16.5 million IOPS with eight without an IOMMU (NVIDIA, 2025). 3,000 ns of CPU for each (assumed)"
                    .into(),
                requests: vec![Request { work_ns: 3_000.0, mappings: pages(1) }],
                depth: 64,
                device: Device {
                    count: cpus.div_ceil(9),
                    requests_per_s: 2_062_500.0,
                    gb_per_s: 14.0,
                    latency_ns: 70_000.0,
                    page_ns: 0.0,
                },
            },
            "nic" => Self {
                name: name.into(),
                about: "packets of 4 KiB received through rings of 256, 1,600 ns of CPU for each (5 CPUs keep 98 Gb/s up: SOSP 2024), a \
                        link of 100 Gb/s for each 5 CPUs"
                    .into(),
                requests: vec![Request { work_ns: 1_600.0, mappings: pages(1) }],
                depth: 256,
                device: Device { count: cpus.div_ceil(5), ..nic },
            },
            "nic-page-pool" => Self {
                name: name.into(),
                about: "as nic, with receive buffers from Linux's page_pool, which stay mapped: what is sent alone is mapped, a part of a page of 66 bytes \
                        for each 2 packets (assumed). Where a policy copies, received bytes are copied once"
                    .into(),
                requests: vec![Request {
                    work_ns: 3_200.0,
                    mappings: vec![Mapping { pages: 0, pieces: 1, bytes: 8_192, shared: false, received: true }, part(66, false)],
                }],
                depth: 128,
                device: Device { count: cpus.div_ceil(5), ..nic },
            },
            "swiotlb" => Self {
                name: name.into(),
                about: "requests of 4 KiB that are sent through bounce buffers, 10,000 ns of CPU for each (assumed), a device that keeps up"
                    .into(),
                requests: vec![Request {
                    work_ns: 10_000.0,
                    mappings: vec![Mapping { pages: 1, pieces: 1, bytes: 4_096, shared: false, received: false }],
                }],
                depth: 32,
                device: Device { count: cpus, requests_per_s: 1e12, gb_per_s: 1e3, latency_ns: 20_000.0, page_ns: 0.0 },
            },
            "disk-2008" => Self {
                name: name.into(),
                about: "requests of 1 KiB; 145,253.1 a second on one CPU without an IOMMU (Tomonori, Grundler and Ben-Yehuda, 2008): \
                        6,885 ns each. 32 deep (assumed), disks that keep up"
                    .into(),
                requests: vec![Request { work_ns: 6_885.0, mappings: vec![part(1_024, false)] }],
                depth: 32,
                device: Device { count: cpus, requests_per_s: 1e12, gb_per_s: 1e3, latency_ns: 80_000.0, page_ns: 0.0 },
            },
            "nested" => Self {
                name: name.into(),
                about: "what a guest receives, 256 KiB for each mapping, 39,600 ns of CPU for each: one core did 43 Gb/s and spent 9,200 ns of \
                        48,800 in a flush. (256 KiB is inferred: at 229 Gb/s the queue took 8.2 us for a submission, one after the other, so \
                        each was for 235 KB at least.) Links that keep up. A guest's waits are longer: crates/portcullis-trace/profiles/vtd-nested.toml (--profile)"
                    .into(),
                requests: vec![Request { work_ns: 39_600.0, mappings: pages(64) }],
                depth: 8,
                device: Device { count: cpus, requests_per_s: 1e12, gb_per_s: 1e3, latency_ns: 20_000.0, page_ns: 0.0 },
            },
            _ => return None,
        })
    }
}
