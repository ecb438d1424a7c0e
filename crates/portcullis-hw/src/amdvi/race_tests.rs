//! One CPU looks for errors while another turns the unit on, and a third submits. Each step waits for the previous one.

extern crate std;

use core::cell::Cell;
use core::sync::atomic::{AtomicU32, Ordering};
use std::sync::OnceLock;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use std::vec::Vec;

use portcullis::addr::{DomainId, Iova, IovaRange, PhysAddr};
use portcullis::invalidation::{Invalidation, InvalidationQueue};
use portcullis::platform::{Frames, Table};

use super::layout::{command, control, entry, feature, reg, ring_index, ring_place, status};
use super::{Config, Unit};
use crate::fake::Memory;
use crate::host::{Host, Registers};
use crate::iommu::Iommu;

/// The longest wait of a CPU.
const LONG: Duration = Duration::from_secs(60);

/// Steps in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Begin,
    /// The driver takes commands, and is about to turn the unit on.
    Enabling,
    /// The looking CPU has read that the unit does not run, or waits without reading.
    Looked,
    Enabled,
    /// It is about to replace a command, or does not replace one.
    Replacing,
    /// The third CPU has written a command, and not rung yet.
    Written,
    /// The looking CPU has finished.
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Cpu {
    Test,
    Enables,
    Looks,
    Submits,
}

std::thread_local! {
    static CPU: Cell<Cpu> = const { Cell::new(Cpu::Test) };
    /// This CPU's counted accesses.
    static SEEN: Cell<u32> = const { Cell::new(0) };
}

struct Steps(Mutex<Step>, Condvar);

impl Steps {
    fn go(&self, to: Step) {
        let mut step = self.0.lock().unwrap();
        *step = to.max(*step);
        self.1.notify_all();
    }

    fn until(&self, at: Step) {
        let step = self.0.lock().unwrap();
        let (_step, waited) = self.1.wait_timeout_while(step, LONG, |step| *step < at).unwrap();
        assert!(!waited.timed_out(), "no CPU comes to {at:?}");
    }
}

/// Counts an access of this CPU. Returns whether it is the `nth`.
fn is_nth(nth: u32) -> bool {
    SEEN.set(SEEN.get() + 1);
    SEEN.get() == nth
}

struct Shared {
    memory: Memory,
    steps: Steps,
    /// Control, command base, event base, head, tail.
    registers: Mutex<[u64; 5]>,
    done: Mutex<Vec<[u64; 2]>>,
}

impl Shared {
    fn runs(registers: &[u64; 5]) -> bool {
        let on = control::IOMMU_EN | control::CMD_BUF_EN;
        registers[0] & on == on
    }

    fn process(&self, registers: &mut [u64; 5]) {
        while Self::runs(registers) && registers[3] != registers[4] {
            let at = (registers[1] & entry::ADDRESS) + registers[3];
            let word = |at| self.memory.word(at).load(Ordering::Acquire);
            let command = [word(at), word(at + 8)];
            if command[0] >> 60 == 1 && command[0] & 1 != 0 {
                let address = command[0] & (entry::ADDRESS | 0xff8);
                self.memory.word(address).store(command[1], Ordering::Release);
            }
            self.done.lock().unwrap().push(command);
            registers[3] = ring_place(ring_index(registers[3] + 16));
        }
    }
}

struct TestHost(Arc<Shared>);

// SAFETY: the memory's clauses.
unsafe impl Frames for TestHost {
    fn alloc(&self, count: usize) -> Option<PhysAddr> {
        self.0.memory.alloc(count)
    }

    unsafe fn free(&self, first: PhysAddr, count: usize) {
        // SAFETY: clauses 1 and 2 are the caller's.
        unsafe { self.0.memory.free(first, count) };
    }

    unsafe fn table(&self, frame: PhysAddr) -> &Table {
        let steps = &self.0.steps;
        match CPU.get() {
            // It has read the first word of the supposed bad command, and stores both words.
            Cpu::Looks if SEEN.get() >= 2 && is_nth(4) => {
                steps.go(Step::Replacing);
                steps.until(Step::Written);
            }
            // Both words of its command are stored, the wait's are not.
            Cpu::Submits if is_nth(3) => {
                steps.go(Step::Written);
                steps.until(Step::Done);
            }
            _ => {}
        }
        // SAFETY: clause 1 is the caller's.
        unsafe { self.0.memory.table(frame) }
    }
}

