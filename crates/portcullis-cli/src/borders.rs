//! What is said on either side of each border, and of what is missing.

use portcullis_trace::replay::{Mode, Profile, Report, Work};
use portcullis_trace::{Recorded, Warning};
use serde_json::{Value, json};

use crate::golden::{benched, body, changes, replayed, runs, scale, summary};
use crate::look::BOLD;
use crate::on_linux::Offer;
use crate::report::read;
use crate::runs::{Runs, cpu_time};
use crate::verdict::Verdict;
use crate::{choice, explain, header, legend, look, machine, short, table, warnings};

#[test]
fn figures_change_their_form_at_these_borders() {
    let said = [0.99, 1.0, 999.4, 999.5, 999.4e3, 999.5e3, 999.4e6, 999.5e6].map(look::bytes);
    let expected = ["< 1 byte", "1 byte", "999 bytes", "1 kB", "999 kB", "1.0 MB", "999.4 MB", "1.0 GB"];
    assert_eq!(said, expected);
    let said = [1023, 1 << 10, (1 << 20) - 1, 1 << 20, (1 << 30) - 1, 1 << 30].map(look::size);
    assert_eq!(said, ["1023 B", "1 KiB", "1023 KiB", "1 MiB", "1023 MiB", "1 GiB"]);
    assert_eq!([0.000_49, 0.0005, 1.0].map(look::percent), ["less than 0.1 %", "0.1 %", "100.0 %"]);
    assert_eq!(
        [0, 1, 2, 1_000].map(|n| look::number_of(n, "map")),
        ["0 maps", "1 map", "2 maps", "1,000 maps"]
    );
    let mut runs = runs();
    let line = |label: &str, runs: &Runs| {
        let line = table::LINES.iter().find(|line| line.label.trim() == label).unwrap();
        (line.value)(&runs.report.policies[0], &runs.costs[0], true)
    };
    let mut of = |label: &str, value: f64| {
        runs.costs[0].median_ns = value;
        runs.report.policies[0].exposure.stale_byte_s = value;
        line(label, &runs)
    };
    assert_eq!([99.94, 99.99, 100.0, 1234.5].map(|ns| of("cost, ns", ns)), ["99.9", "100.0", "100", "1,235"]);
    let byte_s = [0.0, 0.001, 999.9994, 1000.0, 1234.5].map(|open| of("freed memory, byte-s", open));
    assert_eq!(byte_s, ["0", "0.001", "999.999", "1,000", "1,235"]);
}

#[test]
fn a_border_in_the_price_of_a_copy_has_two_digits() {
    let strict = Mode::Each(portcullis::domain::Policy::Strict);
    let said = |assumed: f64, borders: [f64; 2]| {
        let at = |ns: f64| {
            let mode = if ns < borders[0] {
                Mode::Adaptive
            } else if ns < borders[1] {
                Mode::Bounce
            } else {
                strict
            };
            Some((mode, ns / 1e4))
        };
        let said = choice::by_copies(assumed, at, |_| None).unwrap();
        let said = said.strip_prefix("A copied KiB is assumed to take ").unwrap();
        let (price, said) = said.split_once(" (--calibration): ").unwrap();
        (price.to_owned(), said.to_owned())
    };
    let both = "from 140 ns on, choose strict (1.4 %); up to 7.6 ns, choose adaptive (0.1 %).";
    assert_eq!(said(74.85, [7.65, 135.0]), ("75 ns".into(), both.into()));
    assert_eq!(said(8.0, [0.0, 99.1]).1, "from 100 ns on, choose strict (1.0 %).");
    assert_eq!(said(9.94, [9.9, 1e9]), ("9.9 ns".into(), "up to 9.8 ns, choose adaptive (0.1 %).".into()));
    let same = "the choice is the same at 1 ns and at 1,000 ns.";
    for assumed in [0.5, 1.0, 75.0, 1_000.0, 2_000.0] {
        assert_eq!(said(assumed, [0.0, 1e9]).1, same, "{assumed}");
    }
    assert_eq!(said(2_000.0, [0.0, 1_000.0]).1, "up to 990 ns, choose bounce (9.9 %).");
}

