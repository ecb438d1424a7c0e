//! A pool, and a plain model of what each side of each mapping must see.
//!
//! Bytes are painted by whom they are for: bits 5 and 6 are the trust group, bit 7 says that a CPU wrote them. 0 is
//! nobody's. Memory beside mappings is painted with a group that no device has.

use std::sync::Arc;

use portcullis::addr::{Direction, Iova, PageSize, Permissions, PhysAddr, PhysSegment};
use portcullis::bounce::pool::{Attributes, BounceDevice, DeviceProfile, PoolConfig, Way};
use portcullis::dma::{DmaMapError, DmaUnmapError};
use portcullis::domain::{MapListError, UnmapError};
use portcullis::iova::IovaError;
use portcullis::pgtable::MapError;
use portcullis_model::open::{OpenDomain, OpenPool};
use portcullis_model::{Buffer, DeviceId};

use crate::chosen::Chosen;
use crate::pool::support::{Bench, Device, PAGE, TIMEOUT, map, piece};

/// What is beside mappings.
const SECRET: u8 = 0xe0;
/// The group that a byte is for; `None` for nobody's.
fn group_of(byte: u8) -> Option<u8> {
    (byte != 0).then_some(byte >> 5 & 3)
}

pub fn paint(group: u8, cpu: bool, value: u8) -> u8 {
    u8::from(cpu) << 7 | group << 5 | (value % 31 + 1)
}

#[derive(Debug, Clone)]
pub enum Op {
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
    /// From now on so many allocations are granted, for buffers and for tables, and so many invalidations fail.
    Strain {
        frames: u64,
        tables: u64,
        silent: u64,
    },
}

/// A mapping, and what each side of it must see.
pub struct Live {
    pub device: usize,
    pub direction: Direction,
    pub way: Way,
    pub iova: Iova,
    /// For unmap.
    pub span: u64,
    /// Where the device finds each piece.
    pub view: Vec<(Iova, u64)>,
    pub list: Vec<PhysSegment>,
    pub _buffers: Vec<Buffer>,
    pub original: Vec<u8>,
    /// `None`: never written, and so anything that is the group's device's.
    pub buffer: Vec<Option<u8>>,
    /// Bytes that both share.
    pub direct: Vec<bool>,
}

impl Live {
    pub fn len(&self) -> u64 {
        self.original.len() as u64
    }

    /// A part of the mapping.
    pub fn part(&self, at: u64, len: u64) -> std::ops::Range<usize> {
        let at = at % self.len();
        at as usize..(at + len % (self.len() - at) + 1) as usize
    }
}

pub struct World {
    pub bench: Bench,
    pub devices: [Device<Arc<Chosen>>; 3],
    pub live: Vec<Live>,
    /// Whether memory, addresses and answers may be short.
    pub strained: bool,
    /// What devices may still reach after an unmap or a map that was not confirmed.
    haunted: Vec<Buffer>,
    /// How often something was refused.
    pub refused: u64,
}

impl World {
    /// Strained, devices have few addresses for buffers of their own.
    pub fn with(config: PoolConfig, strained: bool) -> Self {
        let bench = Bench::new(config);
        let device = |index: usize, untrusted, mask, offset_mask| {
            let profile = DeviceProfile { mask, offset_mask, untrusted, group: index as u32 };
            BounceDevice::new(bench.pool.clone(), profile).unwrap()
        };
        let devices = [
            device(0, false, u64::MAX, 0),
            device(1, true, u64::MAX, 0xfff),
            // Does not reach the slots.
            device(2, true, if strained { 0x3f_ffff } else { u32::MAX.into() }, 0),
        ];
        Self { bench, devices, live: Vec::new(), strained, haunted: Vec::new(), refused: 0 }
    }

