//! Several CPUs at once: each byte arrives where it belongs, whoever frees, trims or ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use portcullis::addr::Direction;
use portcullis::bounce::pool::Attributes;
use portcullis::domain::Policy;
use portcullis::std_platform::StdPlatform;
use portcullis_model::DeviceId;
use portcullis_model::open::OpenPool;

use crate::pool::support::{Bench, PAGE, map, piece, small, without_timer};

const THREADS: u32 = 4;
const ROUNDS: u64 = 400;

#[test]
fn data_is_right_while_others_free_and_trim() {
    // Fewer slots than threads: some share.
    let bench = Bench::on(StdPlatform::with_cpus(3), Policy::Strict, without_timer(small()));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Each hands its mappings to the next, which ends them.
        let (senders, mut receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::sync_channel(16)).unzip();
        receivers.rotate_left(1);
        let workers: Vec<_> = senders
            .into_iter()
            .zip(receivers)
            .enumerate()
            .map(|(n, (sender, receiver))| {
                let bench = &bench;
                scope.spawn(move || {
                    let device = bench.device(n as u32 % 2, n % 2 == 1);
                    for round in 0..ROUNDS {
                        let len = 1 + (round * 977 + n as u64 * 331) % (6 * PAGE);
                        let buffer = bench.memory.buffer(len).unwrap();
                        let byte = (round % 200 + 1) as u8;
                        let half = len / 2;
                        let halves = [piece(buffer.phys(), 0, half), piece(buffer.phys(), half, len - half)];
                        let whole = [piece(buffer.phys(), 0, len)];
                        let list = if round % 3 == 0 && half > 0 { &halves[..] } else { &whole[..] };
                        let mapping =
                            map(&device, list, Direction::FromDevice, Attributes::default()).unwrap();
                        let iova = mapping.iova();
                        bench.iommu.dma_write(DeviceId(n as u32), iova, &vec![byte; len as usize]).unwrap();
                        // Where the next has ended already, this one does it itself.
                        if let Err(mpsc::SendError((iova, buffer, len, byte))) =
                            sender.send((iova, buffer, len, byte))
                        {
                            bench.pool.close(iova, len).unwrap();
                            assert_eq!(bench.bytes(buffer.phys(), len), vec![byte; len as usize]);
                        }
                        if round >= 8 {
                            let (iova, buffer, len, byte): (_, portcullis_model::Buffer, u64, u8) =
                                receiver.recv().unwrap();
                            bench.pool.close(iova, len).unwrap();
                            assert_eq!(bench.bytes(buffer.phys(), len), vec![byte; len as usize]);
                        }
                    }
                    drop(sender);
                    for (iova, buffer, len, byte) in receiver {
                        bench.pool.close(iova, len).unwrap();
                        assert_eq!(bench.bytes(buffer.phys(), len), vec![byte; len as usize]);
                    }
                })
            })
            .collect();
        let trimmer = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                bench.pool.trim(8 * PAGE).unwrap();
                std::thread::yield_now();
            }
        });
        let results: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        over.store(true, Ordering::Relaxed);
        trimmer.join().unwrap();
        results.into_iter().for_each(|result| result.unwrap());
    });
    bench.finish();
}

#[test]
fn what_a_thread_kept_is_anybody_s_when_it_ends() {
    let bench = Bench::on(StdPlatform::new(), Policy::Strict, without_timer(small()));
    let work = || {
        let buffer = bench.memory.buffer(PAGE).unwrap();
        let list = [piece(buffer.phys(), 0, PAGE)];
        let live: Vec<_> = (0..40)
            .map(|_| map(&bench.device, &list, Direction::ToDevice, Attributes::default()).unwrap().iova())
            .collect();
        live.into_iter().for_each(|iova| bench.pool.close(iova, PAGE).unwrap());
    };
    for _ in 0..3 {
        std::thread::scope(|scope| scope.spawn(work).join().unwrap());
        let usage = bench.pool.usage();
        assert_eq!((usage.buffer_bytes, usage.cached_bytes), (40 * PAGE, 40 * PAGE));
    }
    bench.finish();
}
