//! Random maps, syncs, accesses and unmaps against a plain model of what each side must see.
//!
//! Bytes are painted by whom they are for: bits 5 and 6 are the trust group, bit 7 says that a CPU wrote them. 0 is
//! nobody's. Memory beside mappings is painted with a group that no device has.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, Permissions};
use portcullis::bounce::pool::{Attributes, BounceDevice, DeviceProfile, TrustGroup, Way};
use portcullis::domain::PhysSegment;
use portcullis_model::{Buffer, DeviceId};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::chosen::Chosen;
use crate::support::{Bench, Device, PAGE, map, piece, small};

const SECRET: u8 = 0xe0;
const DIRECTIONS: [Direction; 3] = [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional];

/// The group that a byte is for; `None` for nobody's.
fn group_of(byte: u8) -> Option<u8> {
    (byte != 0).then_some(byte >> 5 & 3)
}

fn paint(group: u8, cpu: bool, value: u8) -> u8 {
    u8::from(cpu) << 7 | group << 5 | (value % 31 + 1)
}

#[derive(Debug, Clone)]
enum Op {
    Map {
        cpu: usize,
        device: usize,
        direction: usize,
        attributes: Attributes,
        pieces: Vec<(u64, u64)>,
        touching: bool,
    },
    /// The device writes, or looks, if it may; the CPU writes to the original.
    Device {
        which: usize,
        at: u64,
        len: u64,
        value: u8,
    },
    Cpu {
        which: usize,
        at: u64,
        len: u64,
        value: u8,
    },
    SyncForCpu {
        which: usize,
        at: u64,
        len: u64,
    },
    SyncForDevice {
        which: usize,
        at: u64,
        len: u64,
    },
    Unmap {
        cpu: usize,
        which: usize,
    },
    Trim {
        keep: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let len = prop_oneof![5 => 1..PAGE, 3 => 1..5 * PAGE, 1 => 1..80 * PAGE, 1 => (1..40_u64).prop_map(|n| n * PAGE)];
    let offset = prop_oneof![1 => Just(0), 2 => 0..PAGE];
    let often = prop::bool::weighted;
    let attributes = (often(0.05), often(0.2), often(0.2), often(0.3)).prop_map(
        |(persistent_streaming, direct, wipe, keep_unwritten)| Attributes {
            persistent_streaming,
            direct,
            wipe,
            keep_unwritten,
        },
    );
    let pieces = prop_oneof![3 => vec((offset.clone(), len.clone()), 1), 1 => vec((offset, len), 2..5)];
    let part = || (any::<usize>(), any::<u64>(), any::<u64>());
    let map = (0..4_usize, 0..3_usize, 0..3_usize, attributes, pieces, any::<bool>());
    prop_oneof![
        5 => map.prop_map(|(cpu, device, direction, attributes, pieces, touching)| {
            Op::Map { cpu, device, direction, attributes, pieces, touching }
        }),
        5 => (part(), any::<u8>()).prop_map(|((which, at, len), value)| Op::Device { which, at, len, value }),
        3 => (part(), any::<u8>()).prop_map(|((which, at, len), value)| Op::Cpu { which, at, len, value }),
        2 => part().prop_map(|(which, at, len)| Op::SyncForCpu { which, at, len }),
        2 => part().prop_map(|(which, at, len)| Op::SyncForDevice { which, at, len }),
        5 => (0..4_usize, any::<usize>()).prop_map(|(cpu, which)| Op::Unmap { cpu, which }),
        1 => prop_oneof![Just(0), 0..300_000_u64].prop_map(|keep| Op::Trim { keep }),
    ]
}

/// A mapping, and what each side of it must see.
struct Live {
    device: usize,
    direction: Direction,
    keep: bool,
    way: Way,
    iova: Iova,
    /// For unmap.
    span: u64,
    /// Where the device finds each piece.
    view: Vec<(Iova, u64)>,
    list: Vec<PhysSegment>,
    _buffers: Vec<Buffer>,
    original: Vec<u8>,
    /// `None`: never written, and so anything that is the group's device's.
    buffer: Vec<Option<u8>>,
    /// Bytes that both share.
    direct: Vec<bool>,
}

impl Live {
    fn len(&self) -> u64 {
        self.original.len() as u64
    }

    /// A part of the mapping.
    fn part(&self, at: u64, len: u64) -> std::ops::Range<usize> {
        let at = at % self.len();
        at as usize..(at + len % (self.len() - at) + 1) as usize
    }

    fn copies_in(&self) -> bool {
        self.keep || self.direction != Direction::FromDevice
    }
}

struct World {
    bench: Bench,
    devices: [Device<Arc<Chosen>>; 3],
    live: Vec<Live>,
}

impl World {
    fn new() -> Self {
        let bench = Bench::new(small());
        let device = |index: usize, untrusted, mask, offset_mask| {
            let profile = DeviceProfile { mask, offset_mask, untrusted, group: TrustGroup(index as u32) };
            BounceDevice::new(Arc::clone(&bench.pool), profile).unwrap()
        };
        let devices = [
            device(0, false, u64::MAX, 0),
            device(1, true, u64::MAX, 0xfff),
            // Does not reach the slots.
            device(2, true, u32::MAX.into(), 0),
        ];
        Self { bench, devices, live: Vec::new() }
    }

