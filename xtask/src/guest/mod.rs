//! `cargo xtask guest`: Linux's own drivers behind the project's module, in guests that QEMU emulates, each byte checked; and what a
//! hostile device reaches.
//!
//! A guest is a kernel ([`kernel`]), a first file system ([`initramfs`]) with the drivers, the modules, the programs and scripts of
//! `tests/guest`, and a machine ([`machine`]) whose devices lie behind an IOMMU. It does one job, and says what held ([`report`]).

mod firmware;
mod initramfs;
mod jobs;
mod kernel;
mod machine;
mod report;
mod root;
#[cfg(test)]
pub mod whole;

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::initramfs::{Archive, Modules};
use self::jobs::{JOBS, Job};
use self::kernel::{Kernel, MODULE, OWN};
use self::machine::{Iommu, QEMU, Run};
use self::root::{KERNELS, Root};
use crate::nightly::output;
use crate::packages;

pub const WHAT: &str = "Linux's drivers in guests";

/// How long a kernel may take to its first program: it takes 5 s on an idle machine.
const BOOT: Duration = Duration::from_secs(100);

/// The guest's program.
pub const PROGRAMS: &str = "tests/guest/programs";

pub const USAGE: &str = "\
cargo xtask guest [OPTION]..
    --kernel 6.1|6.12|newest     of Debian's kernels only this one (more than once: these)
    --guest-kernel FOLDER        this kernel instead: bzImage, modules.tar.xz and build-tree.tar.xz (or bzImage with all built in)
    --iommu vtd|virtio|amdvi     only this IOMMU (more than once: these)
    --job NAME                   only this job (more than once: these); `--job list` names them
    --modes 'MODE ..'            these ways to protect: strict lazy bounce auto, or Linux's linux-passthrough linux-lazy linux-strict
    --minutes N                  how long the job `soak` goes on (30)
    --patience N                 N times the time after which a guest is given up: on a busy machine, or with a slow kernel (1)
    --seed N                     what the programs write and in what order (a new one each time)
    --verbose                    print all that the guests say
without options: what `cargo xtask test` runs
";

/// What the command was asked for.
#[derive(Default)]
struct Wanted {
    kernels: Vec<String>,
    given: Option<PathBuf>,
    iommus: Vec<Iommu>,
    jobs: Vec<&'static Job>,
    modes: Option<String>,
    minutes: u64,
    patience: u32,
    seed: u32,
    verbose: bool,
}

/// Does what its words say.
pub fn command(words: &[&str]) -> Result<(), String> {
    if matches!(words, ["--help" | "-h"]) {
        print!("{USAGE}");
        return Ok(());
    }
    if words == LIST {
        println!("{}", list());
        return Ok(());
    }
    let wanted = parse(words)?;
    if let Some(image) = wanted.given.as_ref().map(|given| given.join("bzImage"))
        && !image.is_file()
    {
        return Err(format!("--guest-kernel: there is no {}", image.display()));
    }
    if let Some(why) = missing() {
        return Err(why);
    }
    run_wanted(&wanted)
}

/// Whether the words are ones that the command takes.
#[cfg(test)]
pub fn is_request(words: &[&str]) -> bool {
    words == LIST || parse(words).is_ok()
}

/// The words that ask for the names of the jobs.
const LIST: [&str; 2] = ["--job", "list"];

/// Each job with what it is for.
fn list() -> String {
    let lines: Vec<_> = JOBS.iter().map(|job| format!("{}: {}", job.name, job.what)).collect();
    lines.join("\n")
}

fn parse(words: &[&str]) -> Result<Wanted, String> {
    let mut wanted = Wanted { minutes: 30, patience: 1, seed: std::process::id(), ..Wanted::default() };
    let mut words = words.iter();
    while let Some(&word) = words.next() {
        let mut value = || words.next().copied().ok_or_else(|| format!("{word} wants a value\n{USAGE}"));
        let unknown = |value: &str| format!("{word} knows no {value}\n{USAGE}");
        match word {
            "--verbose" => wanted.verbose = true,
            "--kernel" => {
                let value = value()?;
                let known = KERNELS.iter().find(|(name, _)| *name == value);
                wanted.kernels.push(known.ok_or_else(|| unknown(value))?.0.to_owned());
            }
            "--guest-kernel" => wanted.given = Some(PathBuf::from(value()?)),
            "--iommu" => {
                let value = value()?;
                let known = Iommu::ALL.into_iter().find(|iommu| iommu.name() == value);
                wanted.iommus.push(known.ok_or_else(|| unknown(value))?);
            }
            "--job" => {
                let value = value()?;
                let known = JOBS.iter().find(|job| job.name == value);
                let names = || JOBS.map(|job| job.name).join(", ");
                let unknown = || format!("there is no job {value}: `--job list` explains {}", names());
                wanted.jobs.push(known.ok_or_else(unknown)?);
            }
            "--modes" => {
                let value = value()?;
                let is_known = |mode: &str| jobs::ALL.split(' ').any(|one| one == mode);
                if let Some(mode) = value.split_whitespace().find(|mode| !is_known(mode)) {
                    let all = jobs::ALL.replace(' ', ", ");
                    return Err(format!("--modes knows no {mode}: it takes {all}"));
                }
                wanted.modes = Some(value.to_owned());
            }
            "--minutes" => wanted.minutes = at_least_one(word, value()?)?.get().into(),
            // With 0 every guest would be given up before it has booted, and a soak of no minutes is none.
            "--patience" => wanted.patience = at_least_one(word, value()?)?.get(),
            "--seed" => wanted.seed = at_least_one(word, value()?)?.get(),
            _ => return Err(format!("there is no option {word}\n{USAGE}")),
        }
    }
    Ok(wanted)
}

