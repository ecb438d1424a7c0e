//! Memory that runs out, and mappings that only grow.

use super::number_of;
use crate::doctor::facts::Facts;
use crate::doctor::finding::{Finding, Severity};
use crate::doctor::kernel::boot_with;
use crate::doctor::memory::SLOT;
use crate::linux::host::Host;
use crate::look;

/// Entries of the cache of addresses that no load explains: at 64 bytes each more than half a gigabyte.
const TOO_MANY: u64 = 8_000_000;

pub fn check(facts: &Facts, host: &Host<'_>) -> Vec<Finding> {
    [swiotlb(facts, host), growing(facts), misuse(facts)].into_iter().flatten().collect()
}

fn swiotlb(facts: &Facts, host: &Host<'_>) -> Option<Finding> {
    let pool = &facts.swiotlb;
    let slots = pool.slots.filter(|slots| *slots > 0);
    let most = pool.most_used.max(pool.used).unwrap_or_default();
    let share = slots.map_or(0.0, |slots| most as f64 / slots as f64);
    let full: Vec<&String> =
        facts.log.lines.iter().filter(|line| line.contains("swiotlb buffer is full (sz:")).collect();
    if share < 0.9 && full.is_empty() {
        return None;
    }
    let said = full.first().map_or(String::new(), |line| {
        format!("; the kernel says \"{line}\", {}", number_of(full.len(), "time"))
    });
    let what = match slots {
        Some(slots) if share >= 0.9 => format!(
            "swiotlb was nearly full: {} of {} in use at the most ({:.0} %){said}",
            look::size(most * SLOT),
            look::size(slots * SLOT),
            share * 100.0
        ),
        _ => format!("swiotlb had no room for a buffer{said}"),
    };
    let size = slots.unwrap_or(32_768).saturating_mul(2).next_power_of_two().min(1 << 22);
    let noforce = facts.kernel.says("swiotlb", "noforce");
    let finding = Finding::new("swiotlb-full", Severity::Warning, what)
        .means("memory for copies (devices that do not reach all memory, external ones, confidential guests) runs out; a single buffer may be 256 KiB at the most")
        .costs("maps fail then: I/O is tried again at the best, and fails at the worst");
    Some(if noforce {
        finding.then("swiotlb=noforce on the kernel's command line leaves no room at all: take it out if devices need copies")
    } else {
        finding.steps(boot_with(host, &format!("swiotlb={size}")))
    })
}

fn growing(facts: &Facts) -> Option<Finding> {
    let by = |counter: &&crate::doctor::memory::Counter| {
        let grown = counter.second.unwrap_or_default().saturating_sub(counter.first);
        // A load that begins adds a few percent once. A leak adds more.
        grown > 1_000 && grown > counter.first / 50
            || counter.first.max(counter.second.unwrap_or_default()) > TOO_MANY
    };
    let found: Vec<_> = facts.counts.iter().filter(by).collect();
    let told = found.iter().map(|counter| match counter.second {
        Some(second) if second > counter.first => {
            format!("{}: {}, then {}", counter.name, look::count(counter.first), look::count(second))
        }
        _ => format!("{}: {}", counter.name, look::count(counter.first)),
    });
    let told: Vec<String> = told.collect();
    (!told.is_empty()).then(|| {
        Finding::new("growing", Severity::Warning, format!("mappings grow: {}", told.join("; ")))
            .means("a driver maps more than it unmaps (a leak), or a load has just begun")
            .costs("a leak ends with no addresses or no memory left, and leaves everything that leaked open to the device")
            .run("look for a minute, while the load is steady: it must not go on growing", "sudo portcullis doctor --seconds 60")
            .run("which device: its mappings, as they come and go", "sudo portcullis watch")
    })
}

/// Breaches of the DMA API's rules, which its debugging counts.
fn misuse(facts: &Facts) -> Option<Finding> {
    let errors = facts.api_errors.filter(|errors| *errors > 0)?;
    let first = facts.log.lines.iter().find(|line| line.contains("DMA-API: "));
    let said = first.map_or(String::new(), |line| format!("; the first is \"{line}\""));
    let finding = Finding::new(
        "dma-api",
        Severity::Warning,
        format!("drivers broke the rules of the DMA API, {}{said}", number_of(errors as usize, "time")),
    )
    .means("a driver unmaps what it has not mapped, forgets to unmap, or asks for more than its device can")
    .costs("memory that is still in use by a device may be given to something else")
    .run("all of them", "sudo dmesg | grep -A 20 DMA-API");
    Some(finding)
}