#[test]
fn few_mappings_and_close_costs_are_warned_of() {
    let few = |operations| {
        let mut report = runs().report;
        report.policies.iter_mut().for_each(|policy| policy.operations = operations);
        Verdict::of(&Runs::of(vec![report]).unwrap(), Offer::Module)
            .sentences
            .into_iter()
            .find(|text| text.contains("few"))
    };
    let said = |number| {
        Some(format!(
            "Too few mappings to time: {number}; 1,000 are needed, as first calls take several times what later ones do. So costs in this \
             verdict are counted, and not measured."
        ))
    };
    assert_eq!([0, 1, 999, 1000].map(few), [None, said(1), said(999), None]);
    let noise = |number, spreads: [f64; 4]| {
        let mut runs = self::runs();
        runs.number = number;
        for (cost, (at, spread)) in runs.costs.iter_mut().zip(spreads.into_iter().enumerate()) {
            let median = 100.0 * (4 - at) as f64;
            (cost.median_ns, cost.least_ns, cost.most_ns) = (median, median - spread, median + spread);
        }
        warnings::of(&runs, &portcullis_trace::Summary::default())
            .into_iter()
            .find(|text| text.contains("too noisy"))
    };
    let ranks = |pairs, more| {
        Some(format!(
            "This machine is too noisy to rank {pairs}: their costs differ by less than they vary between runs. `--repeat {more}` measures more often."
        ))
    };
    assert_eq!(noise(3, [49.0; 4]), None);
    assert_eq!(noise(1, [90.0; 4]), None, "one run does not vary");
    assert_eq!(noise(2, [1.0, 1.0, 99.0, 1.0]), ranks("passthrough and lazy, or lazy and adaptive", 6));
    assert_eq!(noise(3, [1.0, 1.0, 50.0, 50.0]), ranks("passthrough and lazy", 9));
    assert_eq!(
        noise(50, [50.0; 4]),
        ranks("passthrough and lazy, or lazy and adaptive, or adaptive and strict", 100)
    );
}

#[test]
fn what_was_not_replayed_has_no_cost_and_no_share_below_none() {
    let report = runs().report;
    let mut none = report.clone();
    none.policies.iter_mut().for_each(|policy| policy.operations = 0);
    assert!(Runs::of(vec![none]).unwrap().costs.is_empty());
    assert!(Runs::of(Vec::new()).is_none());
    // A mapping that takes less than the work beside it is said to take costs nothing, and not less.
    let mut quick = report.clone();
    quick.policies.iter_mut().for_each(|policy| policy.ops_per_s = 2e9 / report.work_ns);
    assert!(Runs::of(vec![quick]).unwrap().costs.iter().all(|cost| cost.median_ns == 0.0));
    let mut policy = report.policies[0].clone();
    let mut share = |relative| {
        policy.relative_to_passthrough = relative;
        (cpu_time(&policy), short::share(&policy))
    };
    assert_eq!(share(Some(0.75)), (0.25, "25.0 %".into()));
    assert_eq!(share(Some(1.2)), (0.0, "0.0 %".into()));
    assert_eq!(share(None), (0.0, "-".into()));
}

