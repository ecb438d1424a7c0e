//! What an input may take: no input of a fuzzer is longer than some kilobytes, and none may take more than this.

use portcullis_trace::budget::{self, Counted, Over};

/// Of all that runs in a fuzzer's process at once.
const LIMIT: u64 = 1 << 30;

#[global_allocator]
static MEMORY: Counted = Counted::new(full);

fn full(over: Over) -> ! {
    eprintln!("an input takes too much memory: {over}");
    std::process::abort()
}

/// From now on whatever exceeds the limit ends the process: what can tell that it would must do so before.
pub(crate) fn keep() {
    budget::set_limit(LIMIT);
}
