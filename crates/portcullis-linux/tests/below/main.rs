//! Every layer below a registration cache panics, fails, refuses or runs out of memory, once at every call: with the harness of the core's
//! `tests/below`, whose first file lists the checks.

#![allow(dead_code, reason = "the harness has more")]

#[path = "../../../portcullis/tests/below/doubles.rs"]
mod doubles;
#[path = "../../../portcullis/tests/below/faults.rs"]
mod faults;
#[path = "../../../portcullis/tests/below/hostile.rs"]
mod hostile;
mod registration;
#[path = "../../../portcullis/tests/below/run.rs"]
mod run;
