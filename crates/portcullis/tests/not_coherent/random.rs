//! Random work with a cache that evicts and prefetches at any time.

use portcullis::addr::{Direction, PhysSegment};
use portcullis::dma::{DmaMapError, Ended, Queue};
use portcullis::domain::Policy;

use crate::dice::{Dice, operations};
use crate::world::{MAPPING, Machine, PAGE, STRATEGIES, World, map, segment};

/// A buffer in pages of its own, and what the CPU is to find in all of these, once it has the
/// buffer.
struct Work {
    list: Vec<PhysSegment>,
    pages: PhysSegment,
    expected: Vec<u8>,
    direction: Direction,
}

impl Work {
    fn places(&self) -> impl Iterator<Item = usize> + use<> {
        let first = self.pages.phys.get();
        let list = self.list.clone();
        list.into_iter().flat_map(move |piece| {
            let at = (piece.phys.get() - first) as usize;
            at..at + piece.len as usize
        })
    }

    fn bytes(&self) -> Vec<u8> {
        self.places().map(|at| self.expected[at]).collect()
    }

    fn set(&mut self, bytes: &[u8]) {
        for (at, byte) in self.places().zip(bytes) {
            self.expected[at] = *byte;
        }
    }

    fn check(&self, world: &World, what: &str) {
        let found = world.cpu(&[self.pages]);
        let wrong = found.iter().zip(&self.expected).position(|(found, expected)| found != expected);
        assert_eq!(wrong, None, "{what}: {:x?} {:?}", self.list, self.direction);
    }
}

fn noise(dice: &mut Dice, len: usize) -> Vec<u8> {
    (0..len).map(|_| dice.next() as u8).collect()
}

fn run(seed: u64, policy: Policy, config: portcullis::dma::QueueConfig, trusted: bool, line: u64) {
    let mut dice = Dice::new(seed);
    let world = World::with(policy, line, seed);
    let card = world.card();
    let card = if trusted { card.trusted() } else { card };
    let mut queue: Queue<Machine> = card.queue(config).unwrap();
    world.cache.set_restless(true);
    let mut pending: Vec<Work> = Vec::new();
    for round in 0..operations(60) {
        let what =
            format!("round {round} of seed {seed}, {policy:?} {config:?} trusted: {trusted} line {line:#x}");
        let first = world.pages(4);
        let direction = Direction::ALL[dice.below(3) as usize];
        let unit = if dice.one_in(2) { line } else { 1 + dice.below(line) };
        let mut list = Vec::new();
        let mut at = dice.below(64) * unit % PAGE;
        for _ in 0..1 + dice.below(3) {
            let len = unit * (1 + dice.below(2 * PAGE / unit));
            if at + len > 4 * PAGE {
                break;
            }
            list.push(segment(first, at, len));
            at += len + dice.below(20) * unit;
        }
        if list.is_empty() {
            continue;
        }
        let mut work = Work {
            list,
            pages: segment(first, 0, 4 * PAGE),
            expected: noise(&mut dice, 4 * 4096),
            direction,
        };
        world.cpu_writes(&[work.pages], &work.expected);
        let (mapping, view) = match map(&mut queue, &work.list, direction) {
            Ok(mapped) => mapped,
            Err(DmaMapError::SharesLine { line: said }) => {
                let whole = |piece: &PhysSegment| (piece.phys.get() | piece.len).is_multiple_of(line);
                assert!(
                    said == line && direction != Direction::ToDevice && MAPPING.contains(&config),
                    "{what}"
                );
                assert!(!work.list.iter().all(whole), "{what}");
                continue;
            }
            Err(error) => panic!("{what}: {error}"),
        };
        if direction == Direction::FromDevice {
            // What such a device leaves alone is not the CPU's own in a copy.
            let all = noise(&mut dice, work.bytes().len());
            assert!(world.card_writes(&view, &all), "{what}");
            work.set(&all);
        }
        for _ in 0..dice.below(5) {
            let len = work.bytes().len() as u64;
            match dice.below(4) {
                0 if direction != Direction::FromDevice => {
                    assert!(world.card_reads(&view) == work.bytes(), "{what}");
                }
                1 if direction != Direction::ToDevice => {
                    let news = noise(&mut dice, len as usize);
                    assert!(world.card_writes(&view, &news), "{what}");
                    work.set(&news);
                }
                2 => {
                    queue.sync_raw_for_cpu(&mapping, 0, len).unwrap();
                    work.check(&world, &what);
                    if direction != Direction::FromDevice {
                        let news = noise(&mut dice, len as usize);
                        work.set(&news);
                        world.cpu_writes(&work.list, &news);
                    }
                    queue.sync_raw_for_device(&mapping, 0, len).unwrap();
                }
                _ => {
                    // Somebody else's data, beside the buffer.
                    let mut others = vec![true; work.expected.len()];
                    work.places().for_each(|at| others[at] = false);
                    let at = dice.below(4 * PAGE) as usize;
                    if others[at] {
                        work.expected[at] = dice.next() as u8;
                        world.cpu_writes(&[segment(first, at as u64, 1)], &[work.expected[at]]);
                    }
                }
            }
        }
        match queue.unmap_raw(mapping).unwrap() {
            Ended::Done(()) => work.check(&world, &what),
            Ended::Pending => pending.push(work),
            Ended::Flushed(()) => {
                pending.push(work);
                pending.drain(..).for_each(|work| work.check(&world, &what));
            }
        }
        if dice.one_in(8) {
            assert_eq!(queue.commit_raw().unwrap(), pending.len());
            pending.drain(..).for_each(|work| work.check(&world, &what));
        }
        if dice.one_in(16) {
            world.cache.evict_all();
        }
    }
}

#[test]
fn whatever_the_cache_does_both_sides_find_what_the_other_wrote() {
    for policy in [Policy::Strict, Policy::LAZY, Policy::Passthrough] {
        for (index, config) in STRATEGIES.into_iter().enumerate() {
            if policy == Policy::Passthrough && index == 2 {
                continue;
            }
            for seed in 0..4 {
                run(seed, policy, config, seed % 2 == 0, if seed < 2 { 64 } else { 256 });
            }
        }
    }
}
