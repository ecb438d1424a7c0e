//! A split that unwinds, where another CPU has begun to split a part of the same page.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use portcullis::pgtable::Arm;

use super::support::*;
use crate::common::PAGE;

const LARGE: u64 = 2 << 20;

/// Its parts are entered, and then what cleans them panics; meanwhile another CPU has begun to split the last of them. What unwinds
/// leaves that one alone.
#[test]
fn a_page_of_several_entries_whose_parts_are_entered_is_not_finished_again() {
    let frames = Hooked::<false>::new();
    let table = Arc::new(make(Arc::clone(&frames), Arm::<12>::stage_1(48, 48).unwrap()));
    let (run, last) = (16 * LARGE, 31 * LARGE);
    map(&table, run, run).unwrap();
    let ((begun, begins), (goes, go)) = (channel(), channel::<()>());
    let (other, place) = (Arc::clone(&table), Arc::new(Mutex::new(None)));
    let spawned = Arc::clone(&place);
    let mut hook = Some(move || {
        let mut invalidations = 0;
        let unmap = move || {
            let unmapped = unmap_telling(&other, range(last, PAGE), |_| {
                invalidations += 1;
                if invalidations == 1 {
                    begun.send(()).unwrap();
                    go.recv().unwrap();
                }
                true
            });
            (unmapped.bytes, invalidations)
        };
        *spawned.lock().unwrap() = Some(std::thread::spawn(unmap));
        begins.recv().unwrap();
        std::panic::resume_unwind(Box::new("as the test wants"));
    });
    let panicking = std::panic::AssertUnwindSafe(|| {
        unmap_telling(&table, range(run, PAGE), |_| {
            if hook.is_some() {
                let mut hook = hook.take();
                frames.once(move || hook.take().unwrap()());
            }
            true
        })
    });
    assert!(std::panic::catch_unwind(panicking).is_err());
    goes.send(()).unwrap();
    let other = place.lock().unwrap().take().unwrap();
    assert_eq!(other.join().unwrap(), (PAGE, 1), "it was split once");
    assert!(is_mapped(&table, run) && !is_mapped(&table, last) && is_mapped(&table, last + PAGE));
    assert_eq!(unmap(&table, run, run), run - PAGE);
    reclaim(&table);
    assert_accounted(&frames.memory, &table);
}
