//! Mappings of queues: each by itself, and in batches.

use portcullis::dma::{DmaUnmapError, Ended, Mapping, NotMapped, NotUnmapped, Queue};
use portcullis::pgtable::Format;
use portcullis_model::Buffer;

use super::model::{End, State, pages};
use super::world::{Machine, World};
use crate::input::Input;

/// The queue whose unmaps are a batch. The others' end one by one, by the policy of the device of that number.
const BATCHED: usize = 2;

/// How many those are.
pub const BATCH: usize = 4;

/// Queues, and what they have mapped.
pub struct Typed<X: Format> {
    pub mapped: Vec<(usize, Mapping<Buffer>)>,
    pub queues: [Queue<Machine<X>, Buffer>; 3],
    /// Mappings that a commit of the queue of batches has ended which could not say so.
    pub untold: usize,
}

impl<X: Format> World<X> {
    pub fn typed_step(&mut self, way: u8, input: &mut Input<'_>) {
        match way {
            0..=4 => self.map_typed(input),
            5..=10 => self.unmap_typed(input),
            _ => self.commit_typed(usize::from(way - 11)),
        }
    }

    fn map_typed(&mut self, input: &mut Input<'_>) {
        let Some(which) = input.which(self.free.len()) else { return };
        let (number, direction) = (usize::from(input.byte() % 3), input.direction());
        let buffer = self.free.swap_remove(which);
        let (phys, len) = (buffer.phys().get(), buffer.len());
        match self.typed.queues[number].map(buffer, direction) {
            Ok(mapping) => {
                let iova = mapping.iova().get();
                assert!(iova + (len - 1) <= self.devices[0].mask());
                self.settle();
                self.model.map(iova, pages(phys, len), direction.permissions());
                self.typed.mapped.push((number, mapping));
            }
            Err(NotMapped { buffer, error }) => {
                assert!(self.weak || self.tainted, "{error}");
                assert_eq!(buffer.is_none(), error.may_be_reached());
                self.free.extend(buffer);
            }
        }
    }

    fn unmap_typed(&mut self, input: &mut Input<'_>) {
        let Some(which) = input.which(self.typed.mapped.len()) else { return };
        let (number, mapping) = self.typed.mapped.swap_remove(which);
        let place = (mapping.iova().get(), mapping.buffer().len());
        let lazy = number != BATCHED && self.is_lazy(number);
        let waits = Some(State::Until(End::Typed));
        let queue = &mut self.typed.queues[number];
        let waiting = queue.waiting();
        let (mut back, mut is_flushed) = (Vec::new(), false);
        let ended = queue.unmap(mapping).map(|ended| {
            is_flushed = matches!(ended, Ended::Flushed(_));
            ended.for_each(|buffer| back.push(buffer));
        });
        let comes_again = matches!(&ended, Err(NotUnmapped { mapping: Some(_), .. }));
        let mut in_batch = waiting - if number == BATCHED { self.typed.untold } else { 0 };
        if number == BATCHED && in_batch == BATCH && !comes_again {
            // There was no room, and a commit before.
            self.model.committed(End::Typed);
            (self.typed.untold, in_batch) = (waiting, 0);
        }
        match ended {
            Ok(()) if number == BATCHED => {
                assert_eq!(is_flushed, in_batch + 1 == BATCH);
                assert!(if is_flushed { back.len() >= BATCH } else { back.is_empty() });
                self.free.append(&mut back);
                self.model.unmap(place.0, place.1, waits);
                if is_flushed {
                    self.typed.untold = 0;
                    self.model.committed(End::Typed);
                }
            }
            Ok(()) => {
                assert!(!is_flushed && back.len() == 1, "it comes at once");
                self.free.append(&mut back);
                self.unmapped(place, Ok(()), lazy);
            }
            Err(NotUnmapped { mapping, error, .. }) => {
                assert!(self.weak || self.tainted, "{error}");
                match error {
                    DmaUnmapError::Unmap(error) if number == BATCHED => {
                        let kept = matches!(error, portcullis::domain::UnmapError::StillMapped { .. });
                        self.model.unmap(place.0, place.1, if kept { Some(State::Kept) } else { waits });
                    }
                    DmaUnmapError::Unmap(error) => self.unmapped(place, Err(error), lazy),
                    // The commit that was to come, or came, with it.
                    error => {
                        assert!(self.weak && number == BATCHED, "{error}");
                        match mapping {
                            Some(mapping) => self.typed.mapped.push((number, mapping)),
                            None => self.model.unmap(place.0, place.1, waits),
                        }
                    }
                }
            }
        }
    }

    /// What waits comes back, or all of it waits on.
    fn commit_typed(&mut self, number: usize) {
        let queue = &mut self.typed.queues[number];
        let waiting = queue.waiting();
        let committed = queue.commit().map(|buffers| self.free.extend(buffers));
        match committed {
            Ok(()) => {
                assert_eq!(queue.waiting(), 0);
                if number == BATCHED {
                    self.typed.untold = 0;
                    self.model.committed(End::Typed);
                }
            }
            Err(error) => {
                assert!(self.weak && waiting > 0, "{error}");
                assert_eq!(queue.waiting(), waiting);
            }
        }
    }

    /// Ends all mappings. What somebody has ended by number under its queue comes with the commit.
    pub fn finish_typed(&mut self) {
        for (number, mapping) in std::mem::take(&mut self.typed.mapped) {
            let ended = self.typed.queues[number].unmap(mapping).map(drop);
            assert!(ended.is_ok() || self.tainted);
        }
        for queue in &mut self.typed.queues {
            queue.commit().unwrap().for_each(drop);
        }
    }
}
