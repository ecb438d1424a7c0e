//! Copies, and wipes, that panic half-way: the slot comes back, and its bytes reach no device of another group.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use portcullis::addr::{Direction, Iova};
use portcullis::bounce::pool::{Attributes, PoolConfig, Way};
use portcullis_model::open::OpenPool;

use crate::chosen::Chosen;
use crate::pool::support::{Bench, Device, PAGE, map, piece, small};

/// The slots of the class of one page.
const SLOTS: usize = 64;
const OWN: u8 = 0x5a;

/// Maps and unmaps a page of `byte`, which the device may read.
fn use_one(bench: &Bench, device: &Device<Arc<Chosen>>, byte: u8, direction: Direction, is_list: bool) {
    let buffer = bench.memory.buffer(2 * PAGE).unwrap();
    bench.write(buffer.phys(), &vec![byte; 2 * PAGE as usize]);
    let page = [piece(buffer.phys(), 0, PAGE)];
    let pieces = [0, 512, 1024, 1536].map(|at| piece(buffer.phys(), 2 * at, 512));
    let list = if is_list { &pieces[..] } else { &page };
    let mapping = map(device, list, direction, Attributes::default()).unwrap();
    assert_eq!(mapping.way(), Way::Slot);
    bench.pool.close(mapping.iova(), list.iter().map(|piece| piece.len).sum()).unwrap();
}

/// Each step that touches bytes panics in its turn. The slot is another group's, or the same one's, before and after.
#[test]
fn a_copy_that_panics_half_way_shows_no_other_group_its_bytes_and_loses_no_slot() {
    let byte_of = |group: usize| group as u8 * 0x11;
    let mut panics = 0;
    for number in 0..2 * 2 * 2 * 3 * 2 * 2 {
        let direction = [Direction::ToDevice, Direction::Bidirectional][number % 2];
        let config = PoolConfig { wipe: number / 2 % 2 > 0, ..small() };
        let is_list = number / 4 % 2 > 0;
        let (before, user) = (number / 8 % 3, 1 + number / 24 % 2);
        let next = [user, 3][number / 48];
        for step in 0.. {
            let bench = Bench::new(config);
            let devices = [0, 1, 2, 3].map(|group| bench.device(group, true));
            if before > 0 {
                use_one(&bench, &devices[before], byte_of(before), direction, false);
            }
            bench.frames.break_at(step);
            let used = catch_unwind(AssertUnwindSafe(|| {
                use_one(&bench, &devices[user], byte_of(user), direction, is_list);
            }));
            let is_over = bench.frames.break_at(u64::MAX) != u64::MAX;
            assert_eq!(used.is_err(), !is_over);
            panics += usize::from(!is_over);
            let own = bench.memory.buffer(64).unwrap();
            bench.write(own.phys(), &[OWN; 64]);
            let list = [piece(own.phys(), 0, 64)];
            let mut slots = 0;
            let live: Vec<Iova> = (0..SLOTS)
                .map(|_| map(&devices[next], &list, direction, Attributes::default()).unwrap())
                .inspect(|mapping| slots += usize::from(mapping.way() == Way::Slot))
                .map(|mapping| mapping.iova())
                .collect();
            let what = format!("{direction:?} {} {is_list} {before} {user} {next}: {step}", config.wipe);
            assert_eq!(slots, SLOTS, "{what}");
            for iova in &live {
                let seen = bench.seen(Iova::new(iova.get() & !(PAGE - 1)), PAGE).unwrap();
                // Its group's, but for what was to be wiped.
                let may_be_seen =
                    |byte: &u8| [0, OWN].contains(byte) || *byte == byte_of(next) && !config.wipe;
                assert!(seen.iter().all(may_be_seen), "{what}");
            }
            live.iter().for_each(|iova| bench.pool.close(*iova, 64).unwrap());
            drop((own, devices));
            bench.finish();
            if is_over {
                break;
            }
        }
    }
    assert!(panics > 200, "{panics}");
}
