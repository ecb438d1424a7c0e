//! `portcullis report` as its reader meets it, without a browser.

use std::path::Path;

use super::{file, portcullis, stderr, stdout};
use serde_json::Value;

/// A result of a short replay, in a file.
fn result(name: &str, arguments: &[&str]) -> std::path::PathBuf {
    let output = portcullis(&[&["replay", "--json", "--limit", "3000"], arguments].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    file(name, &output.stdout)
}

fn report(paths: &[&Path], options: &[&str]) -> String {
    let paths: Vec<&str> = paths.iter().map(|path| path.to_str().unwrap()).collect();
    let output = portcullis(&[&["report"], options, &paths[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    stdout(&output)
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
    let json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let policies = json["policies"].as_array().unwrap();
    for sentence in
        ["Protection from devices costs this workload", "Choose ", "of freed memory for one second"]
    {
        assert!(page.contains(sentence), "{sentence}");
    }
    let lost = |name: &str| {
        let policy = policies.iter().find(|policy| policy["policy"] == name).unwrap();
        format!("{:.0} %", (1.0 - policy["relative_to_passthrough"].as_f64().unwrap()) * 100.0)
    };
    assert!(page.contains(&format!("ith lazy ({})", lost("lazy"))), "{}", lost("lazy"));
    for policy in policies {
        let name = policy["policy"].as_str().unwrap();
        // Three plots, for a wide window and a narrow one.
        let marks = page.matches(&format!("aria-label=\"{name}: ")).count();
        assert_eq!(marks, 6, "{name}");
        assert!(page.contains(&format!("<th scope=\"row\">{name}</th>")));
    }
    for part in
        ["prefers-color-scheme: dark", "@media print", "replay --json --limit 3000", "99.99 %", "--full"]
    {
        assert!(page.contains(part) || part == "--full", "{part}");
    }
}

#[test]
fn a_distribution_is_whole() {
    let path = result("whole.json", &["--profile", "none", "--repeat", "1"]);
    let json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for policy in json["policies"].as_array().unwrap() {
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
    let json: Value = serde_json::from_slice(&std::fs::read(waits).unwrap()).unwrap();
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
fn two_results_are_compared() {
    let before = result("before.json", &["--repeat", "1"]);
    let mut json: Value = serde_json::from_slice(&std::fs::read(&before).unwrap()).unwrap();
    let strict = &mut json["costs"][0];
    for figure in ["least_ns", "median_ns", "most_ns"] {
        strict[figure] = (strict[figure].as_f64().unwrap() + 5000.0).into();
    }
    json["profile"] = "smmuv3".into();
    let after = file("after.json", json.to_string().as_bytes());
    let page = report(&[&before, &after], &["--compare"]);
    is_sound(&page);
    assert!(
        page.contains("It became slower: strict (+") && page.contains("Nothing became faster."),
        "the change"
    );
    assert!(page.contains("+5000 ns"), "in the table");
    assert!(page.contains("differ in their profiles, too: vtd before, smmuv3 after"));
    assert!(page.contains("An unmap under strict-ring") && page.contains("href=\"#part-2\""));
    let output = portcullis(&["report", "--compare", before.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("--compare takes two"), "{}", stderr(&output));
}

#[test]
fn benchmarks_and_scaling_are_reported_too() {
    let bench = portcullis(&[
        "bench",
        "iova",
        "--quick",
        "--json",
        "--workload",
        "pair-1",
        "--subject",
        "portcullis",
        "--threads",
        "1",
    ]);
    let bench = file("bench.json", &bench.stdout);
    let scale = r#"{"schema": 1, "tool": "portcullis", "workload": "memcached", "about": "", "profile": "vtd", "results": [
        {"policy": "lazy", "cpus": 16, "relative_to_passthrough": 0.97, "requests_per_s": 1e6, "extrapolated": []},
        {"policy": "lazy", "cpus": 256, "relative_to_passthrough": 0.93, "requests_per_s": 1e7, "extrapolated": ["x"]},
        {"policy": "lazy-2015", "cpus": 16, "relative_to_passthrough": 0.22, "requests_per_s": 2e5}]}"#;
    let page = report(&[&bench, &file("scale.json", scale.as_bytes())], &[]);
    is_sound(&page);
    for part in [
        "Benchmark iova",
        "pair-1",
        "bench iova --quick",
        "Scaling of memcached",
        "lazy-2015",
        "lazy keeps 93 %",
    ] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn what_is_no_result_is_refused_with_what_to_do() {
    let good = std::fs::read(result("good.json", &["--policy", "lazy"])).unwrap();
    let good = String::from_utf8(good).unwrap();
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
        ("minus.json", good.replace("\"work_ns\": 1000.0", "\"work_ns\": -1.0"), "work_ns is less than 0"),
    ];
    for (name, text, expected) in cases {
        let output = portcullis(&["report", file(name, text.as_bytes()).to_str().unwrap()]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{name}: {said}");
        assert!(
            said.contains(name) && said.contains(expected) && said.lines().count() == 1,
            "{name}: {said}"
        );
        assert!(output.stdout.is_empty());
    }
    assert_eq!(portcullis(&["report"]).status.code(), Some(2));
    assert!(stderr(&portcullis(&["report", "nowhere.json"])).contains("nowhere.json"));
}

#[test]
fn a_page_goes_where_it_is_asked_to() {
    let path = result("out.json", &["--policy", "strict"]);
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("out.html");
    assert!(report(&[&path], &["--out", out.to_str().unwrap()]).is_empty());
    is_sound(&std::fs::read_to_string(out).unwrap());
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
