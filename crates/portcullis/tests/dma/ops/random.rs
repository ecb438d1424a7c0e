//! Any calls in any order, right ones and wrong ones, beside a plain list of what is mapped: what is no mapping is refused, and what is
//! stays as it was.

use portcullis::addr::{Direction, DmaSegment, Iova, Permissions};
use portcullis::dma::{DmaAttributes, DmaUnmapError, OpsConfig};
use portcullis_model::Buffer;

use super::support::{CONFIGS, Calls, Ops, THRESHOLD, contents, machine, part, whole};
use crate::dice::{Dice, operations};
use crate::queue::world::{BROKEN, CARD, PAGE, World};

struct Live {
    memory: Buffer,
    /// What the memory is to have when the mapping has ended.
    wanted: Vec<u8>,
    direction: Direction,
    /// Where each piece is for the device, and in the memory.
    view: Vec<(DmaSegment, u64)>,
    /// Bytes of each of two pieces.
    half: Option<u64>,
    iova: Iova,
    len: u64,
}

fn map(world: &World, ops: &Ops, dice: &mut Dice, fill: u8) -> Live {
    let direction = Direction::ALL[dice.below(3) as usize];
    let lens = [1, 64, PAGE, 3 * PAGE, THRESHOLD, 2 * THRESHOLD, 3 * THRESHOLD];
    let (len, offset) = (lens[dice.below(7) as usize] + dice.below(9), dice.below(2) * dice.below(PAGE));
    let memory = world.memory.buffer(len + 4 * PAGE).unwrap();
    memory.write(0, &vec![fill; memory.len() as usize]).unwrap();
    let lasting = dice.one_in(8);
    let attributes = DmaAttributes { lasting, ..DmaAttributes::default() };
    let (view, (iova, span), half) = if dice.one_in(3) {
        // Two pieces with a gap of a page.
        let half = len / 2 + 1;
        let list = [part(&memory, offset, half), part(&memory, offset + half + PAGE, half)];
        let mut out = [DmaSegment::default(); 2];
        // SAFETY: the memory is the test's, all of it atomics.
        let count = unsafe { ops.map_sg(&list, direction, attributes, &mut out) }.unwrap();
        let whole = whole(&out[..count]);
        let view = match count {
            1 => vec![(out[0], offset)],
            _ => vec![(out[0], offset), (out[1], offset + half + PAGE)],
        };
        (view, whole, Some(half))
    } else {
        let iova = ops.maps_as(part(&memory, offset, len), direction, attributes).unwrap();
        (vec![(DmaSegment { iova, len }, offset)], (iova, len), None)
    };
    let wanted = contents(&memory);
    Live { memory, wanted, direction, view, half, iova, len: span }
}

impl Live {
    /// The device writes somewhere, if it may.
    fn write(&mut self, world: &World, dice: &mut Dice) {
        let which = dice.below(self.view.len() as u64) as usize;
        let (segment, offset) = self.view[which];
        let (at, byte) = (dice.below(segment.len), dice.next() as u8);
        let may_write = self.direction != Direction::ToDevice;
        assert_eq!(world.writes(Iova::new(segment.iova.get() + at), &[byte]), may_write);
        if may_write {
            // The pieces of a list may be one segment, and are apart in memory.
            let place = match self.half {
                Some(half) if self.view.len() == 1 && at >= half => offset + at + PAGE,
                _ => offset + at,
            };
            self.wanted[place as usize] = byte;
        }
    }
}

