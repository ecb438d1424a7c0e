//! What is to be known of a simulation first: the policy to choose, and what it leaves.

use portcullis::domain;
use portcullis_model::scale::Machine;
use portcullis_trace::replay::{Mode, Work};

use super::{Row, Strict, Table};
use crate::choice::{
    BUSY, Besides, Candidate, Chosen, OTHER_KERNEL, OTHER_WAITS, TOO_LITTLE, advice, by_other, capital,
    no_copies, range, too_little,
};
use crate::counted::INSTRUCTION_NS;
use crate::look::{count, number_of, percent, short_time};
use crate::on_linux::{self, Offer};
use crate::price::APART;

/// The policy to choose; `None` where the workload does not tell.
pub fn choice(table: &Table) -> Option<Strict<'_>> {
    chosen(table).map(|chosen| chosen.row)
}

fn chosen(table: &Table) -> Option<Chosen<Strict<'_>>> {
    table.choose(&table.strict()).filter(|_| table.told.nothing.is_none())
}

/// What is to be known first.
pub fn verdict(table: &Table) -> Vec<String> {
    if let Some(why) = &table.told.nothing {
        return vec![why.clone()];
    }
    let strict = table.strict();
    let mut said = Vec::new();
    let cpus = table.machine.cpus;
    let chosen = chosen(table);
    let choice = chosen.map(|chosen| chosen.row);
    if let (Some(costs), Some(choice)) = (range(&strict), choice) {
        let of = number_of(cpus.into(), "CPU");
        let work = table.told.besides.map(|besides| besides.work);
        said.extend(too_little(&strict, "the throughput on this server", table.offer, work));
        said.push(match table.told.besides {
            None => {
                format!("Protection from devices costs this workload {costs} of its throughput on {of}.")
            }
            Some(besides) => format!(
                "{} protection from devices costs {} of the throughput on {of}.",
                besides.clause(),
                besides.takes(&costs)
            ),
        });
        said.push(advice(choice, &strict, table.offer));
        said.extend(chosen.and_then(|chosen| hardly_busy(table, chosen, &strict)));
        said.extend(by_itself(table, choice));
        said.extend(memory(table, choice, &strict));
        said.extend(better(table, choice));
    }
    if let Some((own, row)) = table.strict_of_linux() {
        let lost = percent(row.lost());
        let ours = if table.rows.iter().any(is_of_library) {
            " The row strict is the library's, for drivers that use its queues: CPUs that wait at the same time share a wait."
        } else {
            ""
        };
        let unlocked = table.unlocked.as_ref().map_or(String::new(), |row| {
                format!(
                    " Its lock is for all devices behind an IOMMU, as where CPUs use the queues of one device. Linux has a lock for each device: \
                     with one for each CPU it would cost {}.",
                    percent(row.run().lost())
                )
            });
        let code = if table.offer == Offer::Module {
            ""
        } else {
            " Its waits are Linux's, and its code is the library's, as Linux's was not counted there: it takes more."
        };
        let design = if row.name == own.name { String::new() } else { format!(" (the design {})", own.name) };
        said.push(format!(
            "Strict is Linux's own ({lost}), the row {}{design}: {}.{code}{unlocked}{ours}",
            row.name, own.differs
        ));
        said.extend(choice.and_then(|choice| without_module(table, choice, row)));
    }
    said.extend(choice.and_then(|choice| waits(table, choice)));
    said.extend(table.by_copies.clone());
    said.extend(choice.and_then(|choice| instructions(table, choice)));
    if let Some(lazy) = lazy(table) {
        let lost = percent(lazy.lost());
        said.push(format!(
            "With lazy ({lost}), devices reach memory that the driver has back until the next flush."
        ));
    }
    said.extend(behind(table));
    said.extend(choice.and_then(|choice| units(table, choice)));
    let chosen = choice.map(|choice| choice.row);
    let dear = table.rows.iter().map(Row::run).filter(|row| row.policy.operation.is_some());
    let slowest = dear.min_by(|a, b| a.outcome.per_s.total_cmp(&b.outcome.per_s));
    let chosen =
        chosen.filter(|chosen| slowest.is_none_or(|slowest| slowest.policy.name != chosen.policy.name));
    let most: Vec<String> = chosen.into_iter().chain(slowest).map(most).collect();
    if !most.is_empty() {
        said.push(format!("What takes the most of a request: {}.", most.join("; ")));
    }
    said.extend(pace(table));
    said.extend(pools(table).map(str::to_owned));
    said.extend((!table.told.copies()).then(|| no_copies(table.told.directions, table.told.syncs)));
    let choice = choice.map(|choice| choice.mode.name());
    said.extend(on_linux::of_choice(choice, table.offer, &table.told.place));
    said
}

