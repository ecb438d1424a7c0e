//! The half that owns buffers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use portcullis::SetupError;
use portcullis::addr::{DeviceId, Direction, DmaSegment, Iova, PhysAddr, PhysSegment};
use portcullis::bounce::pool::PoolConfig;
use portcullis::dma::{
    DmaDomain, DmaMapError, DmaMask, DmaUnmapError, Ended, MOST_IN_BATCH, Mapping, Queue, QueueConfig,
    Strategy,
};
use portcullis::domain::{MapListError, Policy};

#[cfg(not(watched))]
use crate::dice::Dice;
use crate::queue::world::{BATCH, BATCHES, BROKEN, CARD, Frame, Machine, PAGE, STRATEGIES, World};

/// What every driver of a receive queue does: some buffers are always posted; the device fills the oldest, and is told of it.
/// After each step it tries everything that was given back.
struct Driver<'a> {
    world: &'a World,
    rx: Queue<Machine, Frame>,
    posted: VecDeque<Mapping<Frame>>,
    /// Unmapped, and not given back: addresses in the order of their unmaps, and what the device has written there.
    pending: VecDeque<(Iova, u8)>,
    /// Given back.
    back: Vec<(Iova, Frame, u8)>,
}

impl<'a> Driver<'a> {
    fn new(world: &'a World, config: QueueConfig) -> Self {
        let rx = world.nic.queue(config).unwrap();
        Self { world, rx, posted: VecDeque::new(), pending: VecDeque::new(), back: Vec::new() }
    }

    fn post(&mut self, direction: Direction) {
        let mapping = self.rx.map(self.world.frame(), direction).unwrap();
        assert_eq!(mapping.len(), PAGE);
        self.posted.push_back(mapping);
    }

    fn receive(&mut self, byte: u8) {
        let mapping = self.posted.pop_front().unwrap();
        let iova = mapping.iova();
        self.world.fill(self.rx.segments(&mapping), byte);
        let mut given = Vec::new();
        self.pending.push_back((iova, byte));
        match self.rx.unmap(mapping).unwrap() {
            Ended::Done(frame) => {
                let (iova, byte) = self.pending.pop_back().unwrap();
                given.push((iova, frame, byte));
            }
            Ended::Pending => {}
            Ended::Flushed(frames) => {
                given.extend(frames.map(|frame| {
                    let (iova, byte) = self.pending.pop_front().unwrap();
                    (iova, frame, byte)
                }));
                assert!(self.pending.is_empty(), "a flush is one of all");
            }
        }
        self.back.extend(given);
        assert_eq!(self.rx.waiting(), self.pending.len());
        self.try_late();
    }

    fn commit(&mut self) {
        for frame in self.rx.commit().unwrap() {
            let (iova, byte) = self.pending.pop_front().unwrap();
            self.back.push((iova, frame, byte));
        }
        assert!(self.pending.is_empty() && self.rx.waiting() == 0);
        self.try_late();
    }

    /// The device writes to wherever it was given something that came back.
    fn try_late(&self) {
        for (iova, frame, byte) in &self.back {
            // Another mapping may have the address by now.
            let is_again = |other: Iova| other == *iova;
            let again =
                self.posted.iter().map(Mapping::iova).chain(self.pending.iter().map(|(iova, _)| *iova));
            if !again.into_iter().any(is_again) {
                let _ = self.world.writes(*iova, b"too late");
            }
            assert!(frame.is_all(*byte), "{:?} at {iova}", self.rx.strategy());
        }
    }
}

#[test]
fn what_came_back_is_out_of_reach_whatever_the_strategy() {
    for config in STRATEGIES {
        for direction in [Direction::FromDevice, Direction::Bidirectional] {
            let world = World::new(Policy::Strict);
            let mut driver = Driver::new(&world, config);
            (0..5).for_each(|_| driver.post(direction));
            for byte in 1..=30 {
                driver.receive(byte);
                driver.post(direction);
            }
            // The queue falls idle.
            while !driver.posted.is_empty() {
                driver.receive(77);
            }
            driver.commit();
            assert_eq!(driver.back.len(), 35);
            let waits = matches!(driver.rx.strategy(), Strategy::Direct | Strategy::Batch | Strategy::Ring);
            let reached = driver.back.iter().any(|(iova, ..)| world.writes(*iova, b"too late"));
            assert!(!(waits && reached), "what is mapped faults: {config:?}");
        }
    }
}

