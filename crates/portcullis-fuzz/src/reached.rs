//! What targets come to, counted for a test: a target that does less than before would fail nowhere else.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;

thread_local! {
    static COUNTS: RefCell<Option<BTreeMap<String, u64>>> = const { RefCell::new(None) };
}

/// Counts `what`, where a test counts.
pub(crate) fn note(what: impl Display) {
    COUNTS.with_borrow_mut(|counts| {
        if let Some(counts) = counts {
            *counts.entry(what.to_string()).or_default() += 1;
        }
    });
}

/// Counts that `call` was made, and what its error says. Returns the result.
pub(crate) fn noted<T, E: Display>(call: &str, result: Result<T, E>) -> Result<T, E> {
    match &result {
        Ok(_) => note(call),
        Err(error) => note(format_args!("{call}: {error}")),
    }
    result
}

/// What `run` comes to, and how often.
pub fn counted(run: impl FnOnce()) -> BTreeMap<String, u64> {
    COUNTS.set(Some(BTreeMap::new()));
    run();
    COUNTS.take().unwrap_or_default()
}
