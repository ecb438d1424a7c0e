//! Many random operations with every constraint at once, in pools that are too small, without memory now and then, and
//! shrunk and grown by a timer: both sides of every mapping are compared byte by byte with a plain model, and at the end
//! of each round nothing is lost and nothing leaked.
//!
//! A fixed number of operations; `PORTCULLIS_INTEGRITY_OPS` says how many instead.

use portcullis::addr::Direction;

use super::random::{Action, DRIVERS, Limits, run};
use super::support::NONE;
use crate::dice::{Dice, operations};

/// Operations of a run, unless somebody says otherwise.
const OPERATIONS: u64 = 20_000;

/// Operations in one pool, and how often all that is mapped is looked at.
const ROUND: u64 = 2_000;
const LOOK: usize = 64;

fn limits(dice: &mut Dice) -> Limits {
    let align_bits = if dice.one_in(2) { 0 } else { dice.below(14) as u32 };
    let reach = dice.one_in(5).then(|| dice.below(3 << 20));
    Limits { align_bits, reach }
}

fn map(dice: &mut Dice, cpu: usize) -> Action {
    let len = match dice.below(16) {
        0..8 => 1 + dice.below(5000),
        8..13 => 1 + dice.below(30_000),
        13 => 1 + dice.below(300_000),
        _ => 1 << dice.below(20),
    };
    let direction = Direction::ALL[dice.below(3) as usize];
    Action::Map { at: dice.below(DRIVERS), len, direction, limits: limits(dice), cpu }
}

fn action(dice: &mut Dice) -> Action {
    let (which, from, len, byte) =
        (dice.next() as usize, dice.below(100_000), 1 + dice.below(100_000), dice.next() as u8);
    let cpu = if dice.one_in(5) { NONE } else { dice.below(4) as usize };
    match dice.below(64) {
        // Many of them are refused, for want of an original that nobody else has.
        0..28 => map(dice, cpu),
        28..36 => Action::DeviceWrites { which, from, len, byte },
        36..43 => Action::DriverWrites { which, from, len, byte },
        43..51 => Action::Sync { which, from, len, for_cpu: dice.one_in(2) },
        51..60 => Action::Unmap { which, cpu },
        60 => Action::Trim,
        61 => Action::Timer { ns: dice.below(2_000_000_000) },
        62 => Action::Released { cpu: dice.below(4) as usize },
        _ => Action::Fail { after: dice.below(3) },
    }
}

#[test]
fn nothing_is_mixed_up_lost_or_leaked() {
    let (mut left, mut failed, mut round) = (operations(OPERATIONS), 0, 0);
    while left > 0 {
        round += 1;
        let mut dice = Dice::new(round);
        let actions: Vec<Action> = (0..ROUND.min(left)).map(|_| action(&mut dice)).collect();
        left -= actions.len() as u64;
        failed += run(&actions, 1 + round % 4, LOOK);
    }
    assert!(failed > 0, "or no pool was full");
}
