//! What a kernel supplies to a driver: registers, memory, a clock. And the errors of a unit.

use core::fmt::Debug;

use portcullis::addr::{IovaRange, PhysAddr};
use portcullis::platform::Frames;

/// The registers of one unit.
///
/// # Safety
/// Memory is freed on what these registers say, so:
///
/// 1. `offset` is in bytes from the first register of the unit; a read returns the unit's answer, and a write reaches the unit once and
///    whole. (64-bit registers that a bus carries in halves: the low half first.)
/// 2. Accesses reach the unit in the order of the calls of one CPU. The unit sees, when it acts on a write, what the CPU stored to memory
///    before the write, or had seen stored by another.
/// 3. A CPU sees after a read what the unit stored to memory before it answered.
/// 4. Another CPU sees what a CPU stored to memory before a write once it knows that the unit has acted on that write: by an answer of the
///    unit, or by a store of the unit.
/// 5. What a CPU loads from memory before a write is loaded before the unit acts on the write.
/// 6. Accesses of several CPUs that the CPUs' stores and loads put in an order reach the unit in that order.
/// 7. An offset beyond the registers does no harm: such a read returns all ones.
/// 8. From the start of a driver until it is shut down or dropped, nothing else writes these registers, and no other driver is started on a
///    host that reaches them. (An index that another driver's ring has reached would confirm commands of this one that the unit has never
///    seen.)
pub unsafe trait Registers: Send + Sync + 'static {
    /// Reads the 32-bit register at `offset`, a multiple of 4.
    fn read32(&self, offset: usize) -> u32;

    /// Writes the 32-bit register at `offset`, a multiple of 4.
    fn write32(&self, offset: usize, value: u32);

    /// Reads the 64-bit register at `offset`, a multiple of 8.
    fn read64(&self, offset: usize) -> u64;

    /// Writes the 64-bit register at `offset`, a multiple of 8.
    fn write64(&self, offset: usize, value: u64);
}

/// The environment of a driver.
///
/// A call of the driver reserves and fills places of the unit's ring, and holds spin locks for some register accesses. If a CPU is delayed
/// there, the others wait, up to their patience: see [`undisturbed`](Self::undisturbed).
pub trait Host: Send + Sync + 'static {
    /// The unit's registers.
    type Registers: Registers;
    /// The memory of the unit's structures.
    type Frames: Frames;

    /// The unit's registers.
    fn registers(&self) -> &Self::Registers;

    /// The memory of the unit's structures.
    fn frames(&self) -> &Self::Frames;

    /// Monotonic time in nanoseconds.
    fn now_ns(&self) -> u64;

    /// Called while polling hardware.
    fn relax(&self) {
        core::hint::spin_loop();
    }

    /// Calls `f` so that nothing that uses the unit interrupts it: with preemption off, and with interrupts off if interrupt handlers map
    /// or unmap, because a handler would wait for its own CPU. `f` reserves places in the unit's ring and waits for the unit or for other
    /// CPUs that do, or holds a lock. Calls may be nested. The default turns nothing off: right for a program whose preempted threads soon
    /// run again.
    fn undisturbed<R>(&self, f: impl FnOnce() -> R) -> R {
        f()
    }

    /// How many CPUs share waits for the unit: one more than the highest number that [`cpu`](Self::cpu) returns. `start` reads it once. One
    /// submission then carries the requests of all CPUs that wait at the same time. [`SharedWaits`](portcullis::invalidation::SharedWaits)
    /// says how many submissions a CPU waits for, how much memory that takes (in VT-d's scalable mode once for each stage), and which
    /// numbers should be near each other. Without that memory `start` still succeeds, and each CPU submits by itself; so it is with the
    /// default, 0. A virtio-iommu ignores this. An SMMUv3 with more command queues assigns each to one CPU, or to a few.
    ///
    /// A CPU waits for others inside [`undisturbed`](Self::undisturbed), as long as their submissions take: each up to four times the
    /// [patience](Self::patience_ns). So no function of the host, or of its frames, may wait for another CPU: that CPU may wait for this
    /// one. A CPU that stops for good meanwhile blocks the others.
    fn cpus(&self) -> usize {
        0
    }

    /// The number of the calling CPU, if CPUs [share](Self::cpus) waits. Called inside [`undisturbed`](Self::undisturbed): nothing else on
    /// this CPU uses the unit then, so interrupt handlers return their CPU's number, too. Return `None` for a caller that `undisturbed`
    /// does not exclude. If `undisturbed` leaves preemption on, this is a thread that may have preempted another caller and keeps it from
    /// running, because it holds a spin lock or has a higher priority. It would wait for that caller for ever, so it submits by itself.
    fn cpu(&self) -> Option<usize> {
        None
    }

    /// The longest wait for one answer, in nanoseconds. 100 ms by default: Linux allows VT-d a second, manuals give no bound.
    fn patience_ns(&self) -> u64 {
        100_000_000
    }
}

