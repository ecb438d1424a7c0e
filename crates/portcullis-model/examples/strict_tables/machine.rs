//! A card with a receive and a transmit queue for each CPU, its driver, and the IOMMU's misses.
//!
//! The card works on one packet of each queue at a time. A packet is a page; it is written in 16 pieces of 256 bytes, and the pieces of the
//! queues mix at random, equally for each flow. Then the card writes 64 bytes to the completion queue. A transmission is 64 bytes read from
//! the transmit queue, 128 bytes of the packet, and 64 bytes written to a completion queue; a receive descriptor is 1 KiB read when it is
//! posted. The queues' own memory stays mapped.
//!
//! The driver runs in between, in no time: the card does nothing while a descriptor's 64 pages are unmapped and 64 new ones mapped. A sent
//! packet is unmapped when the next packet is received, or in batches.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use portcullis::addr::{Iova, Permissions};
use portcullis_model::{Iommu, IommuConfig, Memory, Stats};

use super::driver::{
    CPUS, DESCRIPTOR_PAGES, DESCRIPTORS, Driver, Mapped, NIC, Ours, PAGE, Purpose, TRANSMITS,
};
use super::linux::Linux;
use super::throughput;

/// The mapping mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Page by page with magazines; invalidations page by page with the leaf-only hint, as for second-stage tables since December 2025.
    Linux,
    /// The same without the hint, as in the published measurements.
    Linux2024,
    /// Page by page in a domain of Portcullis under the strict policy.
    Strict,
    /// By `StrictRing`: descriptors of 64 pages, transmissions in batches of 64.
    Ring,
}

/// The traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// Bulk data in `flows` streams, each with this round trip while the card's buffer is full.
    Streams { flows: usize, round_trip_us: u32 },
    /// Bulk data in 5 streams, where this share of the pages, in percent, is always acknowledged at once.
    Forced { percent: u32 },
    /// Requests of 8 KiB, each with an answer.
    Requests,
}

/// One experiment.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub mode: Mode,
    pub traffic: Traffic,
    /// Queues, each with its CPU.
    pub queues: usize,
    /// Whether the address space is aged.
    pub aged: bool,
    pub iotlb_entries: usize,
    /// Whether the hardware honours the leaf-only hint.
    pub honours: bool,
    /// Windows of 2,048 pages before and during counting.
    pub windows: (u32, u32),
}

/// Per page received.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    pub iotlb: f64,
    /// Walks that missed a table: the highest below the root first, as in the literature.
    pub levels: [f64; 3],
    /// Packets sent.
    pub sent: f64,
    /// By the throughput model; at most the line's speed.
    pub gbps: f64,
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { iotlb, levels: [l1, l2, l3], sent, gbps } = self;
        write!(f, "{iotlb:>5.2}{l1:>5.2}{l2:>5.2}{l3:>6.3}{sent:>5.2}{gbps:>6.0}")
    }
}

/// Windows before and during counting, for the tables of `docs/strict.md`.
pub const WINDOWS: (u32, u32) = (16, 16);
/// Pages after which the senders notice the throughput.
const WINDOW: u64 = 2048;
/// The most pages that others had mapped, and the share that they still have.
const PAST_PAGES: usize = 1 << 17;
const STILL_MAPPED: usize = 8;
/// Pieces of a page write.
const PIECES: u64 = 16;
/// Pages of one acknowledgement without losses: 64 KiB, the most that a receiver merges.
const MERGED: u32 = 16;
/// Pages of a request, and answers that a server sends together.
const REQUEST: u32 = 2;
const ANSWERS: usize = 4;

/// Bytes of an entry of a completion queue or a transmit queue, and of a receive descriptor.
const ENTRY: u64 = 64;
const DESCRIPTOR: u64 = 1024;

/// A queue's own memory, used in rotation.
struct Own {
    start: Iova,
    bytes: u64,
    at: u64,
}

impl Own {
    /// Of entries of `entry` bytes, starting at a random entry.
    fn new(driver: &mut dyn Driver, entries: u64, entry: u64, dice: &mut u64) -> Self {
        let bytes = entries * entry;
        let at = throw(dice, entries as usize) as u64 * entry;
        Self { start: driver.own(bytes), bytes, at }
    }