#[test]
fn both_sides_see_each_other_s_bytes() {
    for config in STRATEGIES {
        let world = World::new(Policy::Strict);
        let mut queue = world.nic.queue(config).unwrap();
        let frame = world.frame();
        frame.put(b"question");
        let mapping = queue.map(frame, Direction::Bidirectional).unwrap();
        assert_eq!(world.reads(mapping.iova()), Some(*b"question"), "{config:?}");
        mapping.buffer().put(b"another?");
        queue.sync_for_device(&mapping, 0, 8).unwrap();
        assert_eq!(world.reads(mapping.iova()), Some(*b"another?"), "{config:?}");
        assert!(world.writes(mapping.iova(), b"an answr"));
        queue.sync_for_cpu(&mapping, 0, 8).unwrap();
        assert_eq!(mapping.buffer().get(), *b"an answr", "{config:?}");
        let (iova, mapped) = (mapping.iova(), mapping.len());
        for (offset, len) in [(0, mapped + 1), (mapped - 1, 2), (mapped + 1, 0), (u64::MAX, 2)] {
            let outside = Err(DmaUnmapError::OutOfRange { iova, offset, len, mapped });
            assert_eq!(queue.sync_for_cpu(&mapping, offset, len), outside, "{config:?}");
            assert_eq!(queue.sync_for_device(&mapping, offset, len), outside, "{config:?}");
        }
        let other: Queue<Machine, Frame> = world.nic.queue(config).unwrap();
        assert_eq!(other.segments(&mapping).count(), 0, "another queue knows nothing of it");
        let mut back = Vec::new();
        queue.unmap(mapping).unwrap().for_each(|frame| back.push(frame));
        back.extend(queue.commit().unwrap());
        assert_eq!(back.len(), 1);
        assert_eq!(back[0].get(), *b"an answr");
    }
}

#[test]
fn a_buffer_of_pieces_is_seen_as_a_whole() {
    for policy in [Policy::Strict, Policy::Passthrough] {
        for config in STRATEGIES {
            let world = World::new(policy);
            let mut queue = world.nic.queue(config).unwrap();
            let lens = [PAGE, 2 * PAGE, 100];
            let mapping = queue.map(world.frames(&lens, &Arc::default()), Direction::FromDevice).unwrap();
            let total: u64 = queue.segments(&mapping).map(|segment| segment.len).sum();
            assert_eq!((total, mapping.len()), (3 * PAGE + 100, 3 * PAGE + 100));
            assert_eq!(queue.segments(&mapping).next().unwrap().iova, mapping.iova());
            world.fill(queue.segments(&mapping), 9);
            let mut back = Vec::new();
            queue.unmap(mapping).unwrap().for_each(|frame| back.push(frame));
            back.extend(queue.commit().unwrap());
            assert!(back[0].is_all(9), "{policy:?} {config:?}");
        }
    }
}

#[test]
fn a_mapping_of_another_queue_comes_back_as_it_was() {
    for policy in [Policy::Strict, Policy::Passthrough] {
        for config in STRATEGIES {
            for others in STRATEGIES {
                let world = World::new(policy);
                let mut queue = world.nic.queue(config).unwrap();
                let mut other: Queue<Machine, Frame> = world.nic.queue(others).unwrap();
                let mapping = queue.map(world.frame(), Direction::FromDevice).unwrap();
                let failed = other.unmap(mapping).map(drop).unwrap_err();
                assert_eq!(failed.error, DmaUnmapError::OtherQueue);
                assert_eq!((other.waiting(), other.commit().unwrap().len()), (0, 0));
                let mapping = failed.mapping.unwrap();
                assert_eq!(other.sync_for_cpu(&mapping, 0, 8), Err(DmaUnmapError::OtherQueue));
                assert_eq!(other.sync_for_device(&mapping, 0, 8), Err(DmaUnmapError::OtherQueue));
                assert!(world.writes(mapping.iova(), b"a packet"));
                let mut back = Vec::new();
                queue.unmap(mapping).unwrap().for_each(|frame| back.push(frame));
                back.extend(queue.commit().unwrap());
                assert_eq!(back[0].get(), *b"a packet");
            }
        }
    }
}

