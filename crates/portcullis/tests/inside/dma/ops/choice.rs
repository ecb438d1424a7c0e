use super::*;

/// Each of two sizes gets its cheaper way, and changes when that does.
#[test]
fn the_way_that_is_cheaper_is_chosen_for_each_size() {
    let chooser = Chooser::new(64 << 10).unwrap();
    let (small, large) = (chooser.size_of(256).unwrap(), chooser.size_of(64 << 10).unwrap());
    assert_ne!(small, large);
    assert_eq!((chooser.size_of(0), chooser.size_of((64 << 10) + 1)), (None, None));
    let mut probes = [0; 2];
    let mut run = |large_copies_at: u64| {
        for _ in 0..4_000 {
            for (number, size, copy_ns) in [(0, small, 20), (1, large, large_copies_at)] {
                let way = chooser.turn(size, 61);
                probes[number] += u32::from(way != chooser.choice(size));
                let ns = if way == Choice::Copy { copy_ns } else { 500 };
                chooser.note(size, way, Half::Map, ns);
                chooser.note(size, way, Half::Unmap, ns);
            }
        }
    };
    run(3_000);
    assert_eq!([small, large].map(|size| chooser.choice(size)), [Choice::Copy, Choice::Map]);
    run(100);
    assert_eq!([small, large].map(|size| chooser.choice(size)), [Choice::Copy, Choice::Copy]);
    assert!(probes.iter().all(|probes| (1..400).contains(probes)), "{probes:?} of 8,000");
}

#[test]
fn a_cpu_times_its_first_mappings_often_and_later_ones_seldom() {
    let turns = Turns::default();
    let timed: alloc::vec::Vec<u64> = (0..10_000).filter(|made| turns.next(*made).is_some()).collect();
    assert_eq!(timed[..4], [8, 10, 12, 15]);
    assert!(timed.len() < 250 && timed.windows(2).rev().take(50).all(|pair| pair[1] - pair[0] == 61));
}
