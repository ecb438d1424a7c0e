//! Mappings that own their buffers: when these come back, and where they are leaked.

use std::cell::RefCell;

use portcullis::addr::PhysSegment;
use portcullis::dma::{DmaBuffer, DmaMask, Ended, Mapping, Queue, QueueConfig};
use portcullis::domain::Policy;

use super::world::{Machine, PAGE, TURNS, World, shown};
use crate::transcript::{FOLDER, TIMED_OUT, Transcript, answer};

thread_local!(static DROPPED: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) });

#[derive(Debug)]
struct Numbered {
    number: u32,
    list: Vec<PhysSegment>,
}

// SAFETY: the memory is the test's, all of it simulated, and never exchanged.
unsafe impl DmaBuffer for Numbered {
    fn segments(&self) -> &[PhysSegment] {
        &self.list
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        DROPPED.with_borrow_mut(|dropped| dropped.push(self.number));
    }
}

struct Script {
    said: Transcript,
    world: World,
    queue: Queue<Machine, Numbered>,
    number: u32,
}

impl Script {
    fn dropped(&mut self) {
        let dropped = DROPPED.take();
        if !dropped.is_empty() {
            self.said.note("dropped", dropped);
        }
    }

    fn map(&mut self, list: &[(u64, u64)]) -> Option<Mapping<Numbered>> {
        self.number += 1;
        let buffer = Numbered { number: self.number, list: self.world.pieces(list) };
        let direction = TURNS[self.number as usize % 3];
        let queue = &mut self.queue;
        let map = || {
            queue.map(buffer, direction).map_err(|refused| {
                format!(
                    "{} (buffer: {:?})",
                    refused.error,
                    refused.buffer.as_ref().map(|buffer| buffer.number)
                )
            })
        };
        let call = format!("map {} of {} pieces {direction:?}", self.number, list.len());
        let mapping =
            self.said.call_as(call, map, |mapping| format!("{:#x}, {} bytes", mapping.iova(), mapping.len()));
        if let Ok(mapping) = &mapping {
            let segments: Vec<_> = self.queue.segments(mapping).collect();
            self.said.note("segments", shown(&segments));
            let _ = self.said.call("sync for cpu", || self.queue.sync_for_cpu(mapping, 0, 1));
            let _ = self
                .said
                .call("sync for device", || self.queue.sync_for_device(mapping, mapping.len() - 1, 1));
        }
        self.dropped();
        mapping.ok()
    }

    fn unmap(&mut self, mapping: Mapping<Numbered>) -> Option<Mapping<Numbered>> {
        let mut again = None;
        let number = mapping.buffer().number;
        let unmap = || match self.queue.unmap(mapping) {
            Ok(ended) => Ok(match ended {
                Ended::Done(buffer) => format!("done: {}", buffer.number),
                Ended::Pending => "pending".into(),
                Ended::Flushed(buffers) => {
                    format!("flushed: {:?}", buffers.map(|buffer| buffer.number).collect::<Vec<_>>())
                }
            }),
            Err(failed) => {
                again = failed.mapping;
                Err(format!("{} (waits: {}, comes back: {})", failed.error, failed.waits, again.is_some()))
            }
        };
        let _ = self.said.call_as(format_args!("unmap {number}"), unmap, String::clone);
        self.dropped();
        again
    }

    fn commit(&mut self) {
        let commit =
            || self.queue.commit().map(|buffers| buffers.map(|buffer| buffer.number).collect::<Vec<_>>());
        let _ = self.said.call("commit", commit);
        self.dropped();
    }
}

fn plays(name: &str, config: QueueConfig, policy: Policy) {
    let (world, said) = World::new(name, policy, |builder| builder);
    let queue = world.device(DmaMask::BITS_64).queue(config).unwrap();
    let mut script = Script { said, world, queue, number: 0 };
    DROPPED.take();
    let lists: [&[(u64, u64)]; 4] = [
        &[(0, 500)],
        &[(0, PAGE), (PAGE, PAGE), (0x5000, 3)],
        &[(0x10, 40 * PAGE)],
        &[(0x800, 20), (0x3000, 90 * PAGE)],
    ];
    for list in lists {
        let mapping = script.map(list).unwrap();
        script.unmap(mapping);
    }
    script.commit();
    script.map(&[]);
    script.map(&[(0, PAGE), (0, 0)]);
    script.said.part("the hardware does not answer");
    for answers in [vec![Some(TIMED_OUT)], vec![Some(TIMED_OUT); 3]] {
        let live: Vec<_> = lists.into_iter().map(|list| script.map(list).unwrap()).collect();
        answer(answers);
        let again: Vec<_> = live.into_iter().filter_map(|mapping| script.unmap(mapping)).collect();
        script.commit();
        again.into_iter().for_each(|mapping| _ = script.unmap(mapping));
        script.commit();
        let _ = script.said.call("flush", || script.world.domain.space().flush());
        script.commit();
    }
    script.said.part("no memory, and no answer");
    script.world.memory.fail_after(1);
    answer([Some(TIMED_OUT)]);
    let mapping = script.map(&[(0, PAGE), (0x60_0000, 300 * PAGE)]);
    script.world.memory.fail_after(0);
    mapping.into_iter().for_each(|mapping| _ = script.unmap(mapping));
    script.said.part("dropped: a mapping, and the queue with one that waits");
    let _ = script.map(&[(0, 500)]);
    let waits = script.map(&[(0, 35 * PAGE)]).unwrap();
    script.unmap(waits);
    let Script { mut said, world, queue, .. } = script;
    drop(queue);
    said.note("dropped", DROPPED.take());
    world.counts(&mut said);
    said.assert_is(FOLDER, &format!("typed-{name}"));
}

#[test]
fn buffers_that_are_owned() {
    plays("direct", QueueConfig::direct(), Policy::Strict);
    plays("batched", QueueConfig::batched(2), Policy::Strict);
    plays("ring", QueueConfig::ring(64, 4 * PAGE).batch(2), Policy::Strict);
    plays("bounce", QueueConfig::bounce(), Policy::Lazy { window_ns: 1000 });
    plays("auto", QueueConfig::auto(64, 4 * PAGE).batch(2), Policy::Strict);
}