/// What the strict policies cost if a recording's CPUs idled for most of the time, where that is not known, and what the choice is if they never did.
fn hardly_busy(table: &Table, chosen: Chosen<Strict<'_>>, strict: &[Strict<'_>]) -> Option<String> {
    let Besides { ns, .. } = table.told.besides.filter(|besides| besides.work == Work::Most)?;
    if strict.iter().any(|strict| strict.row.hardly_busy.is_none()) {
        return None;
    }
    let costs = range(&strict.iter().map(|row| row.hardly_busy()).collect::<Vec<_>>())?;
    let also = match chosen.at_most {
        None if strict.len() > 1 => "; the choice is the same then".to_owned(),
        None => String::new(),
        Some(other) => format!(
            ", so choose {}. If they never idled, choose {} ({}): it is then within one percentage point of the cheapest, and leaves the least open",
            chosen.row.mode.name(),
            other.mode.name(),
            percent(other.lost())
        ),
    };
    Some(format!(
        "The recording does not tell how long those CPUs idled. If they were busy for only a tenth of the time, {} of other work came with each mapping, \
         and protection costs {costs}{also}. `portcullis record` measures that work, and --work names it.",
        short_time(ns * BUSY)
    ))
}

/// That the choice is another on one CPU by itself, which is all that a replay has.
fn by_itself(table: &Table, choice: Strict<'_>) -> Option<String> {
    let (mode, lost) = table.chosen(&table.by_itself)?;
    (mode != choice.mode).then(|| {
        format!(
            "For one CPU by itself, as in `portcullis replay`, choose {} ({}): it shares no IOMMU, no lock and no memory with others.",
            mode.name(),
            percent(lost)
        )
    })
}

/// With which policies the devices set the pace, and how long they walk page tables then.
fn pace(table: &Table) -> Option<String> {
    let busy: Vec<&Row> =
        table.rows.iter().map(Row::run).filter(|row| row.outcome.device_busy > 0.98).collect();
    let names = |rows: &[&Row]| rows.iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
    let walks = busy
        .iter()
        .filter(|row| row.policy.reads > 0.0)
        .max_by(|a, b| a.policy.reads.total_cmp(&b.policy.reads));
    let walks = walks.map_or(String::new(), |row| {
        format!(
            ". Their page walks are in that: up to {:.1} reads of memory for each page ({}; docs/strict.md)",
            row.policy.reads, row.name
        )
    });
    (!busy.is_empty()).then(|| {
        format!("The devices are busy all the time with {}: they set the pace{walks}.", names(&busy))
    })
}

/// What is to be known of the workload `nic`, which maps each packet.
fn pools(table: &Table) -> Option<&'static str> {
    (table.workload.name == "nic").then_some(
        "This card's driver maps each packet. One that takes its receive buffers from Linux's page_pool, as most drivers of fast cards do, keeps \
         them mapped: strict and lazy cost it next to nothing for what it receives, and these pages stay open to it (docs/replay.md). `--workload nic-page-pool` has one.",
    )
}

/// Copies that take this share of what memory can copy set the pace.
const FULL: f64 = 0.95;

/// Whether some policy takes all of what memory can copy.
pub fn memory_is_full(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.policy.strict && row.run().outcome.copy_busy >= FULL)
}

