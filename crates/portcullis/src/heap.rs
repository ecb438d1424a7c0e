//! Memory from the heap that may be refused: a kernel whose heap is empty goes on, with an error.
//!
//! `Box::new`, `Arc::new`, `collect` and an insertion into a map of `alloc`'s stop the program where there is no memory. So the
//! crate takes boxes, slices and [shared values](Shared) from here, and grows a `Vec` by `try_reserve` alone. Large values are
//! built where they stay (`slice_in`), as the stack of a kernel has no room for them.

mod shared;

/// Writes fields of a `Self`, each where it is to stay, in the place that `at` leads to; `made` names the fields that are there already.
/// It does not compile where a field is in neither list. Each field may be written as [`MaybeUninit`]'s contents may be.
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

/// The atomics that count the owners of a [`Shared`]: not the model checker's, which has a test of its own for them.
mod atomics {
    pub use core::sync::atomic::{AtomicUsize, Ordering};
}

/// The heap has no memory. What was to be kept there is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the heap has no memory")]
pub struct OutOfMemory;

/// The place of a field, for a constructor that makes the field there.
///
/// # Safety
/// `field` leads to a field of a place that the caller has to itself for `'a`, and reaches in no other way meanwhile.
pub(crate) unsafe fn place_of<'a, T>(field: *mut T) -> &'a mut MaybeUninit<T> {
    // SAFETY: the caller's promise; nothing need be in the place.
    unsafe { &mut *field.cast() }
}

/// Memory for `count` values, of which none is there yet.
fn memory_for<T>(count: usize) -> Result<NonNull<T>, OutOfMemory> {
    let layout = Layout::array::<T>(count).map_err(|_| OutOfMemory)?;
    if layout.size() == 0 {
        return Ok(NonNull::dangling());
    }
    // SAFETY: the layout has bytes.
    NonNull::new(unsafe { alloc(layout) }).map(NonNull::cast).ok_or(OutOfMemory)
}

/// A box in which there is no value yet.
pub(crate) fn empty_box<T>() -> Result<Box<MaybeUninit<T>>, OutOfMemory> {
    let memory = memory_for::<MaybeUninit<T>>(1)?;
    // SAFETY: the memory came from the global allocator just now, with the layout of the value, which needs no bytes to be set.
    Ok(unsafe { Box::from_raw(memory.as_ptr()) })
}

/// As `Box::new`.
pub(crate) fn boxed<T>(value: T) -> Result<Box<T>, OutOfMemory> {
    Ok(Box::write(empty_box()?, value))
}

/// A box whose value is too large for a stack: `make` is given its place, and returns the value there.
pub(crate) fn boxed_in<T, E: From<OutOfMemory>>(
    make: impl for<'a> FnOnce(&'a mut MaybeUninit<T>) -> Result<&'a mut T, E>,
) -> Result<Box<T>, E> {
    let mut place = empty_box()?;
    made_in(&mut place, make)?;
    // SAFETY: `made_in` has returned, so the value is there.
    Ok(unsafe { place.assume_init() })
}

/// A value that `make` is given the place of, for a caller that has room for it: `make` returns the value there.
pub(crate) fn made<T, E>(
    make: impl for<'a> FnOnce(&'a mut MaybeUninit<T>) -> Result<&'a mut T, E>,
) -> Result<T, E> {
    let mut place = MaybeUninit::uninit();
    made_in(&mut place, make)?;
    // SAFETY: `made_in` has returned, so the value is there.
    Ok(unsafe { place.assume_init() })
}

/// Has `make` put a value in `place`. When this returns `Ok`, the value is there.
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

/// A slice of `len` values, each made by `make`, which is given its number. `make` may be refused memory, too.
pub(crate) fn slice<T>(
    len: usize,
    mut make: impl FnMut(usize) -> Result<T, OutOfMemory>,
) -> Result<Box<[T]>, OutOfMemory> {
    slice_in(len, |number, place| Ok(place.write(make(number)?)))
}

/// As [`slice`], for values that are too large for a stack: `make` is given the place of each, and returns the value there.
pub(crate) fn slice_in<T>(
    len: usize,
    mut make: impl for<'a> FnMut(usize, &'a mut MaybeUninit<T>) -> Result<&'a mut T, OutOfMemory>,
) -> Result<Box<[T]>, OutOfMemory> {
    let memory = memory_for::<T>(len)?;
    // SAFETY: the memory came from the global allocator just now, with the layout of `len` values, or they have no bytes; none of
    // them is there.
    let mut values = unsafe { Vec::from_raw_parts(memory.as_ptr(), 0, len) };
    for number in 0..len {
        made_in(&mut values.spare_capacity_mut()[0], |place| make(number, place))?;
        // SAFETY: there is room for `len` values, and `made_in` has returned, so this one is there.
        unsafe { values.set_len(number + 1) };
    }
    // As many values as there is room for, so they stay where they are.
    Ok(values.into_boxed_slice())
}

/// An empty vector with room for `len` values.
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
