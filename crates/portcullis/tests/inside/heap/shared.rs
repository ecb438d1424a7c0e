use super::*;

/// Says how often it was dropped.
struct Drops<'a>(&'a core::cell::Cell<u32>);

impl Drop for Drops<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

#[test]
fn the_last_owner_drops_the_value_and_weak_ones_find_none_then() {
    let drops = core::cell::Cell::new(0);
    let first = Shared::new(Drops(&drops)).unwrap();
    let weak = Shared::downgrade(&first);
    let other = weak.upgrade().unwrap();
    assert!(Shared::ptr_eq(&first, &other) && Weak::ptr_eq(&weak, &Shared::downgrade(&other)));
    drop(first);
    assert_eq!((weak.owners(), drops.get()), (1, 0));
    drop(other);
    assert_eq!((weak.owners(), drops.get()), (0, 1));
    assert!(weak.clone().upgrade().is_none());
    drop(weak);
    assert_eq!(drops.get(), 1);
    let first = Shared::new(7).unwrap();
    let (weak, other) = (Shared::downgrade(&first), Shared::try_unwrap(first.clone()).unwrap_err());
    drop(other);
    assert_eq!((Shared::owners(&first), Shared::try_unwrap(first).ok()), (1, Some(7)));
    assert!(weak.upgrade().is_none());
}

#[test]
fn a_value_of_a_trait_is_the_same_value() {
    // SAFETY: an unsizing coercion.
    let any = |value: Shared<u64>| unsafe { Shared::cast::<dyn Any + Send + Sync>(value, |counted| counted) };
    let value: Shared<u64> = Shared::new(7).unwrap();
    let other = any(value.clone());
    assert_eq!(Shared::owners(&value), 2);
    assert!(other.clone().downcast::<u32>().is_none());
    assert!(Shared::ptr_eq(&other.downcast::<u64>().unwrap(), &value));
    assert_eq!(Shared::owners(&value), 1);
    // Of no bytes, and aligned to more than the counts.
    #[repr(align(64))]
    struct Aligned(u8);
    let aligned = Shared::new(Aligned(9)).unwrap();
    assert_eq!((aligned.0, (&raw const *aligned).addr() % 64), (9, 0));
    drop(Shared::new(()).unwrap());
}

/// Random owners come and go beside two numbers, until the memory's last goes.
#[test]
fn owners_are_counted_and_so_are_those_of_the_memory() {
    for unwraps in [false, true] {
        let drops = core::cell::Cell::new(0);
        let (mut strong, mut weak) =
            (alloc::vec![Shared::new(Drops(&drops)).unwrap()], alloc::vec::Vec::new());
        for step in 0..200_u32 {
            match step.wrapping_mul(0x9e37_79b9) >> 29 {
                0 | 1 => strong.push(strong[strong.len() / 2].clone()),
                2 => weak.push(Shared::downgrade(&strong[0])),
                3 => weak.extend(weak.last().cloned()),
                4 => strong.extend(weak.last().and_then(Weak::upgrade)),
                5 => _ = weak.pop(),
                _ if strong.len() > 1 => _ = strong.pop(),
                _ => {}
            }
            assert_eq!((Shared::owners(&strong[0]), drops.get()), (strong.len(), 0), "step {step}");
            let of_memory = Shared::downgrade(&strong[0]);
            assert_eq!(of_memory.weak().load(Ordering::Relaxed), weak.len() + 2);
        }
        let last = Shared::downgrade(&strong[0]);
        weak.clear();
        strong.truncate(1);
        let only = strong.remove(0);
        match unwraps {
            true => drop(Shared::try_unwrap(only).ok().expect("it is the only owner")),
            false => drop(only),
        }
        assert_eq!((drops.get(), last.owners(), last.weak().load(Ordering::Relaxed)), (1, 0, 1), "{unwraps}");
    }
}

/// The memory's count goes down where the value's drop panics, too.
#[test]
fn a_drop_that_panics_leaves_no_owner() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("by the test");
        }
    }
    let only = Shared::new(Panics).unwrap();
    let weak = Shared::downgrade(&only);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(only))).is_err());
    assert_eq!((weak.owners(), weak.weak().load(Ordering::Relaxed)), (0, 1));
}

/// Half of what a count holds is the border, on both sides.
#[test]
fn owners_beyond_all_addresses_are_refused() {
    let only = Shared::new(7).unwrap();
    let weak = Shared::downgrade(&only);
    let refused = |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
    for owners in [MOST, MOST + 1, usize::MAX - 2] {
        let is_refused = owners > MOST;
        only.strong().store(owners, Ordering::Relaxed);
        assert_eq!(refused(&|| core::mem::forget(only.clone())), is_refused, "{owners:#x}");
        assert_eq!(Shared::owners(&only), owners + usize::from(!is_refused));
        only.strong().store(owners, Ordering::Relaxed);
        assert_eq!(weak.upgrade().map(core::mem::forget).is_none(), is_refused, "{owners:#x}");
        only.strong().store(1, Ordering::Relaxed);
        weak.weak().store(owners, Ordering::Relaxed);
        assert_eq!(refused(&|| core::mem::forget(weak.clone())), is_refused);
        weak.weak().store(owners, Ordering::Relaxed);
        assert_eq!(refused(&|| core::mem::forget(Shared::downgrade(&only))), is_refused);
        assert_eq!(weak.weak().load(Ordering::Relaxed), owners + usize::from(!is_refused));
        weak.weak().store(2, Ordering::Relaxed);
    }
}
