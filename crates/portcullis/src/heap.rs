//! Fallible allocation: without heap memory a kernel goes on, with an error.
//!
//! `Box::new`, `Arc::new`, `collect` and insertions into maps of `alloc` abort without memory. So the crate takes
//! boxes, slices and [shared values](Shared) from here, and grows a `Vec` only by `try_reserve`. Large values are built
//! in place (`slice_in`), as a kernel's stack has no room for them. `shared.rs` has the shared values. Of the
//! crate, this layer uses only `broken`.

mod shared;

/// Writes fields of a `Self` to `at`; `made` names the fields that are written already. It does not compile if a field
/// is in neither list. Use it in an `unsafe` block: `at` points to writable, uninitialised memory for a `Self`.
macro_rules! write_fields {
    ($at:expr, made [$($made:ident),*], $($field:ident: $value:expr),+ $(,)?) => {{
        let at: *mut Self = $at;
        $((&raw mut (*at).$field).write($value);)+
        let _all = |made: Self| {
            let Self { $($field: _,)+ $($made: _,)* } = made;
        };
    }};
}
pub(crate) use write_fields;

pub(crate) use shared::SharedPlace;
pub use shared::{Shared, Weak};

use alloc::alloc::alloc;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::alloc::Layout;
use core::mem::MaybeUninit;
use core::ptr::{self, NonNull};

use crate::broken::broken;

/// `core`'s atomics for [`Shared`]'s counts, also if the crate is built for loom. The loom model of the counts
/// (`tests/inside/heap/model.rs`) replaces this module.
mod atomics {
    pub use core::sync::atomic::{AtomicUsize, Ordering};
}

/// The heap has no memory. A value that was to be there is dropped, unless it comes back with the error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the heap has no memory")]
pub struct OutOfMemory;

/// A field's memory as `MaybeUninit`, to build the field in place.
///
/// # Safety
/// 1. `field` is a field of a place that the caller has to itself for `'a`, and does not access in any other way
///    meanwhile.
pub(crate) unsafe fn place_of<'a, T>(field: *mut T) -> &'a mut MaybeUninit<T> {
    // SAFETY: the caller's (1); a `MaybeUninit` needs no value.
    unsafe { &mut *field.cast() }
}

fn memory_for<T>(count: usize) -> Result<NonNull<T>, OutOfMemory> {
    let layout = Layout::array::<T>(count).map_err(|_| OutOfMemory)?;
    if layout.size() == 0 {
        return Ok(NonNull::dangling());
    }
    // SAFETY: the layout's size is not 0.
    NonNull::new(unsafe { alloc(layout) }).map(NonNull::cast).ok_or(OutOfMemory)
}

pub(crate) fn empty_box<T>() -> Result<Box<MaybeUninit<T>>, OutOfMemory> {
    let memory = memory_for::<MaybeUninit<T>>(1)?;
    // SAFETY: the memory came from the global allocator just now, with the value's layout, and a `MaybeUninit` needs no
    // value.
    Ok(unsafe { Box::from_raw(memory.as_ptr()) })
}

pub(crate) fn boxed<T>(value: T) -> Result<Box<T>, OutOfMemory> {
    Ok(Box::write(empty_box()?, value))
}

/// As [`boxed`], for a value that is too large for a stack: `make` builds it in place, and returns it.
pub(crate) fn boxed_in<T, E: From<OutOfMemory>>(
    make: impl for<'a> FnOnce(&'a mut MaybeUninit<T>) -> Result<&'a mut T, E>,
) -> Result<Box<T>, E> {
    let mut place = empty_box()?;
    made_in(&mut place, make)?;
    // SAFETY: `made_in` returned `Ok`, so the value is there.
    Ok(unsafe { place.assume_init() })
}

/// As [`boxed_in`], but returns the value by move.
pub(crate) fn made<T, E>(
    make: impl for<'a> FnOnce(&'a mut MaybeUninit<T>) -> Result<&'a mut T, E>,
) -> Result<T, E> {
    let mut place = MaybeUninit::uninit();
    made_in(&mut place, make)?;
    // SAFETY: `made_in` returned `Ok`, so the value is there.
    Ok(unsafe { place.assume_init() })
}

/// Builds a value in `place` by `make`. After `Ok` the value is there.
fn made_in<T, E>(
    place: &mut MaybeUninit<T>,
    make: impl for<'a> FnOnce(&'a mut MaybeUninit<T>) -> Result<&'a mut T, E>,
) -> Result<(), E> {
    let at = place.as_mut_ptr();
    if ptr::from_mut(make(place)?) != at {
        broken("a value is made in the place that it was given");
    }
    Ok(())
}

pub(crate) fn slice<T>(
    len: usize,
    mut make: impl FnMut(usize) -> Result<T, OutOfMemory>,
) -> Result<Box<[T]>, OutOfMemory> {
    slice_in(len, |number, place| Ok(place.write(make(number)?)))
}

/// As [`slice`], for values that are too large for a stack: `make` builds each in its place, and returns it.
pub(crate) fn slice_in<T>(
    len: usize,
    mut make: impl for<'a> FnMut(usize, &'a mut MaybeUninit<T>) -> Result<&'a mut T, OutOfMemory>,
) -> Result<Box<[T]>, OutOfMemory> {
    let memory = memory_for::<T>(len)?;
    // SAFETY: the memory came from the global allocator just now, with the layout of `len` values, or they have no
    // bytes; no value is initialised.
    let mut values = unsafe { Vec::from_raw_parts(memory.as_ptr(), 0, len) };
    for number in 0..len {
        made_in(&mut values.spare_capacity_mut()[0], |place| make(number, place))?;
        // SAFETY: there is room for `len` values, and `made_in` returned `Ok`, so this one is there.
        unsafe { values.set_len(number + 1) };
    }
    // The length equals the capacity, so the values are not moved.
    Ok(values.into_boxed_slice())
}

pub(crate) fn room_for<T>(len: usize) -> Result<Vec<T>, OutOfMemory> {
    let mut room = Vec::new();
    room.try_reserve_exact(len).map_err(|_| OutOfMemory)?;
    Ok(room)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_slice_has_what_was_made_and_drops_it_where_making_fails() {
        let made = Shared::new(()).unwrap();
        let all = slice(3, |number| Ok((number, made.clone()))).unwrap();
        assert_eq!((all.len(), all[2].0, Shared::owners(&made)), (3, 2, 4));
        drop(all);
        let half = slice(3, |number| if number == 2 { Err(OutOfMemory) } else { Ok(made.clone()) });
        assert_eq!((half.err(), Shared::owners(&made)), (Some(OutOfMemory), 1));
        assert_eq!(slice(1 << 60, |_| Ok([0_u64; 4])).err(), Some(OutOfMemory), "no layout");
        assert_eq!((slice(4, |_| Ok(())).unwrap().len(), slice(0, Ok).unwrap().len()), (4, 0));
        assert_eq!(*boxed([7; 100]).unwrap(), [7; 100]);
    }
}

#[cfg(all(test, loom))]
#[path = "../tests/inside/heap/model.rs"]
mod model;
