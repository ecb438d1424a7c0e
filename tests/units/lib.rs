//! The tests within three crates, and the program with a disk. Each compiles a whole crate or driver anew, and does little.