/// A number that must not be 0.
fn at_least_one(word: &str, value: &str) -> Result<NonZeroU32, String> {
    value.parse().map_err(|_| format!("{word} wants a number from 1 on, not {value}\n{USAGE}"))
}

/// Why no guest can run here, if so. Installs QEMU, and fetches kernels, where the system allows it.
pub fn missing() -> Option<String> {
    let lacking = || output(std::process::Command::new(QEMU).arg("--version")).is_none();
    let lacking = || lacking().then(|| format!("{QEMU} is not installed"));
    packages::missing(lacking, &["qemu-system-x86"], true)
        .or_else(crate::c_library::missing)
        .or_else(root::lacking)
        .or_else(|| Root::prepare(&folder()).err())
}

/// How many checks of a guest there are: a job with a kernel behind an IOMMU is one.
pub fn count() -> usize {
    jobs::usual().count()
}

/// What `cargo xtask test` runs.
pub fn run() -> Result<(), String> {
    run_wanted(&parse(&[])?)
}

/// Where all lies that is fetched and built.
fn folder() -> PathBuf {
    crate::root().join("target/guest")
}

fn run_wanted(wanted: &Wanted) -> Result<(), String> {
    let folder = folder();
    let root = Root::prepare(&folder)?;
    let program = kernel::program(&folder)?;
    let kernels = match &wanted.given {
        Some(given) => vec![Kernel::given(given, &folder.join("given"))?],
        None => {
            let of = root.releases().iter();
            let of = of.filter(|(name, _)| {
                wanted.kernels.is_empty() || wanted.kernels.iter().any(|one| one == name)
            });
            of.map(|(name, release)| Kernel::of_debian(&root, name, release))
                .collect::<Result<Vec<_>, _>>()?
        }
    };
    // A program that drives devices by itself needs no module.
    let needs_modules = |kernel: &Kernel| jobs::of(wanted, &kernel.name).any(|(job, _)| job.user.is_none());
    if kernels.iter().any(needs_modules) {
        kernel::fetch()?;
    }
    let port = machine::serve_echo()?;
    let mut outcome = Ok(());
    for kernel in &kernels {
        let runs: Vec<_> = jobs::of(wanted, &kernel.name).collect();
        if runs.is_empty() {
            continue;
        }
        let began = Instant::now();
        if needs_modules(kernel) {
            kernel.build(&root, &folder)?;
            println!("== Linux {}: modules built in {} s", kernel.release, began.elapsed().as_secs());
        }
        let base = base(&root, kernel, &folder, &program)?;
        for (job, iommu) in runs {
            let ran = run_one(wanted, kernel, job, iommu, &base, port, &folder);
            if let Err(why) = ran {
                eprintln!("{why}");
                outcome = Err(format!("{} on Linux {} behind {}", job.name, kernel.release, iommu.name()));
            }
        }
    }
    outcome
}

