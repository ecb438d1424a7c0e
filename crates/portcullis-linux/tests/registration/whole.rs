//! A long random life of a cache: the result of each step, its submissions, and the usage, against `tests/whole/registration.txt`. With
//! `PORTCULLIS_WRITE_TABLES=1` the test writes the file.

use std::fmt::{Display, Write};

use portcullis::addr::Direction;
use portcullis_linux::registration::{Registration, ReleaseRegistrationError};

use crate::dice::Random;
use crate::golden::is_golden;
use crate::open::OpenCache;
use crate::rig::PAGE;
use crate::support::{Bench, HELD, KEPT, bytes};

fn ended<T: std::fmt::Debug, E: Display>(result: Result<T, E>) -> String {
    result.map_or_else(|error| error.to_string(), |done| format!("{done:?}"))
}

fn life(seed: u64, entries: usize, pages: u64, steps: u32) -> String {
    let bench = Bench::new(entries, pages);
    let (mut random, mut text, mut held) = (Random(seed), String::new(), Vec::<Registration>::new());
    for _ in 0..steps {
        let offset = random.below(10) * PAGE + [0, 0, 100, PAGE - 8][random.below(4) as usize];
        let memory = bytes(offset, 1 + random.below(3 * PAGE));
        let about = format!("{offset:#x}+{:#x}", memory.len);
        let said = match random.below(10) {
            0..=4 => {
                let keep = [HELD, KEPT][random.below(2) as usize];
                let direction = [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional]
                    [random.below(3) as usize];
                match bench.cache.open(memory, direction, keep) {
                    Ok(registration) => {
                        let (iova, len) = (registration.iova(), registration.len());
                        let reached = bench.reached(iova).map(|phys| phys == memory.phys);
                        held.push(registration);
                        format!(
                            "acquire {about} {direction:?} {keep:?}: {iova:?}+{len:#x}, written {reached:?}"
                        )
                    }
                    Err(error) => format!("acquire {about} {direction:?} {keep:?}: {error}"),
                }
            }
            5..=7 if !held.is_empty() => {
                let registration = held.swap_remove(random.below(held.len() as u64) as usize);
                let iova = registration.iova();
                let released = bench.cache.release(registration);
                let released = released.map_err(|error: ReleaseRegistrationError| error.to_string());
                format!("release {iova:?}: {}, reached {:?}", ended(released), bench.reached(iova).is_some())
            }
            8 => format!("forget {about}: {}", ended(bench.cache.forget(memory))),
            _ if random.below(3) == 0 => {
                let fails = random.below(2) == 0;
                bench.fail(fails);
                format!("hardware fails: {fails}")
            }
            _ => {
                let keep = random.below(6) * PAGE;
                format!("trim {keep:#x}: {}", ended(bench.cache.trim(keep)))
            }
        };
        let usage = bench.cache.usage();
        writeln!(
            text,
            "{said}; {} asked, {} entries of {:#x}, idle {} of {:#x}, unconfirmed {} of {:#x}, forgotten {}",
            bench.submissions(),
            usage.entries,
            usage.bytes,
            usage.idle_entries,
            usage.idle_bytes,
            usage.unconfirmed_entries,
            usage.unconfirmed_bytes,
            usage.forgotten_entries
        )
        .unwrap();
    }
    bench.fail(false);
    let (usage, stats) = (bench.cache.usage(), bench.rig.domain.stats());
    writeln!(
        text,
        "{usage:?}\n{} maps, {} unmaps, {:#x} taken",
        stats.maps, stats.unmaps, stats.taken_iova_bytes
    )
    .unwrap();
    text
}

#[test]
fn a_cache_lives_as_it_did() {
    let mut text = life(0x9e37_79b9_7f4a_7c15, 6, 16, 300);
    // Of longer lives the end.
    for (seed, entries, pages) in [(3, 2, 8), (5, 20, 64), (7, 64, 12), (11, 5, 5)] {
        let life = life(seed << 33 | 0x1234_5678, entries, pages, 4000);
        let end: Vec<&str> = life.lines().rev().take(2).collect();
        writeln!(text, "-- {entries} entries, {pages} pages\n{}\n{}", end[1], end[0]).unwrap();
    }
    is_golden(
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/portcullis-linux/tests/whole/registration.txt"),
        &text,
    );
}