#[test]
fn without_translation_buffers_come_back_too() {
    for config in STRATEGIES {
        let world = World::new(Policy::Passthrough);
        let mut queue = world.nic.queue(config).unwrap();
        let copies = queue.strategy() == Strategy::Bounce;
        let mut back = 0;
        for _ in 0..9 {
            let frame = world.frame();
            let phys = portcullis::dma::DmaBuffer::segments(&frame)[0].phys;
            let mapping = queue.map(frame, Direction::FromDevice).unwrap();
            assert_eq!(mapping.iova().get() == phys.get(), !copies);
            assert!(world.writes(mapping.iova(), b"a packet"));
            queue.unmap(mapping).unwrap().for_each(|frame| {
                assert_eq!(frame.get(), *b"a packet");
                back += 1;
            });
        }
        back += queue.commit().unwrap().len();
        assert_eq!(back, 9, "{config:?}");
    }
}

#[test]
fn a_queue_that_ends_gives_its_buffers_up_only_where_that_is_confirmed() {
    for &config in BATCHES {
        for confirmed in [true, false] {
            let world = World::new(Policy::Strict);
            let drops = Arc::new(AtomicUsize::new(0));
            let mut queue = world.nic.queue(config).unwrap();
            for _ in 0..3 {
                let mapping = queue.map(world.frames(&[PAGE], &drops), Direction::FromDevice).unwrap();
                assert!(world.writes(mapping.iova(), b"a packet"));
                assert!(matches!(queue.unmap(mapping), Ok(Ended::Pending)));
            }
            assert_eq!(drops.load(Ordering::Relaxed), 0);
            if !confirmed {
                world.iommu.queue().fail_next(u64::MAX, BROKEN);
            }
            drop(queue);
            assert_eq!(drops.load(Ordering::Relaxed), if confirmed { 3 } else { 0 }, "{config:?}");
        }
    }
}

#[test]
fn a_mapping_that_is_dropped_keeps_its_buffer_for_the_device() {
    for config in STRATEGIES {
        let world = World::new(Policy::Strict);
        let drops = Arc::new(AtomicUsize::new(0));
        let mut queue = world.nic.queue(config).unwrap();
        let mapping = queue.map(world.frames(&[PAGE], &drops), Direction::FromDevice).unwrap();
        let iova = mapping.iova();
        drop(mapping);
        assert_eq!(queue.commit().unwrap().len(), 0);
        assert!(world.writes(iova, b"a packet"));
        drop(queue);
        assert_eq!(drops.load(Ordering::Relaxed), 0, "{config:?}");
    }
}

#[test]
fn a_full_ring_says_so_and_has_room_after_a_commit() {
    let world = World::new(Policy::Strict);
    let mut queue = world.nic.queue(QueueConfig::ring(4, PAGE).batch(4)).unwrap();
    let mut mappings = Vec::new();
    let failed = loop {
        match queue.map(world.frame(), Direction::FromDevice) {
            Ok(mapping) => mappings.push(mapping),
            Err(failed) => break failed,
        }
        assert!(mappings.len() < 10_000);
    };
    assert!(failed.error.is_full() && failed.buffer.is_some(), "{failed}");
    assert_eq!(failed.error, DmaMapError::Full);
    assert!(matches!(queue.unmap(mappings.remove(0)), Ok(Ended::Pending)));
    assert!(queue.map(world.frame(), Direction::FromDevice).is_err(), "what waits has its address");
    assert_eq!(queue.commit().unwrap().len(), 1);
    let _mapped = queue.map(world.frame(), Direction::FromDevice).unwrap();
}

#[test]
fn an_option_that_would_have_no_effect_is_an_error() {
    let world = World::new(Policy::Strict);
    let refused = |config: QueueConfig| match world.nic.queue::<Frame>(config) {
        Ok(_) => None,
        Err(SetupError::NoEffect { option, strategy }) => Some((option, strategy)),
        Err(error) => panic!("{config:?}: {error}"),
    };
    let (ring, auto) = (QueueConfig::ring(8, PAGE), QueueConfig::auto(8, PAGE));
    let (batched, toward) = (QueueConfig::batched(4), Direction::ToDevice);
    assert_eq!(refused(QueueConfig::direct().batch(8)), Some(("batch", "direct")));
    assert_eq!(refused(QueueConfig::bounce().batch(32)), Some(("batch", "bounce")));
    assert_eq!(refused(batched.colour(0)), Some(("colour", "batched")));
    assert_eq!(refused(QueueConfig::direct().colour(1)), Some(("colour", "direct")));
    assert_eq!(refused(QueueConfig::bounce().measuring(toward)), Some(("measuring", "bounce")));
    assert_eq!(refused(ring.measuring(toward)), Some(("measuring", "ring")));
    for config in [
        batched,
        ring.batch(2).colour(1),
        auto.batch(2).colour(1).measuring(toward),
        QueueConfig::direct().copying_in(),
    ] {
        assert_eq!(refused(config), None, "{config:?}");
    }
    let said = world.nic.queue::<Frame>(ring.measuring(toward)).map(drop).unwrap_err().to_string();
    assert_eq!(
        said,
        "a queue by `ring` has no use for `measuring`: leave it out, or take a strategy that has"
    );
}

