//! Devices that cache translations themselves, tried by one that does so all the time.

mod coming;
mod machine;
mod protection;
