//! Prints how fast each policy replays the given traces, without the time to read them.
//!
//! `cargo run --release -p portcullis-trace --example replay_speed -- TRACE...`
//!
//! A replay reads the trace as it goes and also runs passthrough as the baseline, so a policy's own time is a difference: of a replay under
//! it and one of passthrough only; for passthrough, of that and of reading the trace without a replay. Medians of interleaved runs. A busy
//! machine still distorts them: repeat odd results.

use std::process::ExitCode;
use std::time::Instant;

use portcullis::domain::Policy;
use portcullis_trace::replay::{Mode, Options, Profile, ReplayError, Timer, replay};
use portcullis_trace::{Chunk, ReadOptions, Trace};

const RUNS: usize = 5;
/// Events of a replay's chunk.
const CHUNK_EVENTS: usize = 16_384;

/// Seconds to read the trace and to calibrate a clock, as each replay does; and the events.
fn parse(name: &str, bytes: &[u8]) -> Result<(f64, u64), ReplayError> {
    let start = Instant::now();
    let timer = Timer::calibrated();
    let mut trace = Trace::from_bytes(name, bytes, ReadOptions::default())?;
    let mut chunk = Chunk::default();
    while trace.next_chunk(&mut chunk, CHUNK_EVENTS)? {
        std::hint::black_box((&timer, &chunk));
    }
    Ok((start.elapsed().as_secs_f64(), trace.summary().events))
}

fn run(name: &str, bytes: &[u8], options: &Options) -> Result<f64, ReplayError> {
    let start = Instant::now();
    let mut trace = Trace::from_bytes(name, bytes, ReadOptions::default())?;
    std::hint::black_box(replay(&mut trace, options, |_| ())?);
    Ok(start.elapsed().as_secs_f64())
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn show(path: &str, profile: &Profile) -> Result<(), Box<dyn std::error::Error>> {
    let bytes = std::fs::read(path)?;
    let protections = [Policy::Strict.into(), Policy::LAZY.into(), Mode::Bounce, Mode::Swiotlb];
    let under = |mode: Mode| Options { policies: vec![mode], ..Options::new(profile.clone()) };
    let (mut parses, mut yardsticks, mut events) = (Vec::new(), Vec::new(), 0);
    let mut replays = vec![Vec::new(); protections.len()];
    for _ in 0..RUNS {
        let (seconds, counted) = parse(path, &bytes)?;
        parses.push(seconds);
        events = counted;
        yardsticks.push(run(path, &bytes, &under(Mode::PASSTHROUGH))?);
        for (seconds, &mode) in replays.iter_mut().zip(&protections) {
            seconds.push(run(path, &bytes, &under(mode))?);
        }
    }
    let (parse, yardstick) = (median(parses), median(yardsticks));
    println!("{path}: {events} events, read in {parse:.3} s");
    let line = |mode: Mode, seconds: f64| {
        let speed = events as f64 / seconds / 1e6;
        println!("  {:<12} {seconds:.3} s  {speed:.2} M events/s", mode.name());
    };
    for (seconds, &mode) in replays.into_iter().zip(&protections) {
        line(mode, median(seconds) - yardstick);
    }
    line(Mode::PASSTHROUGH, yardstick - parse);
    Ok(())
}

fn main() -> ExitCode {
    let profile = match Profile::load("vtd") {
        Ok(profile) => profile,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut code = ExitCode::SUCCESS;
    for path in std::env::args().skip(1) {
        if let Err(error) = show(&path, &profile) {
            eprintln!("error: {path}: {error}");
            code = ExitCode::FAILURE;
        }
    }
    code
}