    fn next(&mut self, bytes: u64) -> Iova {
        let at = self.at;
        self.at = (at + bytes) % self.bytes;
        self.start.checked_add(at).unwrap()
    }
}

struct Queue {
    posted: VecDeque<Mapped>,
    /// The oldest descriptor's next page and piece, and the packet's flow.
    page: usize,
    piece: u64,
    flow: usize,
    /// Sent, and not unmapped.
    sent: Vec<Mapped>,
    /// Receive descriptors, received, to send, sent.
    own: [Own; 4],
}

/// A card, its driver and the IOMMU between them.
struct Machine {
    iommu: Arc<Iommu>,
    driver: Box<dyn Driver>,
    queues: Vec<Queue>,
    /// Unacknowledged pages of each flow.
    waiting: Vec<u32>,
    /// The share of pages that are acknowledged at once, because an earlier one was lost.
    out_of_order: f64,
    /// Pages of one answer, and answers that are unmapped together.
    merged: u32,
    together: usize,
    received: u64,
    transmitted: u64,
    dice: u64,
}

/// The misses of `setup`.
pub fn run(setup: Setup) -> Rates {
    let mut machine = Machine::new(setup);
    let (warm_up, counted) = setup.windows;
    (0..warm_up).for_each(|_| machine.window(setup.traffic));
    let (before, received, transmitted) = (machine.iommu.stats(), machine.received, machine.transmitted);
    (0..counted).for_each(|_| machine.window(setup.traffic));
    let pages = (machine.received - received) as f64;
    let after = machine.iommu.stats();
    let per_page = |count: fn(&Stats) -> u64| (count(&after) - count(&before)) as f64 / pages;
    Rates {
        iotlb: per_page(|stats| stats.iotlb_misses),
        levels: [
            per_page(|stats| stats.misses_by_level[2]),
            per_page(|stats| stats.misses_by_level[1]),
            per_page(|stats| stats.misses_by_level[0]),
        ],
        sent: (machine.transmitted - transmitted) as f64 / pages,
        gbps: throughput::gbps(per_page(|stats| stats.table_reads)).min(throughput::LINE_GBPS),
    }
}

impl Machine {
    fn new(setup: Setup) -> Self {
        let iommu = Iommu::new(IommuConfig {
            iotlb_entries: setup.iotlb_entries,
            iotlb_ways: setup.iotlb_entries / 16,
            honours_leaf_only: setup.honours,
            ..IommuConfig::new(Memory::new(1 << 28))
        });
        let mut dice = 1;
        let driver: Box<dyn Driver> = match setup.mode {
            Mode::Linux | Mode::Linux2024 => {
                let mut driver = Linux::new(&iommu, setup.mode == Mode::Linux);
                age(&mut driver, setup, &mut dice);
                Box::new(driver)
            }
            Mode::Strict | Mode::Ring => {
                let mut driver = Ours::new(&iommu);
                age(&mut driver, setup, &mut dice);
                if setup.mode == Mode::Ring {
                    driver.make_rings(setup.queues);
                }
                Box::new(driver)
            }
        };
        let (flows, merged, together) = match setup.traffic {
            Traffic::Streams { flows, .. } => (flows, MERGED, 1),
            Traffic::Forced { .. } => (5, MERGED, 1),
            Traffic::Requests => (setup.queues, REQUEST, ANSWERS),
        };
        let waiting = vec![0; flows];
        let mut machine = Self {
            iommu,
            driver,
            queues: Vec::new(),
            waiting,
            out_of_order: 0.0,
            merged,
            together,
            received: 0,
            transmitted: 0,
            dice,
        };
        for cpu in 0..setup.queues {
            let (transmits, completions) = ((TRANSMITS, ENTRY), (512, ENTRY));
            let own = [(DESCRIPTORS as u64, DESCRIPTOR), completions, transmits, transmits]
                .map(|(entries, entry)| Own::new(&mut *machine.driver, entries, entry, &mut machine.dice));
            let (posted, sent) = (VecDeque::new(), Vec::new());
            machine.queues.push(Queue { posted, page: 0, piece: 0, flow: cpu, sent, own });
            (0..DESCRIPTORS).for_each(|_| machine.post(cpu));
        }
        machine
    }

