//! The simulated memory: allocations, contents, and the mistakes that it counts.

use std::sync::Arc;

use portcullis::addr::PhysAddr;
use portcullis::platform::{FRAME_SIZE, Frames};
use portcullis::sync::Ordering;
use portcullis_model::{BadAddress, Memory};
use proptest::prelude::*;

#[test]
fn bytes_come_back_across_words_and_frames() {
    let memory = Memory::new(1 << 20);
    let start = memory.base().checked_add(FRAME_SIZE - 5).unwrap();
    let written: Vec<u8> = (1..=23).collect();
    memory.write(start, &written).unwrap();
    let mut read = [0; 23];
    memory.read(start, &mut read).unwrap();
    assert_eq!(read[..], written[..]);

    // The bytes beside them are untouched.
    let mut around = [0xff; 25];
    memory.read(start.get().checked_sub(1).map(PhysAddr::new).unwrap(), &mut around).unwrap();
    assert_eq!((around[0], around[24]), (0, 0));
    assert_eq!(memory.read_u64(memory.base().checked_add(FRAME_SIZE).unwrap()), Some(0x0d0c_0b0a_0908_0706));
}

#[test]
fn a_write_of_some_bytes_keeps_the_rest_of_the_word() {
    let memory = Memory::new(1 << 20);
    let word = memory.base();
    memory.write(word, &0x1122_3344_5566_7788_u64.to_le_bytes()).unwrap();
    memory.write(word.checked_add(2).unwrap(), &[0xaa, 0xbb, 0xcc]).unwrap();
    assert_eq!(memory.read_u64(word), Some(0x1122_33cc_bbaa_7788));
}

#[test]
fn addresses_outside_are_refused_whole() {
    let memory = Memory::new(2 * FRAME_SIZE);
    let last = memory.base().checked_add(2 * FRAME_SIZE - 1).unwrap();
    assert_eq!(memory.write(last, &[1, 2]), Err(BadAddress { address: last.get(), len: 2 }));
    let mut byte = [9];
    memory.read(last, &mut byte).unwrap();
    assert_eq!(byte, [0], "a refused write wrote nothing");
    for address in [0, memory.base().get() - 1, memory.base().get() + 2 * FRAME_SIZE, u64::MAX] {
        let address = PhysAddr::new(address);
        assert!(memory.read(address, &mut byte).is_err());
        assert!(memory.write(address, &byte).is_err());
        assert_eq!(memory.read_u64(address), None);
        assert!(!memory.is_allocated(address));
    }
    assert_eq!(memory.read_u64(memory.base().checked_add(4).unwrap()), None, "not at a word");
}

#[test]
fn frames_come_zeroed_and_are_counted() {
    let memory = Memory::new(1 << 20);
    assert_eq!((memory.frames_in_use(), memory.peak_frames(), memory.bad_frees()), (0, 0, 0));
    let frame = memory.alloc(1).unwrap();
    memory.table_at(frame)[17].store(5, Ordering::Relaxed);
    memory.release(frame, 1);
    assert!(!memory.is_allocated(frame));
    assert_eq!(memory.alloc(1), Some(frame), "the last freed is the first taken");
    assert_eq!(memory.table_at(frame)[17].load(Ordering::Relaxed), 0);
    let run = memory.alloc(3).unwrap();
    assert_eq!((memory.frames_in_use(), memory.peak_frames()), (4, 4));
    memory.release(run, 3);
    assert_eq!((memory.frames_in_use(), memory.peak_frames()), (1, 4));
    memory.alloc(1).unwrap();
    assert_eq!((memory.frames_in_use(), memory.peak_frames()), (2, 4));
    assert_eq!((memory.bad_frees(), memory.stray_tables()), (0, 0));
}

