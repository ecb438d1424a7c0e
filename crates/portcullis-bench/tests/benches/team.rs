//! The pinned threads: what fails or panics in one is told, and nobody is left waiting.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis_bench::runner::Failure;
use portcullis_bench::team::{Span, Team};

#[test]
fn threads_stay_on_cores_of_their_own() {
    let team = Team::new(2).unwrap();
    let cores: Vec<_> = team.cores().collect();
    assert_eq!(cores.len(), team.size());
    assert!(cores.windows(2).all(|pair| pair[0] != pair[1]), "{cores:?}");
    let name = |_: usize, _: &_| Ok(std::thread::current().id());
    let (first, second) = (team.each(team.size(), name).unwrap(), team.each(team.size(), name).unwrap());
    assert_eq!(first, second, "they live as long as the team");
}

#[test]
fn what_fails_is_told_and_nobody_waits_for_it() {
    let team = Team::new(2).unwrap();
    if team.size() < 2 {
        return;
    }
    let broken = || Failure::Broken("on purpose".into());
    for culprit in [0, 1] {
        let failed = team.race(2, move |index, line| {
            if index == culprit {
                return Err(broken());
            }
            line.wait()?;
            Ok(Span::of(|| ()).0)
        });
        assert_eq!(failed, Err(broken()));
        let panicked: Result<Vec<()>, _> = team.each(2, move |index, line| {
            if index == culprit {
                panic!("on purpose, number {index}");
            }
            line.wait()
        });
        assert_eq!(panicked, Err(Failure::Panicked(format!("on purpose, number {culprit}"))));
    }
    assert!(team.race(2, |_, line| line.wait().map(|()| Span::of(|| ()).0)).is_ok(), "and goes on working");
}

#[test]
fn a_job_is_gone_when_its_result_is_there() {
    let team = Team::new(2).unwrap();
    let threads = team.size();
    let shared = Arc::new(Mutex::new(0));
    let inside = Arc::clone(&shared);
    team.each(threads, move |_, _| {
        *inside.lock().unwrap() += 1;
        Ok(())
    })
    .unwrap();
    assert_eq!(Arc::strong_count(&shared), 1);
    assert_eq!(*shared.lock().unwrap(), threads);
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    let too_many = team.each(threads + 1, move |_, _| {
        counter.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    assert!(matches!(too_many, Err(Failure::Unsupported(_))), "{too_many:?}");
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

/// Takes its time to be dropped, and counts it.
struct Ends(Arc<AtomicUsize>);

impl Drop for Ends {
    fn drop(&mut self) {
        std::thread::sleep(Duration::from_millis(50));
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn the_end_of_a_team_waits_for_its_threads() {
    thread_local! {
        static ENDS: RefCell<Option<Ends>> = const { RefCell::new(None) };
    }
    let team = Team::new(2).unwrap();
    let (threads, ended) = (team.size(), Arc::new(AtomicUsize::new(0)));
    let counter = Arc::clone(&ended);
    team.each(threads, move |_, _| {
        ENDS.set(Some(Ends(Arc::clone(&counter))));
        Ok(())
    })
    .unwrap();
    drop(team);
    assert_eq!(ended.load(Ordering::Relaxed), threads);
}
