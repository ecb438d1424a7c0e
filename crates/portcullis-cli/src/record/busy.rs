//! How busy the machine's CPUs are: `/proc/stat` before and after.

use std::path::Path;
use std::time::{Duration, Instant};

use portcullis_trace::Measured;

/// CPU time of the machine and of this program until now.
#[derive(Debug, Clone, Copy)]
pub struct Busy {
    at: Instant,
    cpus: u32,
    /// Of all CPUs.
    busy: Duration,
    own: Duration,
}

impl Busy {
    /// What `/proc/stat` below `root` says now.
    pub fn now(root: &Path) -> Self {
        let stat = std::fs::read_to_string(root.join("proc/stat")).unwrap_or_default();
        let (cpus, busy) = read(&stat, ticks_per_second());
        Self { at: Instant::now(), cpus, busy, own: own() }
    }

    /// What was done between `self` and `after`; `None` where the kernel does not say.
    pub fn until(&self, after: &Self) -> Option<Measured> {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let measured = Measured {
            cpus: after.cpus,
            wall_ns: ns(after.at.saturating_duration_since(self.at)),
            busy_ns: ns(after.busy.saturating_sub(self.busy)),
            own_ns: ns(after.own.saturating_sub(self.own)),
        };
        (after.cpus > 0 && measured.wall_ns > 0).then_some(measured)
    }
}

/// CPUs that are online, and the time that all of them were busy.
fn read(stat: &str, ticks_per_second: u64) -> (u32, Duration) {
    let cpus = stat.lines().filter(|line| {
        let number = line.strip_prefix("cpu").and_then(|rest| rest.split(' ').next());
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    });
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
    // user nice system idle iowait irq softirq steal; guests' time is in user's already.
    let ticks = all.split_ascii_whitespace().take(8).map(|word| word.parse().unwrap_or(0)).enumerate();
    let busy: u64 =
        ticks.filter(|(at, _)| !matches!(at, 3 | 4 | 7)).map(|(_, ticks)| ticks).fold(0, u64::saturating_add);
    (cpus.count() as u32, Duration::from_nanos(busy.saturating_mul(1_000_000_000 / ticks_per_second.max(1))))
}

fn ticks_per_second() -> u64 {
    // SAFETY: the call takes a number.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).unwrap_or(100)
}

/// CPU time of this program.
pub fn own() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live value.
    if unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) } != 0 {
        return Duration::ZERO;
    }
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_all_but_idling_waiting_and_what_the_host_took() {
        let stat = "cpu  1 2 4 1000 2000 8 16 4000 32 64\ncpu0 1 2 4 8\ncpu11 1\nintr 5\ncpuidle x\n";
        assert_eq!(read(stat, 100), (2, Duration::from_millis(310)));
        assert_eq!(read("", 100), (0, Duration::ZERO));
    }

    #[test]
    fn what_the_kernel_does_not_say_is_not_measured() {
        let at = Instant::now();
        let of = |cpus, ms: u64, busy, own| Busy {
            at: at + Duration::from_millis(ms),
            cpus,
            busy: Duration::from_millis(busy),
            own: Duration::from_millis(own),
        };
        let before = of(2, 0, 100, 10);
        let measured = before.until(&of(4, 1_000, 350, 15)).unwrap();
        let expected = Measured { cpus: 4, wall_ns: 1_000_000_000, busy_ns: 250_000_000, own_ns: 5_000_000 };
        assert_eq!(measured, expected);
        assert_eq!([before.until(&of(0, 1_000, 0, 0)), before.until(&of(2, 0, 0, 0))], [None, None]);
    }
}