#[test]
fn mistakes_are_counted_and_do_nothing() {
    let memory = Memory::new(1 << 20);
    let run = memory.alloc(4).unwrap();
    let inside = run.checked_add(FRAME_SIZE).unwrap();
    for (first, count) in
        [(run, 3), (inside, 1), (run.checked_add(8).unwrap(), 4), (PhysAddr::new(0), 1), (run, 0)]
    {
        memory.release(first, count);
    }
    assert_eq!((memory.bad_frees(), memory.frames_in_use()), (5, 4));
    memory.release(run, 4);
    memory.release(run, 4);
    assert_eq!((memory.bad_frees(), memory.frames_in_use()), (6, 0));

    for stray in [run, PhysAddr::new(0), PhysAddr::new(u64::MAX)] {
        let table = memory.table_at(stray);
        assert_eq!(table[3].load(Ordering::Relaxed), 0, "what strays wrote is not seen by the next");
        table[3].store(1, Ordering::Relaxed);
    }
    assert_eq!(memory.stray_tables(), 3);
    assert_eq!(memory.read_u64(run.checked_add(24).unwrap()), Some(0), "the freed frame is not written");
}

#[test]
fn capacity_is_kept_and_failures_can_be_ordered() {
    let memory = Memory::new(4 * FRAME_SIZE + 100);
    assert_eq!(memory.capacity(), 4 * FRAME_SIZE);
    assert_eq!(memory.alloc(0), None);
    assert_eq!(memory.alloc(5), None);
    memory.fail_after(2);
    let first = memory.alloc(1).unwrap();
    assert_eq!(memory.alloc(1), None);
    let rest: Vec<_> = std::iter::from_fn(|| memory.alloc(1)).collect();
    assert_eq!(rest.len(), 3);
    memory.release(first, 1);
    for frame in rest {
        memory.release(frame, 1);
    }
    assert!(memory.alloc(4).is_some(), "single frames merge again");
}

#[test]
fn buffers_hold_bytes_and_free_their_frames() {
    let memory = Memory::new(1 << 20);
    let buffer = memory.buffer(5000).unwrap();
    assert_eq!((buffer.len(), memory.frames_in_use()), (5000, 2));
    buffer.fill(0xa5);
    let mut bytes = [0; 3];
    buffer.read(4997, &mut bytes).unwrap();
    assert_eq!(bytes, [0xa5; 3]);
    let mut after = [0xff];
    memory.read(buffer.phys().checked_add(5000).unwrap(), &mut after).unwrap();
    assert_eq!(after, [0], "not a byte past the end");
    assert!(buffer.read(4998, &mut bytes).is_err());
    assert!(buffer.write(u64::MAX, &bytes).is_err());
    drop(buffer);
    assert_eq!((memory.frames_in_use(), memory.bad_frees()), (0, 0));
    assert!(memory.buffer(0).is_none());
    assert!(memory.buffer(u64::MAX).is_none());
}

