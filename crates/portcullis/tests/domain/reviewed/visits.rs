//! What is called for each leaf of a page table may do whatever its caller may.

use portcullis::addr::{Direction, IovaRange};
use portcullis::domain::Policy;
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;

use crate::common::{Bench, PAGE};
use crate::queued::{direct, end};

const LEN: u64 = 600 * PAGE;

/// With `cpus` CPUs, the first of which is the visiting CPU's.
fn visited(cpus: usize) {
    let platform = StdPlatform::with_cpus(cpus);
    let bench = Bench::on(platform.clone(), Policy::Strict);
    let mut queue = direct(&bench.device);
    let mut map = |len| queue.map(bench.memory.buffer(len).unwrap(), Direction::Bidirectional).unwrap();
    let kept: Vec<_> = (0..200).map(|_| map(PAGE)).collect();
    // More than a lowest table's, so that there is one to reclaim.
    let large: Vec<_> = (0..3).map(|_| map(LEN)).collect();
    large.into_iter().for_each(|mapping| drop(end(&mut queue, mapping)));
    platform.with_cpu(|cpu| assert_eq!(cpu.is_some(), cpus > 0));
    let mut visits = 0;
    let table = bench.domain.mapper().table();
    table.entries(&platform, table.aperture()).for_each(|mapping| {
        visits += 1;
        platform.with_cpu(|cpu| assert_eq!(cpu.is_some(), cpus > 0, "it is lent to the visit"));
        assert_eq!(mapping.range.len(), PAGE);
        if visits == 1 {
            bench.domain.reclaim().unwrap();
        }
        let buffer = bench.memory.buffer(PAGE).unwrap();
        let mapping = queue.map(buffer, Direction::Bidirectional).unwrap();
        drop(end(&mut queue, mapping));
    });
    assert!((200..=400).contains(&visits), "{visits}");
    let mut ranges = Vec::<IovaRange>::new();
    ranges.extend(table.entries(&platform, table.aperture()).map(|leaf| leaf.range));
    let mut mapped: Vec<_> = kept.iter().map(|mapped| mapped.iova()).collect();
    mapped.sort();
    assert_eq!(ranges.iter().map(|range| range.start()).collect::<Vec<_>>(), mapped);
}

#[test]
fn a_visitor_may_map_unmap_and_reclaim() {
    visited(2);
    visited(0);
}