/// Why a driver's call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// The registers do not read as a unit's do: there is none, or it is off.
    #[error("no IOMMU answers: its {register} register reads {value:#x}")]
    NotThere {
        /// The register's name.
        register: &'static str,
        /// Its value.
        value: u64,
    },
    /// The unit lacks a feature that the driver needs.
    #[error("the IOMMU lacks {what} ({register} is {value:#x})")]
    Lacks {
        /// The feature.
        what: &'static str,
        /// The register that reports it.
        register: &'static str,
        /// Its value.
        value: u64,
    },
    /// The unit did not answer in time.
    #[error("the IOMMU did not {what} within {waited_ns} ns")]
    TimedOut {
        /// The request.
        what: &'static str,
        /// How long the driver waited.
        waited_ns: u64,
    },
    /// There is no memory for the unit's structures.
    #[error("no memory for the IOMMU's structures")]
    OutOfMemory,
    /// The unit's structures have no room for a device of this number.
    #[error("no device {device:#x} is behind this IOMMU (the highest number that one can have is {last:#x})")]
    NoSuchDevice {
        /// The number.
        device: u32,
        /// The largest number.
        last: u32,
    },
    /// The unit has no such domain number.
    #[error("no domain {domain}: this IOMMU has numbers from {first} to {last}")]
    NoSuchDomain {
        /// The number.
        domain: u16,
        /// The first number that a domain may have.
        first: u16,
        /// The last.
        last: u16,
    },
    /// The unit walks no tables of this shape.
    #[error("the IOMMU walks no tables of {levels} levels")]
    NoSuchTables {
        /// Their levels.
        levels: u32,
    },
    /// The root of a page table is at an address that no root can have.
    #[error(
        "a page table's root is at {root}, where none can be: roots are whole frames at multiples of their size"
    )]
    BadRoot {
        /// The address.
        root: PhysAddr,
    },
    /// The device is attached elsewhere: detach it first.
    #[error("device {device:#x} is attached already: detach it first")]
    Attached {
        /// Its number.
        device: u32,
    },
    /// The device is attached to nothing.
    #[error("device {device:#x} is not attached")]
    NotAttached {
        /// Its number.
        device: u32,
    },
    /// The domain's number is in use.
    #[error("domain {domain} is in use")]
    DomainInUse {
        /// The number.
        domain: u16,
    },
    /// The device reserves addresses that its domain may map.
    #[error("device {device:#x} reserves {range}, which its domain may map: reserve it in the domain, too")]
    Reserved {
        /// The device's number.
        device: u32,
        /// The addresses.
        range: IovaRange,
    },
    /// The unit refused a request.
    #[error("the IOMMU refused to {what} (code {code:#x})")]
    Refused {
        /// The request.
        what: &'static str,
        /// The unit's own code.
        code: u32,
    },
    /// The device is attached, and the unit has not accepted all of the domain's mappings.
    #[error("device {device:#x} is attached, but the IOMMU refused mappings of its domain (code {code:#x})")]
    Incomplete {
        /// The device's number.
        device: u32,
        /// The unit's own code.
        code: u32,
    },
    /// Other clones of the `Arc` exist: only the last one shuts the unit down.
    #[error("the IOMMU is still in use: only the last handle can shut it down")]
    Shared,
    /// The unit did not confirm the invalidation of a device's former context. The device reaches nothing new, and may reach what it
    /// reached until now.
    #[error("the IOMMU did not confirm that it has forgotten a context: {0}")]
    Unconfirmed(portcullis::invalidation::InvalidationError),
}

impl UnitError {
    /// Whether an attach that returns this has changed nothing. After other errors the device may count as attached: detach it before
    /// anything else.
    pub const fn changes_nothing(&self) -> bool {
        match self {
            Self::Lacks { .. }
            | Self::OutOfMemory
            | Self::NoSuchDevice { .. }
            | Self::NoSuchDomain { .. }
            | Self::NoSuchTables { .. }
            | Self::BadRoot { .. }
            | Self::Attached { .. }
            | Self::NotAttached { .. }
            | Self::DomainInUse { .. }
            | Self::Reserved { .. }
            | Self::Refused { .. } => true,
            Self::NotThere { .. }
            | Self::TimedOut { .. }
            | Self::Incomplete { .. }
            | Self::Shared
            | Self::Unconfirmed(_) => false,
        }
    }
}

/// Polls `done` until it is true, for the host's patience.
///
/// # Errors
/// [`UnitError::TimedOut`], with `what`.
pub(crate) fn wait_until<H: Host + ?Sized>(
    host: &H,
    what: &'static str,
    mut done: impl FnMut() -> bool,
) -> Result<(), UnitError> {
    let began = host.now_ns();
    while !done() {
        let waited_ns = host.now_ns().saturating_sub(began);
        // Once more: the caller may have been interrupted since the last poll.
        if waited_ns > host.patience_ns() && !done() {
            return Err(UnitError::TimedOut { what, waited_ns });
        }
        host.relax();
    }
    Ok(())
}
