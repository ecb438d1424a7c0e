//! Registrations under the loom model checker: `cargo xtask test` runs this with `--cfg loom`. Without that the file is empty.
#![cfg(loom)]

mod loom {
    #[allow(dead_code, reason = "the core's models use all of it")]
    #[path = "../../../portcullis/tests/loom/frames.rs"]
    pub mod frames;
    pub mod given;
    pub mod registration;
}