/// Addresses that a device can reach may be all taken for a while: that is full, too. What it can never reach is not.
#[test]
fn addresses_that_are_all_taken_are_full_until_some_come_back() {
    let world = World::new(Policy::Strict);
    let card = world.nic.domain().attach(DeviceId(8), DmaMask::bits(24)).unwrap();
    let mut queue = card.queue(QueueConfig::batched(4)).unwrap();
    let list = |len| [PhysSegment { phys: PhysAddr::new(1 << 30), len }];
    let mut out = [DmaSegment::default()];
    // SAFETY: no device uses the memory.
    let mut map = |queue: &mut Queue<Machine, Frame>, len| unsafe {
        queue.map_raw(&list(len), Direction::FromDevice, &mut out).map(|(mapping, _)| mapping)
    };
    let mut mappings = Vec::new();
    let full = loop {
        match map(&mut queue, 1 << 20) {
            Ok(mapping) => mappings.push(mapping),
            Err(error) => break error,
        }
    };
    assert!(matches!(full, DmaMapError::List(_)) && full.is_full(), "{full}");
    assert!((8..=16).contains(&mappings.len()));
    assert!(matches!(queue.unmap_raw(mappings.remove(3)), Ok(Ended::Pending)));
    assert!(map(&mut queue, 1 << 20).unwrap_err().is_full(), "what waits has its addresses");
    queue.commit_raw().unwrap();
    mappings.push(map(&mut queue, 1 << 20).unwrap());
    let never = map(&mut queue, (1 << 24) + PAGE).unwrap_err();
    assert!(!never.is_full(), "{never}");
}

#[test]
fn a_ring_has_room_for_what_waits_besides_what_was_asked_for() {
    let world = World::new(Policy::Strict);
    // A large page of descriptors, to which the ring is not rounded up.
    let mut queue = world.nic.queue(QueueConfig::ring(512, PAGE).batch(BATCH)).unwrap();
    let map = |queue: &mut Queue<Machine, Frame>| queue.map(world.frame(), Direction::FromDevice).unwrap();
    let mut live: Vec<_> = (0..512).map(|_| map(&mut queue)).collect();
    for mapping in live.drain(..BATCH - 1).collect::<Vec<_>>() {
        assert!(matches!(queue.unmap(mapping), Ok(Ended::Pending)));
        live.push(map(&mut queue));
    }
    assert_eq!((queue.waiting(), live.len()), (BATCH - 1, 512));
}

#[test]
fn what_never_fits_into_a_ring_goes_beside_it() {
    // By the policy of the domain it would be lazy; a ring is strict.
    let world = World::new(Policy::Lazy { window_ns: u64::MAX });
    let mut queue = world.nic.queue(QueueConfig::ring(4, PAGE).batch(4)).unwrap();
    let mapping = queue.map(world.frames(&[8 << 20], &Arc::default()), Direction::FromDevice).unwrap();
    let iova = mapping.iova();
    world.fill(queue.segments(&mapping), 3);
    let Ok(Ended::Done(frame)) = queue.unmap(mapping) else { panic!("it waits for nobody") };
    assert!(!world.writes(iova, b"too late"));
    assert!(frame.is_all(3));
}

#[test]
fn a_list_of_nothing_comes_back() {
    for policy in [Policy::Strict, Policy::Passthrough] {
        for config in STRATEGIES {
            let world = World::new(policy);
            let mut queue = world.nic.queue(config).unwrap();
            let failed = queue.map(world.frames(&[], &Arc::default()), Direction::FromDevice).unwrap_err();
            assert_eq!(failed.error, DmaMapError::List(MapListError::EmptyList), "{policy:?} {config:?}");
            assert!(failed.buffer.is_some());
        }
    }
}