/// With which policy memory's bandwidth sets the pace, and what twice of it would leave.
fn memory(table: &Table, choice: Strict<'_>, strict: &[Strict<'_>]) -> Option<String> {
    let full = strict.iter().find(|strict| strict.row.outcome.copy_busy >= FULL)?;
    let Machine { sockets, copies, .. } = &table.machine;
    let copied = |times: f64| count((copies.socket_gb_per_s * f64::from(*sockets) * times).round() as u64);
    let twice = table.strict_of(&table.more_memory, table.offer);
    let leaves = twice.iter().find(|row| row.mode == full.mode).map_or(String::new(), |row| {
        let chosen = table.choose(&twice).filter(|chosen| chosen.row.mode != choice.mode);
        let chosen =
            chosen.map_or(String::new(), |chosen| format!(": then choose {}", chosen.row.mode.name()));
        format!(
            " Where it copies {} GB/s, {} leaves {}{chosen}.",
            copied(2.0),
            row.row(),
            percent(row.row.share)
        )
    });
    Some(format!(
        "With {}, memory sets the pace: the copies take {} of the {} GB/s that {} can copy (--calibration).{leaves}",
        full.row(),
        percent(full.row.outcome.copy_busy.min(1.0)),
        copied(1.0),
        number_of((*sockets).into(), "socket")
    ))
}

/// Of a choice that leaves too little, what a driver of the library's would leave.
fn better(table: &Table, choice: Strict<'_>) -> Option<String> {
    if choice.row.share >= TOO_LITTLE || table.offer == Offer::Library {
        return None;
    }
    let better = table
        .choose(&table.strict_of(&table.rows, Offer::Library))
        .map(|better| better.row)
        .filter(|better| better.mode() != choice.mode() && better.row.share >= TOO_LITTLE)?;
    Some(format!(
        "{} leaves {}: a driver that uses the library's queues has it (--on library).",
        capital(better.row()),
        percent(better.row.share)
    ))
}

/// What Linux has without the module that is chosen, where its strict mode leaves too little.
fn without_module(table: &Table, choice: Strict<'_>, strict: &Row) -> Option<String> {
    if choice.row() == strict.name || strict.share >= TOO_LITTLE {
        return None;
    }
    let lazy = lazy(table).map_or(String::new(), |row| format!("; lazy leaves {}", percent(row.share)));
    Some(format!(
        "Without the module, Linux's strict leaves {} of the throughput: too little where the CPUs are busy{lazy}.",
        percent(strict.share)
    ))
}

/// The row of lazy.
fn lazy(table: &Table) -> Option<&Row> {
    table.rows.iter().find(|row| row.policy.name == domain::Policy::LAZY.name()).map(Row::run)
}

/// Whether a row is of the library's strict, which shares waits, and not of Linux's.
fn is_of_library(row: &Row) -> bool {
    row.policy.name == domain::Policy::Strict.name()
}

/// `with 8`, and whether each device has an IOMMU of its own then.
fn with_iommus(table: &Table, iommus: u32) -> String {
    let each = if iommus == table.workload.device.count { ", one for each device," } else { "" };
    format!("with {}{each}", count(iommus.into()))
}

/// What policies that wait for each unmap cost behind other numbers of IOMMUs.
fn behind(table: &Table) -> Option<String> {
    let costs = |(iommus, rows): &(u32, Vec<Row>)| {
        let cost = |row: &Row| {
            let whose = if table.own.is_some() && is_of_library(row) { "the library's " } else { "" };
            let row = row.run();
            format!("{whose}{} costs {}", row.name, percent(row.lost()))
        };
        let all: Vec<String> = rows.iter().filter(|row| row.policy.waits_each()).map(cost).collect();
        (!all.is_empty()).then(|| format!("{} {}", with_iommus(table, *iommus), all.join(", ")))
    };
    let all: Vec<String> = table.by_units.iter().filter_map(costs).collect();
    (!all.is_empty()).then(|| format!("Behind another number of IOMMUs (--units): {}.", all.join("; ")))
}

/// With which other number of IOMMUs the choice is another one.
fn units(table: &Table, choice: Strict<'_>) -> Option<String> {
    let chosen = |(iommus, rows): &(u32, Vec<Row>)| {
        let (mode, lost) = table.chosen(rows)?;
        (mode != choice.mode)
            .then(|| format!("{} choose {} ({})", with_iommus(table, *iommus), mode.name(), percent(lost)))
    };
    let all: Vec<String> = table.by_units.iter().filter_map(chosen).collect();
    (!all.is_empty()).then(|| {
        format!(
            "The choice depends on the number of IOMMUs ({} here; --units): {}. `portcullis doctor` says how many a machine has, as /sys/class/iommu lists them.",
            count(table.machine.iommus.into()),
            all.join("; ")
        )
    })
}

