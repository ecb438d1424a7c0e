//! Threads that map, and unmap what others mapped, in a pool that is too small for them.

use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::thread;

use portcullis::addr::{Direction, PhysAddr};
use portcullis::bounce::swiotlb::{Bounced, Constraints, Swiotlb, SwiotlbConfig};
use portcullis::dma::DmaMapError;
use portcullis::heap::Shared;
use portcullis::std_platform::StdPlatform;
use portcullis_model::{Buffer, Memory};

use super::support::*;

const THREADS: usize = 4;
const ROUNDS: u64 = 3000;
/// Mappings that a thread has, or has sent to its neighbour, at most.
const MOST: usize = 8;

struct Sent {
    buffer: Buffer,
    bounced: Bounced,
    byte: u8,
}

/// Each thread waits for the token only, so one that was not told would never go on.
#[test]
fn nobody_waits_in_vain_and_nothing_is_lost() {
    for slots in [0, 2, 64] {
        let memory = Memory::new(512 << 20);
        let config = SwiotlbConfig { max_bytes: 2 * AREA, idle_ns: 50_000, ..config() };
        let mut pool = Swiotlb::new(StdPlatform::with_cpus(slots), Arc::clone(&memory), &config).unwrap();
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel::<Sent>()).unzip();
        let done = Barrier::new(THREADS);
        thread::scope(|scope| {
            for (number, receiver) in receivers.into_iter().enumerate() {
                let next = senders[(number + 1) % THREADS].clone();
                let (pool, memory, done) = (&pool, &memory, &done);
                scope.spawn(move || {
                    let finish = |sent: Sent| {
                        let Sent { buffer, bounced, byte } = sent;
                        let seen = bytes(memory, bounced.phys, bounced.len);
                        assert!(seen.iter().all(|seen| *seen == byte), "another mapping shows");
                        // What the device writes.
                        memory.write(bounced.phys, &vec![!byte; bounced.len as usize]).unwrap();
                        unmap(pool, bounced.phys, bounced.len).unwrap();
                        let seen = bytes(memory, buffer.phys(), bounced.len);
                        assert!(seen.iter().all(|seen| *seen == !byte), "another mapping was copied");
                    };
                    let mut seed = number as u64 + 1;
                    let mut below = |n: u64| {
                        seed = seed
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        (seed >> 33) % n
                    };
                    let mut own: Vec<Sent> = Vec::new();
                    for round in 0..ROUNDS {
                        let len = 1 + below(if round % 16 == 0 { AREA } else { 9000 });
                        let buffer = memory.buffer(len).unwrap();
                        let byte = below(256) as u8;
                        buffer.fill(byte);
                        let bounced = loop {
                            let constraints = Constraints::new();
                            match map(pool, buffer.phys(), len, Direction::Bidirectional, &constraints) {
                                Ok(bounced) => break bounced,
                                Err(DmaMapError::Pressure { .. }) => {
                                    own.drain(..).for_each(finish);
                                    receiver.try_iter().for_each(finish);
                                    thread::yield_now();
                                }
                                Err(error) => panic!("{error}"),
                            }
                        };
                        let sent = Sent { buffer, bounced, byte };
                        match below(3) {
                            0 => next.send(sent).unwrap(),
                            1 => own.push(sent),
                            _ => finish(sent),
                        }
                        if own.len() > MOST {
                            finish(own.swap_remove(0));
                        }
                        receiver.try_iter().for_each(finish);
                    }
                    own.drain(..).for_each(finish);
                    // Those who still wait may wait for what was sent here.
                    drop(next);
                    receiver.iter().for_each(finish);
                    done.wait();
                });
            }
            drop(senders);
        });
        assert_eq!(pool.usage().mapped, 0);
        // The timer's thread may be at it still.
        let pool = loop {
            match Shared::try_unwrap(pool) {
                Ok(alone) => break alone,
                Err(shared) => pool = shared,
            }
            thread::yield_now();
        };
        pool.trim();
        assert_eq!((pool.usage().capacity, pool.usage().kept), (AREA, 0));
        drop(pool);
        assert_eq!((memory.frames_in_use(), memory.bad_frees(), memory.stray_tables()), (0, 0, 0));
    }
}

/// One thread maps and another unmaps: what the second keeps finds its way back to the first.
#[test]
fn one_maps_and_another_unmaps() {
    let memory = Memory::new(16 << 20);
    let config = SwiotlbConfig { max_bytes: AREA, ..config() };
    let pool = Swiotlb::new(StdPlatform::new(), Arc::clone(&memory), &config).unwrap();
    let (sender, receiver) = mpsc::sync_channel::<Bounced>(16);
    thread::scope(|scope| {
        scope.spawn(|| {
            for bounced in receiver {
                unmap(&pool, bounced.phys, bounced.len).unwrap();
            }
        });
        let phys = PhysAddr::new(Memory::DEFAULT_BASE);
        for _ in 0..20_000 {
            // Never full: at most 18 slots are mapped, and what the other thread keeps is taken back.
            sender.send(map(&pool, phys, 2048, Direction::ToDevice, &Constraints::new()).unwrap()).unwrap();
        }
        drop(sender);
    });
    assert_eq!(pool.usage().mapped, 0);
}
