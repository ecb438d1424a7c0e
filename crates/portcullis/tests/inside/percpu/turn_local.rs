use super::*;

fn marks(cpus: usize) -> Shared<Marks> {
    Shared::new(Marks::new(cpus).unwrap()).unwrap()
}

#[test]
fn a_turn_leads_to_the_values_of_its_own_marks_alone_and_is_over_after_a_panic() {
    let of = |value| TurnLocal::new(marks(2), 2, move |_| Ok(value)).unwrap();
    let (one, other) = (of(7), of(8));
    let beside = TurnLocal::new(one.marks().clone(), 1, Ok).unwrap();
    // SAFETY: one thread uses these values, one call after the other.
    let cpus = [0, 1].map(|index| unsafe { LocalCpu::new(index) });
    let [first, second] = &cpus;
    {
        let turn = one.turn(first).unwrap();
        assert_eq!((one.get(&turn), beside.get(&turn), other.get(&turn)), (Some(&7), Some(&0), None));
        // Inside another, of whichever values.
        assert!(one.turn(first).is_none() && beside.in_turn(first, |_, _| ()).is_none());
    }
    // A CPU that has a mark and no value.
    let value = |values: &TurnLocal<_>| values.in_turn(second, |_, value| value.copied());
    assert_eq!((value(&beside), value(&one)), (Some(None), Some(Some(7))));
    let in_turn = || one.in_turn(first, |_, _| -> () { panic!("as a platform's clock does") });
    #[cfg(feature = "std")]
    assert!(std::panic::catch_unwind(core::panic::AssertUnwindSafe(in_turn)).is_err());
    #[cfg(not(feature = "std"))]
    let _ = in_turn;
    assert!(one.turn(first).is_some());
}

#[test]
#[cfg(feature = "std")]
fn what_others_have_apart_leaves_its_owner_a_turn_with_all_else() {
    let lists = TurnLocal::new(marks(1), 1, |_| Ok(7)).unwrap();
    let queues = TurnLocal::apart_in(lists.marks().clone(), 1, |_, place| Ok(place.write(8))).unwrap();
    // SAFETY: one thread uses these values, one call after the other.
    let cpu = unsafe { LocalCpu::new(0) };
    let has = || lists.turn(&cpu).map(|turn| (lists.get(&turn).is_some(), queues.get(&turn).is_some()));
    let in_turn = || queues.in_turn(&cpu, |_, queue| queue.copied());
    let platform = crate::std_platform::StdPlatform::with_cpus(0);
    assert_eq!((has(), in_turn()), (Some((true, true)), Some(Some(8))));
    queues.with_others(&platform, None, |_, _| {
        assert_eq!((has(), in_turn()), (Some((true, false)), Some(None)));
    });
    lists.with_others(&platform, None, |_, _| assert_eq!(has(), None));
    assert_eq!((has(), in_turn()), (Some((true, true)), Some(Some(8))));
}

/// A section may be taking a frame from the embedder, and the caller of a drain may hold that allocator's lock.
#[test]
#[cfg(feature = "std")]
fn others_get_to_values_while_their_owner_is_in_a_section() {
    let values = alloc::sync::Arc::new(TurnLocal::new(marks(1), 1, |_| Ok(7)).unwrap());
    // SAFETY: one thread uses the CPU.
    let cpu = unsafe { LocalCpu::new(0) };
    // SAFETY: it is the one platform's that there is.
    let _section = unsafe { values.marks().section(Some(&cpu)) };
    let (tell, told) = std::sync::mpsc::channel();
    let other = alloc::sync::Arc::clone(&values);
    std::thread::spawn(move || {
        let platform = crate::std_platform::StdPlatform::with_cpus(0);
        other.with_others(&platform, None, |_, value| tell.send(*value).unwrap());
    });
    assert_eq!(told.recv_timeout(std::time::Duration::from_secs(60)), Ok(7));
}
