//! Mappings by type, and batches of them.

use portcullis::dma::{DmaDevice, MapFailed, Mapped, Unlinked, UnmapBatch};
use portcullis::pgtable::Format;
use portcullis_model::Buffer;

use super::Clocked;
use super::model::{End, State, pages};
use super::world::{Mapper, World};
use crate::input::Input;
use std::sync::Arc;

type Platform = Arc<Clocked>;
type Device<X> = DmaDevice<Mapper<X>, Platform>;

/// Buffers that are mapped, that are not any more, and that wait in a batch.
pub struct Typed<X: Format> {
    pub mapped: Vec<(usize, Mapped<Buffer, Device<X>>)>,
    pub unlinked: Vec<Unlinked<Buffer, Device<X>>>,
    pub batch: UnmapBatch<Buffer, Mapper<X>, Platform>,
}

impl<X: Format> World<X> {
    pub fn typed_step(&mut self, way: u8, input: &mut Input<'_>) {
        match way {
            0..=4 => self.map_typed(input),
            5..=7 => {
                let Some(which) = input.which(self.typed.mapped.len()) else { return };
                let (device, mapped) = self.typed.mapped.swap_remove(which);
                let (iova, len) = (mapped.iova().get(), mapped.buffer().len());
                let lazy = self.is_lazy(device);
                match mapped.unmap() {
                    // It was confirmed, or it is deferred: a failure that a flush made good is a success.
                    Ok(buffer) => {
                        self.unmapped((iova, len), Ok(()), lazy);
                        self.free.push(buffer);
                    }
                    Err(failed) => {
                        assert!(self.weak, "{}", failed.error);
                        self.unmapped((iova, len), Err(failed.error), lazy);
                        self.typed.unlinked.push(failed.unlinked);
                    }
                }
            }
            8 | 9 => {
                let Some(which) = input.which(self.typed.mapped.len()) else { return };
                let (_, mapped) = self.typed.mapped.swap_remove(which);
                let (iova, len) = (mapped.iova().get(), mapped.buffer().len());
                self.typed.unlinked.push(mapped.unlink());
                let waits = if self.weak { End::Unsure } else { End::Flush };
                // Whether it was confirmed does not show.
                self.model.unmap(iova, len, Some(State::Until(waits)));
                self.settle();
                self.model.flushed_meanwhile();
            }
            10 => {
                let Some(which) = input.which(self.typed.unlinked.len()) else { return };
                match self.typed.unlinked.swap_remove(which).reclaim() {
                    Ok(buffer) => self.free.push(buffer),
                    Err(failed) => {
                        assert!(self.weak, "{}", failed.error);
                        self.typed.unlinked.push(failed.unlinked);
                    }
                }
            }
            11 | 12 => {
                let Some(which) = input.which(self.typed.mapped.len()) else { return };
                let (device, mapped) = self.typed.mapped.swap_remove(which);
                let (iova, len) = (mapped.iova().get(), mapped.buffer().len());
                match self.typed.batch.unmap(mapped) {
                    Ok(()) => self.model.unmap(iova, len, Some(State::Until(End::Typed))),
                    Err(refused) => {
                        assert!(self.typed.batch.is_full(), "{}", refused.error);
                        self.typed.mapped.push((device, refused.mapped));
                    }
                }
            }
            _ => {
                let count = self.typed.batch.len();
                match self.typed.batch.commit_and_drain() {
                    Ok(buffers) => {
                        assert_eq!(buffers.len(), count);
                        self.free.extend(buffers);
                        self.model.committed(End::Typed);
                    }
                    Err(error) => assert!(self.weak && count > 0, "{error}"),
                }
            }
        }
    }

    fn map_typed(&mut self, input: &mut Input<'_>) {
        let Some(which) = input.which(self.free.len()) else { return };
        let (device, direction) = (usize::from(input.flag()), input.direction());
        let buffer = self.free.swap_remove(which);
        let (phys, len) = (buffer.phys().get(), buffer.len());
        match Mapped::new(self.devices[device].clone(), buffer, direction) {
            Ok(mapped) => {
                let iova = mapped.iova().get();
                assert!(iova + (len - 1) <= self.devices[device].mask());
                self.settle();
                self.model.map(iova, pages(phys, len), direction.permissions());
                self.typed.mapped.push((device, mapped));
            }
            Err(MapFailed { buffer, error }) => {
                assert!(self.weak || self.tainted, "{error}");
                self.free.extend(buffer);
            }
        }
    }
}
