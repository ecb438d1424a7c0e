//! What each strategy does below, and answers, call by call, against files in `tests/transcripts`.

mod domain;
mod iova;
mod ops;
mod pools;
mod queues;
mod swiotlb;
mod tables;
mod typed;
mod world;
