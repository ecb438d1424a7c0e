//! The owner of a CPU and somebody who revokes it never use its value at the same time, and each sees what the
//! other did before.

use ::loom::cell::UnsafeCell;
use ::loom::sync::Arc;
use ::loom::thread;
use portcullis::heap::{OutOfMemory, Shared, Weak};
use portcullis::percpu::{BiasedLock, Counter, Marks, PerCpu, TurnLocal};
use portcullis::platform::{LocalCpu, Platform, PlatformEvents};

/// A platform with full fences on both sides, as the model checker knows no others.
struct Fences;

// SAFETY: one thread at a time is the owner of CPU 0; fences are full.
unsafe impl Platform for Fences {
    fn cpus(&self) -> usize {
        1
    }

    fn with_cpu<R>(&self, f: impl FnOnce(Option<&LocalCpu<'_>>) -> R) -> R {
        f(Some(&cpu()))
    }

    fn now_ns(&self) -> u64 {
        0
    }

    fn register(&self, _: Weak<dyn PlatformEvents>) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn wake_at(&self, _: u64) {}
}

/// The CPU, for the one thread that is its owner.
fn cpu() -> LocalCpu<'static> {
    // SAFETY: each model has one owner at a time.
    unsafe { LocalCpu::new(0) }
}

/// A value whose simultaneous use loom reports.
struct Value(UnsafeCell<u32>);

// SAFETY: that it is not used by two at once is what the test checks; loom's cell panics if it is.
unsafe impl Sync for Value {}
// SAFETY: as above.
unsafe impl Send for Value {}

impl Value {
    fn add_one(&self) {
        // SAFETY: the pointer is used inside the closure only, and loom watches for others.
        self.0.with_mut(|value| unsafe { *value += 1 });
    }
}

/// One value for CPU 0, wherever its mark is.
trait Values: Send + Sync + 'static {
    fn new() -> Arc<Self>;

    /// The owner's turn with it; whether there was one.
    fn add_one(&self) -> bool;

    fn with_others(&self, only: Option<usize>, f: impl FnMut(usize, &Value));
}

impl Values for BiasedLock<Value> {
    fn new() -> Arc<Self> {
        Arc::new(Self::new(1, || Value(UnsafeCell::new(0))).unwrap())
    }

    fn add_one(&self) -> bool {
        self.with(Some(&cpu()), Value::add_one).is_some()
    }

    fn with_others(&self, only: Option<usize>, f: impl FnMut(usize, &Value)) {
        self.with_others(&Fences, only, f);
    }
}

/// A value whose mark is apart from it.
struct Apart {
    marks: Shared<Marks>,
    value: TurnLocal<Value>,
}

impl Values for Apart {
    fn new() -> Arc<Self> {
        let marks = Shared::new(Marks::new(1).unwrap()).unwrap();
        let value = TurnLocal::new(marks.clone(), 1, |_| Ok(Value(UnsafeCell::new(0)))).unwrap();
        Arc::new(Self { marks, value })
    }

    fn add_one(&self) -> bool {
        let cpu = cpu();
        // SAFETY: there is one platform.
        let turn = unsafe { self.marks.turn(&cpu) };
        turn.as_ref().and_then(|turn| self.value.get(turn)).map(Value::add_one).is_some()
    }

    fn with_others(&self, only: Option<usize>, f: impl FnMut(usize, &Value)) {
        self.value.with_others(&Fences, only, f);
    }
}

/// A value that others have apart, in turns that have another value, too.
struct Beside {
    marks: Shared<Marks>,
    rest: TurnLocal<Value>,
    value: TurnLocal<Value, true>,
}

impl Values for Beside {
    fn new() -> Arc<Self> {
        let marks = Shared::new(Marks::new(1).unwrap()).unwrap();
        let value = || Value(UnsafeCell::new(0));
        let rest = TurnLocal::new(marks.clone(), 1, |_| Ok(value())).unwrap();
        let value = TurnLocal::apart_in(marks.clone(), 1, |_, place| Ok(place.write(value()))).unwrap();
        Arc::new(Self { marks, rest, value })
    }

    fn add_one(&self) -> bool {
        let cpu = cpu();
        // SAFETY: there is one platform.
        let Some(turn) = (unsafe { self.marks.turn(&cpu) }) else { return false };
        // Turns have this one wherever they are not all revoked.
        self.rest.get(&turn).unwrap().add_one();
        self.value.get(&turn).map(Value::add_one).is_some()
    }

    fn with_others(&self, only: Option<usize>, f: impl FnMut(usize, &Value)) {
        self.value.with_others(&Fences, only, f);
    }
}

fn owner_and_revoker<V: Values>() {
    ::loom::model(|| {
        let values = V::new();
        let owner = {
            let values = Arc::clone(&values);
            // Twice: the second may be met in the place of the first.
            thread::spawn(move || u32::from(values.add_one()) + u32::from(values.add_one()))
        };
        values.with_others(None, |_, value| value.add_one());
        let expected = 1 + owner.join().unwrap();
        let mut sum = 0;
        values.with_others(None, |_, value| {
            // SAFETY: as in `add_one`.
            value.0.with(|value| sum = unsafe { *value });
        });
        assert_eq!(sum, expected);
        // Afterwards the owner has it again.
        assert!(values.add_one());
    });
}

#[test]
fn owner_and_revoker_take_turns() {
    owner_and_revoker::<BiasedLock<Value>>();
    owner_and_revoker::<Apart>();
    owner_and_revoker::<Beside>();
}

fn two_revokers<V: Values>() {
    ::loom::model(|| {
        let values = V::new();
        let other = {
            let values = Arc::clone(&values);
            thread::spawn(move || values.with_others(Some(0), |_, value| value.add_one()))
        };
        values.with_others(None, |_, value| value.add_one());
        other.join().unwrap();
        assert!(values.add_one());
    });
}

#[test]
fn two_revokers_take_turns_too() {
    two_revokers::<BiasedLock<Value>>();
    two_revokers::<Apart>();
    two_revokers::<Beside>();
}

/// One revokes all values of a CPU, and then another those that are apart: a turn that goes on with the rest during the second
/// revocation sees what the first did to it.
#[test]
fn a_turn_beside_a_revocation_apart_sees_the_one_before() {
    ::loom::model(|| {
        let values = Beside::new();
        let owner = {
            let values = Arc::clone(&values);
            thread::spawn(move || {
                values.add_one();
            })
        };
        let other = {
            let values = Arc::clone(&values);
            thread::spawn(move || values.rest.with_others(&Fences, None, |_, rest| rest.add_one()))
        };
        values.with_others(None, |_, value| value.add_one());
        other.join().unwrap();
        owner.join().unwrap();
    });
}

/// Two CPUs beyond those that a counter was made for share its last word.
#[test]
fn counts_of_cpus_without_a_word_of_their_own_are_not_lost() {
    ::loom::model(|| {
        let counts = Arc::new(PerCpu::new(1, Counter::default).unwrap());
        let add = |counts: &PerCpu<Counter>, index| {
            let (count, alone) = counts.get(Some(index));
            count.add(alone, 1);
        };
        let other = {
            let counts = Arc::clone(&counts);
            thread::spawn(move || add(&counts, 1))
        };
        add(&counts, 2);
        other.join().unwrap();
        assert_eq!(counts.iter().map(Counter::get).sum::<u64>(), 2);
    });
}
