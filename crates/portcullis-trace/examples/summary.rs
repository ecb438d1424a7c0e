//! Prints the summary of each given trace, and how fast it was read.
//!
//! `cargo run --release -p portcullis-trace --example summary -- TRACE...`

use std::process::ExitCode;
use std::time::Instant;

use portcullis_trace::{Chunk, ReadOptions, Trace, TraceError};

fn show(path: &str) -> Result<(), TraceError> {
    let mut trace = Trace::open(path, ReadOptions::default())?;
    let mut chunk = Chunk::default();
    let start = Instant::now();
    let mut ops = 0;
    while trace.next_chunk(&mut chunk, 4096)? {
        ops += chunk.ops.len();
    }
    let seconds = start.elapsed().as_secs_f64();
    let summary = trace.summary();
    let speed = summary.text_bytes as f64 / 1e6 / seconds;
    println!("{summary:#?}");
    println!(
        "{path}: {} events, {} accounted, {ops} operations, {} still mapped; {:.1} MB of text at {speed:.0} MB/s",
        summary.events,
        summary.accounted(),
        summary.still_mapped(),
        summary.text_bytes as f64 / 1e6,
    );
    Ok(())
}

fn main() -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for path in std::env::args().skip(1) {
        if let Err(error) = show(&path) {
            eprintln!("error: {error}");
            code = ExitCode::FAILURE;
        }
    }
    code
}
