//! What a kernel supplies to a driver: registers, memory, a clock. What goes wrong with a unit as a whole.

use core::fmt::Debug;

use portcullis::addr::{IovaRange, PhysAddr};
use portcullis::platform::Frames;

/// The registers of one unit.
///
/// # Safety
/// Memory goes back to its owner on what these registers say, so:
///
/// - `offset` is counted in bytes from the first register of the unit; a read returns what the unit answers, and a write
///   reaches the unit, once and whole. (64-bit registers that a bus carries in halves: the low half first.)
/// - Accesses reach the unit in the order of the calls of one CPU. What a CPU has stored to memory before a write, or has
///   seen stored by another, is seen by the unit when it acts on the write.
/// - What the unit has stored to memory before it answers a read, a CPU sees after that read.
/// - What a CPU has stored to memory before a write, another CPU sees once it knows that the unit has acted on that write: by an
///   answer of the unit, or by what the unit has stored.
/// - What a CPU has loaded from memory before a write, it has loaded before the unit acts on the write.
/// - Accesses of several CPUs, of which one comes before another by what the CPUs have stored and loaded, reach the unit in that
///   order.
/// - An offset beyond the registers does no harm: such a read returns all ones.
/// - From the start of a driver until it is shut down, or dropped for good, nothing else writes these registers, and no other driver
///   is started on a host that reaches them. (An index that another driver's ring has come to would confirm commands of this one's
///   that the unit has never seen.)
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

/// What a driver stands on.
///
/// A call of the driver takes places in the unit's ring and fills them, and holds spin locks for some accesses of registers. A CPU
/// that is kept from going on there keeps the others waiting, up to their patience: see [`undisturbed`](Self::undisturbed).
pub trait Host: Send + Sync + 'static {
    /// The unit's registers.
    type Registers: Registers;
    /// The memory that the unit's structures are made of.
    type Frames: Frames;

    /// The registers.
    fn registers(&self) -> &Self::Registers;

    /// The memory.
    fn frames(&self) -> &Self::Frames;

    /// Nanoseconds since some fixed time. Never goes backwards.
    fn now_ns(&self) -> u64;

    /// Called between two looks at hardware that has not answered yet.
    fn relax(&self) {
        core::hint::spin_loop();
    }

    /// Calls `f`, which takes places in the unit's ring and waits for the unit or for other CPUs that do, or holds a lock, so that nothing that uses the unit
    /// interrupts it: with preemption off; and with interrupts off where their handlers map or unmap, as a handler would wait for
    /// what its own CPU has not done. Calls may be nested. By default nothing is turned off: right for a program whose preempted
    /// threads go on soon.
    fn undisturbed<R>(&self, f: impl FnOnce() -> R) -> R {
        f()
    }

    /// How many CPUs share their waits for the unit: one more than the highest number that [`cpu`](Self::cpu) returns. `start` asks once. Then one submission
    /// carries the requests of all CPUs that wait at the same time. [`SharedWaits`](portcullis::invalidation::SharedWaits) says how many
    /// submissions a CPU waits for, how much memory that takes (in VT-d's scalable mode once for each stage), and which numbers should be near each other. Without
    /// that memory `start` succeeds all the same, and each CPU submits by itself. The default, 0, does so, too. A virtio-iommu does not ask. An SMMUv3 that has
    /// more command queues gives each CPU its own, or to a few of them one together.
    ///
    /// A CPU waits for others inside of [`undisturbed`](Self::undisturbed), as long as their submissions take: each takes up to four times the
    /// [patience](Self::patience_ns). So no function of the host, or of its frames, may wait for another CPU: that CPU may wait for this one. A CPU that
    /// stops for good meanwhile keeps the others waiting.
    fn cpus(&self) -> usize {
        0
    }

    /// The number of the CPU that calls, where [`cpus`](Self::cpus) share their waits. The driver asks inside of [`undisturbed`](Self::undisturbed): nothing else on
    /// this CPU uses the unit then, so interrupt handlers return their CPU's number, too. Return `None` for a caller that `undisturbed` does not
    /// keep away. Where `undisturbed` leaves preemption on, this is a thread that may have preempted another caller and keeps it from running, because it holds
    /// a spin lock or has a higher priority. It would wait for that caller for ever, so it submits by itself.
    fn cpu(&self) -> Option<usize> {
        None
    }

    /// The longest that the driver waits for one answer, in nanoseconds. 100 ms by default: Linux allows VT-d a second,
    /// manuals give no bound.
    fn patience_ns(&self) -> u64 {
        100_000_000
    }
}

/// Something that a driver cannot do with its unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// The registers do not answer as a unit's would: nothing is there, or it is off.
    #[error("no IOMMU answers: its {register} register reads {value:#x}")]
    NotThere {
        /// The register's name.
        register: &'static str,
        /// What it says.
        value: u64,
    },
    /// The unit lacks what the driver needs.
    #[error("the IOMMU lacks {what} ({register} is {value:#x})")]
    Lacks {
        /// What it lacks.
        what: &'static str,
        /// The register that says so.
        register: &'static str,
        /// What it says.
        value: u64,
    },
    /// The unit did not answer in time.
    #[error("the IOMMU did not {what} within {waited_ns} ns")]
    TimedOut {
        /// What it was asked to do.
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
    /// The root of a page table that is no frame's address.
    #[error(
        "a page table's root is at {root}, where none can be: roots are whole frames at multiples of their size"
    )]
    BadRoot {
        /// The address.
        root: PhysAddr,
    },
    /// The device is led to something else: detach it first.
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
    /// The device keeps addresses for itself that its domain may map.
    #[error("device {device:#x} keeps {range} for itself: reserve it in the domain, which may map it")]
    Reserved {
        /// The device's number.
        device: u32,
        /// The addresses.
        range: IovaRange,
    },
    /// The unit refused what it was asked for.
    #[error("the IOMMU refused to {what} (code {code:#x})")]
    Refused {
        /// What it was asked to do.
        what: &'static str,
        /// The unit's own code.
        code: u32,
    },
    /// The device is attached, and the unit has not taken all that the domain maps.
    #[error("device {device:#x} is attached, but the IOMMU refused mappings of its domain (code {code:#x})")]
    Incomplete {
        /// The device's number.
        device: u32,
        /// The unit's own code.
        code: u32,
    },
    /// Others have the unit, too: it is shut down by the last.
    #[error("the IOMMU is in use elsewhere: the last that has it can shut it down")]
    Shared,
    /// The unit did not confirm that it has forgotten a device's former context. The device reaches nothing new, and may
    /// reach what it reached until now.
    #[error("the IOMMU did not confirm that it has forgotten a context: {0}")]
    Unconfirmed(portcullis::invalidation::InvalidationError),
}

impl UnitError {
    /// Whether a call that returns this, to attach a device, has changed nothing. After others the device may count as attached,
    /// and is detached before anything else is done with it.
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

/// Looks until `done` is true, for as long as `host` has patience.
///
/// # Errors
/// [`UnitError::TimedOut`], which says `what`.
pub(crate) fn wait_until<H: Host + ?Sized>(
    host: &H,
    what: &'static str,
    mut done: impl FnMut() -> bool,
) -> Result<(), UnitError> {
    let began = host.now_ns();
    while !done() {
        let waited_ns = host.now_ns().saturating_sub(began);
        // One more look: the caller may have been interrupted since the last.
        if waited_ns > host.patience_ns() && !done() {
            return Err(UnitError::TimedOut { what, waited_ns });
        }
        host.relax();
    }
    Ok(())
}