    /// Reads or writes all of the device's view, from `from` bytes into it on.
    pub fn access(&self, live: &Live, from: usize, bytes: &mut [u8], write: bool) {
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

    pub fn map(
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
        let mapping = match map(&self.devices[device], &list, direction, attributes) {
            Ok(mapping) => mapping,
            Err(error) => return self.refuse(error, buffers),
        };
        let total = original.len() as u64;
        let view: Vec<_> = mapping.segments().map(|segment| (segment.iova, segment.len)).collect();
        assert_eq!(view.iter().map(|(_, len)| len).sum::<u64>(), total);
        let (way, iova, span) = (mapping.way(), mapping.iova(), mapping.len());
        assert!(!matches!(way, Way::Direct | Way::Split) || total > 64 << 10);
        let before = list[0].phys.get() % PAGE;
        let head = (PAGE - before) % PAGE;
        let tail = list[last].phys.get().wrapping_add(list[last].len) % PAGE;
        let direct = (0..total).map(|at| match way {
            Way::Direct => true,
            Way::Split => at >= head && at < total - tail,
            _ => false,
        });
        let direct: Vec<bool> = direct.collect();
        let keep = attributes.copy_in;
        let known = |at: usize| keep || direct[at] || direction != Direction::FromDevice;
        let buffer = original.iter().enumerate().map(|(at, byte)| known(at).then_some(*byte)).collect();
        let _buffers = buffers;
        let live =
            Live { device, direction, way, iova, span, view, list, _buffers, original, buffer, direct };
        self.look(&live);
        self.live.push(live);
    }

    /// A mapping that was not made, for a reason that there may be.
    fn refuse(&mut self, error: DmaMapError, buffers: Vec<Buffer>) {
        self.refused += 1;
        match error {
            DmaMapError::NoBuffer { .. }
            | DmaMapError::List(
                MapListError::Map(MapError::OutOfMemory) | MapListError::Iova(IovaError::Exhausted { .. }),
            ) => assert!(self.strained, "nothing is exhausted here"),
            DmaMapError::List(MapListError::Unconfirmed { error: TIMEOUT }) => {
                assert!(self.strained);
                self.haunted.extend(buffers);
            }
            error => panic!("{error}"),
        }
    }

    /// Everything that the device sees in the mapping's pages is for it; what it may read is right.
    pub fn look(&self, live: &Live) {
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

    pub fn unmap(&mut self, which: usize) {
        let mut live = self.live.swap_remove(which);
        self.look(&live);
        let result = self.bench.pool.close(live.iova, live.span);
        assert!(self.bench.pool.close(live.iova, live.span).is_err());
        copy_out(&mut live, None);
        self.check_original(&live, true);
        match result {
            Ok(()) => return,
            Err(DmaUnmapError::Unconfirmed { error: TIMEOUT }) => assert_eq!(live.way, Way::Split),
            Err(DmaUnmapError::Unmap(UnmapError::Unconfirmed { error: TIMEOUT, .. })) => {
                assert_eq!(live.way, Way::Direct);
            }
            Err(error) => panic!("{error}"),
        }
        assert!(self.strained);
        self.refused += 1;
        self.haunted.extend(live._buffers);
    }

    /// Looks at both sides of everything.
    pub fn check(&self) {
        for live in &self.live {
            self.look(live);
            self.check_original(live, true);
        }
    }

    /// How many mappings there are.
    pub fn count(&self) -> usize {
        self.live.len()
    }

    /// Ends all mappings. Nothing is short any more, nothing is lost and nothing leaked.
    pub fn finish(mut self) {
        self.step(Op::Strain { frames: u64::MAX, tables: u64::MAX, silent: 0 });
        while !self.live.is_empty() {
            self.unmap(0);
        }
        let Self { bench, devices, strained, haunted, .. } = self;
        drop(devices);
        if strained {
            // What waited for a confirmation gets it, and each CPU takes its addresses back where none are left.
            bench.domain.flush().unwrap();
            drop(haunted);
            let list = [PhysSegment { phys: bench.memory.base(), len: 8 * PAGE }];
            bench.domain.open(&list, Permissions::READ, Iova::new(4 * PAGE)).unwrap_err();
        }
        bench.finish();
    }

    /// The original is as the model says.
    pub fn check_original(&self, live: &Live, beside: bool) {
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
            let after = self.bench.bytes(PhysAddr::new(end), 8);
            let before = self.bench.bytes(piece.phys.align_down(PageSize::SIZE_4K), piece.phys.get() % PAGE);
            assert!(
                after.iter().chain(&before).all(|byte| *byte == SECRET + 7),
                "written beside the original"
            );
        }
    }
}

/// Stands for what a device was to write and did not: no paint has this value.
pub const UNKNOWN: u8 = 0x1f | 0x60;

/// What a copy to the original does to the model.
pub fn copy_out(live: &mut Live, part: Option<std::ops::Range<usize>>) {
    let part = part.unwrap_or(0..live.original.len());
    for at in part {
        if !live.direct[at] && live.direction != Direction::ToDevice {
            live.original[at] = live.buffer[at].unwrap_or(UNKNOWN);
        }
    }
}