/// Tables, CSV and JSON agree on what a policy leaves open. None of them prints a number for "all memory", or for "not known".
#[test]
fn what_is_open_is_the_same_in_each_form() {
    let said = |tells: bool, open: f64| {
        let mut runs = runs();
        runs.report.trace.iommu_only = !tells;
        runs.report.policies[0].exposure.neighbour_byte_s = open;
        let forms = |at: usize| {
            let (policy, cost) = (&runs.report.policies[at], &runs.costs[at]);
            let full = table::LINES.iter().filter(|line| line.label.ends_with("byte-s"));
            let full: Vec<String> = full.map(|line| (line.value)(policy, cost, tells)).collect();
            let csv = machine::csv(&runs, Offer::Module);
            let csv: Vec<String> =
                csv.lines().nth(at + 1).unwrap().split(',').skip(11).take(2).map(str::to_owned).collect();
            let json = serde_json::to_value(crate::exposed::for_json(&runs.report)).unwrap();
            let json = &json["policies"][at]["exposure"];
            let figures = ["stale_byte_s", "neighbour_byte_s"].map(|name| json[name].as_f64());
            (full, csv, figures)
        };
        [forms(0), forms(3)]
    };
    let texts = |texts: [&str; 2]| texts.map(str::to_owned).to_vec();
    let all = (texts(["all", "all"]), texts(["all", "all"]), [None, None]);
    let stale = runs().report.policies[0].exposure.stale_byte_s;
    for (tells, open, full, csv, json) in [
        (true, 0.0, "0", "0", Some(0.0)),
        (true, 2.5, "2.500", "2.5", Some(2.5)),
        (false, 0.0, "not known", "", None),
        (false, 2.5, "> 2.500", "2.5", Some(2.5)),
    ] {
        let [strict, passthrough] = said(tells, open);
        let stale_csv = stale.to_string();
        assert_eq!(
            strict,
            (texts(["0", full]), texts([&stale_csv, csv]), [Some(stale), json]),
            "{tells} {open}"
        );
        assert_eq!(passthrough, all);
    }
    // What is read back is what was.
    let mut runs = runs();
    runs.report.trace.iommu_only = true;
    runs.report.policies[0].exposure.neighbour_byte_s = 0.0;
    let json = serde_json::to_value(crate::exposed::for_json(&runs.report)).unwrap();
    let read: Report = serde_json::from_value(json).unwrap();
    assert_eq!(read.policies[0].exposure, runs.report.policies[0].exposure);
}

#[test]
fn what_is_open_is_said_in_words() {
    let said = |change: fn(&mut Runs)| {
        let mut runs = runs();
        change(&mut runs);
        Verdict::of(&runs, Offer::Library).sentences.join(" ")
    };
    let text = said(|runs| runs.report.policies[2].exposure.stale_byte_s = 0.0);
    assert!(text.contains("for up to 10 ms, to read and to write: here nothing was. Take it"), "{text}");
    let text = said(|runs| {
        runs.report.policies.truncate(1);
        runs.costs.truncate(1);
    });
    assert!(
        text.contains("; it leaves open other data in a buffer's page (in sum, 2 kB for one second)."),
        "{text}"
    );
    assert!(
        text.contains(
            " If 1.2us of other CPU work comes with each mapping (--work), protection from devices takes 42.0 % of the CPU time."
        ),
        "{text}"
    );
    let text = said(|runs| {
        runs.report.policies.truncate(1);
        runs.costs.truncate(1);
        runs.report.trace.copies_known = false;
    });
    assert!(text.contains("(in sum, more than 2 kB for one second)"), "{text}");
}

#[test]
fn json_has_a_line_for_each_field_and_the_command_its_quotes() {
    let found = json!({"list": [1, 2], "none": {}, "one": {"two": {"three": "a\u{1b}b"}}});
    let text = machine::document(7, json!({"x": null}), &[], found).unwrap();
    let (head, rest) = text.split_once(",\n  \"options\": ").unwrap();
    assert!(
        head.starts_with(
            "{\n  \"schema\": 7,\n  \"tool\": {\n    \"name\": \"portcullis\",\n    \"version\": "
        ),
        "{head}"
    );
    let expected = "{\n    \"x\": null\n  },\n  \"profiles\": [],\n  \"list\": [1,2],\n  \"none\": {\n  },\n  \"one\": {\n    \"two\": \
                    {\n      \"three\": \"a\\u001bb\"\n    }\n  }\n}\n";
    assert_eq!(rest, expected);
    let words = ["/usr/bin/portcullis", "replay", "a b", "it's", "", "--work=5us", "x;y", "A-_./,:=+@%9"];
    let command = machine::command(words.into_iter().map(Into::into));
    assert_eq!(command, r"portcullis replay 'a b' 'it'\''s' '' --work=5us 'x;y' A-_./,:=+@%9");
}

