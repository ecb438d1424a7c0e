//! Over a kernel that behaves as its documents say, and fails where the test likes.

mod calls;
mod fake;
mod mapper;
mod says;
