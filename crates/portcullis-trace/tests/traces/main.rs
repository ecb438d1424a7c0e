//! Traces: reading, pairing, checking and replaying them.

#[path = "../common/mod.rs"]
mod common;

mod anonymize;
mod archives;
mod checker;
mod direct;
mod eras;
mod exact;
mod figures;
mod hostile;
mod lines;
mod order;
mod painted;
mod pairing;
mod replay;
mod ring;
mod robustness;
#[path = "../../../portcullis/tests/said/mod.rs"]
mod said;
mod sentences;
mod shapes;
mod whole;
