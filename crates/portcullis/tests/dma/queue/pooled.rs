//! Buffers that a driver takes out of the pool: the device and the driver use them at the same time, no other driver gets them meanwhile, and
//! no I/O maps or unmaps anything.

use portcullis::SetupError;
use portcullis::addr::{DeviceId, Direction};
use portcullis::bounce::pool::PoolConfig;
use portcullis::dma::{BufferPool, DmaMapError, DmaMask, PoolBuffer, Queue, QueueConfig};
use portcullis::domain::Policy;

use super::world::{Machine, PAGE, World};

/// Both go to other threads, and are shared with them.
const _: () = {
    const fn crosses<T: Send + Sync>() {}
    crosses::<BufferPool<Machine>>();
    crosses::<PoolBuffer<Machine>>();
};

const ROOM: usize = PAGE as usize;

/// What the driver reads of a buffer.
fn read(buffer: &PoolBuffer<Machine>, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    buffer.read(offset, &mut bytes).unwrap();
    bytes
}

#[test]
fn what_the_device_writes_the_driver_reads_in_place_and_the_other_way_round() {
    let world = World::new(Policy::Strict);
    let pool = world.nic.buffers().unwrap();
    // Whole frames, a part of one, and one that ends inside a word.
    for len in [ROOM, 100, 3 * ROOM + 13] {
        let from = pool.take(len, Direction::FromDevice).unwrap();
        assert_eq!((from.len(), from.iova().get() % PAGE, from.phys().get() % PAGE), (len, 0, 0));
        let bytes: Vec<u8> = (0..len).map(|at| at as u8 ^ (at >> 8) as u8).collect();
        assert!(world.writes(from.iova(), &bytes));
        assert_eq!(read(&from, 0, len), bytes);
        assert_eq!(read(&from, len - 9, 9), bytes[len - 9..]);
        let to = pool.take(len, Direction::ToDevice).unwrap();
        to.write(0, &bytes).unwrap();
        to.write(len - 9, &[7; 9]).unwrap();
        let last = to.iova().checked_add(len as u64 - 8).unwrap();
        assert_eq!(world.reads(last), Some([7; 8]));
        assert_eq!(world.reads(to.iova()).unwrap(), bytes[..8]);
        let both = pool.take(len, Direction::Bidirectional).unwrap();
        both.write(1, &[5; 6]).unwrap();
        assert!(world.writes(both.iova(), &[9]));
        assert_eq!(read(&both, 0, 8), [9, 5, 5, 5, 5, 5, 5, 0]);
    }
}

/// As each direction has one who writes, no driver finds what another's CPU left.
#[test]
fn a_buffer_is_for_its_direction_alone_and_ends_where_it_ends() {
    let world = World::new(Policy::Strict);
    let pool = world.nic.buffers().unwrap();
    let from = pool.take(100, Direction::FromDevice).unwrap();
    assert_eq!((from.write(0, &[1]), from.read(0, &mut [0; 100])), (None, Some(())));
    assert_eq!(from.read(1, &mut [0; 100]), None);
    assert_eq!(from.read(usize::MAX, &mut [0; 2]), None);
    let to = pool.take(100, Direction::ToDevice).unwrap();
    assert_eq!(
        (to.read(0, &mut [0]), to.write(0, &[1; 100]), to.write(1, &[1; 100])),
        (None, Some(()), None)
    );
    assert!(!world.writes(to.iova(), &[1]), "the device only reads it");
    let both = pool.take(100, Direction::Bidirectional).unwrap();
    assert_eq!((both.read(0, &mut [0]), both.write(0, &[1])), (Some(()), Some(())));
    drop(both);
    let again = pool.take(100, Direction::Bidirectional).unwrap();
    assert_eq!(read(&again, 0, 1), [0], "it was zeroed");
}

/// The same memory serves one I/O after the other: no invalidation, no map.
#[test]
fn a_buffer_that_was_dropped_is_the_next_and_stays_mapped() {
    let world = World::new(Policy::Strict);
    let pool = world.nic.buffers().unwrap();
    let first = pool.take(ROOM, Direction::FromDevice).unwrap().iova();
    let domain = world.nic.domain();
    let before = (domain.space().stats().maps, domain.pool_usage().unwrap().buffer_bytes);
    for _ in 0..100 {
        let buffer = pool.take(ROOM, Direction::FromDevice).unwrap();
        assert_eq!(buffer.iova(), first);
    }
    assert_eq!((domain.space().stats().maps, domain.pool_usage().unwrap().buffer_bytes), before);
}

/// While a driver has a buffer, neither a queue that copies nor another driver gets it, and no trim takes its memory.
#[test]
fn a_buffer_that_is_taken_is_nobody_else_s() {
    let world =
        World::with_pool(Policy::Strict, PoolConfig { class_bytes: 32 * PAGE, ..PoolConfig::default() });
    let pool = world.nic.buffers().unwrap();
    let mut queue: Queue<Machine, _> = world.nic.queue(QueueConfig::bounce()).unwrap();
    let taken: Vec<_> = (0..32).map(|_| pool.take(ROOM, Direction::FromDevice).unwrap()).collect();
    let mut places: Vec<_> = taken.iter().map(|buffer| buffer.iova()).collect();
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), 32);
    let error = pool.take(ROOM, Direction::FromDevice).unwrap_err();
    assert_eq!(error, DmaMapError::AllTaken { bytes: PAGE });
    assert!(error.is_full());
    // A copy goes through a buffer of its own.
    let mapping = queue.map(world.frame(), Direction::FromDevice).unwrap();
    assert!(!places.contains(&mapping.iova()));
    let _ = queue.unmap(mapping).unwrap();
    for buffer in &taken {
        assert!(world.writes(buffer.iova(), &[3]));
        assert_eq!(read(buffer, 0, 1), [3]);
    }
    drop(taken);
    assert!(places.contains(&pool.another().unwrap().take(ROOM, Direction::FromDevice).unwrap().iova()));
}