#[test]
fn whatever_is_called_in_any_order_what_is_mapped_is_right_and_the_rest_is_refused() {
    for seed in 0..4 {
        let (world, ops) = machine(CONFIGS[seed as usize % 3]);
        let (mut dice, mut live, mut unconfirmed) = (Dice::new(seed), Vec::<Live>::new(), 0);
        let (mut maps, mut errors) = (0, 0);
        for step in 0..operations(if cfg!(debug_assertions) { 1_500 } else { 15_000 }) {
            match dice.below(12) {
                0..3 if live.len() < 24 => {
                    live.push(map(&world, &ops, &mut dice, step as u8));
                    maps += 1;
                }
                3..6 if !live.is_empty() => {
                    let which = dice.below(live.len() as u64) as usize;
                    live[which].write(&world, &mut dice);
                }
                6..8 if !live.is_empty() => {
                    let which = dice.below(live.len() as u64) as usize;
                    let Live { memory, wanted, iova, len, .. } = live.swap_remove(which);
                    ops.ends(iova, len).unwrap();
                    assert!(contents(&memory) == wanted, "seed {seed}, step {step}: {len:#x} bytes");
                    if !matches!(ops.config(), OpsConfig::Lazy { .. }) {
                        let range = memory.phys().get()..memory.phys().get() + memory.len();
                        let reached = world.iommu.probe(CARD, iova, Permissions::READ);
                        assert!(reached.is_none_or(|phys| !range.contains(&phys.get())));
                    } else {
                        // Before the memory is given to another.
                        ops.domain().flush().unwrap();
                    }
                }
                8 => {
                    let near = live.get(dice.below(24) as usize).map_or(0x5000, |live| live.iova.get());
                    let iova = Iova::new(near.wrapping_add(dice.below(3) * dice.below(3 * PAGE)));
                    let len = dice.below(2) * dice.below(2 * THRESHOLD);
                    if live.iter().all(|live| (live.iova, live.len) != (iova, len)) {
                        let error = ops.ends(iova, len).unwrap_err();
                        let is_typed = matches!(
                            error,
                            DmaUnmapError::NotMapped { .. } | DmaUnmapError::OutOfRange { .. }
                        );
                        assert!(is_typed, "{error}");
                        errors += 1;
                    }
                    let inside = live.iter().any(|live| {
                        let first = live.iova.get();
                        iova.get() >= first && iova.get() + len <= first + live.len
                    });
                    match ops.syncs_for_cpu(iova, len) {
                        Ok(()) => assert!(inside, "{iova} {len:#x}"),
                        Err(_) => {
                            assert!(!inside || len == 0, "{iova} {len:#x}");
                            errors += 1;
                        }
                    }
                }
                9 => {
                    let threshold = THRESHOLD;
                    let configs = [CONFIGS[0], CONFIGS[1], CONFIGS[2], OpsConfig::Auto { threshold }];
                    ops.set_config(configs[dice.below(4) as usize]).unwrap();
                }
                10 => {
                    let offset_mask = [0, 7, 0xfff][dice.below(3) as usize];
                    ops.set_limits([u64::MAX, u32::MAX.into()][dice.below(2) as usize], offset_mask).unwrap();
                    ops.maintain().unwrap();
                }
                _ if !live.is_empty() => {
                    // The hardware does not confirm: the mapping is over, and says so.
                    world.iommu.queue().fail_next(1, BROKEN);
                    let Live { iova, len, memory, .. } = live.swap_remove(0);
                    match ops.ends(iova, len) {
                        Ok(()) => {}
                        Err(DmaUnmapError::Unmap(_) | DmaUnmapError::Unconfirmed { .. }) => unconfirmed += 1,
                        Err(error) => panic!("{error}"),
                    }
                    world.iommu.queue().fail_next(0, BROKEN);
                    ops.domain().flush().unwrap();
                    drop(memory);
                }
                _ => {}
            }
            let usage = ops.usage();
            assert_eq!(usage.open_mappings(), live.len() as u64, "seed {seed}, step {step}");
        }
        let usage = ops.usage();
        assert_eq!((usage.maps, usage.errors), (maps, errors + unconfirmed));
        // SAFETY: nothing else runs.
        let (mappings, _) = unsafe { ops.unmap_all() }.unwrap();
        assert_eq!(mappings, live.len() as u64);
        ops.domain().flush().unwrap();
        let usage = ops.usage();
        assert_eq!((usage.open_mappings(), usage.open_bytes, usage.exposed_bytes), (0, 0, 0));
        assert_eq!(ops.domain().stats().lost_iova_bytes, 0);
    }
}
