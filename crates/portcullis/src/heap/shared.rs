//! [`Shared`]: an `Arc` whose constructor returns an error if there is no memory, as `Arc::try_new` is unstable.
//!
//! Memory ordering, as in `Arc`. A new owner comes from an existing one, so its increment needs no order. A leaving
//! owner releases what it did with the value, and the last acquires what all others did before it drops the value. The
//! strong owners together are one weak owner, so the memory is freed after the value was dropped.

use core::any::{Any, TypeId};
use core::fmt;
use core::marker::PhantomData;
use core::mem::{ManuallyDrop, MaybeUninit};
use core::ops::Deref;
use core::ptr::{self, NonNull};

use alloc::boxed::Box;

use super::atomics::{AtomicUsize, Ordering};
use super::{OutOfMemory, broken, empty_box};

/// The most owners: half of `usize::MAX`, so that concurrent increments that all fail this check cannot wrap the count.
const MOST: usize = usize::MAX / 2;

#[repr(C)]
pub(crate) struct Counted<T: ?Sized> {
    strong: AtomicUsize,
    /// The weak owners, plus one while there are strong owners.
    weak: AtomicUsize,
    value: ManuallyDrop<T>,
}

/// A value with several owners: clones are the same value. The last owner drops it.
pub struct Shared<T: ?Sized> {
    counted: NonNull<Counted<T>>,
    _drops: PhantomData<T>,
}

/// A weak reference to the value of a [`Shared`].
pub struct Weak<T: ?Sized> {
    counted: NonNull<Counted<T>>,
}

// SAFETY: many threads may have `&T` (`Sync`), and the last owner drops the value on any of them (`Send`).
unsafe impl<T: ?Sized + Send + Sync> Send for Shared<T> {}
// SAFETY: as above; a thread with a reference may clone an owner.
unsafe impl<T: ?Sized + Send + Sync> Sync for Shared<T> {}
// SAFETY: it may be upgraded to an owner, which is `Send`.
unsafe impl<T: ?Sized + Send + Sync> Send for Weak<T> {}
// SAFETY: as above.
unsafe impl<T: ?Sized + Send + Sync> Sync for Weak<T> {}

impl<T> Shared<T> {
    /// Makes the first owner of `value`.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the value is dropped.
    pub fn new(value: T) -> Result<Self, OutOfMemory> {
        Ok(SharedPlace::new()?.fill(value))
    }
}

pub(crate) struct SharedPlace<T>(Box<MaybeUninit<Counted<T>>>);

impl<T> SharedPlace<T> {
    pub(crate) fn new() -> Result<Self, OutOfMemory> {
        empty_box().map(Self)
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        // SAFETY: the field lies in the box's memory.
        unsafe { (&raw mut (*self.0.as_mut_ptr()).value).cast() }
    }

    /// Makes the first owner of the value that was built.
    ///
    /// # Safety
    /// 1. The value was written to [`as_mut_ptr`](Self::as_mut_ptr).
    pub(crate) unsafe fn filled(mut self) -> Shared<T> {
        let at = self.0.as_mut_ptr();
        // SAFETY: the counts are fields in the box; with them and the value (clause 1) all of it is initialised.
        let counted = unsafe {
            (&raw mut (*at).strong).write(AtomicUsize::new(1));
            (&raw mut (*at).weak).write(AtomicUsize::new(1));
            self.0.assume_init()
        };
        Shared { counted: NonNull::from(Box::leak(counted)), _drops: PhantomData }
    }

    /// Inlined, so that the compiler can build the value in its place.
    #[inline(always)]
    pub(crate) fn fill(self, value: T) -> Shared<T> {
        let (strong, weak) = (AtomicUsize::new(1), AtomicUsize::new(1));
        let counted = Box::write(self.0, Counted { strong, weak, value: ManuallyDrop::new(value) });
        Shared { counted: NonNull::from(Box::leak(counted)), _drops: PhantomData }
    }
}

impl<T> Shared<T> {
    /// Returns the value, if it has no other owner.
    ///
    /// # Errors
    /// `this`, if the value has other owners.
    pub fn try_unwrap(this: Self) -> Result<T, Self> {
        // Acquire: as where the last owner drops it.
        if this.strong().compare_exchange(1, 0, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Err(this);
        }
        let this = ManuallyDrop::new(this);
        // Frees the memory, unless a weak owner has it.
        let _memory = Weak { counted: this.counted };
        // SAFETY: this was the last owner, and no upgrade makes another; nothing reads the value after this.
        Ok(unsafe { ManuallyDrop::take(&mut (*this.counted.as_ptr()).value) })
    }
}

impl<T: ?Sized> Shared<T> {
    fn strong(&self) -> &AtomicUsize {
        // SAFETY: a strong owner keeps the memory allocated.
        unsafe { &(*self.counted.as_ptr()).strong }
    }

    /// Returns the number of owners: a hint, if others come and go meanwhile.
    pub fn owners(this: &Self) -> usize {
        this.strong().load(Ordering::Relaxed)
    }

    /// Whether both are the same value.
    pub fn ptr_eq(this: &Self, other: &Self) -> bool {
        ptr::addr_eq(this.counted.as_ptr(), other.counted.as_ptr())
    }

