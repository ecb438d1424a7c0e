//! Mappings of a bounce pool with addresses of their own: whoever ends what, and whatever panics meanwhile, each caller ends its own.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

use portcullis::addr::{Direction, Iova, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{Attributes, BounceDevice, BouncePool, DeviceProfile, PoolConfig, Way};
use portcullis::dma::DmaUnmapError;
use portcullis::domain::Policy;
use portcullis::heap::Shared;
use portcullis::invalidation::InvalidationError;
use portcullis_model::open::OpenPool;
use portcullis_model::{Buffer, Memory, Queue};

use crate::played::Played;
use crate::queued::{direct, end};
use crate::reviewed::steps::{before, came, each, step};
use crate::rig::{Call, DEVICE, Hooked, Mapper, Moody, PAGE, Rig};

const PAGES: u64 = 8;

/// How a mapping is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// With buffers: for all of it, or for its ends.
    Own,
    Direct,
    /// The same, of a list with a gap.
    Listed,
}

type Pool = BouncePool<Mapper, Played, Arc<Memory>>;

struct Bench {
    rig: Rig<Arc<Moody>, Hooked<Queue>>,
    pool: Shared<Pool>,
    /// Frames that were in use before.
    frames: u64,
}

/// A mapping, and its memory.
struct Mine {
    iova: Iova,
    len: u64,
    original: Buffer,
}

impl Bench {
    /// Each turn of a CPU, and each submission, is a step.
    fn new(split: bool) -> Rc<Self> {
        let rig = Rig::new(Moody::new(2), Policy::Strict, Hooked::new);
        let frames = rig.memory.frames_in_use();
        let config = PoolConfig {
            threshold: PAGE,
            class_bytes: 4 * PAGE,
            split,
            idle_ns: u64::MAX,
            ..PoolConfig::default()
        };
        let pool = BouncePool::new(rig.domain.clone(), Arc::clone(&rig.memory), config).unwrap();
        rig.platform.inner.after_each_turn(step);
        rig.queue.set(step);
        Rc::new(Self { rig, pool, frames })
    }

    /// Maps all but the first and the last bytes of eight pages.
    fn map(&self, kind: Kind) -> Mine {
        let original = self.rig.memory.buffer(PAGES * PAGE).unwrap();
        let piece = |from, len| PhysSegment { phys: PhysAddr::new(original.phys().get() + from), len };
        let all = [piece(8, PAGES * PAGE - 16)];
        let listed = [piece(8, 100), piece(PAGE, (PAGES - 1) * PAGE - 8)];
        let untrusted = kind == Kind::Own;
        let profile = DeviceProfile { untrusted, offset_mask: PAGE - 1, ..DeviceProfile::default() };
        let device = BounceDevice::new(self.pool.clone(), profile).unwrap();
        let list = if kind == Kind::Listed { &listed[..] } else { &all };
        // SAFETY: the memory is simulated, every access to it atomic, and any address allowed.
        let mapping = unsafe { device.map(list, Direction::FromDevice, Attributes::default()) }.unwrap();
        assert_eq!(untrusted, mapping.way() != Way::Direct, "{kind:?}");
        let (iova, len) = (mapping.iova(), mapping.len());
        Mine { iova, len, original }
    }

    /// The device writes to it.
    fn write(&self, mine: &Mine, byte: u8) {
        self.rig.iommu.dma_write(DEVICE, mine.iova, &[byte; 64]).unwrap();
    }

    fn end(&self, mine: &Mine) -> Result<(), DmaUnmapError> {
        self.pool.close(mine.iova, mine.len)
    }

    /// The pool ends. All memory is free again, and no address is gone that is not counted. How many are.
    fn finish(self: Rc<Self>) -> u64 {
        self.rig.queue.clear();
        let Self { rig, pool, frames } = Rc::into_inner(self).unwrap();
        drop(pool);
        let (gone, lost) = rig.gone();
        assert!(gone <= lost, "{gone:#x} bytes of addresses are gone, and {lost:#x} counted");
        rig.domain.reclaim().unwrap();
        assert_eq!((rig.memory.frames_in_use(), rig.memory.bad_frees()), (frames, 0));
        gone
    }
}

impl Mine {
    /// Whether what the device has written is there.
    fn has(&self, byte: u8) -> bool {
        let mut bytes = [0; 64];
        self.original.read(8, &mut bytes).unwrap();
        bytes == [byte; 64]
    }
}

