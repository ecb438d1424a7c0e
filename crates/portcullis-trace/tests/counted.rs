//! A program that exceeds its memory limit, and allocates more in its error message.

use std::process::Command;

use portcullis_trace::budget::{self, Counted, Over, STEP};

#[global_allocator]
static MEMORY: Counted = Counted::new(full);

/// Set in the environment of the program that exceeds its limit.
const GREEDY: &str = "PORTCULLIS_TEST_GREEDY";

/// Allocates itself, and more than a thread counts locally.
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

/// Memory is in use from its allocation to its free, by any method.
#[test]
fn what_is_given_back_is_in_use_no_more() {
    // More than threads count locally, and than the other test allocates meanwhile.
    const SLACK: u64 = 1 << 20;
    let before = budget::used();
    let is = |more: u64| {
        let used = budget::used();
        assert!(used.abs_diff(before + more) < SLACK, "{used} of {before} and {more} more");
    };
    let filled = vec![1_u8; 16 << 20];
    is(16 << 20);
    let zeroed = vec![0_u8; 8 << 20];
    is(24 << 20);
    drop(filled);
    is(8 << 20);
    let mut grown = zeroed;
    grown.reserve_exact(24 << 20);
    is(32 << 20);
    grown.truncate(4 << 20);
    grown.shrink_to_fit();
    is(4 << 20);
    drop(grown);
    is(0);
}
