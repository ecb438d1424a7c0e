//! Which thread has which CPU.

use std::panic::panic_any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use portcullis::percpu::BiasedLock;
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;

use super::{Event, PATIENCE, PanicsWhenDropped, cpu_of, listen, next, on_timer, wake_now};

#[test]
fn a_thread_keeps_its_cpu_and_has_it_to_itself() {
    let platform = StdPlatform::with_cpus(3);
    assert_eq!(platform.cpus(), 3);
    assert!(platform.with_cpu_fast(|_| ()).is_none(), "the first call finds the CPU");
    let own = cpu_of(&platform).unwrap();
    let (taken, over) = (Barrier::new(5), Barrier::new(5));
    let mut cpus: Vec<_> = thread::scope(|scope| {
        let other = || {
            let cpu = cpu_of(&platform);
            taken.wait();
            // While all of them have theirs.
            (0..3).for_each(|_| assert_eq!(cpu_of(&platform), cpu));
            let fast = platform.with_cpu_fast(|cpu| cpu.index());
            assert!(fast.is_none() || fast == cpu);
            over.wait();
            cpu
        };
        let others: Vec<_> = (0..4).map(|_| scope.spawn(other)).collect();
        taken.wait();
        assert_eq!(cpu_of(&platform), Some(own));
        over.wait();
        others.into_iter().map(|other| other.join().unwrap()).collect()
    });
    cpus.push(Some(own));
    cpus.sort();
    assert_eq!(cpus, [None, None, Some(0), Some(1), Some(2)]);
}

#[test]
fn a_cpu_is_drained_before_the_next_thread_has_it() {
    let platform = StdPlatform::with_cpus(1);
    let (heard, hears) = channel();
    let (heard, clone) = (Mutex::new(heard), platform.clone());
    let _listener = listen(&platform, move |event| {
        // The CPU is in nobody's hands meanwhile, nor in those of the thread that ends.
        let others = thread::scope(|scope| scope.spawn(|| cpu_of(&clone)).join().unwrap());
        heard.lock().unwrap().send((event, cpu_of(&clone), others)).unwrap();
    });
    for _ in 0..3 {
        let end = thread::spawn({
            let platform = platform.clone();
            move || cpu_of(&platform)
        });
        assert_eq!(end.join().unwrap(), Some(0));
        assert_eq!(next(&hears), (Event::Released(0), None, None));
        // It comes back after that, but a thread is joined before.
        while thread::scope(|scope| scope.spawn(|| cpu_of(&platform)).join().unwrap()).is_none() {
            thread::yield_now();
        }
        assert_eq!(next(&hears).0, Event::Released(0));
    }
}

#[test]
fn a_thread_without_a_cpu_gets_one_when_it_is_there() {
    let platform = StdPlatform::with_cpus(1);
    let (go_on, may_go_on) = channel::<()>();
    let (has, had) = channel();
    let other = thread::spawn({
        let platform = platform.clone();
        move || {
            has.send(cpu_of(&platform)).unwrap();
            may_go_on.recv().unwrap();
        }
    });
    assert_eq!(next(&had), Some(0));
    assert_eq!(cpu_of(&platform), None);
    go_on.send(()).unwrap();
    other.join().unwrap();
    while cpu_of(&platform).is_none() {
        thread::yield_now();
    }
}

#[test]
fn a_cpu_comes_back_although_a_listener_panics() {
    let platform = StdPlatform::with_cpus(1);
    let _panicking = listen(&platform, |_| panic!("as the test wants"));
    let _worse = listen(&platform, |_| panic_any(PanicsWhenDropped));
    let (heard, hears) = channel();
    let heard = Mutex::new(heard);
    let _last = listen(&platform, move |event| heard.lock().unwrap().send(event).unwrap());
    for _ in 0..2 {
        // A thread that is joined may still be giving its CPU back.
        while thread::scope(|scope| scope.spawn(|| cpu_of(&platform)).join().unwrap()).is_none() {
            thread::yield_now();
        }
        assert_eq!(next(&hears), Event::Released(0));
    }
}

#[test]
fn a_cpu_comes_back_although_the_drop_of_a_listener_s_last_handle_panics() {
    let platform = StdPlatform::with_cpus(1);
    let ((enter, entered), (go_on, may_go_on)) = (channel(), channel::<()>());
    let (enter, may_go_on, dropped) = (Mutex::new(enter), Mutex::new(may_go_on), PanicsWhenDropped);
    let handle = listen(&platform, move |_| {
        let _hold = &dropped;
        enter.lock().unwrap().send(()).unwrap();
        let _ = may_go_on.lock().unwrap().recv_timeout(PATIENCE);
    });
    let ends = thread::spawn({
        let platform = platform.clone();
        move || cpu_of(&platform)
    });
    next(&entered);
    drop(handle);
    go_on.send(()).unwrap();
    assert_eq!(ends.join().unwrap(), Some(0));
    assert_eq!(cpu_of(&platform), Some(0));
}

