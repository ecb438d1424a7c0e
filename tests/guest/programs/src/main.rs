//! The guest's program: `blocks` writes a disk and checks it, `read` only reads, `echo` sends data over a network and checks
//! what comes back, and `load` and `start` change the kernel.

mod blocks;
mod echo;
mod next;
mod numbers;

use std::process::ExitCode;

const USAGE: &str = "\
blocks DISK --threads N --seconds N|--operations N [--span MIB] [--largest BYTES] [--seed N] [--errors]
    random reads and writes of 4 KiB to 1 MiB, or less, past the page cache; each thread checks all that it reads.
    --errors: an I/O may fail, and is counted; what a failed write has left is not checked
read DISK --threads N --operations N --size BYTES
    random reads, nothing checked: prints I/O per second
echo ADDRESS:PORT --mib N [--seed N]
    sends a pattern, and checks that the same comes back
load KERNEL INITRAMFS WORDS
    loads the next kernel, which `start` starts without the firmware
";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match words.first().map(String::as_str) {
        Some("blocks") => blocks::check(&Options(&words[1..])),
        Some("read") => blocks::read(&Options(&words[1..])),
        Some("echo") => echo::run(&Options(&words[1..])),
        Some("load") => match &words[1..] {
            [kernel, initramfs, line] => next::load(kernel, initramfs, line),
            _ => Err(USAGE.to_owned()),
        },
        Some("start") => next::start(),
        _ => Err(USAGE.to_owned()),
    };
    match outcome {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// The words behind a command.
struct Options<'a>(&'a [String]);

impl Options<'_> {
    fn first(&self) -> Result<&str, String> {
        self.0.first().map(String::as_str).ok_or_else(|| USAGE.to_owned())
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|word| word == name)
    }

    fn number(&self, name: &str, usual: u64) -> Result<u64, String> {
        let Some(at) = self.0.iter().position(|word| word == name) else { return Ok(usual) };
        let word = self.0.get(at + 1).ok_or_else(|| format!("{name} wants a number"))?;
        word.parse().map_err(|_| format!("{name} wants a number, not {word}"))
    }
}