/// What the choice is where waits take a quarter of what is assumed, and where they take four times as long.
fn waits(table: &Table, choice: Strict<'_>) -> Option<String> {
    let [short, long] =
        table.by_waits.each_ref().map(|rows| table.choose(&table.strict_of(rows, table.offer)));
    let (short, long) = (short?.row, long?.row);
    if table.strict().len() < 2 {
        let [short, long] = [short, long].map(|strict| percent(strict.lost()));
        return Some(format!(
            "If the IOMMU's waits are a quarter as long as assumed, that costs {short}; if four times as long, {long}."
        ));
    }
    let said = by_other(choice, short, long, OTHER_WAITS);
    Some(said + &unlocked(table, [short, choice, long].map(|row| row.mode)).unwrap_or_default())
}

/// What the choice is where instructions of the kernel take half of what is assumed, and where they take twice as long.
fn instructions(table: &Table, choice: Strict<'_>) -> Option<String> {
    let strict = table.strict();
    if strict.len() < 2 || strict.iter().all(|strict| table.rows.iter().any(|row| row.name == strict.row())) {
        return None;
    }
    let [short, long] = [1.0 / APART, APART].map(|times| {
        let priced = |row: &Row| row.priced(&table.machine, &table.workload, INSTRUCTION_NS * times);
        table.rows.iter().map(priced).collect::<Vec<_>>()
    });
    let [short, long] = [&short, &long].map(|rows| table.choose(&table.strict_of(rows, table.offer)));
    Some(by_other(choice, short?.row, long?.row, OTHER_KERNEL))
}

/// The same where Linux's strict mode has a lock for each CPU, as where each has a device of its own. `locked` is what is chosen otherwise.
fn unlocked(table: &Table, locked: [Mode; 3]) -> Option<String> {
    let name = table.unlocked.as_ref()?.policy.name;
    let chosen = |rows| table.choose(&table.strict_where(rows, table.offer, Some(name)));
    let [short, long] = table.by_waits.each_ref().map(|rows| chosen(rows.as_slice()));
    let now: Vec<Strict<'_>> = table
        .strict()
        .into_iter()
        .filter(|row| row.mode != Mode::Each(domain::Policy::Strict))
        .chain(table.strict_where(table.unlocked.as_slice(), table.offer, Some(name)))
        .collect();
    let all = [short?, table.choose(&now)?, long?].map(|chosen| chosen.row);
    if all.map(|row| row.mode) == locked {
        return Some(" That holds with a lock for each CPU, too.".into());
    }
    let [short, now, long] = all.map(|row| format!("{} ({})", row.mode.name(), percent(row.lost())));
    Some(format!(
        " With a lock for each CPU in Linux's strict, choose {now}; where waits are a quarter as long, {short}; where four times as long, {long}."
    ))
}

/// What takes the most of a request with this policy, and where that comes from.
fn most(row: &Row) -> String {
    let (what, ns) = row.hottest();
    let from = if what.ends_with("queue") {
        format!("; the hardware is busy for {} of the time", percent(row.outcome.queue_busy))
    } else if let (true, Some(line)) = (what.ends_with("share"), row.outcome.lines.first()) {
        format!("; {} of the transfers are of {}", percent(line.share), structure(&line.source))
    } else {
        String::new()
    };
    format!("with {}, {what} ({} ns{from})", row.name, count(ns.round() as u64))
}

/// What the line of memory is a part of that CPUs take from each other, by the places in the library's sources that touch it.
pub fn structure(source: &str) -> &'static str {
    const STRUCTURES: [(&str, &str); 8] = [
        ("invalidation/", "the queue of invalidations"),
        ("iova/", "the allocator of addresses"),
        ("bounce/swiotlb", "the swiotlb"),
        ("bounce/", "the bounce pool"),
        ("pgtable/", "the page tables"),
        ("domain/", "the domain's account"),
        ("dma/", "the driver's queue"),
        ("mapper", "the page tables"),
    ];
    let of =
        |frame: &str| STRUCTURES.iter().find(|(folder, _)| frame.starts_with(folder)).map(|(_, name)| *name);
    source.split(" < ").find_map(of).unwrap_or("one structure")
}
