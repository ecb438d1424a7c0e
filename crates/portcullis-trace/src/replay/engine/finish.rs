//! The end of a replay: figures, and the domains' own counts checked against the observed ones.

use portcullis::domain::Policy;
use portcullis::exposure::Exposure;
use portcullis_model::Exposed;

use super::Engine;
use crate::replay::choices::Choices;
use crate::replay::hostile::Hostile;
use crate::replay::port::Port;
use crate::replay::report::{self, PolicyReport};

impl Engine {
    /// Ends the replay at `end_ns`, the time of the trace's last event, which commits everything pending.
    pub(in crate::replay) fn finish(mut self, work_ns: f64, end_ns: u64) -> PolicyReport {
        let end_ns = end_ns.max(self.last_time_ns);
        self.commit_due(end_ns);
        self.go_to(self.last_cpu, end_ns);
        self.last_time_ns = end_ns;
        // The driver unloads.
        self.commit_by(end_ns, u64::MAX);
        // Queues report their counts at a commit. Mappings that live to the end have none.
        self.ports.iter_mut().for_each(Port::settle);
        self.retry_all(false);
        self.look_at_all();
        self.iommu.set_time(self.last_time_ns);
        let stats = self.iommu.stats();
        let exposure = self.iommu.total_exposure();
        let translated = self.policy != Policy::Passthrough;
        let operations = self.operations;
        let invalidations = self.invalidations() - self.startup.invalidations;
        let wait_ns = self.queue.waited_ns() - self.startup.waited_ns;
        let per_operation = |amount: f64| if operations == 0 { 0.0 } else { amount / operations as f64 };
        let timer = self.timer.less(&self.empty);
        let (map_ns, unmap_ns) = (self.map.figures(&timer), self.unmap.figures(&timer));
        let spent_ns = operations as f64 * work_ns
            + self.operations as f64 * map_ns.mean
            + self.ended as f64 * unmap_ns.mean
            + wait_ns;
        let found = self.hostile.as_ref().map(|hostile| hostile.found);
        let window_ns = match self.policy {
            Policy::Passthrough => u64::MAX,
            Policy::Lazy { window_ns } => window_ns,
            _ => 0,
        };
        // With changing policies: the longest window. Retries check each mapping's own window.
        let changed_ns = self.hostile.as_ref().and_then(Hostile::longest_window_ns).unwrap_or(0);
        let late = u64::from(exposure.longest_stale_ns > window_ns.max(changed_ns));
        let counted = translated.then(|| self.counted());
        let uncounted = counted.is_some_and(|counted| is_more(&exposure, &counted));
        let per_access =
            |count: u64| if stats.accesses == 0 { 0.0 } else { count as f64 / stats.accesses as f64 };
        let byte_s = |byte_ns: u128| byte_ns as f64 / 1e9;
        let painted = self.painter.as_ref().map(|painter| painter.found);
        // The other translating policies protect pages.
        let shown = painted.filter(|_| self.mode.protects_bytes()).map_or(0, |painted| painted.shown());
        let drivers = || self.ports.iter().map(|port| &port.driver);
        PolicyReport {
            policy: self.mode.name(),
            mode: self.mode,
            operations,
            map_ns,
            unmap_ns,
            map_latency: self.map.latency(&timer),
            unmap_latency: self.unmap.latency(&timer),
            wait_ns_per_op: per_operation(wait_ns),
            ops_per_s: if spent_ns > 0.0 { operations as f64 * 1e9 / spent_ns } else { 0.0 },
            relative_to_passthrough: None,
            invalidations,
            iotlb_misses_per_access: per_access(stats.iotlb_misses),
            walk_cache_misses_per_access: per_access(stats.walk_cache_misses),
            peak_iova_bytes: drivers().map(|driver| driver.peak_iova_bytes()).sum(),
            peak_table_bytes: if translated { drivers().map(|driver| driver.table_bytes()).sum() } else { 0 },
            peak_bounce_bytes: self.bytes.as_ref().map_or(0, |bytes| bytes.peak_pool_bytes()),
            copied_bytes: Some(self.copied_bytes() - self.startup.copied_bytes),
            exposure: report::Exposure {
                stale_byte_s: byte_s(exposure.stale_byte_ns),
                neighbour_byte_s: byte_s(exposure.neighbour_byte_ns),
            },
            exposure_counted: counted.map(|counted| report::Exposure {
                stale_byte_s: byte_s(counted.stale_byte_ns),
                neighbour_byte_s: byte_s(counted.neighbour_byte_ns),
            }),
            faults: self.iommu.fault_count(),
            violations: self.violations
                + late
                + u64::from(uncounted)
                + shown
                + self.bytes.as_ref().map_or(0, |bytes| bytes.strays())
                + found.map_or(0, |found| found.violations()),
            timer_ns: timer.overhead_ns(),
            interrupted_calls: self.map.interrupted() + self.unmap.interrupted(),
            longest_stale_ns: exposure.longest_stale_ns,
            in_force: found,
            painted,
            choices: self.choices(),
            failures: self.failures,
            first_failure: self.first_failure.map(|error| error.to_string()),
        }
    }

    /// The choices for each device.
    fn choices(&self) -> Vec<Choices> {
        let mut all: Vec<Choices> =
            self.ports.iter().map(|port| Choices::new(port.device as usize, &port.explain())).collect();
        all.sort_by_key(|choices| choices.device);
        all.into_iter().filter(|choices| !choices.rows.is_empty()).collect()
    }

    fn counted(&self) -> Exposure {
        let domains = self.ports.iter().map(|port| port.driver.exposure());
        domains.fold(Exposure::default(), |sum, one| Exposure {
            stale_byte_ns: sum.stale_byte_ns + one.stale_byte_ns,
            neighbour_byte_ns: sum.neighbour_byte_ns + one.neighbour_byte_ns,
            longest_stale_ns: sum.longest_stale_ns.max(one.longest_stale_ns),
        })
    }
}

/// Whether more was observed than counted, by more than the sampled clock explains. (Less is normal: the IOTLB evicts entries, and buffers
/// share pages.)
fn is_more(observed: &Exposed, counted: &Exposure) -> bool {
    // A twentieth, and some pages for a millisecond.
    let explained = |counted: u128| counted + counted / 20 + (64 << 12) * 1_000_000;
    observed.stale_byte_ns > explained(counted.stale_byte_ns)
        || observed.neighbour_byte_ns > explained(counted.neighbour_byte_ns)
        || observed.longest_stale_ns > counted.longest_stale_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A twentieth more, and 64 pages for a millisecond; nothing for the longest time.
    #[test]
    fn what_was_observed_may_exceed_what_was_counted_by_what_the_clock_explains() {
        let counted = Exposure { stale_byte_ns: 20_000, neighbour_byte_ns: 40_000, longest_stale_ns: 7 };
        let slack = 64 * 4096 * 1_000_000;
        let most =
            Exposed { stale_byte_ns: 21_000 + slack, neighbour_byte_ns: 42_000 + slack, longest_stale_ns: 7 };
        assert!(!is_more(&most, &counted));
        assert!(is_more(&Exposed { stale_byte_ns: most.stale_byte_ns + 1, ..most }, &counted));
        assert!(is_more(&Exposed { neighbour_byte_ns: most.neighbour_byte_ns + 1, ..most }, &counted));
        assert!(is_more(&Exposed { longest_stale_ns: 8, ..most }, &counted));
    }
}
