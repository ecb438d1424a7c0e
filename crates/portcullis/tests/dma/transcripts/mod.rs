//! What each strategy does below, and answers, call by call, against files in `tests/transcripts`.

mod domain;
mod ops;
mod queues;
mod swiotlb;
mod tables;
mod typed;
mod world;