    /// Reads or writes all of the device's view, from `from` bytes into it on.
    fn access(&self, live: &Live, from: usize, bytes: &mut [u8], write: bool) {
        let (mut skip, mut rest) = (from as u64, bytes);
        for (iova, len) in &live.view {
            if skip >= *len {
                skip -= len;
                continue;
            }
            let count = (len - skip).min(rest.len() as u64) as usize;
            let (now, later) = rest.split_at_mut(count);
            let at = Iova::new(iova.get() + skip);
            let device = DeviceId(live.device as u32);
            match write {
                true => self.bench.iommu.dma_write(device, at, now).unwrap(),
                false => self.bench.iommu.dma_read(device, at, now).unwrap(),
            }
            (skip, rest) = (0, later);
        }
        assert!(rest.is_empty());
    }

    fn originals(&self, live: &Live) -> Vec<u8> {
        live.list.iter().flat_map(|piece| self.bench.bytes(piece.phys, piece.len)).collect()
    }

    fn map(
        &mut self,
        device: usize,
        direction: Direction,
        attributes: Attributes,
        pieces: &[(u64, u64)],
        touching: bool,
    ) {
        let group = device as u8;
        let last = pieces.len() - 1;
        let (mut buffers, mut list, mut original) = (Vec::new(), Vec::new(), Vec::new());
        for (n, (offset, len)) in pieces.iter().enumerate() {
            // Pieces that touch begin and end at pages' edges where others follow.
            let offset = if touching && n > 0 { 0 } else { *offset };
            let len =
                if touching && n < last { (offset + len).next_multiple_of(PAGE) - offset } else { *len };
            let buffer = self.bench.memory.buffer(offset + len + PAGE).unwrap();
            buffer.fill(SECRET + 7);
            let painted: Vec<u8> =
                (0..len).map(|at| paint(group, true, (at % 251) as u8 ^ n as u8)).collect();
            buffer.write(offset, &painted).unwrap();
            list.push(piece(buffer.phys(), offset, len));
            original.extend(painted);
            buffers.push(buffer);
        }
        let Ok(mapping) = map(&self.devices[device], &list, direction, attributes) else {
            let untrusted = device > 0;
            assert!(attributes.persistent_streaming && untrusted, "nothing is exhausted here");
            return;
        };
        let total = original.len() as u64;
        let view: Vec<_> = mapping.segments().map(|segment| (segment.iova, segment.len)).collect();
        assert_eq!(view.iter().map(|(_, len)| len).sum::<u64>(), total);
        let (way, iova, span) = (mapping.way(), mapping.iova(), mapping.len());
        let expected = attributes.persistent_streaming || attributes.direct || total > 64 << 10;
        assert!(!matches!(way, Way::Direct | Way::Split) || expected);
        let before = list[0].phys.get() % PAGE;
        let head = (PAGE - before) % PAGE;
        let tail = list[last].phys.get().wrapping_add(list[last].len) % PAGE;
        let direct = (0..total).map(|at| match way {
            Way::Direct => true,
            Way::Split => at >= head && at < total - tail,
            _ => false,
        });
        let direct: Vec<bool> = direct.collect();
        let keep = attributes.keep_unwritten;
        let known = |at: usize| keep || direct[at] || direction != Direction::FromDevice;
        let buffer = original.iter().enumerate().map(|(at, byte)| known(at).then_some(*byte)).collect();
        let _buffers = buffers;
        let live =
            Live { device, direction, keep, way, iova, span, view, list, _buffers, original, buffer, direct };
        self.look(&live);
        self.live.push(live);
    }

    /// Everything that the device sees in the mapping's pages is for it; what it may read is right.
    fn look(&self, live: &Live) {
        let permissions = live.direction.permissions();
        for (iova, len) in &live.view {
            let (first, last) = (iova.get() & !(PAGE - 1), (iova.get() + len - 1) | (PAGE - 1));
            // A trusted device's direct mapping opens the pages around it: that is what trust means here.
            if live.way == Way::Direct && live.device == 0 {
                continue;
            }
            for page in (first..=last).step_by(PAGE as usize) {
                let device = DeviceId(live.device as u32);
                let phys = self.bench.iommu.probe(device, Iova::new(page), permissions).unwrap();
                let bytes = self.bench.bytes(phys, PAGE);
                let foreign = bytes
                    .iter()
                    .find(|byte| group_of(**byte).is_some_and(|group| group != live.device as u8));
                assert_eq!(foreign, None, "{:?} at {page:#x} of {iova}", live.way);
            }
        }
        if permissions.allows(Permissions::READ) {
            let mut seen = vec![0; live.original.len()];
            self.access(live, 0, &mut seen, false);
            let right =
                seen.iter().zip(&live.buffer).all(|(seen, known)| known.is_none_or(|known| known == *seen));
            assert!(right, "the device sees something else than it should");
        }
    }

