use super::support::{at, found};
use super::*;

#[test]
fn long_growing_and_shrinking() {
    let directory = Directory::new(4).unwrap();
    for round in 0..1000u64 {
        let keys = [0, round + 1, 7 * round + 1001, 1 << 40].map(|key| key + 3 * round);
        (0..4).for_each(|area| directory.insert(keys[area], area, at(area)));
        assert_eq!(keys.map(|key| found(&directory, key)), [0, 1, 2, 3].map(|area| Some((area, at(area)))));
        assert_eq!(found(&directory, 1 << 45), None);
        // Areas behind a freed place are still found.
        for gone in 0..4 {
            directory.remove(keys[gone], gone);
            for (area, key) in keys.into_iter().enumerate() {
                let there = (area > gone).then_some((area, at(area)));
                assert_eq!(found(&directory, key), there, "round {round}, without {gone}");
            }
        }
    }
}
