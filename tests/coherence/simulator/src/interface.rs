//! What the program and the simulator tell each other. Both have this file.

/// What things cost, in picoseconds, and what the machine looks like.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// CPUs.
    pub cpus: u32,
    /// CPUs of a socket.
    pub per_socket: u32,
    /// The core that all of it is simulated on, of those that the process may use; `u32::MAX` leaves that to the system.
    pub core: u32,
    /// Whether the callers of what transfers lines are remembered.
    pub sites: u32,
    /// An access that hits, with the instructions around it.
    pub access: u64,
    /// An atomic read-modify-write, or a full fence, on top.
    pub atomic: u64,
    /// A line that no CPU has.
    pub memory: u64,
    /// A line of another CPU of the same socket.
    pub near: u64,
    /// A line of another socket.
    pub far: u64,
    /// When several CPUs want a copy of an unchanged line, the time from one copy to the next: one place answers for the line. With 0,
    /// all get theirs at once.
    pub answer: u64,
    /// A turn of a loop that waits for another CPU.
    pub spin: u64,
    /// Reading the clock.
    pub clock: u64,
    /// Taking memory from the heap, and giving it back.
    pub heap: u64,
    /// Telling the scheduler to run somebody else.
    pub reschedule: u64,
    /// Waking a thread that sleeps: for the one that wakes it.
    pub wake: u64,
    /// And until it runs.
    pub awake: u64,
    /// A barrier of all CPUs, for the one that asks for it.
    pub barrier: u64,
    /// And for each other.
    pub interrupt: u64,
}

impl Machine {
    /// A server of today in round figures; `docs/scaling.md` says where they come from.
    #[cfg_attr(not(test), allow(dead_code))]
    pub const fn server(cpus: u32, per_socket: u32) -> Self {
        Self {
            cpus,
            per_socket,
            core: u32::MAX,
            sites: 0,
            access: 200,
            atomic: 6_000,
            memory: 5_000,
            near: 60_000,
            far: 120_000,
            answer: 60_000,
            spin: 40_000,
            clock: 20_000,
            heap: 20_000,
            reschedule: 200_000,
            wake: 500_000,
            awake: 2_000_000,
            barrier: 2_000_000,
            interrupt: 300_000,
        }
    }
}

/// What a CPU did between two moments.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// Picoseconds.
    pub time: u64,
    /// Accesses to a cache line.
    pub accesses: u64,
    /// Lines that came from another CPU, or that others had to give up.
    pub transfers: u64,
    /// Of these, those from or in another socket.
    pub far: u64,
    /// Atomic read-modify-writes and full fences.
    pub atomics: u64,
}

/// How many return addresses a site has.
pub const FRAMES: usize = 8;

/// Instructions that transferred lines.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Site {
    /// How often.
    pub count: u64,
    /// Where: the access itself, its caller, and so on; 0 behind the last.
    pub frames: [u64; FRAMES],
}
