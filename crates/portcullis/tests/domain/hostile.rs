//! A hostile device that retries every address it ever saw, while policies change.
//!
//! - `threads`: a long random run. CPUs map and unmap in every way there is, one changes the policies of the domain,
//!   of a device and of all devices, and the device retries all the time.
//! - `borders`: the same without chance: a change at each border of an unmap, an unmap at each border of a change.
//! - `window`: on a clock that the test holds, nothing is reached after lazy protection's window.

mod borders;
mod paint;
mod policies;
mod threads;
mod turns;
mod window;
mod worker;