#[test]
fn a_device_finds_what_another_wrote_only_where_both_are_in_one_group() {
    for is_one_group in [false, true] {
        let world = World::new(Policy::Strict);
        let mut nics =
            [DeviceId(7), DeviceId(8)].map(|id| world.nic.domain().attach(id, DmaMask::BITS_64).unwrap());
        if is_one_group {
            nics = nics.map(|nic| nic.in_group(9));
        }
        // The first writes to its mapping, the second leaves its own as it is: it gets the buffer next.
        let [first, second] = [Some(b"a secret"), None].map(|secret| {
            let nic = &nics[usize::from(secret.is_none())];
            let mut queue = nic.queue(QueueConfig::bounce()).unwrap();
            let mapping = queue.map(world.frame(), Direction::FromDevice).unwrap();
            secret.inspect(|secret| assert!(world.writes(mapping.iova(), *secret)));
            let Ok(Ended::Done(frame)) = queue.unmap(mapping) else { panic!("a copy waits for nothing") };
            frame
        });
        assert_eq!(&first.get(), b"a secret");
        assert_eq!(&second.get(), if is_one_group { b"a secret" } else { &[0; 8] });
    }
}

/// What a driver gets back of a mapping from a device that wrote `written`, if anything.
fn received(queue: &mut Queue<Machine, Frame>, world: &World, written: Option<&[u8; 8]>) -> [u8; 8] {
    let frame = world.frame();
    frame.put(b"original");
    let mapping = queue.map(frame, Direction::FromDevice).unwrap();
    written.inspect(|bytes| assert!(world.writes(mapping.iova(), *bytes)));
    let Ok(Ended::Done(frame)) = queue.unmap(mapping) else { panic!("a copy waits for nothing") };
    frame.get()
}

#[test]
fn copies_are_wiped_where_the_pool_says_so_and_filled_where_the_queue_does() {
    for (wipe, config, then) in [
        (false, QueueConfig::bounce(), b"a secret"),
        (true, QueueConfig::bounce(), &[0; 8]),
        (false, QueueConfig::bounce().copying_in(), b"original"),
        (true, QueueConfig::bounce().copying_in(), b"original"),
    ] {
        let world = World::with_pool(Policy::Strict, PoolConfig { wipe, ..PoolConfig::default() });
        let mut queue = world.nic.queue(config).unwrap();
        assert_eq!(&received(&mut queue, &world, Some(b"a secret")), b"a secret");
        assert_eq!(&received(&mut queue, &world, None), then, "{config:?}");
    }
}

#[test]
fn a_domain_says_what_its_pool_holds() {
    let world = World::new(Policy::Strict);
    let domain = world.nic.domain().clone();
    assert_eq!(domain.pool_usage(), None, "no queue has needed it");
    let mut queue = world.nic.queue(QueueConfig::bounce()).unwrap();
    let mapping = queue.map(world.frame(), Direction::FromDevice).unwrap();
    let usage = domain.pool_usage().unwrap();
    assert_eq!((usage.bounced, usage.buffer_bytes - usage.cached_bytes), (1, PAGE));
    let Ok(Ended::Done(_)) = queue.unmap(mapping) else { panic!("a copy waits for nothing") };
    let usage = domain.pool_usage().unwrap();
    assert_eq!((usage.bounced, usage.buffer_bytes - usage.cached_bytes), (1, 0));
}

