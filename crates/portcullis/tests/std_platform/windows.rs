//! Domains on one platform: a window ends whatever other domains do.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use portcullis::addr::{DomainId, Iova, Permissions};
use portcullis::domain::{Domain, Policy};
use portcullis::mapper::TableMapper;
use portcullis::pgtable::{PageTable, VtdSecondStage};
use portcullis::platform::Platform;
use portcullis::std_platform::StdPlatform;
use portcullis_model::Queue;
use portcullis_model::open::OpenDomain;

use super::rig::{ANYWHERE, Hooked, Moment, Observed, Rig, page};
use super::{PATIENCE, PanicsWhenDropped, next};

type Bench = Rig<StdPlatform, Hooked<Queue>>;

const WINDOW: Policy = Policy::Lazy { window_ns: 2_000_000 };

fn bench(platform: &StdPlatform) -> Bench {
    Rig::new(platform.clone(), WINDOW, Hooked::new)
}

/// Maps a page, lets the device use it, and unmaps it.
fn unmapped(bench: &Bench) -> Iova {
    let range = bench.domain.open(&[page(0)], Permissions::READ_WRITE, ANYWHERE).unwrap();
    assert!(bench.reaches(range.start()));
    bench.domain.unmap(range).unwrap();
    range.start()
}

/// The window ends by itself.
#[track_caller]
fn window_ends(bench: &Bench, iova: Iova) {
    let start = Instant::now();
    while bench.reaches(iova) {
        assert!(start.elapsed() < PATIENCE, "the window stays open");
        thread::yield_now();
    }
}

/// The hardware of `bench` is silent from now on. Who comes, and how to let it answer.
fn silence(bench: &Bench) -> (Receiver<()>, Sender<()>) {
    let ((enter, entered), (answer, answers)) = (channel(), channel());
    let (enter, answers) = (Mutex::new(enter), Mutex::new(answers));
    bench.queue.set(move || {
        let _ = enter.lock().unwrap().send(());
        // At once when the other end is gone.
        let _ = answers.lock().unwrap().recv_timeout(PATIENCE);
    });
    (entered, answer)
}

#[test]
fn hardware_that_is_silent_keeps_no_other_domain_s_window_open() {
    let platform = StdPlatform::new();
    let silent: Vec<_> = (0..3).map(|_| bench(&platform)).collect();
    let sound = bench(&platform);
    let calls: Vec<_> = silent.iter().map(silence).collect();
    let stale: Vec<_> = silent.iter().map(unmapped).collect();
    calls.iter().for_each(|(entered, _)| next(entered));
    for _ in 0..3 {
        window_ends(&sound, unmapped(&sound));
    }
    for (bench, iova) in silent.iter().zip(&stale) {
        assert!(bench.reaches(*iova), "its own cannot have ended");
    }
    // It answers again.
    drop(calls);
    silent.iter().zip(stale).for_each(|(bench, iova)| window_ends(bench, iova));
    silent.iter().for_each(|bench| window_ends(bench, unmapped(bench)));
}

#[test]
fn what_is_unmapped_while_the_hardware_is_silent_is_covered_when_it_answers() {
    let platform = StdPlatform::new();
    let bench = bench(&platform);
    let (entered, answer) = silence(&bench);
    let early = unmapped(&bench);
    next(&entered);
    // After that flush began: it asks for a timer of its own, which may come before the other is over.
    let late = unmapped(&bench);
    drop(answer);
    window_ends(&bench, early);
    window_ends(&bench, late);
}

#[test]
fn a_mapper_whose_drop_panics_keeps_no_other_domain_s_window_open() {
    let platform = StdPlatform::new();
    let sound = bench(&platform);
    // A domain of its own, the last handle on which will be the timer's.
    let ((enter, entered), (answer, answers)) = (channel(), channel::<()>());
    let (enter, answers, dropped) = (Mutex::new(enter), Mutex::new(answers), PanicsWhenDropped);
    let gone = Arc::new(AtomicBool::new(false));
    let tell = Tell(Arc::clone(&gone));
    let format = VtdSecondStage::new(4, 3, 48).unwrap();
    let table = PageTable::for_cpus(Arc::clone(&sound.memory), format, platform.cpus()).unwrap();
    let inner = TableMapper::new(table, sound.iommu.queue(), DomainId(2), Vec::new());
    let mapper = Observed::new(inner, move |moment| {
        let _hold = (&dropped, &tell);
        if moment == Moment::Sync {
            let _ = enter.lock().unwrap().send(());
            let _ = answers.lock().unwrap().recv_timeout(PATIENCE);
        }
    });
    let domain = Domain::new(platform.clone(), mapper, WINDOW).unwrap();
    let range = domain.open(&[page(0)], Permissions::READ, ANYWHERE).unwrap();
    domain.unmap(range).unwrap();
    next(&entered);
    drop(domain);
    answer.send(()).unwrap();
    let start = Instant::now();
    while !gone.load(Ordering::Relaxed) {
        assert!(start.elapsed() < PATIENCE, "the domain is never dropped");
        thread::yield_now();
    }
    for _ in 0..3 {
        window_ends(&sound, unmapped(&sound));
    }
}

/// Says that it is gone.
struct Tell(Arc<AtomicBool>);

impl Drop for Tell {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