#[test]
fn cpus_of_several_platforms_in_one_thread_are_not_mistaken() {
    let (none, one, two) = (StdPlatform::with_cpus(0), StdPlatform::with_cpus(1), StdPlatform::with_cpus(2));
    // Somebody else has CPU 0 of the last.
    let (go_on, may_go_on) = channel::<()>();
    let (has, had) = channel();
    let other = thread::spawn({
        let two = two.clone();
        move || {
            has.send(cpu_of(&two)).unwrap();
            may_go_on.recv().unwrap();
        }
    });
    assert_eq!(next(&had), Some(0));
    for _ in 0..3 {
        assert_eq!(cpu_of(&one), Some(0));
        assert_eq!(cpu_of(&none), None);
        assert_eq!(two.with_cpu_fast(|cpu| cpu.index()), None, "another's is at hand");
        assert_eq!(cpu_of(&two), Some(1));
        let fast = two.with_cpu_fast(|cpu| cpu.index());
        assert!(fast.is_none() || fast == Some(1));
        assert_eq!(one.with_cpu_fast(|cpu| cpu.index()), None, "another's is at hand");
        // A clone is the same platform.
        assert_eq!(cpu_of(&two.clone()), Some(1));
        assert_eq!(cpu_of(&one.clone()), Some(0));
    }
    go_on.send(()).unwrap();
    other.join().unwrap();
}

#[test]
fn the_end_of_a_thread_gives_back_its_cpus_on_all_platforms_that_are_left() {
    let (one, two, gone) = (StdPlatform::with_cpus(1), StdPlatform::with_cpus(1), StdPlatform::with_cpus(1));
    let (heard, hears) = channel();
    let listen_on = |platform: &StdPlatform, name: &'static str| {
        let heard = Mutex::new(heard.clone());
        listen(platform, move |event| heard.lock().unwrap().send((name, event)).unwrap())
    };
    let _listeners = [listen_on(&one, "one"), listen_on(&two, "two"), listen_on(&gone, "gone")];
    let all = [one, two, gone];
    thread::spawn(move || {
        assert_eq!(all.each_ref().map(cpu_of), [Some(0); 3]);
        let [one, two, gone] = all;
        drop(gone);
        // A platform that is made now is another one.
        let new = StdPlatform::with_cpus(1);
        assert_eq!(cpu_of(&new), Some(0));
        (one, two)
    })
    .join()
    .map(|(one, two)| {
        let mut told = [next(&hears), next(&hears)];
        told.sort_by_key(|(name, _)| *name);
        assert_eq!(told, [("one", Event::Released(0)), ("two", Event::Released(0))]);
        drop((one, two));
    })
    .unwrap();
    drop(heard);
}

#[test]
fn a_listener_that_is_gone_hears_nothing() {
    let platform = StdPlatform::new();
    let (heard, hears) = channel();
    let heard = Arc::new(Mutex::new(heard));
    let [gone, stays] = ["gone", "stays"].map(|name| {
        let heard = Arc::clone(&heard);
        listen(&platform, move |_| heard.lock().unwrap().send(name).unwrap())
    });
    drop(gone);
    thread::spawn({
        let platform = platform.clone();
        move || cpu_of(&platform)
    })
    .join()
    .unwrap();
    assert_eq!(next(&hears), "stays");
    drop(stays);
}

#[test]
fn another_platform_s_cpu_is_kept_while_that_platform_lives() {
    let (first, second) = (StdPlatform::with_cpus(2), StdPlatform::with_cpus(2));
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let _listener = listen(&first, move |event| tell.lock().unwrap().send(event).unwrap());
    let told = thread::scope(|scope| {
        let (first, second) = (&first, &second);
        let both = move || {
            let cpu = cpu_of(first);
            assert!(cpu.is_some() && cpu_of(second).is_some());
            assert!(told.try_recv().is_err(), "given back while the thread and the platform live");
            assert_eq!(cpu_of(first), cpu);
            told
        };
        scope.spawn(both).join().unwrap()
    });
    assert!(matches!(next(&told), Event::Released(_)));
}

/// Each stores a word of its own and then loads the other's. Miri, which shows old values for as long as nothing orders
/// them, has both at a value where either side has no fence.
#[test]
fn an_owner_and_one_who_revokes_are_never_both_at_a_value() {
    let platform = StdPlatform::with_cpus(1);
    assert_eq!(cpu_of(&platform), Some(0));
    let values: Vec<_> = (0..50).map(|_| BiasedLock::new(1, || AtomicU64::new(0)).unwrap()).collect();
    let add = |value: &AtomicU64| value.store(value.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    let turns: Vec<u64> = thread::scope(|scope| {
        scope.spawn(|| {
            values.iter().for_each(|owned| owned.with_others(&platform, None, |_, value| add(value)))
        });
        let turn = |owned: &BiasedLock<_>| platform.with_cpu(|cpu| owned.with(cpu, add)).map_or(1, |()| 2);
        values.iter().map(turn).collect()
    });
    let counts: Vec<u64> =
        values.iter().flat_map(BiasedLock::peek).map(|value| value.load(Ordering::Relaxed)).collect();
    assert_eq!(counts, turns);
}

/// It is told without a lock.
#[test]
fn a_listener_that_hears_of_a_released_cpu_may_ask_for_a_timer_and_listen_for_others() {
    let platform = StdPlatform::new();
    let ((tell, hears), own) = (channel(), platform.clone());
    let (tell, others) = (Mutex::new(tell), Mutex::new(Vec::new()));
    let _listener = listen(&platform, move |event| {
        if let Event::Released(_) = event {
            let tell = Mutex::new(tell.lock().unwrap().clone());
            others.lock().unwrap().push(on_timer(&own, move || tell.lock().unwrap().send(()).unwrap()));
            wake_now(&own);
        }
    });
    let cpus = platform.clone();
    let _ends = thread::spawn(move || cpu_of(&cpus));
    next(&hears);
}
