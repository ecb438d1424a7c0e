//! The process's heap as devices' memory.

use portcullis::addr::PhysAddr;
use portcullis::dma::DmaBuffer;
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames};
use portcullis_linux::heap::{Heap, HeapBuffer};

#[test]
fn frames_are_zeroed_aligned_and_their_words_memory() {
    for count in [1, 2, 3, 5, 16, 511, 512, 513, 1024, 1536] {
        let first = Heap.alloc(count).unwrap();
        let align = count.next_power_of_two() as u64 * FRAME_SIZE;
        assert!(first.get().is_multiple_of(align) && first.get() < 1 << 52, "{count} at {first}");
        for frame in 0..count as u64 {
            let frame = PhysAddr::new(first.get() + frame * FRAME_SIZE);
            // SAFETY: 1: allocated above, and freed below.
            let words = unsafe { Heap.table(frame) };
            assert!(words.iter().all(|word| word.load(std::sync::atomic::Ordering::Relaxed) == 0));
            words[511].store(u64::MAX, std::sync::atomic::Ordering::Relaxed);
        }
        // SAFETY: clauses 1 and 2: allocated above, and not used.
        unsafe { Heap.free(first, count) };
    }
    for count in [0, usize::MAX, usize::MAX / 4096, 1 << 50] {
        assert_eq!(Heap.alloc(count), None);
    }
    assert!(HeapBuffer::new(0).is_none() && HeapBuffer::new(usize::MAX).is_none());
}

/// At every alignment of both sides, with lengths around words and around the groups of eight of a copy: exactly the bytes named.
#[test]
fn copies_and_wipes_touch_the_bytes_named() {
    let (from, to) = (HeapBuffer::new(256).unwrap(), HeapBuffer::new(256).unwrap());
    let source: Vec<u8> = (0..256).map(|at| (at % 251 + 1) as u8).collect();
    from.write(0, &source).unwrap();
    let address = |buffer: &HeapBuffer, at: usize| PhysAddr::new(buffer.phys().get() + at as u64);
    for (a, b) in (0..9).flat_map(|a| (0..9).map(move |b| (a, b))) {
        for len in [0, 1, 7, 8, 9, 15, 16, 17, 40, 63, 64, 65, 80, 81, 128, 200] {
            let mut expected = [0xee; 256];
            to.write(0, &expected).unwrap();
            // SAFETY: clauses 1 and 2: bytes of both buffers.
            unsafe { Heap.copy(address(&from, a), address(&to, b), len as u64) };
            expected[b..b + len].copy_from_slice(&source[a..a + len]);
            let mut found = [0; 256];
            to.read(0, &mut found).unwrap();
            assert_eq!(found, expected, "from {a} to {b}, {len} bytes");
            // SAFETY: clauses 1 and 2: bytes of the buffer.
            unsafe { Heap.zero(address(&to, a), len as u64) };
            expected[a..a + len].fill(0);
            to.read(0, &mut found).unwrap();
            assert_eq!(found, expected, "zeros at {a}, {len} bytes");
        }
    }
}

#[test]
fn a_buffer_ends_where_it_says() {
    let buffer = HeapBuffer::new(5000).unwrap();
    assert_eq!(
        (buffer.size(), buffer.segments()[0].len, buffer.segments()[0].phys),
        (5000, 5000, buffer.phys())
    );
    assert!(buffer.phys().get().is_multiple_of(FRAME_SIZE));
    assert_eq!(buffer.write(4990, b"0123456789"), Some(()));
    let mut bytes = [0; 10];
    assert_eq!((buffer.read(4990, &mut bytes), &bytes), (Some(()), b"0123456789"));
    for (offset, len) in [(4991, 10), (5001, 0), (usize::MAX, 1), (usize::MAX, 10)] {
        assert_eq!(buffer.write(offset, &bytes[..len]), None);
        assert_eq!(buffer.read(offset, &mut vec![0; len]), None);
    }
}