#[test]
fn a_result_is_known_by_all_of_its_fields() {
    for (value, fields) in [
        (replayed(), &["policies", "costs", "trace"][..]),
        (benched(), &["bench", "results"]),
        (scale(), &["workload", "results", "profile"]),
    ] {
        assert!(read::outcome(value.clone()).is_ok());
        for field in fields {
            let mut without = value.clone();
            without.as_object_mut().unwrap().remove(*field);
            assert!(matches!(read::outcome(without), Err(None)), "without {field}");
        }
        let wrong = |change: &dyn Fn(&mut Value)| {
            let mut value = value.clone();
            change(&mut value);
            match read::outcome(value) {
                Err(Some((_, why))) => why,
                _ => panic!("it is taken"),
            }
        };
        assert!(wrong(&|value| value["schema"] = 99.into()).contains("its `schema` is 99"));
        assert!(wrong(&|value| value["schema"] = "1".into()).contains("no number `schema`"));
        assert!(wrong(&|value| value["machine"] = json!({"cpus": -1})).contains("cpus is less than 0"));
    }
    for (name, most) in [("policies", 64), ("results", 8192)] {
        let mut value = if name == "policies" { replayed() } else { benched() };
        value[name] = vec![value[name][0].clone(); most].into();
        let limit = |value: Value| match read::outcome(value) {
            Err(Some((_, why))) => why.contains("are the limit"),
            _ => false,
        };
        assert!(!limit(value.clone()));
        value[name].as_array_mut().unwrap().push(benched());
        assert!(limit(value), "{name}");
    }
}

#[test]
fn parts_of_a_page_that_have_nothing_to_say_are_not_there() {
    let mut value = benched();
    assert!(body(&[("a", &value)], false).contains("Not measured"));
    value["skipped"] = json!([]);
    assert!(!body(&[("a", &value)], false).contains("Not measured"));
    // The one that wins most often is named first, wherever it stands.
    for result in value["results"].as_array_mut().unwrap() {
        let is_faster = result["workload"] != "raw-1" && result["subject"] == "theirs";
        result["ns_per_op"] = if is_faster { 0.125.into() } else { result["ns_per_op"].clone() };
    }
    let page = body(&[("a", &value)], false);
    assert!(
        page.contains("The least time, of 9\u{a0}comparisons: theirs in 6, ours in 3.")
            || page.contains("The least time, of 9 comparisons: theirs in 6, ours in 3."),
        "{}",
        &page[..4000]
    );
    // One run has no spread, so that no change is within it.
    let mut after = replayed();
    after["costs"][2]["median_ns"] = 130.into();
    for (before, after_of, noise) in [(3, 3, true), (2, 2, true), (1, 3, false), (3, 1, false), (1, 1, false)]
    {
        let mut one = replayed();
        one["options"]["repeat"] = before.into();
        after["options"]["repeat"] = after_of.into();
        assert_eq!(
            changes([&one, &after]).contains("<td>within the noise</td>"),
            noise,
            "{before} and {after_of} runs"
        );
        assert_ne!(changes([&one, &after]).contains("cannot tell: one run"), noise);
    }
    // A result without times of a request's parts has no such plot, and no figures in their columns.
    let mut value = scale();
    for result in value["results"].as_array_mut().unwrap() {
        ["work_ns", "library_ns", "shared_ns", "queue_wait_ns", "copy_ns", "idle_ns"]
            .into_iter()
            .for_each(|part| result[part] = 0.into());
    }
    let page = body(&[("a", &value)], false);
    assert!(!page.contains("What the time of a request goes into") && page.contains("<td>-</td>"));
}

#[test]
fn notes_are_of_what_there_is() {
    let mut one = summary();
    one.limited = true;
    let notes = crate::header::notes(&one).join("; ");
    assert!(
        notes.contains("160 mappings without an end before the limit")
            && notes.contains("stopped after 12,345 events, as --limit asks"),
        "{notes}"
    );
    assert!(!notes.contains("promises"), "{notes}");
    (one.limited, one.stopped) = (false, true);
    let notes = crate::header::notes(&one).join("; ");
    assert!(
        notes.contains("160 mappings without an end so far")
            && notes.contains("stopped after 12,345 events, by Ctrl-C"),
        "{notes}"
    );
    let names: Vec<String> = (0..18).map(|n| format!("d{n}")).collect();
    let listed = |n: usize| crate::header::some_of(&names[..n]);
    assert!(
        listed(16).ends_with("d14, d15")
            && listed(17).ends_with("d15, and 1 more")
            && listed(18).ends_with(", and 2 more")
    );
}

