//! A program that wants more memory than it may have, and takes some more for what it says about that.

use std::process::Command;

use portcullis_trace::budget::{self, Counted, Over, STEP};

#[global_allocator]
static MEMORY: Counted = Counted::new(full);

/// Set in the program's environment where it is to want too much.
const GREEDY: &str = "PORTCULLIS_TEST_GREEDY";

/// Takes memory itself, and more than a thread counts alone.
fn full(over: Over) -> ! {
    let text = vec![b'x'; 4 * STEP as usize];
    println!("{} {}", over.limit, text.len());
    std::process::exit(7)
}

#[test]
fn what_ends_the_program_may_take_memory_beyond_the_limit() {
    if std::env::var_os(GREEDY).is_some() {
        budget::set_limit(budget::LEAST);
        let taken: Vec<_> = (0..budget::LEAST / (1 << 20) + 1).map(|_| vec![1_u8; 1 << 20]).collect();
        panic!("{} MiB were taken", taken.len());
    }
    let mut greedy = Command::new(std::env::current_exe().unwrap());
    let name = "what_ends_the_program_may_take_memory_beyond_the_limit";
    let greedy = greedy.args(["--exact", name, "--nocapture"]).env(GREEDY, "1").output().unwrap();
    let said = String::from_utf8_lossy(&greedy.stdout);
    assert_eq!(greedy.status.code(), Some(7), "{said}{}", String::from_utf8_lossy(&greedy.stderr));
    assert!(said.contains(&format!("{} {}\n", budget::LEAST, 4 * STEP)), "{said}");
}
