//! The set of allocated frames: a thread that has a frame from its owner, or from the allocator after that, sees whether it is allocated,
//! whatever happens to its neighbours.

#[allow(dead_code, reason = "the heap uses all of it")]
#[path = "../../src/heap/given/bits.rs"]
mod bits;

use ::loom::sync::{Arc, Mutex};
use ::loom::thread;
use bits::Bits;

/// The owner of the test's frame.
#[derive(Clone, Copy, PartialEq)]
enum Frame {
    /// The allocator, at first.
    Fresh,
    /// A caller of the heap.
    Heaps,
    /// The allocator again.
    Back,
}

#[test]
fn the_next_owner_of_a_frame_sees_whether_the_heap_gave_it() {
    ::loom::model(|| {
        let (bits, frame) = (Arc::new(Bits::default()), Arc::new(Mutex::new(Frame::Fresh)));
        let neighbour = {
            let bits = Arc::clone(&bits);
            thread::spawn(move || {
                bits.set(4);
                assert!(bits.is_set(4));
                bits.clear(4);
                assert!(!bits.is_set(4));
            })
        };
        let reader = {
            let (bits, frame) = (Arc::clone(&bits), Arc::clone(&frame));
            thread::spawn(move || {
                // The lock is held while this thread owns the frame.
                let state = frame.lock().unwrap();
                match *state {
                    // Its bit belongs to another owner.
                    Frame::Fresh => {}
                    Frame::Heaps => assert!(bits.is_set(5)),
                    Frame::Back => assert!(!bits.is_set(5)),
                }
            })
        };
        bits.set(5);
        *frame.lock().unwrap() = Frame::Heaps;
        {
            let mut state = frame.lock().unwrap();
            bits.clear(5);
            *state = Frame::Back;
        }
        neighbour.join().unwrap();
        reader.join().unwrap();
        assert!(*frame.lock().unwrap() == Frame::Back && !bits.is_set(5) && !bits.is_set(4));
    });
}
