use alloc::vec::Vec;

use super::*;
use crate::dice::Dice;

/// A note sorts unwanted parts, and joins those that overlap or touch, in any order.
#[test]
fn parts_that_touch_are_one() {
    let range = |first: usize, end: usize| {
        IovaRange::new(Iova::new(first as u64 * 0x1000), (end - first) as u64 * 0x1000).unwrap()
    };
    let mut dice = Dice(7);
    for _ in 0..300 {
        let mut note = Note { whole: range(0, 24), gone: 0, unwanted: Vec::new() };
        let mut pages = [false; 25];
        for _ in 0..dice.below(12) {
            let first = dice.below(23) as usize;
            let end = (first + 1 + dice.below(3) as usize).min(24);
            assert!(note.add(range(first, end)));
            pages[first..end].fill(true);
            let mut expected = Vec::new();
            for at in (0..24).filter(|at| pages[*at] && (*at == 0 || !pages[at - 1])) {
                expected.push(range(at, (at..25).find(|end| !pages[*end]).unwrap()));
            }
            assert_eq!(note.unwanted, expected);
            assert_eq!(note.is_unwanted(), pages[..24].iter().all(|page| *page));
        }
    }
}