#[test]
fn what_a_recording_does_not_tell_is_said() {
    let mut report = runs().report;
    let without = "5 mappings of this recording have no direction: they were mapped without a choice";
    let said = |report: &Report| explain::render(report).split_whitespace().collect::<Vec<_>>().join(" ");
    report.trace.without_direction = 5;
    assert!(!said(&report).contains(without));
    report.trace.copies_known = false;
    assert!(said(&report).contains(without));
    let one = |hides: Option<&str>| Recorded {
        hides: hides.map(str::to_owned),
        ..report.trace.recorded[0].clone()
    };
    let recorded = |all: &[Recorded]| header::recorded(all).ends_with("; nothing is hidden");
    assert!(recorded(&[one(None), one(None)]) && !recorded(&[one(None), one(Some("much"))]));
    // The verdict does not choose a policy whose cost is not known. Nor does it choose `adaptive` once freed memory was open under it.
    let mut runs = runs();
    assert_eq!(Verdict::of(&runs, Offer::Library).choice, Some("adaptive"));
    // Linux's unchanged drivers cannot have it.
    assert_ne!(Verdict::of(&runs, Offer::Module).choice, Some("adaptive"));
    let left_out = |runs: &Runs| {
        let mut sentences = Verdict::of(runs, Offer::Module).sentences.into_iter();
        sentences.find_map(|said| Some(said.strip_prefix("Policies that copy are left out: ")?.to_owned()))
    };
    assert_eq!(left_out(&runs), None);
    runs.report.policies[1].exposure.stale_byte_s = 0.5;
    assert_eq!(Verdict::of(&runs, Offer::Module).choice, Some("strict"));
    runs.costs[1].known = false;
    // It says what is missing, and nothing else.
    let (directions, syncs) = ("mappings without a direction", "syncs of buffers whose map is not in it");
    for (known, lacks) in [
        ((false, true), directions.to_owned()),
        ((true, false), syncs.to_owned()),
        ((false, false), format!("{directions}, and {syncs}")),
    ] {
        (runs.report.trace.directions_known, runs.report.trace.syncs_known) = known;
        let expected = format!("this recording does not tell what they would copy, as it has {lacks}.");
        assert_eq!(left_out(&runs), Some(expected));
    }
    // The tables show no cost and no spread for a policy whose cost is not known. They set the chosen policy alone in bold.
    let parts = crate::golden::parts("vtd-ss");
    let render = |parts| short::render(&runs, &Profile::load("vtd").unwrap(), &summary(), parts);
    let text = render(parts.clone());
    let bold = |name: &str| text.contains(&format!("{BOLD}{name:<12}{BOLD:#}"));
    // Under Linux it is its own strict.
    assert_eq!(["linux-strict", "strict", "adaptive", "linux-lazy"].map(bold), [true, false, false, false]);
    let plain = anstream::adapter::strip_str(&text).to_string();
    let line = plain.lines().find(|line| line.contains("adaptive  ")).unwrap();
    let words: Vec<&str> = line.split_whitespace().skip(1).take(5).collect();
    assert_eq!(words, ["not", "known", "-", "-", "-"], "{line}");
    assert!(text.contains("All figures: --full. What they mean: --legend."));
    let full = render(short::Parts { full: true, ..parts });
    assert!(full.contains("What they mean: --legend.") && !full.contains("All figures"), "{full}");
}

#[test]
fn a_warning_names_the_file_and_the_rest_are_counted() {
    let mut summary = summary();
    summary.kept_warnings.push(Warning { line: 7, expected: "a time".into(), found: "\"x\"".into() });
    let said = warnings::of(&runs(), &summary);
    assert_eq!(
        said[..2],
        ["golden.trace: line 7: expected a time, found \"x\"", "golden.trace: 6 more warnings"]
    );
}

/// One that is not in the order would win each tie.
#[test]
fn every_strict_policy_has_its_place_among_those_that_tie() {
    for mode in Mode::ALL.into_iter().filter(|mode| mode.is_strict()) {
        assert!(choice::PREFERRED.contains(&mode), "{}", mode.name());
    }
}

