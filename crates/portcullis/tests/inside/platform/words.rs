use super::*;

#[test]
fn every_part_is_read_and_written_and_nothing_beside_it() {
    let words = [const { AtomicU64::new(0) }; 4];
    let source: [u8; 32] = core::array::from_fn(|at| at as u8 + 1);
    for offset in 0..=32 {
        for len in 0..=32 - offset {
            write(&words, 0, &[0xee; 32]).unwrap();
            write(&words, offset, &source[..len]).unwrap();
            let mut expected = [0xee; 32];
            expected[offset..offset + len].copy_from_slice(&source[..len]);
            let mut all = [0; 32];
            read(&words, 0, &mut all).unwrap();
            assert_eq!(all, expected, "{len} bytes at {offset}");
            let mut part = [0; 32];
            read(&words, offset, &mut part[..len]).unwrap();
            assert_eq!(part[..len], source[..len], "{len} bytes at {offset}");
        }
    }
    for (offset, len) in [(32, 1), (33, 0), (0, 33), (usize::MAX, 1), (usize::MAX, 0)] {
        assert_eq!(write(&words, offset, &[1; 40][..len]), None, "{len} bytes at {offset}");
        assert_eq!(read(&words, offset, &mut [1; 40][..len]), None, "{len} bytes at {offset}");
    }
}
