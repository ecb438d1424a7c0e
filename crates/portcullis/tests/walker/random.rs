//! Random maps, by every way, unmaps of pages and of their parts, and reclaims.

use portcullis::pgtable::{Format, Layout};

use super::edges::attributes;
use super::machine::{Backing, Machine, Way};
use crate::dice::Dice;

/// What random operations have made use of.
#[derive(Default)]
pub struct Used {
    pub maps: u64,
    pub lists: u64,
    pub near: u64,
    /// Of the sizes of leaves.
    pub sizes: Vec<bool>,
}

/// As many operations; each is followed by a look at where it was, and there are looks at everything.
pub fn walk_randomly<F: Backing, X: Format>(
    machine: &mut Machine<F, X>,
    operations: u64,
    dice: &mut Dice,
) -> Used {
    let (format, granule, top) = (machine.case.format, machine.granule(), machine.top());
    let sizes = machine.sizes();
    // Where tables of several levels meet, the ends of the space, and where bits end.
    let mut places: Vec<_> = [1 << 32, 1 << 47, 1 << 48].into_iter().filter(|place| *place < top).collect();
    let third = (1_u64 << format.shift(3).min(format.input_bits() - 1)) % top;
    places.extend([0, 0, top / 2 + 1, top / 2 + 1, top - (top >> 3), third, top - (8 * granule - 1)]);
    let mut used = Used { sizes: vec![false; sizes.len()], ..Used::default() };
    for _ in 0..operations {
        let place = places[dice.below(places.len() as u64) as usize];
        let index = dice.below(sizes.len() as u64) as usize;
        let size = sizes[index];
        // Whole pages of some size, or a few granules somewhere.
        let (start, len, align) = if dice.one_in(2) {
            (place / size * size + dice.below(3) * size, size * (1 + dice.below(2)), size)
        } else {
            let page = granule * (1 << dice.below(12));
            let most = if dice.one_in(4) { 600 } else { 6 };
            (place / page * page + dice.below(2048) * granule, granule * (1 + dice.below(most)), granule)
        };
        let memory = machine.last_phys().div_ceil(2);
        if start > top - (len - 1).min(top) || memory < align {
            continue;
        }
        let phys = match dice.below(8) {
            // Over an edge, or beyond the end.
            0 => {
                let edge = [1 << 32, 1 << 47, 1 << 48, 2 * memory][dice.below(4) as usize];
                (edge / align).saturating_sub(len / 2 / align) * align
            }
            _ => dice.below(memory / align) * align,
        };
        let attributes = attributes(dice.below(72));
        match dice.below(10) {
            0..3 => {
                let is_mapped = machine.map(Way::Whole, start, &[(phys, len)], attributes);
                used.maps += u64::from(is_mapped);
                used.sizes[index] |= is_mapped && align == size;
            }
            3 => {
                // Pieces that fit nothing take an entry for each granule.
                let (len, mut list, mut done) = (len.min(1500 * granule), Vec::new(), 0);
                while done < len {
                    let piece = (granule * (1 + dice.below(len / granule))).min(len - done);
                    let phys = dice.below(memory / granule) * granule;
                    list.push((if dice.one_in(4) { phys / size * size } else { phys }, piece));
                    done += piece;
                }
                used.lists += u64::from(machine.map(Way::List, start, &list, attributes));
            }
            4..6 => {
                let len = granule * (1 + dice.below(3));
                // Beside what is there, often.
                let beside = machine.plain.pieces();
                let start = match beside.len() {
                    0 => start,
                    _ if dice.one_in(4) => start,
                    count => {
                        let (at, piece) = beside[dice.below(count as u64) as usize];
                        at + piece.len
                    }
                };
                used.near += u64::from(match dice.one_in(2) {
                    false => machine.map(Way::AtHand, start, &[(phys, len)], attributes),
                    true => {
                        // Its granules apart from each other, or as they come.
                        let apart = if dice.one_in(2) { 2 * granule } else { granule };
                        let piece = |number| (phys.saturating_add(number * apart), granule);
                        let list: Vec<_> = (0..len / granule).map(piece).collect();
                        machine.map(Way::ListAtHand, start, &list, attributes)
                    }
                });
            }
            6..9 => machine.unmap(start, len),
            _ if dice.one_in(5) => {
                machine.reclaim(!dice.one_in(3));
                machine.look_at_all();
            }
            _ => {}
        }
        for _ in 0..4 {
            machine.probe((start + dice.below(4 * len)).saturating_sub(len));
        }
    }
    used
}
