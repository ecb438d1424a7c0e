//! `stack-frames FILE`: fails with the functions of an object, or of a static library, whose frames are too large for a kernel's
//! stack. The module's `make check` asks it of the object that the kernel links.

#[cfg(any(loom, watched))]
fn main() {}

#[cfg(not(any(loom, watched)))]
fn main() -> std::process::ExitCode {
    use portcullis_stack::{BUILDS, FRAME, code::Code};

    let Some(file) = std::env::args_os().nth(1) else {
        eprintln!("usage: stack-frames FILE");
        return std::process::ExitCode::FAILURE;
    };
    let bytes = match std::fs::read(&file) {
        Ok(bytes) => bytes,
        Err(error) => {
            eprintln!("{}: {error}", file.display());
            return std::process::ExitCode::FAILURE;
        }
    };
    let code = Code::read(&bytes);
    let mut larger: Vec<_> =
        code.functions.iter().filter(|function| function.frame() > FRAME + BUILDS).collect();
    larger.sort_by_key(|function| std::cmp::Reverse(function.frame()));
    for function in &larger {
        eprintln!(
            "a frame of {} bytes, of {FRAME} and {BUILDS} that builds vary by: {}",
            function.frame(),
            function.name
        );
    }
    if code.functions.is_empty() {
        eprintln!("{}: no function", file.display());
    }
    let fits = larger.is_empty() && !code.functions.is_empty();
    if fits { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
