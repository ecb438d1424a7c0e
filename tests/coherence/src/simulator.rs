//! The simulator, as the program finds it: a library that was linked to it.

use std::sync::OnceLock;

use libloading::os::unix::{Library, Symbol};

#[path = "../simulator/src/interface.rs"]
mod interface;
pub use interface::{Figures, Machine, Site};

macro_rules! functions {
    ($($name:ident: $type:ty = $symbol:literal;)*) => {
        /// Its functions, which are described in `simulator/src/control.rs`.
        pub struct Simulator {
            $($name: Symbol<$type>,)*
        }

        impl Simulator {
            fn find() -> Result<Self, libloading::Error> {
                let program = Library::this();
                // SAFETY: the functions have these types; `simulator/src/control.rs` holds them.
                Ok(unsafe { Self { $($name: program.get($symbol)?,)* } })
            }
        }
    };
}

functions! {
    start: extern "C" fn(&Machine) = b"coherence_start";
    arrive: extern "C" fn(u32) = b"coherence_arrive";
    arrived: extern "C" fn() -> u32 = b"coherence_arrived";
    leave: extern "C" fn() = b"coherence_leave";
    begin: extern "C" fn() = b"coherence_begin";
    end: extern "C" fn(&mut Figures) = b"coherence_end";
    ended: extern "C" fn() -> u32 = b"coherence_ended";
    now: extern "C" fn() -> u64 = b"coherence_now";
    wait: extern "C" fn(u64) = b"coherence_wait";
    serve: extern "C" fn(u32, u64) = b"coherence_serve";
    watch: extern "C" fn(u64) = b"coherence_watch";
    interrupt: extern "C" fn() = b"coherence_interrupt";
    hide: extern "C" fn(bool) = b"coherence_hide";
    wake_at: extern "C" fn(u64) = b"coherence_wake_at";
    timer_is_due: extern "C" fn() -> bool = b"coherence_timer_is_due";
    sites: unsafe extern "C" fn(*mut Site, usize) -> usize = b"coherence_sites";
}

/// Waits until another CPU writes the line of `address`, which this one has just read.
pub fn watch(address: usize) {
    if let Some(simulator) = simulator() {
        (simulator.watch)(address as u64);
    }
}

static SIMULATOR: OnceLock<Option<Simulator>> = OnceLock::new();

/// The simulator; `None` where the program was built without.
pub fn simulator() -> Option<&'static Simulator> {
    SIMULATOR.get_or_init(|| Simulator::find().ok()).as_ref()
}

impl Simulator {
    /// Makes the machine: once, before any thread arrives.
    pub fn start(&self, machine: &Machine) {
        (self.start)(machine);
    }

    /// Has `work` done by each CPU of the machine at once. What they return is in their order.
    pub fn on_each<T: Send>(&self, cpus: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let work = &work;
            let thread = |cpu: usize| {
                let thread = scope.spawn(move || {
                    (self.arrive)(cpu as u32);
                    let result = work(cpu);
                    (self.leave)();
                    result
                });
                // One after the other, so that each finds the same memory in each run.
                while ((self.arrived)() as usize) <= cpu {
                    std::thread::yield_now();
                }
                thread
            };
            let threads: Vec<_> = (0..cpus).map(thread).collect();
            let result = |thread: std::thread::ScopedJoinHandle<'_, T>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(result).collect()
        })
    }

    /// What this CPU does from now on counts.
    pub fn begin(&self) {
        (self.begin)();
    }

    /// What it did since then.
    pub fn end(&self) -> Figures {
        let mut figures = Figures::default();
        (self.end)(&mut figures);
        figures
    }

    /// How many CPUs have come to their end.
    pub fn ended(&self) -> usize {
        (self.ended)() as usize
    }

    /// This CPU's clock, in nanoseconds.
    pub fn now(&self) -> u64 {
        (self.now)()
    }

    /// This CPU does nothing for `ns` nanoseconds.
    pub fn wait(&self, ns: u64) {
        (self.wait)(ns);
    }

    /// Waits for hardware that works on this for `ns` nanoseconds, on one thing at a time.
    pub fn serve(&self, hardware: u32, ns: u64) {
        (self.serve)(hardware, ns);
    }

    /// A barrier on all CPUs.
    pub fn interrupt(&self) {
        (self.interrupt)();
    }

    /// Does `work` at no cost, without being seen.
    pub fn hidden<T>(&self, work: impl FnOnce() -> T) -> T {
        (self.hide)(true);
        let result = work();
        (self.hide)(false);
        result
    }

    /// Wants the timer at `ns`.
    pub fn wake_at(&self, ns: u64) {
        (self.wake_at)(ns);
    }

    /// Whether the timer is due, and this CPU the one to tell.
    pub fn timer_is_due(&self) -> bool {
        (self.timer_is_due)()
    }

    /// The instructions that transferred the most lines, `count` at the most. All CPUs have gone.
    pub fn sites(&self, count: usize) -> Vec<Site> {
        let mut sites = vec![Site::default(); count];
        // SAFETY: there is room for `count`.
        let found = unsafe { (self.sites)(sites.as_mut_ptr(), count) };
        sites.truncate(found);
        sites
    }
}