#[test]
fn what_cannot_be_is_said_at_the_door() {
    let world = World::new(Policy::Strict);
    let bare = DmaDomain::<Machine>::over(world.nic.domain().space().clone(), None).unwrap();
    let nic = bare.attach(DeviceId(1), DmaMask::bits(36)).unwrap();
    let refused = nic.queue::<Frame>(QueueConfig::bounce()).unwrap_err();
    assert_eq!(refused, SetupError::NoCopyMemory);
    let auto: Queue<Machine> = nic.queue(QueueConfig::auto(16, PAGE)).unwrap();
    assert_eq!(auto.strategy(), Strategy::Ring, "there is nothing to choose from");
    let none = bare.attach(DeviceId(1), DmaMask::bits(11)).unwrap_err();
    assert_eq!(none, SetupError::BeyondReach { last: 0x7ff, first: Iova::new(PAGE) });
    let odd = world.nic.clone().keeping_offsets(6).queue::<Frame>(QueueConfig::bounce()).unwrap_err();
    assert!(matches!(odd, SetupError::OffsetMask { .. }), "{odd}");
    // Translated or not.
    let open = World::new(Policy::Passthrough);
    for nic in [&world.nic, &open.nic] {
        for batch in [0, MOST_IN_BATCH + 1] {
            let error = SetupError::Batch { batch, most: MOST_IN_BATCH };
            for config in [QueueConfig::batched(1), QueueConfig::ring(4, PAGE), QueueConfig::auto(4, PAGE)] {
                assert_eq!(nic.queue::<Frame>(config.batch(batch)).unwrap_err(), error);
            }
            assert_eq!(nic.queue::<Frame>(QueueConfig::batched(batch)).unwrap_err(), error);
        }
        for (descriptors, bytes) in [(0, PAGE), (4, 0)] {
            let error = SetupError::NoRing { descriptors, bytes };
            for config in [QueueConfig::ring(descriptors, bytes), QueueConfig::auto(descriptors, bytes)] {
                assert_eq!(nic.queue::<Frame>(config).unwrap_err(), error);
            }
        }
        let largest: Queue<Machine> = nic.queue(QueueConfig::batched(MOST_IN_BATCH)).unwrap();
        assert_eq!(largest.waiting(), 0);
    }
    assert_eq!((DmaMask::BITS_64.last(), DmaMask::BITS_32.last()), (u64::MAX, u64::from(u32::MAX)));
    let _ = CARD;
}

/// Lists of some pieces come and go in any order, and each ends by itself: its buffer then has all that the device wrote.
#[cfg(not(watched))]
#[test]
fn many_lists_are_mapped_at_once_and_none_is_another_s() {
    let rounds = 300;
    // A ring's oldest mapping may stay for long.
    let rings = [QueueConfig::ring, QueueConfig::auto].map(|make| make(512, 4 * PAGE).batch(BATCH));
    let all = [STRATEGIES[0], STRATEGIES[1], STRATEGIES[3], rings[0], rings[1]];
    let policies = [Policy::Strict, Policy::Passthrough];
    for (policy, config) in policies.iter().flat_map(|policy| all.map(|config| (*policy, config))) {
        let (world, drops, mut dice) = (World::new(policy), Arc::default(), Dice::new(7));
        let mut queue = world.nic.queue(config).unwrap();
        let (mut live, mut ended, mut byte) = (Vec::new(), VecDeque::new(), 0_u8);
        let check = |ended: &mut VecDeque<u8>, frame: Frame| {
            let byte = ended.pop_front().unwrap();
            assert!(frame.is_all(byte), "{policy:?} {config:?}: {byte}");
        };
        for round in 0..rounds {
            if round + 10 < rounds && live.len() < 8 && !dice.one_in(3) {
                let pieces = dice.below(3) as usize + 1;
                let lens: Vec<u64> =
                    (0..pieces).map(|_| [64, 100, PAGE, PAGE + 904][dice.below(4) as usize]).collect();
                let mapping = queue.map(world.frames(&lens, &drops), Direction::FromDevice).unwrap();
                assert_eq!(
                    queue.segments(&mapping).map(|segment| segment.len).sum::<u64>(),
                    lens.iter().sum()
                );
                byte = byte % 255 + 1;
                world.fill(queue.segments(&mapping), byte);
                live.push((mapping, byte));
            } else if !live.is_empty() {
                let (mapping, byte) = live.swap_remove(dice.below(live.len() as u64) as usize);
                match queue.unmap(mapping).unwrap() {
                    Ended::Done(frame) => check(&mut VecDeque::from([byte]), frame),
                    Ended::Pending => ended.push_back(byte),
                    Ended::Flushed(frames) => {
                        ended.push_back(byte);
                        frames.for_each(|frame| check(&mut ended, frame));
                        assert!(ended.is_empty());
                    }
                }
            }
        }
        assert!(live.is_empty(), "{}", live.len());
        queue.commit().unwrap().for_each(|frame| check(&mut ended, frame));
        assert!(ended.is_empty());
        if let Some(pool) = &world.swiotlb {
            assert_eq!(pool.usage().mapped, 0);
        }
    }
}