    fn unmap(&mut self, which: usize) {
        let mut live = self.live.swap_remove(which);
        self.look(&live);
        self.bench.pool.unmap(live.iova, live.span).unwrap();
        assert!(self.bench.pool.unmap(live.iova, live.span).is_err());
        copy_out(&mut live, None);
        self.check_original(&live, true);
    }

    /// The original is as the model says.
    fn check_original(&self, live: &Live, beside: bool) {
        for (at, (found, known)) in self.originals(live).into_iter().zip(&live.original).enumerate() {
            if *known == UNKNOWN {
                // Never the CPU's bytes, and never another group's.
                let own = found == 0 || found >> 7 == 0 && group_of(found) == Some(live.device as u8);
                assert!(own, "{found:#x} at {at} was left in the buffer");
            } else {
                assert_eq!(found, *known, "at {at}, {:?} {:?}", live.way, live.direction);
            }
        }
        for piece in live.list.iter().filter(|_| beside) {
            let end = piece.phys.get() + piece.len;
            let after = self.bench.bytes(portcullis::addr::PhysAddr::new(end), 8);
            let before = self
                .bench
                .bytes(piece.phys.align_down(portcullis::addr::PageSize::SIZE_4K), piece.phys.get() % PAGE);
            assert!(
                after.iter().chain(&before).all(|byte| *byte == SECRET + 7),
                "written beside the original"
            );
        }
    }
}

/// Stands for what a device was to write and did not: no paint has this value.
const UNKNOWN: u8 = 0x1f | 0x60;

/// What a copy to the original does to the model.
fn copy_out(live: &mut Live, part: Option<std::ops::Range<usize>>) {
    let part = part.unwrap_or(0..live.original.len());
    for at in part {
        if !live.direct[at] && live.direction != Direction::ToDevice {
            live.original[at] = live.buffer[at].unwrap_or(UNKNOWN);
        }
    }
}

fn step(world: &mut World, op: Op) {
    let count = world.live.len();
    match op {
        Op::Map { cpu, device, direction, attributes, pieces, touching } => {
            world.bench.platform.be(cpu);
            world.map(device, DIRECTIONS[direction], attributes, &pieces, touching);
        }
        Op::Trim { keep } => {
            world.bench.pool.trim(keep).unwrap();
            assert!(world.bench.pool.usage().cached_bytes <= keep);
        }
        Op::Unmap { cpu, which } if count > 0 => {
            world.bench.platform.be(cpu);
            world.unmap(which % count);
        }
        Op::Device { which, at, len, value } if count > 0 => {
            let live = &world.live[which % count];
            let part = live.part(at, len);
            if live.direction == Direction::ToDevice {
                let first = Iova::new(live.view[0].0.get());
                assert!(world.bench.iommu.dma_write(DeviceId(live.device as u32), first, &[1]).is_err());
                return;
            }
            let byte = paint(live.device as u8, false, value);
            world.access(live, part.start, &mut vec![byte; part.len()], true);
            let live = &mut world.live[which % count];
            for at in part {
                live.buffer[at] = Some(byte);
                if live.direct[at] {
                    live.original[at] = byte;
                }
            }
        }
        Op::Cpu { which, at, len, value } if count > 0 => {
            let live = &mut world.live[which % count];
            let part = live.part(at, len);
            let byte = paint(live.device as u8, true, value);
            let mut begin = 0;
            for piece in &live.list {
                let end = begin + piece.len as usize;
                for at in part.start.max(begin)..part.end.min(end) {
                    world
                        .bench
                        .memory
                        .write(
                            portcullis::addr::PhysAddr::new(piece.phys.get() + (at - begin) as u64),
                            &[byte],
                        )
                        .unwrap();
                    live.original[at] = byte;
                    if live.direct[at] {
                        live.buffer[at] = Some(byte);
                    }
                }
                begin = end;
            }
        }
        Op::SyncForCpu { which, at, len } if count > 0 => {
            let part = world.live[which % count].part(at, len);
            let live = &world.live[which % count];
            if live.span == live.len() {
                world.bench.pool.sync_for_cpu(live.iova, part.start as u64, part.len() as u64).unwrap();
                copy_out(&mut world.live[which % count], Some(part));
            }
            world.check_original(&world.live[which % count], true);
        }
        Op::SyncForDevice { which, at, len } if count > 0 => {
            let live = &mut world.live[which % count];
            let part = live.part(at, len);
            if live.span == live.len() {
                world.bench.pool.sync_for_device(live.iova, part.start as u64, part.len() as u64).unwrap();
                let part = if live.copies_in() { part } else { 0..0 };
                for at in part {
                    // What the device left in the original unwritten stays unknown.
                    live.buffer[at] = Some(live.original[at]).filter(|byte| *byte != UNKNOWN);
                }
            }
            world.look(&world.live[which % count]);
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn both_sides_see_what_a_plain_model_says(ops in vec(op(), 1..60)) {
        let mut world = World::new();
        ops.into_iter().for_each(|op| step(&mut world, op));
        while !world.live.is_empty() {
            world.unmap(0);
        }
        let World { bench, devices, .. } = world;
        drop(devices);
        bench.finish();
    }
}
