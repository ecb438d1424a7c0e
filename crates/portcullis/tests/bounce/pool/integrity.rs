//! Many random operations with every constraint at once, while memory for buffers and tables, addresses, slots and
//! answers of the hardware run short: both sides of every mapping are compared byte by byte with a plain model, and at the
//! end of each round nothing is lost and nothing leaked.
//!
//! A fixed number of operations; `PORTCULLIS_INTEGRITY_OPS` says how many instead.

use portcullis::bounce::pool::{Attributes, PoolConfig};

use crate::dice::{Dice, operations};
use crate::pool::support::{PAGE, small};
use crate::pool::world::{Op, World};

/// Operations of a run, unless somebody says otherwise.
const OPERATIONS: u64 = 20_000;

/// Operations in one pool, and how often all that is mapped is looked at.
const ROUND: u64 = 2_000;
const LOOK: u64 = 64;

/// The most mappings at once: more than the larger classes have slots.
const MOST: usize = 40;

/// Offset and length of a piece.
fn piece(dice: &mut Dice) -> (u64, u64) {
    let len = match dice.below(20) {
        0..12 => 1 + dice.below(PAGE),
        12..17 => 1 + dice.below(5 * PAGE),
        17 => 1 + dice.below(80 * PAGE),
        18 => 1 + dice.below(20 * PAGE),
        _ => (1 + dice.below(40)) * PAGE,
    };
    (if dice.one_in(3) { 0 } else { dice.below(PAGE) }, len)
}

fn map(dice: &mut Dice) -> Op {
    let attributes = Attributes { copy_in: dice.one_in(3) };
    let pieces = if dice.one_in(4) { 2 + dice.below(3) } else { 1 };
    Op::Map {
        cpu: dice.below(4) as usize,
        device: dice.below(3) as usize,
        direction: dice.below(3) as usize,
        attributes,
        pieces: (0..pieces).map(|_| piece(dice)).collect(),
        touching: dice.one_in(2),
    }
}

fn op(dice: &mut Dice, mapped: usize) -> Op {
    let (which, at, len, value) = (dice.next() as usize, dice.next(), dice.next(), dice.next() as u8);
    match dice.below(60) {
        0..16 if mapped < MOST => map(dice),
        0..30 => Op::Unmap { cpu: dice.below(4) as usize, which },
        30..39 => Op::Device { which, at, len, value },
        39..45 => Op::Cpu { which, at, len, value },
        45..50 => Op::SyncForCpu { which, at, len },
        50..55 => Op::SyncForDevice { which, at, len },
        55 => Op::Trim { keep: if dice.one_in(2) { 0 } else { dice.below(300_000) } },
        _ => {
            let mut grants = |most| if dice.one_in(2) { u64::MAX } else { dice.below(most) };
            let (frames, tables) = (grants(12), grants(6));
            Op::Strain { frames, tables, silent: if dice.one_in(3) { dice.below(4) } else { 0 } }
        }
    }
}

#[test]
fn nothing_is_mixed_up_lost_or_leaked() {
    let (mut left, mut refused, mut round) = (operations(OPERATIONS), 0, 0);
    while left > 0 {
        round += 1;
        let mut dice = Dice::new(round);
        let config = PoolConfig { split: dice.one_in(2), wipe: dice.one_in(4), ..small() };
        let mut world = World::with(config, true);
        for operation in 0..ROUND.min(left) {
            let next = op(&mut dice, world.count());
            world.step(next);
            if operation % LOOK == 0 {
                world.check();
            }
        }
        world.check();
        left -= ROUND.min(left);
        refused += world.refused;
        world.finish();
    }
    assert!(refused > 0, "or nothing was short");
}