// SAFETY: 1 to 6: one lock serializes accesses; the unit's memory accesses are atomic. 7: other offsets are in the match. 8: only this test
// uses it.
unsafe impl Registers for TestHost {
    fn read32(&self, _: usize) -> u32 {
        0
    }

    fn write32(&self, _: usize, _: u32) {}

    fn read64(&self, offset: usize) -> u64 {
        let registers = self.0.registers.lock().unwrap();
        let value = match offset {
            reg::EXTENDED_FEATURE => feature::IA_SUP,
            reg::CONTROL => registers[0],
            reg::COMMAND_BASE => registers[1],
            reg::COMMAND_HEAD => registers[3],
            reg::STATUS if Shared::runs(&registers) => status::CMD_BUF_RUN | status::EVENT_LOG_RUN,
            _ => 0,
        };
        drop(registers);
        // The second read, under the queue's lock, finds that the unit does not run; then it does.
        if offset == reg::STATUS && value == 0 && CPU.get() == Cpu::Looks && is_nth(2) {
            self.0.steps.go(Step::Looked);
            self.0.steps.until(Step::Enabled);
        }
        value
    }

    fn write64(&self, offset: usize, value: u64) {
        if offset == reg::DEVICE_TABLE_BASE && CPU.get() == Cpu::Enables {
            self.0.steps.go(Step::Enabling);
            self.0.steps.until(Step::Looked);
        }
        if CPU.get() == Cpu::Looks && offset == reg::CONTROL {
            // It resumes the unit: it has replaced the command.
            self.0.steps.go(Step::Done);
        }
        let mut registers = self.0.registers.lock().unwrap();
        match offset {
            reg::CONTROL => registers[0] = value,
            reg::COMMAND_BASE => registers[1] = value,
            reg::COMMAND_HEAD => registers[3] = value,
            reg::COMMAND_TAIL => registers[4] = value,
            _ => {}
        }
        self.0.process(&mut registers);
    }
}

impl Host for TestHost {
    type Registers = Self;
    type Frames = Self;

    fn registers(&self) -> &Self {
        self
    }

    fn frames(&self) -> &Self {
        self
    }

    fn now_ns(&self) -> u64 {
        static BEGAN: OnceLock<Instant> = OnceLock::new();
        BEGAN.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }

    fn patience_ns(&self) -> u64 {
        LONG.as_nanos() as u64
    }

    fn relax(&self) {
        static WAITED: AtomicU32 = AtomicU32::new(0);
        if CPU.get() == Cpu::Looks && WAITED.fetch_add(1, Ordering::Relaxed) == 1_000 {
            // It does not check a unit that is not on.
            self.0.steps.go(Step::Looked);
        }
        std::thread::yield_now();
    }
}

/// Case "amdrace": the CPU that had read that the unit does not run replaced the third CPU's command, which was then confirmed.
#[test]
fn a_unit_that_is_being_turned_on_has_not_stopped() {
    let shared = Arc::new(Shared {
        memory: Memory::new(8),
        steps: Steps(Mutex::new(Step::Begin), Condvar::new()),
        registers: Mutex::default(),
        done: Mutex::default(),
    });
    let config = Config { last_device: 255, capability: None };
    let unit = Unit::start(TestHost(Arc::clone(&shared)), config).unwrap();
    let page = |n: u64| Invalidation::Range {
        range: IovaRange::new(Iova::new(n << 12), 4096).unwrap(),
        leaf_only: true,
    };
    let steps = &shared.steps;
    let confirmed = std::thread::scope(|scope| {
        scope.spawn(|| {
            CPU.set(Cpu::Enables);
            assert_eq!(unit.enable(), Ok(()));
            steps.go(Step::Enabled);
        });
        steps.until(Step::Enabling);
        let first = scope.spawn(|| {
            CPU.set(Cpu::Looks);
            let confirmed = unit.invalidate(DomainId(1), page(0x111));
            steps.go(Step::Done);
            confirmed
        });
        steps.until(Step::Replacing);
        let second = scope.spawn(|| {
            CPU.set(Cpu::Submits);
            unit.invalidate(DomainId(2), page(0x222))
        });
        [first.join().unwrap(), second.join().unwrap()]
    });
    let done = shared.done.lock().unwrap();
    let is_done = |domain, number: u64| done.contains(&command::pages(domain, number << 12, 0, true));
    assert!(confirmed[1].is_err() || is_done(2, 0x222), "confirmed, and the unit never saw it: {done:x?}");
    assert!(is_done(1, 0x111));
    assert_eq!(confirmed, [Ok(()); 2], "nothing was wrong");
}