#[test]
fn columns_are_of_what_their_names_say() {
    let mut runs = runs();
    let policy = &mut runs.report.policies[0];
    (policy.faults, policy.violations, policy.relative_to_passthrough) = (3, 5, None);
    let of = |label: &str| {
        let line = table::LINES.iter().find(|line| line.label.trim() == label).unwrap();
        (line.value)(&runs.report.policies[0], &runs.costs[0], true)
    };
    assert_eq!((of("faults"), of("violations")), ("3".into(), "5".into()));
    let csv = machine::csv(&runs, Offer::Module);
    let (names, figures) = (csv.lines().next().unwrap().split(','), csv.lines().nth(1).unwrap().split(','));
    let of = |name: &str| names.clone().zip(figures.clone()).find(|(named, _)| *named == name).unwrap().1;
    assert_eq!(["faults", "violations", "relative_to_passthrough"].map(of), ["3", "5", "0.0000"]);
}

#[test]
fn what_a_terminal_has_not_is_written_otherwise() {
    let profile = Profile::load("vtd").unwrap();
    let items = [false, true].map(|unicode| legend::render(&profile, unicode).matches("\n  ±: ").count());
    assert_eq!(items, [0, 1]);
    assert!(legend::render(&profile, false).contains("\n  +-: "));
    // One beyond 16 bits is a pair of surrogates (RFC 8259, 7).
    let text = machine::document(7, json!({}), &[], json!({"tag": "a\u{e0041}"})).unwrap();
    assert!(text.contains(r#""tag": "a\udb40\udc41""#), "{text}");
}

/// No form prints what first calls took.
#[test]
fn what_was_timed_of_a_few_mappings_is_nowhere() {
    let mut report = runs().report;
    for policy in &mut report.policies {
        (policy.operations, policy.copied_bytes) = (999, Some(0));
        policy.choices.clear();
        policy.ops_per_s = 1e9 / (report.work_ns + 18_902.0);
        policy.relative_to_passthrough = Some(report.work_ns / (report.work_ns + 18_902.0));
    }
    let runs = Runs::of(vec![report]).unwrap();
    let profile = Profile::load("vtd").unwrap();
    for offer in [Offer::Module, Offer::Library] {
        let parts = short::Parts { offer, sweep: true, ..crate::golden::parts("vtd-ss") };
        let full = short::Parts { full: true, ..parts.clone() };
        for parts in [parts, full] {
            let text =
                anstream::adapter::strip_str(&short::render(&runs, &profile, &summary(), parts)).to_string();
            assert!(
                text.contains("too few") && !text.contains("18,9") && !text.contains(" 93.9 %"),
                "{text}"
            );
            assert!(!text.contains("est."), "{text}");
        }
    }
    assert!(
        machine::csv(&runs, Offer::Module).lines().nth(1).unwrap().starts_with("strict,999,,,,,,,,,"),
        "{}",
        machine::csv(&runs, Offer::Module)
    );
    let with = |name: &str| {
        warnings::of(&runs, &portcullis_trace::Summary::default()).iter().any(|text| text.contains(name))
    };
    assert!(!with("noisy") && !with("few"));
}

#[test]
fn missing_events_are_in_the_verdict() {
    let said = |missing, work| {
        let mut runs = runs();
        (runs.report.trace.events, runs.report.trace.missing) = (9_000, missing);
        runs.report.work = work;
        let Verdict { sentences, choice } = Verdict::of(&runs, Offer::Library);
        (choice.is_some(), sentences.into_iter().find(|text| text.contains("missing")))
    };
    assert_eq!(said(90, Work::Most), (true, None));
    let (chosen, text) = said(1_000, Work::Most);
    let text = text.unwrap();
    assert!(chosen && text.starts_with("Of the recording's events 10.0 % are missing (1,000 of 10,000): what the device did meanwhile"), "{text}");
    // Of 1,234 ns a tenth less.
    assert!(text.contains(" If mappings are missing in the same part, 1.1us of other work came with each, and protection takes "), "{text}");
    let (_, text) = said(1_000, Work::Asked);
    assert!(text.unwrap().ends_with("is not in these figures."));
    assert!(said(9_000, Work::Most).0);
    let (chosen, text) = said(9_002, Work::Most);
    assert!(
        !chosen
            && text
                .unwrap()
                .starts_with("No verdict: 50.0 % of the recording's events are missing (9,002 of 18,002)")
    );
}