/// A driver that can get no other buffer gets the last one, wherever it is: with another CPU, or mapped for another direction.
#[test]
fn the_last_free_buffer_is_found_wherever_it_is() {
    let world =
        World::with_pool(Policy::Strict, PoolConfig { class_bytes: 32 * PAGE, ..PoolConfig::default() });
    let pool = world.nic.buffers().unwrap();
    let mut taken: Vec<_> = (1..32).map(|_| pool.take(ROOM, Direction::FromDevice).unwrap()).collect();
    let last = pool.take(ROOM, Direction::ToDevice).unwrap();
    let refused = DmaMapError::AllTaken { bytes: PAGE };
    assert_eq!(pool.take(ROOM, Direction::FromDevice).unwrap_err(), refused);
    drop(last);
    let found = pool.take(ROOM, Direction::FromDevice).unwrap();
    assert!(world.writes(found.iova(), &[1]), "it is mapped for the direction that was asked for");
    let (place, another) = (found.iova(), taken.pop().unwrap());
    assert_eq!(pool.take(ROOM, Direction::FromDevice).unwrap_err(), refused);
    std::thread::scope(|scope| scope.spawn(move || drop(found)).join().unwrap());
    let again = pool.take(ROOM, Direction::FromDevice).unwrap();
    assert_eq!(again.iova(), place);
    drop((another, again));
}

/// The pool zeroes it, as it does a copy, whether the CPU wrote it last or the device.
#[test]
fn a_pool_that_wipes_leaves_nothing_in_a_buffer_that_comes_back() {
    let config = PoolConfig { wipe: true, ..PoolConfig::default() };
    let world = World::with_pool(Policy::Strict, config);
    let (pool, secret) = (world.nic.buffers().unwrap(), [0x5a; 64]);
    for direction in [Direction::FromDevice, Direction::ToDevice, Direction::Bidirectional] {
        let taken = pool.take(ROOM, direction).unwrap();
        let (iova, phys) = (taken.iova(), taken.phys());
        match direction {
            Direction::FromDevice => assert!(world.writes(iova, &secret)),
            _ => taken.write(ROOM - 64, &secret).unwrap(),
        }
        drop(taken);
        let mut found = [0xee; ROOM];
        world.memory.read(phys, &mut found).unwrap();
        assert!(found == [0; ROOM], "{direction:?}");
        assert_eq!(pool.take(ROOM, direction).unwrap().iova(), iova, "it is not lost");
    }
}

/// Nothing of it comes to a device of another group.
#[test]
fn a_device_of_another_group_finds_zeros() {
    // One slot: it changes hands.
    let world =
        World::with_pool(Policy::Strict, PoolConfig { class_bytes: 32 * PAGE, ..PoolConfig::default() });
    let (most, secret) = (world.nic.buffers().unwrap().longest() as usize, [0x5a; 64]);
    let other = world.nic.domain().attach(DeviceId(8), DmaMask::BITS_64).unwrap();
    for direction in [Direction::FromDevice, Direction::ToDevice, Direction::Bidirectional] {
        let taken = world.nic.buffers().unwrap().take(most, direction).unwrap();
        let at = taken.iova();
        match direction {
            Direction::FromDevice => assert!(world.writes(at, &secret)),
            _ => taken.write(0, &secret).unwrap(),
        }
        drop(taken);
        let buffer = other.buffers().unwrap().take(most, direction).unwrap();
        assert_eq!(buffer.iova(), at, "or the test means nothing");
        let mut found = [0xee; 64];
        world.memory.read(buffer.phys(), &mut found).unwrap();
        assert_eq!(found, [0; 64], "{direction:?}");
    }
}

#[test]
fn what_cannot_be_had_is_an_error() {
    let world = World::new(Policy::Strict);
    let pool = world.nic.buffers().unwrap();
    let most = pool.longest();
    for len in [0, most + 1] {
        let error = pool.take(len as usize, Direction::FromDevice).unwrap_err();
        assert_eq!(error, DmaMapError::TooLong { len, most });
    }
    let narrow = |bits| world.nic.domain().attach(DeviceId(9), DmaMask::bits(bits)).unwrap().buffers();
    let Err(SetupError::PoolBeyondReach { last, end }) = narrow(21) else { panic!("it is beyond reach") };
    assert_eq!(last, (1 << 21) - 1);
    assert!(narrow(end.get().ilog2() + 1).is_ok() && narrow(end.get().ilog2()).is_err());
    let refused = |world: &World| world.nic.buffers().err().unwrap();
    assert_eq!(refused(&World::new(Policy::Passthrough)), SetupError::NotTranslated);
    let uneven = world.nic.clone().not_coherent().unwrap();
    assert_eq!(uneven.buffers().err(), Some(SetupError::NotCoherent));
}

/// A pool goes with the last that has something of it.
#[test]
fn a_buffer_outlives_its_domain_s_other_handles() {
    let world = World::new(Policy::Strict);
    let buffer = world.nic.buffers().unwrap().take(ROOM, Direction::FromDevice).unwrap();
    let World { memory, iommu, nic, .. } = world;
    drop(nic);
    assert!(iommu.dma_write(super::world::CARD, buffer.iova(), &[4]).is_ok());
    assert_eq!(read(&buffer, 0, 1), [4]);
    let phys = buffer.phys();
    assert!(memory.is_allocated(phys));
    drop(buffer);
    assert!(!memory.is_allocated(phys));
}
