//! The address space with its CPUs' lists against a plain model.

use std::collections::BTreeMap;

use crate::chosen::{Chosen, PAGE, alloc, config, free};
use portcullis::addr::{Iova, IovaRange};
use portcullis::iova::{IovaError, IovaSpace};
use proptest::prelude::*;
#[derive(Debug, Clone)]
enum Action {
    Alloc { cpu: usize, pages: u64, limit: u64 },
    Free { cpu: usize, which: usize },
    FreeAgain { cpu: usize, which: usize },
    FreePart { cpu: usize, which: usize },
    Flush,
    Release { cpu: usize },
}

fn action(cpus: usize, pages: u64) -> impl Strategy<Value = Action> {
    let cpu = 0..=cpus;
    prop_oneof![
        8 => (cpu.clone(), prop_oneof![1..40u64, 1..4u64, 500..600u64], prop_oneof![Just(u64::MAX), 1..pages * PAGE])
            .prop_map(|(cpu, pages, limit)| Action::Alloc { cpu, pages, limit }),
        8 => (cpu.clone(), any::<usize>()).prop_map(|(cpu, which)| Action::Free { cpu, which }),
        1 => (cpu.clone(), any::<usize>()).prop_map(|(cpu, which)| Action::FreeAgain { cpu, which }),
        1 => (cpu, any::<usize>()).prop_map(|(cpu, which)| Action::FreePart { cpu, which }),
        1 => Just(Action::Flush),
        1 => (0..cpus).prop_map(|cpu| Action::Release { cpu }),
    ]
}

/// Whether `pages` pages at their natural alignment fit between the ranges of `live`, below `end`.
fn fits(live: &BTreeMap<u64, u64>, first: u64, end: u64, pages: u64) -> bool {
    let align = pages.next_power_of_two();
    let mut at = first;
    let holes = live.iter().map(|(start, len)| (*start, *len)).chain([(end, 0)]);
    for (start, len) in holes {
        let aligned = at.next_multiple_of(align);
        if aligned + pages <= start.min(end) {
            return true;
        }
        at = at.max(start + len);
    }
    false
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Never an overlap, a misaligned range or an address above the limit; never an error while there is
    /// room; everything comes back.
    #[test]
    fn agrees_with_a_plain_model(
        low in prop_oneof![Just(1u64), Just((1u64 << 20) - 700)],
        actions in proptest::collection::vec(action(3, 2048), 1..300),
    ) {
        // 8 MiB, once below 4 GiB and once across it.
        let pages = 2048;
        let platform = Chosen::new(3);
        let space = IovaSpace::new(&config(low, pages, 3)).unwrap();
        let total = space.usage().total;
        let mut live: BTreeMap<u64, u64> = BTreeMap::new();
        let mut gone: Vec<IovaRange> = Vec::new();
        let pick = |live: &BTreeMap<u64, u64>, which: usize| {
            let (start, len) = live.iter().nth(which % live.len().max(1))?;
            Some(IovaRange::new(Iova::new(start * PAGE), len * PAGE).unwrap())
        };
        for action in actions {
            match action {
                Action::Alloc { cpu, pages: wanted, limit } => {
                    let limit = if limit == u64::MAX { limit } else { low * PAGE + limit };
                    match alloc(&space, platform.be(cpu), wanted, Iova::new(limit)) {
                        Ok(range) => {
                            let start = range.start().get() / PAGE;
                            prop_assert_eq!(range.len(), wanted * PAGE);
                            prop_assert_eq!(start % wanted.next_power_of_two(), 0);
                            prop_assert!(range.last().get() <= limit);
                            prop_assert!(start >= low && start + wanted <= low + pages);
                            let before = live.range(..start + wanted).next_back();
                            prop_assert!(before.is_none_or(|(other, len)| other + len <= start), "overlap");
                            live.insert(start, wanted);
                        }
                        Err(IovaError::Exhausted { cached, .. }) => {
                            // Ranges that are live may take a rounded size, so "no room" is judged by that.
                            let rounded = live.iter().map(|(start, len)| {
                                (*start, if *len <= 512 { len.next_power_of_two() } else { *len })
                            });
                            let end = (limit / PAGE + u64::from(limit % PAGE == PAGE - 1)).min(low + pages);
                            prop_assert!(!fits(&rounded.collect(), low, end, wanted), "there is room");
                            prop_assert!(cached <= total);
                        }
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                }
                Action::Free { cpu, which } => {
                    if let Some(range) = pick(&live, which) {
                        prop_assert_eq!(free(&space, platform.be(cpu), range), Ok(()));
                        live.remove(&(range.start().get() / PAGE));
                        gone.push(range);
                    }
                }
                Action::FreeAgain { cpu, which } => {
                    if let Some(range) = gone.get(which % gone.len().max(1))
                        && !live.contains_key(&(range.start().get() / PAGE))
                    {
                        let again = free(&space, platform.be(cpu), *range);
                        prop_assert_eq!(again, Err(IovaError::NotAllocated { range: *range }));
                    }
                }
                Action::FreePart { cpu, which } => {
                    if let Some(range) = pick(&live, which) && range.len() >= 2 * PAGE {
                        let start = Iova::new(range.start().get() + PAGE);
                        let part = IovaRange::new(start, PAGE).unwrap();
                        let part_freed = free(&space, platform.be(cpu), part);
                        prop_assert_eq!(part_freed, Err(IovaError::NotAllocated { range: part }));
                    }
                }
                Action::Flush => space.drain_all(&platform),
                Action::Release { cpu } => space.drain_cpu(&platform, cpu),
            }
            let usage = space.usage();
            let asked: u64 = live.values().map(|len| len * PAGE).sum();
            prop_assert!(usage.taken >= asked && usage.taken <= usage.peak_taken);
        }
        for (start, len) in live {
            let range = IovaRange::new(Iova::new(start * PAGE), len * PAGE).unwrap();
            prop_assert_eq!(free(&space, platform.be(0), range), Ok(()));
        }
        space.drain_all(&platform);
        prop_assert_eq!(space.usage().taken, 0);
    }
}
