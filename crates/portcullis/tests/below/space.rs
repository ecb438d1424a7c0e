//! Address spaces by themselves: what CPUs keep goes back where the platform panics, and nothing is handed out twice.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use portcullis::addr::{Iova, IovaRange, PageSize};
use portcullis::iova::{IovaSpace, SpaceConfig};

use crate::doubles::Pl;
use crate::faults::Mode;
use crate::hostile::{Hostile, PAGE};

const PAGES: u64 = 1024;
const CPUS: usize = 3;

/// What each CPU frees for itself and for the others is in lists and boxes, and on its way.
fn used() -> (Arc<Hostile>, Pl, IovaSpace) {
    let hostile = Arc::new(Hostile::default());
    let platform = Pl::new(Arc::clone(&hostile), CPUS);
    let aperture = IovaRange::new(Iova::new(0), PAGES * PAGE).unwrap();
    let space = IovaSpace::new(&SpaceConfig::new(aperture, PageSize::SIZE_4K, CPUS)).unwrap();
    let mut ranges = Vec::new();
    for (cpu, pages) in [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 4)] {
        platform.be(cpu);
        ranges.extend((0..5).map(|_| space.alloc(&platform, pages * PAGE, Iova::new(u64::MAX)).unwrap()));
    }
    for (n, range) in ranges.into_iter().enumerate() {
        platform.be(n % CPUS);
        space.free(&platform, range).unwrap();
    }
    assert!(space.usage().cached > 0);
    (hostile, platform, space)
}

#[test]
fn taking_back_what_cpus_keep_loses_nothing_and_hands_nothing_out_twice() {
    let calls = {
        let (hostile, platform, space) = used();
        hostile.faults.arm(None);
        space.drain_all(&platform);
        hostile.faults.disarm().0
    };
    assert!(calls.len() > 30, "{calls:?}");
    for (at, call) in calls.iter().enumerate() {
        for mode in call.modes().iter().filter(|mode| matches!(mode, Mode::Panic | Mode::PanicAfter)) {
            let (hostile, platform, space) = used();
            hostile.faults.arm(Some((at, *mode)));
            catch_unwind(AssertUnwindSafe(|| space.drain_all(&platform))).unwrap_err();
            assert!(hostile.faults.disarm().1);
            // CPUs take all that there is, in turn.
            let mut seen = BTreeSet::new();
            for n in 0.. {
                platform.be(n % CPUS);
                let Ok(range) = space.alloc(&platform, PAGE, Iova::new(u64::MAX)) else { break };
                assert!(seen.insert(range.start()), "{call:?} {at} {mode:?}: {range:?} is handed out twice");
            }
            assert_eq!(seen.len() as u64, PAGES, "{call:?} {at} {mode:?}");
        }
    }
}
