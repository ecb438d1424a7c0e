//! `portcullis report` as its reader meets it, without a browser.

use std::path::{Path, PathBuf};

use super::{file, portcullis, shape, stderr, stdout};
use serde_json::Value;

/// What a command prints with `--json`, in a file.
fn printed(name: &str, command: &[&str], arguments: &[&str]) -> PathBuf {
    let output = portcullis(&[command, arguments, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    file(name, &output.stdout)
}

/// A result of a short replay, in a file.
pub fn result(name: &str, arguments: &[&str]) -> PathBuf {
    printed(name, &["replay", "--limit", "6000"], arguments)
}

/// A result as `portcullis bench path --json` prints it: not each build has benchmarks.
pub fn bench(name: &str) -> PathBuf {
    let mut results = Vec::new();
    for (workload, ns) in [("raw-1", 38.0), ("typed-1", 42.0), ("sg-64", 445.0)] {
        for (subject, times) in [("portcullis", 1.0), ("linux", 2.5)] {
            for threads in [1, 2] {
                let ns = ns * times * f64::from(threads).sqrt();
                results.push(serde_json::json!({
                    "workload": workload, "threads": threads, "subject": subject, "profile": "none",
                    "ns_per_op": ns, "min": ns * 0.95, "max": ns * 1.1, "p99_99": ns * 8.0
                }));
            }
        }
    }
    let skipped = serde_json::json!([
        {"workload": "pool-64", "threads": 2, "subject": "linux", "reason": "it has no pool"}
    ]);
    let whole = serde_json::json!({
        "schema": 1, "tool": {"name": "portcullis", "version": "0.1.0"}, "date": "2026-11-29 08:22",
        "command": "portcullis bench path --json", "machine": {"os": "linux", "kernel": null, "arch": "x86_64", "cpu": "A", "cpus": 2},
        "options": {"workload": [], "subject": [], "threads": [], "quick": false}, "profiles": [], "bench": "path",
        "limits": {"load_store_ns": 0.3, "atomic_ns": 1.8, "lock_ns": 4.0},
        "timer": {"resolution_ns": 0.3, "overhead_ns": 9.0}, "results": results, "skipped": skipped
    });
    assert_eq!(shape::documented("bench.md").wrong_with(&whole), [""; 0]);
    file(name, whole.to_string().as_bytes())
}

pub fn scale(name: &str, arguments: &[&str]) -> PathBuf {
    printed(name, &["scale"], arguments)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The same result but for a change.
pub fn with(name: &str, path: &Path, change: impl FnOnce(&mut Value)) -> PathBuf {
    let mut json = json(path);
    change(&mut json);
    file(name, json.to_string().as_bytes())
}

pub fn report(paths: &[&Path], options: &[&str]) -> String {
    let paths: Vec<&str> = paths.iter().map(|path| path.to_str().unwrap()).collect();
    let output = portcullis(&[&["report"], options, &paths[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    // The page keeps figures and their units in one line.
    stdout(&output).replace("\u{a0}%", " %")
}

/// Every element that begins ends, in order, and nothing is loaded from anywhere.
fn is_sound(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = page.strip_prefix("<!DOCTYPE html>").unwrap();
    // A style has no elements in it.
    let style = rest.find("<style>").unwrap()..rest.find("</style>").unwrap();
    let without = rest[..style.start].to_owned() + "<style>" + &rest[style.end..];
    rest = &without;
    while let Some(start) = rest.find('<') {
        let end = start + rest[start..].find('>').unwrap();
        let tag = &rest[start + 1..end];
        assert!(tag.matches('"').count().is_multiple_of(2), "{tag}");
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "before {}", &rest[..start]);
        } else if !tag.ends_with('/') && !["meta", "link"].contains(&name) {
            open.push(name);
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty(), "{open:?}");
    for loads in
        ["<script", "<img", "<iframe", "http://", "https://", "url(", "@import", " onload", "javascript:"]
    {
        assert!(!page.contains(loads), "{loads}");
    }
    for link in page.split("href=\"").skip(1) {
        assert!(link.starts_with("#part-") || link.starts_with("data:,\""), "{}", &link[..20]);
    }
    assert!(!page.contains("NaN") && !page.contains(" inf "));
}

#[test]
fn a_report_has_the_verdict_each_policy_and_the_tables() {
    let path = result("one.json", &[]);
    let page = report(&[&path], &[]);
    is_sound(&page);
    // The same sentences as replay's.
    let json = json(&path);
    let policies = json["policies"].as_array().unwrap();
    for sentence in
        ["At most ", "us of other CPU work came with each mapping", "Choose ", "would save ", "On Linux, "]
    {
        assert!(page.contains(sentence), "{sentence}");
    }
    let lost = |name: &str| {
        let policy = policies.iter().find(|policy| policy["policy"] == name).unwrap();
        format!("{:.1} %", (1.0 - policy["relative_to_passthrough"].as_f64().unwrap()) * 100.0)
    };
    assert!(page.contains("Linux's lazy would save ") || page.contains(&lost("lazy")), "{}", lost("lazy"));
    for policy in policies {
        let name = policy["policy"].as_str().unwrap();
        // Two small plots have its line. What is registered takes no time that is spread.
        let drawings = if name == "registered" { 0 } else { 2 };
        assert_eq!(page.matches(&format!("aria-label=\"{name}: ")).count(), drawings, "{name}");
        assert_eq!(
            page.matches(&format!("<tspan class=\"name\">{name}</tspan>: half")).count(),
            drawings,
            "{name}"
        );
        assert!(page.contains(&format!("<th scope=\"row\">{name}")));
    }
    let date = json["date"].as_str().unwrap();
    assert!(date.len() == 16 && page.contains(&format!("<p class=\"made\">{date} UTC · ")), "{date}");
    for part in [
        "prefers-color-scheme: dark",
        "@media print",
        "replay --limit 6000 --json",
        "99.99 %",
        "All figures, and what they mean",
        "Each unmap waits until the IOMMU confirms that no device reaches the buffer. Linux: strict, <code>iommu.strict=1</code>",
        "Linux: lazy, its flush queue, <code>iommu.strict=0</code>",
        "Linux: passthrough, <code>iommu.passthrough=1</code>",
    ] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn a_distribution_is_whole() {
    let path = result("whole.json", &["--profile", "none", "--repeat", "1"]);
    let json = self::json(&path);
    let measured = |policy: &&Value| policy["policy"] != "registered";
    for policy in json["policies"].as_array().unwrap().iter().filter(measured) {
        for (list, figures) in [("map_latency", "map_ns"), ("unmap_latency", "unmap_ns")] {
            let steps: Vec<(f64, u64)> = serde_json::from_value(policy[list].clone()).unwrap();
            assert!(steps.is_sorted_by(|a, b| a.0 < b.0) && steps.iter().all(|step| step.1 > 0));
            let all: u64 = steps.iter().map(|step| step.1).sum();
            let mut seen = 0;
            let middle = steps.iter().find(|step| {
                seen += step.1;
                seen * 2 >= all
            });
            // Without waits it is what was measured, to two digits.
            let (p50, middle) = (policy[figures]["p50"].as_f64().unwrap(), middle.unwrap().0);
            let timer = policy["timer_ns"].as_f64().unwrap();
            assert!((middle - p50).abs() <= (p50 + timer) * 0.02 + 1.0, "{list}: {middle} and {p50}");
        }
    }
    let waits = result("waits.json", &["--policy", "strict", "--repeat", "1"]);
    let json = self::json(&waits);
    let first = json["policies"][0]["unmap_latency"][0][0].as_f64().unwrap();
    let wait = json["policies"][0]["wait_ns_per_op"].as_f64().unwrap();
    assert!(first > 0.9 * wait, "each unmap waits {wait} ns, and the shortest takes {first}");
}

#[test]
fn names_out_of_a_result_are_no_markup() {
    let text =
        String::from_utf8(std::fs::read(result("hostile.json", &["--policy", "lazy,strict"])).unwrap())
            .unwrap();
    let hostile = "</title><script>alert(1)</script><img src=http://x onerror='y'>&amp;";
    let mut json: Value = serde_json::from_str(&text).unwrap();
    json["trace"]["name"] = hostile.into();
    json["trace"]["devices"] = vec![hostile, "\u{202e}\0"].into();
    json["command"] = hostile.into();
    json["notes"] = vec![hostile].into();
    json["machine"]["cpu"] = hostile.into();
    let page = report(&[&file("<b>.json", json.to_string().as_bytes())], &[]);
    assert!(page.contains("&lt;script&gt;alert(1)") && page.contains("&amp;amp;"));
    assert!(!page.contains("<script") && !page.contains("<img") && !page.contains(['\0', '\u{202e}']));
}

#[test]
fn two_replays_are_compared() {
    let before = result("before.json", &["--repeat", "2"]);
    let after = with("after.json", &before, |json| {
        let strict = &mut json["costs"][0];
        for figure in ["least_ns", "median_ns", "most_ns"] {
            strict[figure] = (strict[figure].as_f64().unwrap() + 5e6).into();
        }
        json["profile"] = "smmuv3".into();
    });
    let page = report(&[&before, &after], &["--compare"]);
    is_sound(&page);
    assert!(page.contains("1 of 9 policies became slower: strict (+"), "the change");
    assert!(page.contains("No policy became faster.") && page.contains("8 policies did not change."));
    assert!(page.contains("+5000000 ns"), "in the table");
    assert!(page.contains("Something else is different, too: the profile, vtd before, smmuv3 after"));
    assert!(page.contains("An unmap, before and after: strict-ring") && page.contains("href=\"#part-2\""));
}

/// The value of an attribute in a piece of markup.
fn value<'a>(of: &'a str, name: &str) -> &'a str {
    of.split(&format!("{name}=\"")).nth(1).unwrap().split('"').next().unwrap()
}

/// No label of a plot lies over another, or over a line: as boxes, with letters as narrow as they are
/// anywhere. (A browser's own boxes are in browser.rs.)
fn labels_stand_free(page: &str) -> usize {
    let mut seen = 0;
    for plot in page.split("<svg class=\"plot ").skip(1).map(|rest| rest.split("</svg>").next().unwrap()) {
        let letter = value(plot, "font-size").parse::<f64>().unwrap() * 0.5;
        let mut boxes: Vec<[f64; 4]> = Vec::new();
        for text in plot.split("<text class=\"name\"").skip(1) {
            let [x, y] = ["x", "y"].map(|name| value(text, &format!(" {name}")).parse::<f64>().unwrap());
            let name = text.split(['>', '<']).nth(1).unwrap();
            let width = name.chars().count() as f64 * letter;
            let area = [x, y - 5.0, x + width, y + 5.0];
            let meets = |other: &&[f64; 4]| {
                other[0] < area[2] && area[0] < other[2] && other[1] < area[3] && area[1] < other[3]
            };
            assert!(!boxes.iter().any(|other| meets(&other)), "{name} lies over another");
            boxes.push(area);
        }
        seen += boxes.len();
        for line in plot.split("<g class=\"line\">").skip(1).map(|rest| rest.split("</g>").next().unwrap()) {
            for d in line.split(" d=\"").skip(1).map(|rest| rest.split('"').next().unwrap()) {
                let points = d.split(['M', 'L']).skip(1).map(|point| point.split_once(' ').unwrap());
                let points: Vec<[f64; 2]> =
                    points.map(|(x, y)| [x, y].map(|at| at.parse::<f64>().unwrap())).collect();
                for (a, b) in points.iter().zip(&points[1..]) {
                    for at in (0..=200).map(|n| f64::from(n) / 200.0) {
                        let [x, y] = [0, 1].map(|axis| a[axis] + (b[axis] - a[axis]) * at);
                        let covers =
                            |area: &[f64; 4]| area[0] < x && x < area[2] && area[1] < y && y < area[3];
                        assert!(!boxes.iter().any(covers), "a label lies over a line at {x}, {y}");
                    }
                }
            }
        }
    }
    seen
}

#[test]
fn labels_lie_over_no_line_and_no_label() {
    let policies = "strict,strict-batch,strict-ring,bounce,adaptive,lazy,lazy-2015,smmu-2017";
    for cpus in ["16", "1,2,16,64,256"] {
        let path = scale("free.json", &["--cpus", cpus, "--policy", policies]);
        assert!(labels_stand_free(&report(&[&path], &[])) >= 16);
    }
}

#[test]
fn what_protects_nothing_leaves_all_memory_open_in_every_table() {
    let path = result("open.json", &["--repeat", "1", "--policy", "lazy,swiotlb,passthrough"]);
    // The comparison has a table of its own, before those of both results.
    for (page, expected) in [(report(&[&path], &[]), 2), (report(&[&path, &path], &["--compare"]), 6)] {
        let tables = page.split("<table").skip(1).filter(|table| table.contains("freed memory"));
        let mut rows = 0;
        for table in tables {
            let table = table.split("</table>").next().unwrap();
            for row in table.split("<tr").skip(1) {
                let is = |name: &str| row.contains(&format!("row\">{name}</th>"));
                let all = row.matches(">all memory</td>").count();
                assert!(!is("lazy") || all == 0, "{row}");
                if is("swiotlb") || is("passthrough") {
                    assert_eq!(all, 2, "freed memory and other data: {row}");
                    rows += 1;
                }
            }
        }
        assert_eq!(rows, expected);
    }
}

/// Where strict leaves nothing open, the table lists it below the heading for closed policies. Where it leaves a quarter of a byte open, the
/// table lists it below the heading for partly open ones, and the figure is red.
#[test]
fn the_least_of_other_data_that_is_open_is_said() {
    let path = result("other.json", &["--repeat", "1", "--policy", "strict,passthrough"]);
    for (bytes, group, open) in [(0.0, "closed", 0), (0.25, "partly", 1)] {
        let path = with("other-2.json", &path, |json| {
            json["policies"][0]["exposure"]["neighbour_byte_s"] = bytes.into()
        });
        let page = report(&[&path], &[]);
        let group = page.split(&format!("<tbody class=\"{group}\">")).nth(1).unwrap();
        let group = group.split("</tbody>").next().unwrap();
        assert!(group.contains("<th scope=\"row\">strict"), "{group}");
        // In the library's row and in Linux's.
        assert_eq!(group.matches("class=\"is-open\">&lt; 1 byte</td>").count(), 2 * open, "{group}");
    }
}

#[test]
fn two_benchmarks_are_compared() {
    let before = file(
        "benched.json",
        br#"{"schema": 1, "bench": "path", "command": "portcullis bench path --json", "machine": {"cpus": 2, "cpu": "A"},
        "limits": {}, "timer": {}, "skipped": [], "results": [
        {"workload": "raw-1", "threads": 1, "subject": "portcullis", "ns_per_op": 40.0, "min": 39.0, "max": 42.0, "p99_99": 90.0},
        {"workload": "raw-1", "threads": 2, "subject": "portcullis", "ns_per_op": 50.0, "min": 48.0, "max": 60.0, "p99_99": null},
        {"workload": "raw-4", "threads": 2, "subject": "portcullis", "ns_per_op": 60.0, "min": 60.0, "max": 60.0, "p99_99": null},
        {"workload": "sg-4", "threads": 1, "subject": "portcullis", "ns_per_op": 90.0, "min": 89.0, "max": 91.0, "p99_99": null}]}"#,
    );
    let after = with("benched-2.json", &before, |json| {
        let results = json["results"].as_array_mut().unwrap();
        for (at, ns) in [(0, [30.0, 29.0, 31.0]), (1, [58.0, 55.0, 62.0]), (3, [99.0, 98.0, 101.0])] {
            for (figure, ns) in ["ns_per_op", "min", "max"].iter().zip(ns) {
                results[at][figure] = ns.into();
            }
        }
        results[2]["workload"] = "raw-16".into();
        json["machine"]["cpu"] = "B".into();
    });
    let page = report(&[&before, &after], &["--compare"]);
    is_sound(&page);
    for part in [
        "1 of 3 measurements became faster: raw-1 of portcullis with 1 thread (-25 %).",
        "1 of 3 measurements became slower: sg-4 of portcullis with 1 thread (+10 %).",
        "1 measurement changed by no more than the repetitions differ.",
        "2 measurements are in one of the two only.",
        "<td>-25 %</td><td>faster</td><td>40.0 (39.0 to 42.0)</td><td>30.0 (29.0 to 31.0)</td>",
        "<td>+16 %</td><td>within the noise</td>",
        "Something else is different, too: the machine, A before, B after",
        "Change of time, 1 thread",
        "Change of time, 2 threads",
        "Benchmark path",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(report(&[&before, &before], &["--compare"]).contains("4 measurements did not change."));
    // From the least to the most.
    assert!(report(&[&before], &[]).contains("An operation of portcullis takes 40 ns to 90 ns."));
}

#[test]
fn two_simulations_are_compared() {
    let policies = ["--on", "library", "--policy", "strict,lazy,lazy-2015", "--cpus", "4,16"];
    let before = scale("scaled.json", &policies);
    let after = scale("scaled-2.json", &[&policies[..], &["--profile", "virtio-iommu"]].concat());
    let page = report(&[&before, &after], &["--compare"]);
    is_sound(&page);
    let change = {
        let requests = |path| json(path)["results"][3]["requests_per_s"].as_f64().unwrap();
        let share = (requests(&after) / requests(&before) - 1.0) * 100.0;
        assert!(share < -10.0, "strict unmaps wait longer there: {share}");
        assert!(json(&after)["results"][3]["policy"] == "strict");
        format!("strict ({share:+.0} %)")
    };
    for part in [
        &change,
        " of 3 policies on 16 CPUs became slower: strict (",
        "Something else is different, too: the profile, vtd before, virtio-iommu after",
        "Change of requests in a second",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(report(&[&before, &before], &["--compare"]).contains("3 policies on 16 CPUs did not change."));
}

#[test]
fn what_cannot_be_compared_is_refused_with_what_can() {
    let replay = result("compare-1.json", &["--repeat", "1", "--policy", "lazy"]);
    let other = result("compare-2.json", &["--repeat", "1", "--policy", "strict"]);
    let scale = scale("compare-3.json", &["--policy", "lazy", "--cpus", "2"]);
    let cases = [
        (vec![&replay], "--compare takes two results, the one before and the one after, and not 1"),
        (
            vec![&replay, &scale],
            "two results of the same command: compare-1.json is of `portcullis replay`, and compare-3.json is of `portcullis scale`",
        ),
        (vec![&replay, &other], "nothing that was measured is in both compare-1.json and compare-2.json"),
    ];
    for (paths, expected) in cases {
        let paths = paths.iter().map(|path| path.to_str().unwrap());
        let arguments: Vec<&str> = ["report", "--compare"].into_iter().chain(paths).collect();
        let output = portcullis(&arguments);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(expected) && output.stdout.is_empty(), "{}", stderr(&output));
    }
}

#[test]
fn a_benchmark_is_reported() {
    let page = report(&[&bench("bench.json")], &[]);
    is_sound(&page);
    for part in [
        "Benchmark path",
        "The least time, of 6 comparisons: portcullis in 6.",
        "Time of an operation, 1 thread, no waits",
        "Time of an operation, 2 threads, no waits",
        "portcullis bench path --json",
        "it has no pool",
        "aria-label=\"linux: raw-1 95 ns · typed-1 105 ns",
    ] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn scaling_is_reported_with_the_best_the_worst_and_the_hottest() {
    let path =
        scale("scale.json", &["--policy", "lazy,strict,lazy-2015", "--cpus", "2,32", "--on", "library"]);
    let json = json(&path);
    assert_eq!(
        json["command"],
        "portcullis scale --policy lazy,strict,lazy-2015 --cpus 2,32 --on library --json"
    );
    assert!(json["machine"]["cpus"].as_u64().unwrap() > 0 && json["machine"]["os"].is_string());
    let page = report(&[&path], &[]);
    is_sound(&page);
    let names: Vec<_> = (3..6).map(|at| json["results"][at]["policy"].as_str().unwrap()).collect();
    assert_eq!(names, ["strict", "lazy", "lazy-2015"]);
    // The command's own verdict, of the most CPUs, which come last.
    let verdict: Vec<_> =
        json["verdict"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    assert!(verdict[0].ends_with("of its throughput on 32 CPUs."), "{verdict:?}");
    let open = "; it leaves open other data in a buffer's page.";
    assert!(verdict[1].starts_with("Choose strict (") && verdict[1].ends_with(open), "{verdict:?}");
    for (begins, has) in [
        ("If the IOMMU's waits are a quarter as long as assumed, that costs ", "; if four times as long, "),
        ("With lazy (", " devices reach memory that the driver has back until the next flush."),
        ("What takes the most of a request: with strict, ", "; with lazy-2015, waits for lines and locks "),
    ] {
        assert!(
            verdict.iter().any(|said| said.starts_with(begins) && said.contains(has)),
            "{begins}: {verdict:?}"
        );
    }
    let said = page.split("class=\"verdict\">").nth(1).unwrap().split("</div>").next().unwrap();
    assert!(page.contains("scale --policy lazy") && said.contains("of its throughput on 32"), "{said}");
    assert_eq!(said.matches("<p>").count(), verdict.len(), "{said}");
    // A curve has a point for each number of CPUs, in a wide window and in a narrow one.
    assert_eq!(page.matches("class=\"mark open of-lazy\"").count(), 2);
    assert!(!page.contains("of-lazy bar"));
}

/// Two rows are strict, and cost a multiple of each other: what Linux calls strict is one of them.
#[test]
fn linux_s_own_strict_is_not_taken_for_the_library_s() {
    let path = scale("strict.json", &["--policy", "strict,vtd-2024,bounce", "--cpus", "64"]);
    let (json, page) = (json(&path), report(&[&path], &[]));
    let verdict: Vec<_> =
        json["verdict"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    let has = |text: &str| verdict.iter().any(|said| said.contains(text));
    assert!(
        has("the row linux-strict (the design vtd-2024): ")
            && has("The row strict is the library's, for drivers that use its queues"),
        "{verdict:?}"
    );
    assert!(has("with 1 the library's strict costs "), "{verdict:?}");
    assert!(page.contains("Without the module, strict is <code>iommu.strict=1"), "what to type is code");
    let about = |text: &str| page.matches(text).count();
    assert_eq!(about("Linux: no setting; its own strict mode is the row vtd-2024."), 1);
    // The page has the verdict's figures.
    assert_eq!(about("Estimated with the code of Linux or of our module"), 2);
    let bounce = json["results"].as_array().unwrap().iter().find(|result| result["policy"] == "bounce");
    let lost = 100.0 - 100.0 * bounce.unwrap()["relative_with_kernel"].as_f64().unwrap();
    assert!(has(&format!("Choose bounce ({lost:.1} %)")), "{verdict:?}");
    assert!(page.contains(&format!(">{lost:.1} %</td>")), "{lost}");
    assert_eq!(about("<code>iommu.strict=1</code>, a group"), 0, "no row of the library's has Linux's name");
}

#[test]
fn one_number_of_cpus_is_shown_as_bars_and_not_as_curves_of_one_point() {
    let page = report(&[&scale("scale-1.json", &["--policy", "lazy,strict", "--cpus", "16"])], &[]);
    is_sound(&page);
    assert_eq!(page.matches("class=\"mark open of-lazy bar\"").count(), 2, "a bar in each drawing");
    assert!(page.contains("Throughput that protection takes, on 16 CPUs"));
}

#[test]
fn an_axis_ends_where_its_figures_do() {
    for (name, cpus) in [("axis-1.json", "3,5"), ("axis-2.json", "1,2,16,64,256")] {
        let page = report(&[&scale(name, &["--policy", "lazy,strict", "--cpus", cpus])], &[]);
        let plot = page.split("class=\"plot wide\"").nth(1).unwrap().split("</svg>").next().unwrap();
        let right = |class: &str| {
            let drawn =
                plot.split(class).skip(1).flat_map(|part| part.split("d=\"").nth(1)?.split('"').next());
            let x = drawn.flat_map(|d| d.split(['M', 'L']).skip(1)).map(|p| p.split(' ').next().unwrap());
            x.map(|x| x.parse::<i32>().unwrap()).max().unwrap()
        };
        assert!(right("class=\"grid\"") - right("class=\"line\"") <= 1, "{name}");
    }
}

#[test]
fn a_result_that_names_no_machine_has_no_cpus() {
    let path = with("nowhere.json", &result("here.json", &["--policy", "lazy", "--repeat", "1"]), |json| {
        let whole = json.as_object_mut().unwrap();
        whole.remove("machine");
        whole.remove("command");
    });
    let page = report(&[&path], &[]);
    assert!(page.contains("The result does not name the machine.") && !page.contains("0 CPU"));
    let there = result("there.json", &["--policy", "lazy", "--repeat", "1"]);
    let page = report(&[&path, &there], &["--compare"]);
    assert!(!page.contains("0 CPU") && !page.contains("differ in their number of CPUs"));
}

#[test]
fn what_is_no_result_is_refused_with_what_to_do() {
    let good = std::fs::read(result("good.json", &["--policy", "lazy"])).unwrap();
    let good = String::from_utf8(good).unwrap();
    let mut minus_step: serde_json::Value = serde_json::from_str(&good).unwrap();
    minus_step["policies"][0]["unmap_latency"][0][0] = (-5.0).into();
    let cases = [
        ("prose.json", "what?".to_owned(), "this is no JSON"),
        ("empty.json", String::new(), "this is no JSON"),
        (
            "doctor.json",
            "{\"tool\": \"portcullis\", \"doctor\": []}".into(),
            "`portcullis replay`, `portcullis bench` and",
        ),
        ("list.json", "[]".into(), "no result that a report is made of"),
        ("policy.json", good.replace("\"lazy\"", "\"lax\""), "\"lax\" is none of strict, strict-batch"),
        ("costs.json", good.replace("\"median_ns\"", "\"mean_ns\""), "missing field `median_ns`"),
        ("minus.json", good.replace("\n  \"work_ns\": ", "\n  \"work_ns\": -"), "work_ns is less than 0"),
        (
            "minus-step.json",
            minus_step.to_string(),
            "unmap_latency is less than 0",
        ),
        (
            "old.json",
            r#"{"bench": "path", "command": "portcullis bench path --json", "results": [], "skipped": []}"#.into(),
            "a result of portcullis bench, but it has no number `schema`, which is to be 1; print it again",
        ),
        (
            "older.json",
            r#"{"schema": 1, "tool": "portcullis", "version": "0.1.0", "workload": "nic", "profile": "vtd", "results": []}"#
                .into(),
            "a result of portcullis scale, but its `schema` is 1, and not 2; print it again",
        ),
    ];
    for (name, text, expected) in cases {
        let output = portcullis(&["report", file(name, text.as_bytes()).to_str().unwrap()]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{name}: {said}");
        assert!(said.contains(name) && said.contains(expected), "{name}: {said}");
        assert!(output.stdout.is_empty());
    }
    assert_eq!(portcullis(&["report"]).status.code(), Some(2));
    assert!(stderr(&portcullis(&["report", "nowhere.json"])).contains("nowhere.json"));
}

#[test]
fn a_page_goes_where_it_is_asked_to() {
    let path = result("out.json", &["--policy", "strict"]);
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("out.html");
    // A longer file is there already, and nothing of it stays.
    std::fs::write(&out, "old ".repeat(1 << 20)).unwrap();
    assert!(report(&[&path], &["--out", out.to_str().unwrap()]).is_empty());
    let page = std::fs::read_to_string(out).unwrap();
    assert!(page.ends_with("</html>\n"), "{}", &page[page.len() - 40..]);
    is_sound(&page);
}

#[test]
fn extreme_figures_do_no_harm() {
    let text = String::from_utf8(std::fs::read(result("extreme.json", &["--repeat", "1"])).unwrap()).unwrap();
    for extreme in [0.0, 1e-300, 1e300] {
        let mut json: Value = serde_json::from_str(&text).unwrap();
        for policy in json["policies"].as_array_mut().unwrap() {
            policy["relative_to_passthrough"] = extreme.into();
            policy["exposure"]["stale_byte_s"] = extreme.into();
            policy["unmap_latency"] = serde_json::json!([[extreme, u64::MAX], [extreme, u64::MAX]]);
            policy["map_latency"] = serde_json::json!([[extreme, 0]]);
        }
        is_sound(&report(&[&file("extreme2.json", json.to_string().as_bytes())], &[]));
    }
}