    /// Runs [`WINDOW`] pages; then the senders notice the throughput.
    fn window(&mut self, traffic: Traffic) {
        let (until, reads) = (self.received + WINDOW, self.iommu.stats().table_reads);
        while self.received < until {
            self.piece();
        }
        let reads = self.iommu.stats().table_reads - reads;
        self.out_of_order = throughput::out_of_order(traffic, reads as f64 / WINDOW as f64);
    }

    /// The card's next piece of a packet.
    fn piece(&mut self) {
        let flow = throw(&mut self.dice, self.waiting.len());
        let cpu = flow % self.queues.len();
        let queue = &mut self.queues[cpu];
        if queue.piece == 0 {
            queue.flow = flow;
        }
        let (page, bytes) = (queue.posted[0].pages[queue.page], PAGE / PIECES);
        let at = page.checked_add(queue.piece * bytes).unwrap();
        queue.piece = (queue.piece + 1) % PIECES;
        let complete = queue.piece == 0;
        self.access(at, bytes, Permissions::WRITE);
        if complete {
            let at = self.queues[cpu].own[1].next(ENTRY);
            self.access(at, ENTRY, Permissions::WRITE);
            self.packet(cpu);
        }
    }

    /// The driver receives a packet.
    fn packet(&mut self, cpu: usize) {
        self.received += 1;
        if self.queues[cpu].sent.len() >= self.together {
            for sent in std::mem::take(&mut self.queues[cpu].sent) {
                self.driver.unmap(cpu, Purpose::Transmit, sent);
            }
        }
        let at_once = (throw(&mut self.dice, 1 << 20) as f64) < self.out_of_order * f64::from(1 << 20);
        let waiting = &mut self.waiting[self.queues[cpu].flow];
        *waiting += 1;
        if at_once || *waiting >= self.merged {
            *waiting = 0;
            self.transmit(cpu);
        }
        self.queues[cpu].page += 1;
        if self.queues[cpu].page as u64 == DESCRIPTOR_PAGES {
            self.queues[cpu].page = 0;
            let oldest = self.queues[cpu].posted.pop_front().unwrap();
            self.driver.unmap(cpu, Purpose::Receive, oldest);
            self.post(cpu);
        }
    }

    fn post(&mut self, cpu: usize) {
        let mapped = self.driver.map(cpu, Purpose::Receive, DESCRIPTOR_PAGES);
        self.queues[cpu].posted.push_back(mapped);
        let at = self.queues[cpu].own[0].next(DESCRIPTOR);
        self.access(at, DESCRIPTOR, Permissions::READ);
    }

    fn transmit(&mut self, cpu: usize) {
        self.transmitted += 1;
        let mapped = self.driver.map(cpu, Purpose::Transmit, 1);
        let [_, _, to_send, sent] = &mut self.queues[cpu].own;
        let (to_send, sent) = (to_send.next(ENTRY), sent.next(ENTRY));
        self.access(to_send, ENTRY, Permissions::READ);
        self.access(mapped.pages[0], 128, Permissions::READ);
        self.access(sent, ENTRY, Permissions::WRITE);
        self.queues[cpu].sent.push(mapped);
    }

    fn access(&self, iova: Iova, len: u64, access: Permissions) {
        self.iommu.access(NIC, iova, len, access).unwrap();
    }
}

/// Ages the address space, if requested: other drivers' receive queues on the queues' CPUs, posted in turn; most have gone, their pages in
/// any order and on any CPU. It ages those CPUs, because each allocates fresh addresses where it allocated its others.
fn age(driver: &mut impl Driver, setup: Setup, dice: &mut u64) {
    if !setup.aged {
        return;
    }
    let mut mapped = Vec::new();
    for descriptor in 0..PAST_PAGES / DESCRIPTOR_PAGES as usize {
        mapped.extend(driver.map(descriptor % setup.queues, Purpose::Other, DESCRIPTOR_PAGES).pages);
    }
    while mapped.len() > PAST_PAGES / STILL_MAPPED {
        let which = throw(dice, mapped.len());
        let page = mapped.swap_remove(which);
        driver.unmap(throw(dice, CPUS), Purpose::Other, Mapped::pages(vec![page]));
    }
}

fn throw(dice: &mut u64, sides: usize) -> usize {
    *dice ^= *dice << 13;
    *dice ^= *dice >> 7;
    *dice ^= *dice << 17;
    ((*dice >> 32) as usize * sides) >> 32
}