/// The first file system of a kernel, but for what it is to do.
fn base(root: &Root, kernel: &Kernel, folder: &Path, program: &Path) -> Result<Vec<u8>, String> {
    let mut archive = Archive::default();
    archive.add_console();
    archive.add_file("bin/busybox", &root.at("usr/bin/busybox"))?;
    archive.add_file("bin/portcullis-guest", program)?;
    for tool in ["mke2fs", "e2fsck"] {
        // Not beside busybox, whose shell prefers its own.
        archive.add_file(&format!("tools/{tool}"), &root.at(&format!("usr/sbin/{tool}")))?;
        for library in libraries(root, tool)? {
            archive.add_file(&library, &root.at(&library))?;
        }
    }
    let tests = crate::root().join("tests/guest");
    for script in ["init", "lib.sh"] {
        archive.add_file(script, &tests.join(script))?;
    }
    for script in JOBS.iter().flat_map(|job| std::iter::once(job.script).chain(job.next)) {
        let script = format!("jobs/{script}.sh");
        archive.add_file(&script, &tests.join(&script))?;
    }
    Modules::find(&kernel.drivers)?.add(&mut archive, &jobs::DRIVERS)?;
    let built = folder.join("modules").join(&kernel.release);
    for name in OWN.map(|(_, name)| name).into_iter().chain([MODULE]) {
        let file = built.join(format!("{name}.ko"));
        if file.exists() {
            archive.add_file(&format!("mods/{name}.ko"), &file)?;
            archive.add(&format!("mods/{name}.list"), format!("{name}.ko\n").as_bytes());
        }
    }
    Ok(archive.end())
}

/// The loader and the libraries of a program, as its loader lists them.
fn libraries(root: &Root, program: &str) -> Result<Vec<String>, String> {
    const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
    let out = output(root.command(LOADER).args(["--list", &format!("/usr/sbin/{program}")]));
    let out = out.ok_or_else(|| format!("the libraries of {program} are not to be found"))?;
    let mut found: Vec<String> =
        out.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned).collect();
    found.push(LOADER.to_owned());
    Ok(found)
}

fn run_one(
    wanted: &Wanted,
    kernel: &Kernel,
    job: &Job,
    iommu: Iommu,
    base: &[u8],
    port: u16,
    folder: &Path,
) -> Result<(), String> {
    let began = Instant::now();
    let modes = wanted.modes.as_deref().unwrap_or(job.modes);
    let seed = wanted.seed;
    let script = |script: &str| {
        format!(
            "MODES='{modes}' ECHO_PORT={port} RANDOM_SEED={seed} SECONDS_LONG={} IOMMU={}\n{}\n. /jobs/{script}.sh\n",
            wanted.minutes * 60,
            iommu.name(),
            job.settings,
        )
    };
    let mut over = Archive::default();
    over.add("job", script(job.script).as_bytes());
    if let Some(next) = job.next {
        let mut after = Archive::default();
        after.add("job", script(next).as_bytes());
        over.add_file("next/kernel", &kernel.image)?;
        over.add("next/initramfs", &[base, &after.end()].concat());
    }
    if job.has_command {
        over.add_file("bin/portcullis", &kernel::command(folder)?)?;
    }
    for program in job.user.map_or(Ok(Vec::new()), |build| build(folder))? {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        over.add_file(&format!("bin/{name}"), &program)?;
    }
    let run = Run {
        image: &kernel.image,
        archives: &[base, &over.end()],
        iommu,
        cpus: job.cpus,
        counted: job.counted,
        words: job.words,
        boot: BOOT * wanted.patience,
        time: job.time * wanted.patience
            + Duration::from_secs(if job.name == "soak" { wanted.minutes * 60 } else { 0 }),
        is_linux_alone: job.user.is_some(),
        hostile: job.hostile,
        many: job.many,
        native_hotplug: job.user.is_some(),
        aloud: wanted.verbose,
        folder: &folder.join("run"),
    };
    let report = run.run()?;
    let named = format!("{} on Linux {} behind {}", job.name, kernel.release, iommu.name());
    println!(
        "{named}: {} checks held, {} failed, {} skipped, {} s (seed {seed})",
        report.held,
        report.failed.len(),
        report.skipped.len(),
        began.elapsed().as_secs()
    );
    report.skipped.iter().for_each(|what| println!("skipped: {what}"));
    print!("{}", report.tables());
    report.verdict(&run.log()).map_err(|why| format!("{named}:\n{why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_taken_or_refused() {
        let wanted =
            parse(&["--kernel", "6.12", "--iommu", "vtd", "--job", "edu", "--modes", "strict lazy"]).unwrap();
        assert_eq!(
            (wanted.kernels.len(), wanted.iommus.as_slice(), wanted.jobs.len()),
            (1, &[Iommu::Vtd][..], 1)
        );
        assert_eq!((wanted.modes.as_deref(), wanted.minutes), (Some("strict lazy"), 30));
        for words in
            [&["--kernel", "5.4"][..], &["--iommu"], &["--job", "list"], &["--minutes", "x"], &["edu"]]
        {
            assert!(parse(words).is_err(), "{words:?}");
        }
        for word in ["--patience", "--minutes"] {
            assert!(parse(&[word, "2"]).is_ok());
            let said = parse(&[word, "0"]).err().unwrap_or_default();
            assert!(said.starts_with(&format!("{word} wants a number from 1 on, not 0")), "{said}");
        }
    }
}
