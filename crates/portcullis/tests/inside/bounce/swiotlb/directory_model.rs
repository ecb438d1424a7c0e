use super::support::{at, found};
use super::*;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// A reader looks up areas while one is added and another removed. The area that stays is always found, and a found one is complete.
#[test]
fn areas_come_and_go_under_a_reader() {
    loom::model(|| {
        let directory = Arc::new(Directory::new(3).unwrap());
        let ready = Arc::new(AtomicU64::new(0));
        directory.insert(5, 0, at(0));
        directory.insert(9, 1, at(1));
        let changer = {
            let (directory, ready) = (Arc::clone(&directory), Arc::clone(&ready));
            thread::spawn(move || {
                directory.remove(5, 0);
                ready.store(1, Ordering::Relaxed);
                directory.insert(7, 2, at(2));
            })
        };
        assert_eq!(found(&directory, 9), Some((1, at(1))));
        if let Some(found) = found(&directory, 7) {
            assert_eq!((found, ready.load(Ordering::Relaxed)), ((2, at(2)), 1));
        }
        changer.join().unwrap();
        let found = [5, 7, 9].map(|key| found(&directory, key));
        assert_eq!(found, [None, Some((2, at(2))), Some((1, at(1)))]);
    });
}

/// A place goes from one area to another while a reader follows its pointer: the metadata is complete, whichever it is.
#[test]
fn what_a_place_leads_to_is_complete_when_it_changes_hands() {
    loom::model(|| {
        let directory: Arc<Directory<UnsafeCell<u64>>> = Arc::new(Directory::new(1).unwrap());
        let metadata = Arc::new([UnsafeCell::new(1), UnsafeCell::new(0)]);
        let of = |metadata: &[UnsafeCell<u64>; 2], area: usize| ptr::from_ref(&metadata[area]).cast_mut();
        directory.insert(5, 0, of(&metadata, 0));
        let changer = {
            let (directory, metadata) = (Arc::clone(&directory), Arc::clone(&metadata));
            thread::spawn(move || {
                directory.remove(5, 0);
                // SAFETY: no other thread knows of it before the next line; loom would find it.
                metadata[1].with_mut(|meta| unsafe { *meta = 1 });
                directory.insert(5, 1, of(&metadata, 1));
            })
        };
        if let Some(leads) = directory.find(5) {
            // SAFETY: both pointers are to `metadata`, which is alive; no thread writes there any more; loom would find it.
            let meta = unsafe { &*leads.to }.with(|meta| unsafe { *meta });
            assert_eq!(meta, 1);
        }
        changer.join().unwrap();
    });
}

#[test]
fn two_come_at_once() {
    loom::model(|| {
        let directory = Arc::new(Directory::new(1).unwrap());
        let other = Arc::clone(&directory);
        let thread = thread::spawn(move || other.insert(1, 0, at(0)));
        directory.insert(2, 1, at(1));
        thread.join().unwrap();
        assert_eq!([1, 2].map(|key| found(&directory, key)), [Some((0, at(0))), Some((1, at(1)))]);
    });
}