/// While one CPU ends a mapping, another ends what is none: the address is one too high. The platform panics in that. Then a trim
/// comes.
#[test]
fn a_wrong_unmap_that_panics_takes_nothing_from_the_right_one() {
    for split in [false, true] {
        let steps = each(|number| {
            let bench = Bench::new(split);
            let mine = bench.map(Kind::Own);
            bench.write(&mine, 7);
            let (iova, len) = (Iova::new(mine.iova.get() + 1), mine.len - 1);
            let secrets = Rc::new(RefCell::new(Vec::new()));
            before(number, {
                let (bench, secrets) = (Rc::clone(&bench), Rc::clone(&secrets));
                move || {
                    bench.rig.platform.panic_in(Call::WithCpu);
                    let wrong = catch_unwind(AssertUnwindSafe(|| bench.pool.close(iova, len)));
                    assert!(!matches!(wrong, Ok(Ok(()))), "{wrong:?}");
                    bench.rig.platform.be_well();
                    bench.pool.trim(0).unwrap();
                    // Somebody else gets memory meanwhile, and has a secret there.
                    let secret = || {
                        let secret = bench.rig.memory.buffer(PAGE).unwrap();
                        secret.fill(0x5e);
                        secret
                    };
                    secrets.borrow_mut().extend((0..2 * PAGES).map(|_| secret()));
                }
            });
            bench.end(&mine).unwrap();
            assert!(mine.has(7), "split: {split}, step {number}");
            drop((mine, secrets.take()));
            let came = came();
            assert_eq!(bench.finish(), 0, "split: {split}, step {number}");
            came
        });
        assert!(steps > 3, "{steps}");
    }
}

/// Two trims, of a timer and of a map that finds no memory, say, meet what somebody has panicked at. While the one is at it, the
/// other does what it can, and somebody who has nothing to do with the pool gets addresses.
#[test]
fn a_trim_leaves_alone_what_has_come_where_another_has_cleared_up() {
    for split in [false, true] {
        let steps = each(|number| {
            let bench = Bench::new(split);
            let mine = bench.map(Kind::Own);
            // When it is found, and not unmapped yet.
            before(1, || panic!("as the test wants"));
            assert!(catch_unwind(AssertUnwindSafe(|| bench.end(&mine))).is_err());
            assert!(came() && bench.rig.reaches(mine.iova));
            let mapped = Rc::new(RefCell::new(None));
            before(number, {
                let (bench, mapped) = (Rc::clone(&bench), Rc::clone(&mapped));
                move || {
                    bench.pool.trim(0).unwrap();
                    let buffer = bench.rig.memory.buffer(PAGES * PAGE).unwrap();
                    let mut queue = direct(&bench.rig.device);
                    let mapping = queue.map(buffer, Direction::FromDevice).unwrap();
                    *mapped.borrow_mut() = Some((queue, mapping));
                }
            });
            bench.pool.trim(0).unwrap();
            let came = came();
            if let Some((mut queue, mapping)) = mapped.take() {
                let reached =
                    bench.rig.iommu.access(DEVICE, mapping.iova(), PAGES * PAGE, Permissions::WRITE);
                assert_eq!(reached, Ok(()), "split: {split}, step {number}");
                drop(end(&mut queue, mapping));
            }
            assert_eq!(bench.pool.usage().singles, 0);
            drop(mine);
            assert_eq!(bench.finish(), 0, "split: {split}, step {number}");
            came
        });
        assert!(steps > 3, "{steps}");
    }
}

/// A mapping is ended by number under the pool, which then gets its addresses for another. The owner of each ends its own.
#[test]
fn a_mapping_ended_by_number_under_its_pool_ends_no_other_s() {
    for (split, kind, newest_first) in [false, true]
        .into_iter()
        .flat_map(|split| [Kind::Own, Kind::Direct, Kind::Listed].map(|kind| (split, kind)))
        .flat_map(|(split, kind)| [false, true].map(|newest_first| (split, kind, newest_first)))
    {
        let what = format!("split: {split}, {kind:?}, newest first: {newest_first}");
        let bench = Bench::new(split);
        let first = bench.map(Kind::Own);
        bench.write(&first, 0x11);
        bench.rig.device.unmap_single(first.iova, first.len).unwrap();
        let second = bench.map(kind);
        // Addresses that the pool still has for another are given up, with nothing mapped to them.
        assert!(first.iova == second.iova || !bench.rig.reaches(first.iova), "{what}");
        bench.write(&second, 0x22);
        if newest_first {
            bench.end(&second).unwrap();
            assert!(second.has(0x22) && !first.has(0x11), "{what}");
        }
        bench.end(&first).ok();
        if !newest_first {
            assert!(bench.rig.reaches(second.iova), "{what}");
            assert!(kind != Kind::Own || !second.has(0x22), "{what}");
            bench.end(&second).unwrap();
            assert!(second.has(0x22), "{what}");
        }
        drop((first, second));
        bench.finish();
    }
}

