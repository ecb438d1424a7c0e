//! A network: what is sent to a server that sends all back, and what comes back.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::Options;
use crate::numbers::{differs, fill, mix};

/// How much is written and read at a time.
const PIECE: usize = 48 << 10;

/// How long nothing may come.
const PATIENCE: Duration = Duration::from_secs(30);

pub fn run(options: &Options<'_>) -> Result<String, String> {
    let address = options.first()?;
    let seed = mix(options.number("--seed", 1)?);
    let length = options.number("--mib", 1)? << 20;
    let failed = |error: std::io::Error| format!("{address}: {error}");
    let began = Instant::now();
    let mut stream = loop {
        // The link may still be coming up.
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(error) if began.elapsed() > PATIENCE => return Err(failed(error)),
            Err(_) => std::thread::sleep(Duration::from_millis(200)),
        }
    };
    stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
    stream.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
    let mut out = stream.try_clone().map_err(failed)?;
    let began = Instant::now();
    let sender = std::thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        let mut sent = 0;
        while sent < length {
            let size = (length - sent).min(PIECE as u64);
            fill(&mut piece[..size as usize], seed, sent);
            out.write_all(&piece[..size as usize])?;
            sent += size;
        }
        out.shutdown(std::net::Shutdown::Write)
    });
    let mut piece = vec![0; PIECE];
    let mut come = 0;
    while come < length {
        let size = (length - come).min(PIECE as u64);
        let part = &mut piece[..size as usize];
        stream.read_exact(part).map_err(|error| format!("{address}: after {come} bytes: {error}"))?;
        if let Some(which) = differs(part, seed, come, length) {
            return Err(format!("WRONG BYTES from {address}: {which}"));
        }
        come += size;
    }
    sender.join().map_err(|_| "the sender died".to_owned())?.map_err(failed)?;
    let millis = began.elapsed().as_millis().max(1) as u64;
    Ok(format!("{length} bytes there and back, right, {} KiB/s", length / 1024 * 1000 / millis))
}
