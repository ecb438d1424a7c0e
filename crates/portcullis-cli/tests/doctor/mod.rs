//! `portcullis doctor` on machines that are made up, each a text file in `machines`, which says what is wrong with it and all that is
//! told of it: whole outputs are in `golden`. With `PORTCULLIS_WRITE_TABLES=1` the tests write those.

mod changes;
mod hostile;
mod logs;
mod machines;
mod unpack;