/// The same while the owner is ending it.
#[test]
fn a_mapping_ended_by_number_and_by_its_owner_at_once_ends_no_other_s() {
    for (split, kind) in [false, true]
        .into_iter()
        .flat_map(|split| [Kind::Own, Kind::Direct, Kind::Listed].map(|kind| (split, kind)))
    {
        let steps = each(|number| {
            let what = format!("split: {split}, {kind:?}, step {number}");
            let bench = Bench::new(split);
            let first = bench.map(Kind::Own);
            let (iova, len) = (first.iova, first.len);
            let second = Rc::new(RefCell::new(None));
            before(number, {
                let (bench, second) = (Rc::clone(&bench), Rc::clone(&second));
                move || {
                    bench.rig.device.unmap_single(iova, len).ok();
                    let mine = bench.map(kind);
                    bench.write(&mine, 0x22);
                    *second.borrow_mut() = Some(mine);
                }
            });
            bench.end(&first).ok();
            let came = came();
            if let Some(second) = second.take() {
                assert!(bench.rig.reaches(second.iova), "{what}");
                assert!(kind != Kind::Own || !second.has(0x22), "{what}");
                bench.end(&second).expect(&what);
                assert!(second.has(0x22), "{what}");
            }
            drop(first);
            bench.finish();
            came
        });
        assert!(steps > 3, "{steps}");
    }
}

/// Wherever the platform or the queue panics in an unmap, a trim does what is left of it.
#[test]
fn an_unmap_that_panics_anywhere_leaves_nothing_that_a_trim_does_not_give_back() {
    for split in [false, true] {
        let steps = each(|number| {
            let bench = Bench::new(split);
            let mine = bench.map(Kind::Own);
            before(number, || panic!("as the test wants"));
            let ended = catch_unwind(AssertUnwindSafe(|| bench.end(&mine)));
            let came = came();
            assert_eq!(ended.is_err(), came);
            bench.pool.trim(0).unwrap();
            assert_eq!(bench.pool.usage().singles, 0);
            assert!(!bench.rig.reaches(mine.iova), "split: {split}, step {number}");
            drop(mine);
            assert_eq!(bench.finish(), 0, "split: {split}, step {number}");
            came
        });
        assert!(steps > 3, "{steps}");
    }
}

#[test]
fn a_pool_dropped_while_the_queue_panics_counts_what_it_loses() {
    let bench = Bench::new(false);
    (0..8).for_each(|_| std::mem::forget(bench.map(Kind::Own)));
    bench.rig.queue.set(|| panic!("as the test wants"));
    let Bench { rig, pool, .. } = Rc::into_inner(bench).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| drop(pool))).is_err());
    rig.queue.clear();
    let (gone, lost) = rig.gone();
    assert!(gone > 0 && gone <= lost, "{gone:#x} bytes of addresses are gone, and {lost:#x} counted");
}

/// It is the original's memory, and reached until a flush is confirmed.
#[test]
fn the_middle_of_a_split_mapping_that_is_not_confirmed_is_counted_and_tried_again() {
    let bench = Bench::new(true);
    let mine = bench.map(Kind::Own);
    let middle = Iova::new((mine.iova.get() & !(PAGE - 1)) + PAGE);
    assert!(bench.rig.reaches(middle));
    bench.rig.iommu.queue().fail_next(1, InvalidationError::TimedOut { waited_ns: 1 });
    assert!(matches!(bench.end(&mine), Err(DmaUnmapError::Unconfirmed { .. })));
    assert!(bench.rig.reaches(middle));
    bench.rig.platform.inner.go_to(1_000_000_000);
    assert!(!bench.rig.reaches(middle), "nobody has tried again");
    let exposure = bench.rig.domain.exposure();
    assert!(exposure.stale_byte_ns >= u128::from((PAGES - 2) * PAGE * 1_000_000), "{exposure:?}");
    bench.pool.trim(0).unwrap();
    drop(mine);
    assert_eq!(bench.finish(), 0);
}
