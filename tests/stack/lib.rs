//! The test beside it has all there is.
