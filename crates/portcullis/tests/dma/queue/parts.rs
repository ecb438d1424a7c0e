//! Syncs of any part of a list, beside the plain bytes of both sides.

use portcullis::addr::{Direction, DmaSegment, Iova, PhysAddr, PhysSegment};
use portcullis::dma::{Ended, Queue, QueueConfig};
use portcullis::domain::Policy;

use crate::dice::{Dice, operations};
use crate::queue::world::{CARD, Machine, PAGE, STRATEGIES, World};

/// Pieces of a list: where each begins in the memory, and its bytes.
const PIECES: [(u64, u64); 4] = [(40, 100), (2 * PAGE, PAGE), (3 * PAGE + 8, 1), (5 * PAGE + 1000, 777)];

#[test]
fn a_sync_takes_the_bytes_of_its_part_and_no_others() {
    for policy in [Policy::Strict, Policy::Passthrough] {
        for config in STRATEGIES {
            for count in [1, PIECES.len()] {
                syncs(policy, config, &PIECES[..count]);
            }
        }
    }
}

fn syncs(policy: Policy, config: QueueConfig, pieces: &[(u64, u64)]) {
    let what = format!("{policy:?} {config:?} {}", pieces.len());
    let world = World::new(policy);
    let Ok(mut queue): Result<Queue<Machine>, _> = world.nic.queue(config) else { return };
    let memory = world.memory.buffer(8 * PAGE).unwrap();
    let list: Vec<_> = pieces
        .iter()
        .map(|(offset, len)| PhysSegment { phys: PhysAddr::new(memory.phys().get() + offset), len: *len })
        .collect();
    let len: u64 = list.iter().map(|piece| piece.len).sum();
    // Each byte of the list, for the CPU and for the device.
    let cpu: Vec<_> = pieces.iter().flat_map(|(offset, len)| *offset..offset + len).collect();
    memory.write(0, &vec![7; 8 * PAGE as usize]).unwrap();
    let mut out = vec![DmaSegment::default(); list.len()];
    // SAFETY: the memory is the test's, all of it atomics.
    let (mapping, used) = unsafe { queue.map_raw(&list, Direction::Bidirectional, &mut out) }.unwrap();
    let card: Vec<_> =
        out[..used].iter().flat_map(|at| (0..at.len).map(|byte| Iova::new(at.iova.get() + byte))).collect();
    assert_eq!((cpu.len() as u64, card.len() as u64), (len, len), "{what}");
    let is_copied = {
        world.iommu.dma_write(CARD, card[0], &[8]).unwrap();
        let mut first = [0];
        memory.read(cpu[0], &mut first).unwrap();
        first == [7]
    };
    let (mut original, mut copy) = (vec![7; len as usize], vec![7; len as usize]);
    copy[0] = 8;
    if !is_copied {
        original[0] = 8;
    }
    let mut dice = Dice::new(len);
    for step in 0..operations(60) {
        let first = dice.below(len) as usize;
        let wanted = [1, 2, 99, 100, 101, PAGE, len][dice.below(7) as usize];
        let end = (first as u64 + wanted).min(len) as usize;
        let byte = step as u8;
        match dice.below(4) {
            0 => {
                for at in &card[first..end] {
                    world.iommu.dma_write(CARD, *at, &[byte]).unwrap();
                }
                copy[first..end].fill(byte);
                if !is_copied {
                    original[first..end].fill(byte);
                }
            }
            1 => {
                for at in &cpu[first..end] {
                    memory.write(*at, &[byte]).unwrap();
                }
                original[first..end].fill(byte);
                if !is_copied {
                    copy[first..end].fill(byte);
                }
            }
            2 => {
                queue.sync_raw_for_cpu(&mapping, first as u64, (end - first) as u64).unwrap();
                original[first..end].copy_from_slice(&copy[first..end]);
            }
            _ => {
                queue.sync_raw_for_device(&mapping, first as u64, (end - first) as u64).unwrap();
                copy[first..end].copy_from_slice(&original[first..end]);
            }
        }
        let (mut all, mut found) = (vec![0; 8 * PAGE as usize], vec![0; len as usize]);
        memory.read(0, &mut all).unwrap();
        let mut at = 0;
        for segment in &out[..used] {
            let end = at + segment.len as usize;
            world.iommu.dma_read(CARD, segment.iova, &mut found[at..end]).unwrap();
            at = end;
        }
        let is_original = cpu.iter().zip(&original).all(|(at, byte)| all[*at as usize] == *byte);
        assert!(is_original && found == copy, "{what} step {step}: {first}..{end}");
        cpu.iter().for_each(|at| all[*at as usize] = 7);
        assert!(all.iter().all(|byte| *byte == 7), "{what} step {step}: and nothing beside it");
    }
    match queue.unmap_raw(mapping).unwrap() {
        Ended::Pending => _ = queue.commit_raw().unwrap(),
        Ended::Done(()) | Ended::Flushed(()) => {}
    }
    // The end takes all that the device has.
    let mut all = vec![0; 8 * PAGE as usize];
    memory.read(0, &mut all).unwrap();
    assert!(cpu.iter().zip(&copy).all(|(at, byte)| all[*at as usize] == *byte), "{what}");
}
