use super::*;

#[test]
#[cfg(not(loom))]
fn the_frame_at_0_is_a_buffer() {
    let slot = Slot::new();
    for buffer in [None, Some(PhysAddr::new(0)), Some(PhysAddr::new(1 << 51)), None] {
        slot.set_buffer(buffer);
        assert_eq!(slot.buffer(), buffer);
    }
}

#[test]
#[cfg(not(loom))]
fn terms_are_kept_as_they_are() {
    let slot = Slot::new();
    for bits in 0..8 {
        for direction in Direction::ALL {
            let (copy_in, wipe, listed) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
            let terms = Terms { direction, copy_in, wipe, listed, offset: 0xfff8 };
            slot.set_mapping(terms, PhysAddr::new(7), 9);
            assert_eq!((slot.terms(), slot.phase()), (Some(terms), Phase::Live));
            assert_eq!(slot.origin(), PhysSegment { phys: PhysAddr::new(7), len: 9 });
        }
    }
    for phase in [Phase::Empty, Phase::Free, Phase::Retired, Phase::Lost, Phase::Torn] {
        slot.set_phase(phase);
        assert_eq!((slot.terms(), slot.phase()), (None, phase));
    }
}

/// Two callers want a list at once, and each puts it back: each that gets it owns it whole.
#[test]
#[cfg(loom)]
fn a_parked_box_is_in_one_pair_of_hands() {
    use loom::sync::Arc;
    use loom::thread;
    loom::model(|| {
        let parked = Arc::new(Parked::default());
        parked.put(Box::new(alloc::vec![1]));
        let work = |parked: &Parked<Vec<u32>>| {
            let taken = parked.take();
            let got = taken.is_some();
            if let Some(mut list) = taken {
                let last = *list.last().unwrap();
                assert_eq!(last as usize, list.len());
                list.push(last + 1);
                parked.put(list);
            }
            u32::from(got)
        };
        let other = {
            let parked = Arc::clone(&parked);
            thread::spawn(move || work(&parked))
        };
        let got = work(&parked) + other.join().unwrap();
        assert_eq!(parked.take().unwrap().len() as u32, 1 + got);
        assert!(got >= 1);
    });
}
