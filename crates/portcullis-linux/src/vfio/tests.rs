//! Over a kernel that behaves as its documents say, and fails where the test likes.

mod fake;
mod mapper;
mod says;