#[test]
fn writers_of_neighbouring_bytes_do_not_lose_each_others() {
    let memory = Memory::new(1 << 20);
    std::thread::scope(|scope| {
        for lane in 0..4_u64 {
            let memory = Arc::clone(&memory);
            scope.spawn(move || {
                let at = memory.base().checked_add(2 * lane).unwrap();
                for round in 0..=u16::MAX {
                    memory.write(at, &round.to_le_bytes()).unwrap();
                    let mut seen = [0; 2];
                    memory.read(at, &mut seen).unwrap();
                    assert_eq!(u16::from_le_bytes(seen), round);
                }
            });
        }
    });
    assert_eq!(memory.read_u64(memory.base()), Some(u64::MAX));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Against a plain array: every start and length in words and across frames, and no byte beside them.
    #[test]
    fn bytes_are_exact(
        writes in prop::collection::vec((0_usize..8200, prop::collection::vec(any::<u8>(), 0..40)), 1..20),
        from in 0_usize..8200,
        len in 0_usize..9000,
    ) {
        let memory = Memory::new(3 * FRAME_SIZE);
        let mut model = [0_u8; 3 * FRAME_SIZE as usize];
        for (at, bytes) in writes {
            memory.write(memory.base().checked_add(at as u64).unwrap(), &bytes).unwrap();
            model[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        let mut all = [0; 3 * FRAME_SIZE as usize];
        memory.read(memory.base(), &mut all).unwrap();
        prop_assert_eq!(&all[..], &model[..]);
        let len = len.min(model.len() - from);
        let mut some = vec![0; len];
        memory.read(memory.base().checked_add(from as u64).unwrap(), &mut some).unwrap();
        prop_assert_eq!(&some[..], &model[from..from + len]);
    }

    /// Runs never overlap, are aligned, and no frame is lost: after all frees the memory is one block again.
    #[test]
    fn allocation_is_exact(
        base in 0_u64..64,
        ops in prop::collection::vec((1_usize..20, any::<prop::sample::Index>(), any::<bool>()), 1..120),
    ) {
        let memory = Memory::with_base(PhysAddr::new(base * FRAME_SIZE), 192 * FRAME_SIZE);
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (count, which, free) in ops {
            if free && !runs.is_empty() {
                let (first, count) = runs.swap_remove(which.index(runs.len()));
                memory.release(PhysAddr::new(first * FRAME_SIZE), count as usize);
            } else if let Some(first) = memory.alloc(count) {
                let (first, count) = (first.get() / FRAME_SIZE, count as u64);
                prop_assert_eq!(first % count.next_power_of_two(), 0);
                prop_assert!(first >= base && first + count <= base + 192);
                prop_assert!(runs.iter().all(|&(other, n)| first + count <= other || other + n <= first));
                runs.push((first, count));
            }
            let in_use: u64 = runs.iter().map(|&(_, count)| count).sum();
            prop_assert_eq!(memory.frames_in_use(), in_use);
        }
        for (first, count) in runs {
            memory.release(PhysAddr::new(first * FRAME_SIZE), count as usize);
        }
        // Any 192 contiguous frames have an aligned block of 64.
        prop_assert!(memory.alloc(64).is_some());
        prop_assert_eq!(memory.bad_frees(), 0);
    }
}

#[test]
#[allow(unsafe_code, reason = "the trait's methods are")]
fn bytes_are_copied_and_zeroed_across_frames() {
    use portcullis::platform::CopyMemory;
    let memory = Memory::new(1 << 20);
    let (from, to) = (memory.buffer(20_000).unwrap(), memory.buffer(20_000).unwrap());
    let pattern: Vec<u8> = (0..20_000_u32).map(|n| (n % 251) as u8).collect();
    from.write(0, &pattern).unwrap();
    to.fill(0xff);
    let at = |buffer: &portcullis_model::Buffer, offset| buffer.phys().checked_add(offset).unwrap();
    // SAFETY: clauses 1 and 2: both buffers are longer than that.
    unsafe {
        memory.copy(at(&from, 3), at(&to, 4_091), 9_001);
        memory.zero(at(&to, 5_000), 5_003);
    }
    let mut expected = vec![0xff; 20_000];
    expected[4_091..4_091 + 9_001].copy_from_slice(&pattern[3..3 + 9_001]);
    expected[5_000..5_000 + 5_003].fill(0);
    let mut found = vec![0; 20_000];
    to.read(0, &mut found).unwrap();
    assert!(found == expected);
    assert_eq!(memory.stray_tables(), 0);
}

#[test]
fn frames_within_a_limit_may_end_at_it_and_are_given_back_beyond() {
    let memory = Memory::new(1 << 20);
    let probe = memory.alloc(4).unwrap();
    // SAFETY: 1: allocated above. 2: no table leads to them.
    unsafe { memory.free(probe, 4) };
    let last = probe.checked_add(4 * FRAME_SIZE - 1).unwrap();
    assert_eq!(memory.alloc_within(4, PhysAddr::new(last.get() - 1)), None);
    // All of it is free again, through a handle as well.
    assert_eq!(Arc::clone(&memory).alloc_within(4, PhysAddr::new(0)), None);
    assert_eq!(memory.alloc_within(4, last), Some(probe));
}
