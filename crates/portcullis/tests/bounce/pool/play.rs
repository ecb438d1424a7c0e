//! What each operation does, to the pool and to the model.

use portcullis::addr::{Direction, Iova, PhysAddr};
use portcullis_model::DeviceId;
use portcullis_model::open::OpenPool;

use crate::pool::support::TIMEOUT;
use crate::pool::world::{Op, UNKNOWN, World, copy_out, paint};

impl World {
    /// Does `op`, and holds what it returns against the model.
    pub fn step(&mut self, op: Op) {
        let count = self.live.len();
        match op {
            Op::Map { cpu, device, direction, attributes, pieces, touching } => {
                self.bench.platform.be(cpu);
                self.map(device, Direction::ALL[direction], attributes, &pieces, touching);
            }
            Op::Trim { keep } => {
                let trimmed = self.bench.pool.trim(keep);
                assert!(trimmed.is_ok() || self.strained && trimmed == Err(TIMEOUT));
                let usage = self.bench.pool.usage();
                assert!(usage.cached_bytes <= keep);
            }
            Op::Strain { frames, tables, silent } => {
                self.bench.frames.grant(frames);
                self.bench.tables.grant(tables);
                self.bench.iommu.queue().fail_next(silent, TIMEOUT);
            }
            Op::Unmap { cpu, which } if count > 0 => {
                self.bench.platform.be(cpu);
                self.unmap(which % count);
            }
            Op::Device { which, at, len, value } if count > 0 => {
                let live = &self.live[which % count];
                let part = live.part(at, len);
                if live.direction == Direction::ToDevice {
                    let first = Iova::new(live.view[0].0.get());
                    assert!(self.bench.iommu.dma_write(DeviceId(live.device as u32), first, &[1]).is_err());
                    return;
                }
                let byte = paint(live.device as u8, false, value);
                self.access(live, part.start, &mut vec![byte; part.len()], true);
                let live = &mut self.live[which % count];
                for at in part {
                    live.buffer[at] = Some(byte);
                    if live.direct[at] {
                        live.original[at] = byte;
                    }
                }
            }
            Op::Cpu { which, at, len, value } if count > 0 => {
                let live = &mut self.live[which % count];
                let part = live.part(at, len);
                let byte = paint(live.device as u8, true, value);
                let mut begin = 0;
                for piece in &live.list {
                    let end = begin + piece.len as usize;
                    for at in part.start.max(begin)..part.end.min(end) {
                        self.bench
                            .memory
                            .write(PhysAddr::new(piece.phys.get() + (at - begin) as u64), &[byte])
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
                let part = self.live[which % count].part(at, len);
                let live = &self.live[which % count];
                if live.span == live.len() {
                    self.bench.pool.sync_cpu(live.iova, part.start as u64, part.len() as u64).unwrap();
                    copy_out(&mut self.live[which % count], Some(part));
                }
                self.check_original(&self.live[which % count], true);
            }
            Op::SyncForDevice { which, at, len } if count > 0 => {
                let live = &mut self.live[which % count];
                let part = live.part(at, len);
                if live.span == live.len() {
                    self.bench.pool.sync_device(live.iova, part.start as u64, part.len() as u64).unwrap();
                    let part = if live.direction == Direction::FromDevice { 0..0 } else { part };
                    for at in part {
                        // What the device left in the original unwritten stays unknown.
                        live.buffer[at] = Some(live.original[at]).filter(|byte| *byte != UNKNOWN);
                    }
                }
                self.look(&self.live[which % count]);
            }
            _ => {}
        }
    }
}