    /// Makes a weak owner.
    pub fn downgrade(this: &Self) -> Weak<T> {
        // SAFETY: a strong owner keeps the memory allocated.
        count(unsafe { &(*this.counted.as_ptr()).weak });
        Weak { counted: this.counted }
    }

    /// Converts the owner's type, by an unsizing coercion for one: `|counted| counted` makes a `dyn Trait`.
    ///
    /// # Safety
    /// 1. `to` returns its argument, as a pointer to the same value by a type that the value has.
    pub(crate) unsafe fn cast<U: ?Sized>(
        this: Self,
        to: impl FnOnce(*mut Counted<T>) -> *mut Counted<U>,
    ) -> Shared<U> {
        let this = ManuallyDrop::new(this);
        // SAFETY: the pointer is not null, as it is the argument (clause 1).
        Shared { counted: unsafe { NonNull::new_unchecked(to(this.counted.as_ptr())) }, _drops: PhantomData }
    }
}

impl Shared<dyn Any + Send + Sync> {
    pub(crate) fn downcast<T: Any + Send + Sync>(self) -> Option<Shared<T>> {
        // SAFETY: `cast`, 1: the type was compared, so the value is a `T`.
        ((*self).type_id() == TypeId::of::<T>()).then(|| unsafe { Self::cast(self, <*mut _>::cast) })
    }
}

#[inline]
fn count(owners: &AtomicUsize) {
    // Relaxed: the caller's own is counted already.
    if owners.fetch_add(1, Ordering::Relaxed) > MOST {
        owners.fetch_sub(1, Ordering::Relaxed);
        broken("a value has fewer owners than addresses");
    }
}

/// For the last owner: makes visible what all earlier owners did. Its load reads its own decrement, which belongs to
/// the release sequences of all others' decrements. (A fence would do, but ThreadSanitizer does not model fences.)
fn acquire(owners: &AtomicUsize) {
    owners.load(Ordering::Acquire);
}

impl<T: ?Sized> Clone for Shared<T> {
    #[inline]
    fn clone(&self) -> Self {
        count(self.strong());
        Self { counted: self.counted, _drops: PhantomData }
    }
}

impl<T: ?Sized> Deref for Shared<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: a strong owner keeps the value alive, and owners give out only shared references.
        unsafe { &(*self.counted.as_ptr()).value }
    }
}

impl<T: ?Sized> Drop for Shared<T> {
    #[inline]
    fn drop(&mut self) {
        if self.strong().fetch_sub(1, Ordering::Release) == 1 {
            self.end();
        }
    }
}

impl<T: ?Sized> Shared<T> {
    #[inline(never)]
    fn end(&mut self) {
        acquire(self.strong());
        // Frees the memory after the value, also if its drop panics.
        let _memory = Weak { counted: self.counted };
        // SAFETY: this was the last owner, and no upgrade makes another; nothing reads the value after this.
        unsafe { ManuallyDrop::drop(&mut (*self.counted.as_ptr()).value) };
    }
}

impl<T: ?Sized> Weak<T> {
    /// Returns an owner of the value, if that has one.
    pub fn upgrade(&self) -> Option<Shared<T>> {
        let strong = self.strong();
        let mut owners = strong.load(Ordering::Relaxed);
        loop {
            if owners == 0 || owners > MOST {
                return None;
            }
            // Acquire: makes visible what was done before the value was shared.
            match strong.compare_exchange_weak(owners, owners + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Shared { counted: self.counted, _drops: PhantomData }),
                Err(now) => owners = now,
            }
        }
    }

    fn strong(&self) -> &AtomicUsize {
        // SAFETY: a weak owner keeps the memory allocated.
        unsafe { &(*self.counted.as_ptr()).strong }
    }

    fn weak(&self) -> &AtomicUsize {
        // SAFETY: a weak owner keeps the memory allocated.
        unsafe { &(*self.counted.as_ptr()).weak }
    }

    /// Returns the number of strong owners: a hint, if others come and go meanwhile; but 0 stays 0.
    pub fn owners(&self) -> usize {
        self.strong().load(Ordering::Relaxed)
    }

    /// Whether both lead to the same value.
    pub fn ptr_eq(this: &Self, other: &Self) -> bool {
        ptr::addr_eq(this.counted.as_ptr(), other.counted.as_ptr())
    }
}

impl<T: ?Sized> Clone for Weak<T> {
    fn clone(&self) -> Self {
        count(self.weak());
        Self { counted: self.counted }
    }
}

impl<T: ?Sized> Drop for Weak<T> {
    fn drop(&mut self) {
        if self.weak().fetch_sub(1, Ordering::Release) == 1 {
            acquire(self.weak());
            // SAFETY: the memory came from a box. This was the last weak owner, so the value was dropped before, and a
            // `ManuallyDrop` does not drop it again.
            drop(unsafe { Box::from_raw(self.counted.as_ptr()) });
        }
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T: ?Sized> fmt::Debug for Weak<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(Weak)")
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../../tests/inside/heap/shared.rs"]
mod tests;
