use super::*;

/// A CPU that makes a leaf writes the count, and takes no line from those that read what is in the array's place, or beside it.
#[test]
fn the_count_of_bytes_has_lines_of_its_own() {
    let lines = |offset| offset / align_of::<CachePadded<()>>();
    let count = core::mem::offset_of!(Links, bytes);
    let others = [core::mem::offset_of!(Links, len), core::mem::offset_of!(Links, root)];
    assert!(others.iter().all(|other| lines(*other) != lines(count)));
    assert!(align_of::<Links>() == align_of::<CachePadded<()>>() && align_of::<Links>() >= 64);
}

/// No level more than an array of this length needs, and no two words in one place.
#[test]
fn an_array_has_the_levels_that_it_needs() {
    for (len, levels) in [(1, 0), (512, 0), (513, 1), (512 * 64, 1), (512 * 64 + 1, 2), (512 << 12, 2)] {
        let links = Links::new(len);
        let indices = [0, len / 2, len - 1];
        let fresh = links.leaf_or_make(len - 1).unwrap().unwrap();
        assert!((0..WordLeaf::WORDS).all(|index| fresh.word(index).load(Ordering::Relaxed) == 0));
        for index in indices {
            links.leaf_or_make(index).unwrap().unwrap().word(index).store(index, Ordering::Relaxed);
        }
        let word = |index| links.leaf(index).map(|leaf| leaf.word(index).load(Ordering::Relaxed));
        assert_eq!(indices.map(word), indices.map(Some), "{len}");
        assert!(word(len).is_none() && links.leaf_or_make(len).unwrap().is_none());
        // Each that there is is walked to, once, by the index of its first word.
        let (mut walked, mut there) =
            (alloc::vec![], indices.map(|index| index - index % WordLeaf::WORDS).to_vec());
        links.each_leaf(|first, _| walked.push(first));
        there.dedup();
        assert_eq!(walked, there);
        let leaves = 1 + (len - 1) / LEAF_WORDS as u64 * 2;
        assert_eq!(links.height, levels);
        assert!(links.bytes() as u64 <= leaves.min(3) * (4096 + u64::from(levels) * 512));
        assert!(links.bytes() >= 4096 + levels as usize * 512);
    }
}
