//! Strict protection on the software IOMMU, against measurements of hardware: misses per page of the IOTLB and of the paging-structure
//! caches, and the resulting throughput. `docs/strict.md` explains the experiment and the results, which are the same on every machine. Run
//! with `cargo run --release -p portcullis-model --example strict_tables`.

#[path = "strict_tables/mod.rs"]
mod strict_tables;

use strict_tables::machine::{Mode, Rates, Setup, Traffic, WINDOWS, run};
use strict_tables::paper::{ABLATION, Measured, STREAMS};

/// The mode, and whether the address space is aged.
type Row = (&'static str, Mode, bool);

const OLD_FRESH: Row = ("Linux 2024, fresh", Mode::Linux2024, false);
const OLD_AGED: Row = ("Linux 2024, aged", Mode::Linux2024, true);
const FRESH: Row = ("Linux, fresh", Mode::Linux, false);
const AGED: Row = ("Linux, aged", Mode::Linux, true);
const RING: Row = ("ring, aged", Mode::Ring, true);
const ROUND_TRIP_US: u32 = 100;

fn main() {
    println!("Misses per page of 4 KiB, packets sent per page, and Gb/s by the throughput model.");
    for iotlb_entries in [64, 128] {
        streams(iotlb_entries);
    }
    for iotlb_entries in [64, 128] {
        ablation(iotlb_entries);
    }
    controls();
}

fn streams(iotlb_entries: usize) {
    heading("Streams on 5 CPUs", iotlb_entries);
    let strict = ("strict, aged", Mode::Strict, true);
    for (flows, linux, fast_and_safe) in STREAMS {
        for row in [OLD_FRESH, OLD_AGED, FRESH, AGED, strict, RING] {
            let traffic = Traffic::Streams { flows, round_trip_us: ROUND_TRIP_US };
            print!("{flows:>3} {:20}", row.0);
            both(row, traffic, iotlb_entries);
            match row {
                OLD_FRESH => published(linux),
                RING => published(fast_and_safe),
                _ => println!(),
            }
        }
    }
}

fn ablation(iotlb_entries: usize) {
    heading("Requests of 8 KiB on 8 CPUs", iotlb_entries);
    let [linux, kept, contiguous, all] = ABLATION;
    let rows = [
        (OLD_FRESH, None, Some(linux)),
        (OLD_AGED, None, None),
        (FRESH, Some(true), Some(kept)),
        (AGED, Some(true), None),
        (("ring, hint ignored", Mode::Ring, true), Some(false), Some(contiguous)),
        (RING, Some(true), Some(all)),
    ];
    for (row, honours, measured) in rows {
        print!("    {:20}", row.0);
        match honours {
            None => both(row, Traffic::Requests, iotlb_entries),
            Some(honours) => {
                let rates = experiment(row, Traffic::Requests, iotlb_entries, honours).to_string();
                let [honoured, ignored] = if honours { [&rates, ""] } else { ["", &rates] };
                print!("{honoured:32} |{ignored:32}");
            }
        }
        measured.map_or_else(|| println!(), published);
    }
}

/// The figures with other assumptions.
fn controls() {
    heading("A shorter round trip at 40 flows, and acknowledgements by decree", 64);
    let shorter = Traffic::Streams { flows: 40, round_trip_us: ROUND_TRIP_US / 2 };
    for traffic in [shorter, Traffic::Forced { percent: 0 }, Traffic::Forced { percent: 50 }] {
        let name = match traffic {
            Traffic::Streams { round_trip_us, .. } => format!("{round_trip_us} us"),
            Traffic::Forced { percent } => format!("{percent} %"),
            Traffic::Requests => String::new(),
        };
        for row in [OLD_FRESH, OLD_AGED, FRESH, AGED, RING] {
            print!("{name:>5} {:18}", row.0);
            both(row, traffic, 64);
            println!();
        }
    }
}

fn heading(what: &str, iotlb_entries: usize) {
    println!("\n{what}; IOTLB of {iotlb_entries} in {} ways, 64 tables per level in 4", iotlb_entries / 16);
    println!("{:24}{:^33}|{:^33}|  measured", "", "hint honoured", "hint ignored");
    let columns = format!("{:>5}{:>5}{:>5}{:>6}{:>5}{:>6}", "IOTLB", "L1", "L2", "L3", "sent", "Gb/s");
    println!("{:24}{columns} |{columns} | IOTLB   L1   L2   L3 Gb/s", "");
}

/// With and without hardware support of the leaf-only hint.
fn both(row: Row, traffic: Traffic, iotlb_entries: usize) {
    let [honoured, ignored] = [true, false].map(|honours| experiment(row, traffic, iotlb_entries, honours));
    print!("{honoured} |{ignored}");
}

fn experiment((_, mode, aged): Row, traffic: Traffic, iotlb_entries: usize, honours: bool) -> Rates {
    let queues = if traffic == Traffic::Requests { 8 } else { 5 };
    run(Setup { mode, traffic, queues, aged, iotlb_entries, honours, windows: WINDOWS })
}

fn published(measured: Measured) {
    let level = |level: Option<f64>| level.map_or(format!("{:>5}", "-"), |misses| format!("{misses:>5.2}"));
    let [l1, l2, l3] = measured.levels.map(level);
    println!(" | {:>5.2}{l1}{l2}{l3}{:>5.0}", measured.iotlb, measured.gbps);
}
