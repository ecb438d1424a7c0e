use super::*;
use alloc::vec;
use alloc::vec::Vec;

/// Against one `bool` for each slot: a run was free before, lies where it should, and is found whenever it exists.
#[test]
fn against_a_plain_model() {
    const SLOTS: usize = 448;
    let (mut bits, mut model) = (Bits::all_taken(SLOTS).unwrap(), vec![false; SLOTS]);
    bits.open();
    let mut live: Vec<(usize, usize)> = Vec::new();
    let mut seed = 7u64;
    let mut below = |n: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % n
    };
    for _ in 0..20_000 {
        let free =
            |model: &[bool], at: usize, n: usize| at + n <= SLOTS && !model[at..at + n].contains(&true);
        match below(3) {
            0 => {
                let order = below(9) as u32;
                let run = 1 << order;
                let expected = (0..SLOTS).step_by(run).find(|at| free(&model, *at, run));
                let mut got = None;
                bits.take_runs(order, 1, |at| got = Some(at));
                assert_eq!(got, expected);
                live.extend(got.map(|at| (at, run)));
            }
            1 => {
                let step = 1 << below(5);
                let (n, first) = (1 + below(150), below(step));
                let expected = (first..SLOTS).step_by(step).find(|at| free(&model, *at, n));
                let got = bits.take_odd(n, first, step);
                assert_eq!(got, expected);
                live.extend(got.map(|at| (at, n)));
            }
            _ if !live.is_empty() => {
                let (at, n) = live.swap_remove(below(live.len()));
                bits.give(at, n);
                model[at..at + n].fill(false);
            }
            _ => {}
        }
        live.iter().for_each(|(at, n)| model[*at..at + n].fill(true));
        assert_eq!(bits.free, model.iter().filter(|taken| !**taken).count());
    }
    live.iter().for_each(|(at, n)| bits.give(*at, *n));
    assert!(bits.close() && bits.free == 0 && !bits.close());
    assert_eq!((bits.take_runs(0, 1, |_| ()), bits.take_odd(1, 0, 1)), (0, None), "none is to be had");
}
