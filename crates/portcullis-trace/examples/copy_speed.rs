//! Prints the cost of a replay's copies between a trace's pages and bounce buffers, found by the replay's directory, and of the same copies
//! between plain arrays.
//!
//! `cargo run --release -p portcullis-trace --example copy_speed`
//!
//! Hot: one buffer repeatedly. Cold: buffers in no CPU cache, in an order that defeats prefetchers; the target is hot, as bounce buffers
//! are. Medians of interleaved rounds.

use std::hint::black_box;
use std::time::Instant;

use portcullis::addr::{PhysAddr, PhysSegment};
use portcullis::platform::{CopyMemory, FRAME_SIZE, Frames};
use portcullis_trace::replay::{MOST_BYTES, TraceMemory};

const SIZES: [u64; 6] = [64, 1500, 4096, 16 << 10, 64 << 10, 128 << 10];
const ROUNDS: usize = 15;
/// Bytes of all cold buffers, more than caches hold.
const COLD: u64 = 512 << 20;
/// A plausible address of a trace.
const START: u64 = 0x1_2345_6000;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Nanoseconds of one call of `copy`, with its number as argument.
fn time(count: u64, mut copy: impl FnMut(u64)) -> f64 {
    let start = Instant::now();
    (0..count).for_each(&mut copy);
    start.elapsed().as_nanos() as f64 / count as f64
}

fn main() {
    let memory = TraceMemory::new(MOST_BYTES);
    let all = [PhysSegment { phys: PhysAddr::new(START), len: COLD }];
    assert!(memory.back(&all, |_| ()), "as many pages as fit");
    let buffer = memory.alloc((128 << 10) / FRAME_SIZE as usize).expect("as many frames as fit");
    let source = vec![1_u8; COLD as usize];
    let mut target = vec![0_u8; 128 << 10];
    println!("{:>8}  {:>22}  {:>22}", "bytes", "hot: replay, plain", "cold: replay, plain");
    for len in SIZES {
        let places = COLD / len.next_power_of_two();
        // Each place once, at a large odd stride.
        let cold = |n: u64| n.wrapping_mul(0x9e37_79b1) % places * len.next_power_of_two();
        let hot_count = (4 << 20) / len + 64;
        let cold_count = ((64 << 20) / len).min(places).min(20_000);
        let mut times = [const { Vec::new() }; 4];
        for round in 0..ROUNDS as u64 {
            let shift = round * cold_count;
            let traced = |at: u64| {
                // SAFETY: clauses 1 and 2: both are memory of `memory`, which only this thread uses.
                unsafe { memory.copy(PhysAddr::new(START + at), buffer, len) };
            };
            times[0].push(time(hot_count, |_| traced(0)));
            times[2].push(time(cold_count, |n| traced(cold(n + shift))));
            let mut plain = |at: u64| {
                let at = at as usize;
                black_box(&mut target)[..len as usize].copy_from_slice(&source[at..at + len as usize]);
            };
            times[1].push(time(hot_count, |_| plain(0)));
            times[3].push(time(cold_count, |n| plain(cold(n + shift))));
        }
        let [hot, plain_hot, cold, plain_cold] = times.map(median);
        println!("{len:>8}  {hot:>11.1} {plain_hot:>10.1}  {cold:>11.1} {plain_cold:>10.1}");
    }
}
