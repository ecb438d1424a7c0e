//! The report's pages as a browser shows them. `cargo xtask test` runs these tests where there is Debian's `chromium`.

use std::path::Path;
use std::process::{Command, Stdio};

use serde::Deserialize;

use super::file;
use super::report::{bench, report, result, scale, with};

const CHECK: &str = include_str!("browser/check.js");

/// A phone, and windows on either side of where the plots change.
const WIDTHS: [u32; 5] = [360, 390, 640, 700, 1280];

/// What the check says of a page in a width.
#[derive(Debug, Deserialize)]
struct Found {
    name: String,
    width: u32,
    plots: usize,
    marks: usize,
    /// The colour of its paper.
    page: String,
    wrong: Vec<String>,
}

/// Pages of each kind, and how many plots each has at least.
fn pages() -> Vec<(&'static str, String, usize)> {
    let before = result("browser-1.json", &[]);
    let after = with("browser-2.json", &before, |json| {
        for policy in json["policies"].as_array_mut().unwrap() {
            let share = policy["relative_to_passthrough"].as_f64().unwrap();
            policy["relative_to_passthrough"] = (share * 0.8).into();
        }
    });
    let benched = bench("browser-3.json");
    let faster = with("browser-4.json", &benched, |json| {
        for result in json["results"].as_array_mut().unwrap() {
            for figure in ["ns_per_op", "min", "max"] {
                result[figure] = (result[figure].as_f64().unwrap() * 0.7).into();
            }
        }
    });
    let old = "strict,strict-batch,strict-ring,bounce,adaptive,lazy,lazy-2015,smmu-2017";
    let [one, several, nested] = [
        scale("browser-5.json", &["--cpus", "16", "--policy", old]),
        scale("browser-6.json", &["--cpus", "1,2,16,64,256", "--policy", old]),
        scale("browser-7.json", &["--cpus", "1,2,16,64,256", "--profile", "virtio-iommu"]),
    ];
    vec![
        ("replay", report(&[&before], &[]), 16),
        ("bench", report(&[&benched], &[]), 2),
        ("scale", report(&[&several], &[]), 2),
        ("scale-one", report(&[&one], &[]), 2),
        ("slower", report(&[&before, &after], &["--compare"]), 40),
        ("faster", report(&[&after, &before], &["--compare"]), 40),
        ("benches", report(&[&benched, &faster], &["--compare"]), 6),
        ("scales", report(&[&several, &nested], &["--compare"]), 5),
        ("all", report(&[&before, &benched, &several, &one], &[]), 22),
    ]
}

/// Runs the browser, and returns what it printed, and what it said.
fn chromium(arguments: &[&str], page: &Path) -> (String, String) {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"])
        .args(["--enable-logging=stderr", "--allow-file-access-from-files", "--disable-dev-shm-usage"])
        // A test that waits for nothing waits for as long as a page takes.
        .args(["--virtual-time-budget=600000", "--window-size=1400,1000"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let (document, said) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "chromium: {}\n{said}", output.status);
    (document, said)
}

/// What the browser has printed on pages' consoles: a warning or an error, as our pages have no script.
fn consoles(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.contains(":CONSOLE")).collect()
}

fn found(document: &str) -> Vec<Found> {
    let list = document.split("<pre id=\"found\">").nth(1).and_then(|rest| rest.split("</pre>").next());
    let list = list.unwrap_or_else(|| panic!("the check did not end:\n{document}"));
    let list = list.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    serde_json::from_str(&list).unwrap()
}

#[test]
#[ignore = "needs chromium; cargo xtask test runs it where that is"]
fn pages_are_whole_at_every_width_in_light_and_in_dark() {
    let pages = pages();
    let mut names: Vec<String> = Vec::new();
    for (name, page, _) in &pages {
        let name = format!("browser-{name}.html");
        file(&name, page.as_bytes());
        names.push(name);
    }
    let broken = "browser-broken.html";
    file(broken, include_bytes!("browser/broken.html"));
    names.push(broken.into());
    let run = format!(
        "run({}, {})",
        serde_json::to_string(&names).unwrap(),
        serde_json::to_string(&WIDTHS).unwrap()
    );
    let harness = format!("<!DOCTYPE html><meta charset=utf-8><body><script>{CHECK}\n{run}</script>");
    let harness = file("browser-check.html", harness.as_bytes());
    // Blink's numbers of the preferred colours: 0 is dark, 1 is light.
    for (scheme, setting) in [("light", "preferredColorScheme=1"), ("dark", "preferredColorScheme=0")] {
        let (document, said) = chromium(&["--dump-dom", &format!("--blink-settings={setting}")], &harness);
        let found = found(&document);
        assert_eq!(found.len(), names.len() * WIDTHS.len());
        for one in found.iter().filter(|one| one.name != broken) {
            let least = pages.iter().find(|(name, ..)| one.name == format!("browser-{name}.html")).unwrap().2;
            assert!(
                one.wrong.is_empty(),
                "{} at {}, {scheme}:\n{}",
                one.name,
                one.width,
                one.wrong.join("\n")
            );
            assert!(one.plots >= least && one.marks >= one.plots, "{one:?}");
            let paper = if scheme == "dark" { "rgb(22, 23, 25)" } else { "rgb(255, 255, 255)" };
            assert_eq!(one.page, paper, "{scheme}");
        }
        // What is wrong is found where it is: each kind, on a page that has it.
        let wrong = found.iter().find(|one| one.name == broken && one.width == 360).unwrap().wrong.join("\n");
        for kind in ["overflow", "contrast", "empty", "covered", "overlap", "unnamed", "silent", "order"] {
            assert!(wrong.contains(&format!("{kind}: ")), "{kind} is not found:\n{wrong}");
        }
        let (own, others): (Vec<&str>, Vec<&str>) =
            consoles(&said).into_iter().partition(|line| line.contains(broken));
        assert_eq!(own.len(), WIDTHS.len(), "the forbidden script is reported: {said}");
        assert!(others.is_empty(), "{}", others.join("\n"));
    }
}

/// A result takes three sheets at the most, of either size. A comparison has both results behind it.
#[test]
#[ignore = "needs chromium; cargo xtask test runs it where that is"]
fn a_result_is_printed_on_three_pages_at_the_most() {
    let of_three = ["replay", "bench", "scale", "scale-one"];
    for (name, page, _) in pages().into_iter().filter(|(name, ..)| of_three.contains(name)) {
        for size in ["A4", "letter"] {
            let style = format!("<style>@page {{ size: {size}; }}</style></head>");
            let page = file(&format!("print-{name}.html"), page.replace("</head>", &style).as_bytes());
            let printed = page.with_extension("pdf");
            chromium(&[&format!("--print-to-pdf={}", printed.display())], &page);
            let printed = std::fs::read(printed).unwrap();
            let pages = String::from_utf8_lossy(&printed).matches("/Type /Page\n").count();
            assert!((1..=3).contains(&pages), "{name} takes {pages} pages of {size}");
        }
    }
}
